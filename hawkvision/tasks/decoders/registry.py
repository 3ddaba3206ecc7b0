"""Finds decoders by the names that manifests use."""

from __future__ import annotations

from functools import cache
from typing import Final

from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest import Variant
from hawkvision.tasks import plugins
from hawkvision.tasks.decoders.decoder import Decoder

GROUP: Final = "hawkvision.decoders"
"""The group of entry points: `name = "module:DecoderClass"`."""


def decoder_names() -> tuple[str, ...]:
    """The names of all decoders that are installed, sorted. Nothing is loaded."""
    return plugins.names(GROUP)


@cache
def decoder_class(name: str) -> type[Decoder]:
    """The decoder of that name.

    Raises:
        ManifestError: as `plugins.load`.
    """
    loaded: type[Decoder] = plugins.load(GROUP, name, Decoder, "decoder")  # type: ignore[type-abstract]
    return loaded


def open_decoder(variant: Variant, labels: int) -> Decoder:
    """The decoder of a variant, for a task of so many labels.

    Raises:
        ManifestError: naming the variant, and the decoder that is not installed or the option that it refuses.
    """
    try:
        return decoder_class(variant.decoder)(variant.decoder_options, variant.input, labels)
    except ManifestError as error:
        raise ManifestError(f"variant {variant.name!r}: {error}") from None

"""Finds decoders by the names that manifests use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest import Variant
from hawkvision.tasks import plugins
from hawkvision.tasks.decoders.decoder import Decoder, Logits
from hawkvision.tasks.decoders.dense import CenterNet, CenterNetRows, NanoDet, YoloV5, YoloV8, YoloV10, Yolox
from hawkvision.tasks.decoders.sets import Detections, Detr, Ssd, TfDetections

DECODERS: Final[Mapping[str, type[Decoder]]] = MappingProxyType(
    {
        "centernet": CenterNet,
        "centernet_rows": CenterNetRows,
        "detections": Detections,
        "logits": Logits,
        "nanodet": NanoDet,
        "rt_detr": Detr,
        "ssd": Ssd,
        "tf_detections": TfDetections,
        "yolov10": YoloV10,
        "yolov5": YoloV5,
        "yolov8": YoloV8,
        "yolox": Yolox,
    }
)
GROUP: Final = "hawkvision.decoders"
"""The group of entry points for those of other packages: `name = "module:DecoderClass"`."""


def decoder_names() -> tuple[str, ...]:
    """The names of all decoders, sorted. Nothing is loaded."""
    return plugins.names(DECODERS, GROUP)


@cache
def decoder_class(name: str) -> type[Decoder]:
    """The decoder of that name.

    Raises:
        ManifestError: as `plugins.load`.
    """
    loaded: type[Decoder] = plugins.load(DECODERS, GROUP, name, Decoder, "decoder")  # type: ignore[type-abstract]
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

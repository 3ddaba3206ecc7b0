"""From what a backend returns to the outputs of the task kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hawkvision.core.errors import BackendError
from hawkvision.models.manifest import Variant
from hawkvision.tasks.decoders.decoder import Decoder
from hawkvision.tasks.decoders.registry import open_decoder
from hawkvision.tasks.kind import Output, TaskKind, Tensors


@dataclass(frozen=True, slots=True)
class OutputDecoder:
    """The decoder of one variant, and the kind of its task."""

    variant: str
    decode: Decoder
    kind: TaskKind[Any]
    temperature: float

    @classmethod
    def of(cls, variant: Variant, kind: TaskKind[Any]) -> OutputDecoder:
        """That of a manifest's variant, with its temperature.

        Raises:
            ManifestError: if the decoder is not installed, or refuses its options.
        """
        return cls(variant.name, open_decoder(variant, len(kind.labels)), kind, variant.temperature)

    def __call__(self, tensors: Tensors) -> list[Output]:
        """The outputs for n images, with places as in the model's input.

        Raises:
            BackendError: if the tensors are not those that the decoder and the kind expect, naming the variant.
        """
        try:
            return self.kind.outputs(self.decode(tensors), self.temperature)
        except BackendError as error:
            raise BackendError(f"{self.variant}: {error.message}") from None

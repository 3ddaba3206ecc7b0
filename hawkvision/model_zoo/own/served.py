"""A stage over images as the edge node serves it: decoded, placed, inferred and decoded by the same code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hawkvision.core.errors import ConfigError, RequestError
from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.model_zoo.own.parity import open_session
from hawkvision.models.input_spec import InputSpec
from hawkvision.models.manifest import Variant
from hawkvision.tasks.kind import Output, TaskKind

MAX_PIXELS: Final = 50_000_000
Bodies = Sequence[tuple[str, bytes]]
"""Encoded images with their names."""


@dataclass(frozen=True, slots=True)
class Served:
    """Outputs of a stage, one per image, and the processor time of one inference."""

    outputs: list[Output]
    cpu_ms: float


class ServedStage:
    """One variant, with the file that runs it."""

    def __init__(self, kind: TaskKind[Any], variant: Variant, model: bytes) -> None:
        self._kind = kind
        self._variant = variant
        self._session = open_session(model, variant.name)
        self._names = [output.name for output in self._session.get_outputs()]

    def over(self, images: Bodies, spec: InputSpec | None = None, *, reversed_channels: bool = False) -> Served:
        """The outputs at temperature 1.

        Args:
            images: the images.
            spec: another way of placing images into the input than the manifest's.
            reversed_channels: whether to exchange red and blue.

        Raises:
            ConfigError: naming an image that cannot be read.
        """
        outputs: list[Output] = []
        spent: list[float] = []
        for pixels in inputs_of(images, spec or self._variant.input):
            batch = pixels[np.newaxis, ..., ::-1] if reversed_channels else pixels[np.newaxis]
            before = time.thread_time()
            found = self._session.run(self._names, {"image": np.ascontiguousarray(batch)})
            spent.append(time.thread_time() - before)
            outputs += self._kind.outputs(dict(zip(self._names, found, strict=True)), 1.0)
        return Served(outputs, float(np.median(spent)) * 1e3)


def inputs_of(images: Bodies, spec: InputSpec) -> Iterator[Pixels]:
    """The images as inputs.

    Raises:
        ConfigError: naming an image that cannot be read.
    """
    for name, body in images:
        try:
            yield load_input(body, spec, max_pixels=MAX_PIXELS)[0]
        except RequestError as error:
            raise ConfigError(f"{name}: {error}") from None

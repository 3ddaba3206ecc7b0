"""A stage over images as the edge node serves it: decoded, placed, inferred and decoded by the same code."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, ConfigError, RequestError
from hawkvision.core.types import LOGITS, Pixels, Tensors, ToImage
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_input
from hawkvision.model_zoo.own.graphs.conversion import IMAGE
from hawkvision.model_zoo.own.graphs.parity import open_session
from hawkvision.models.input_spec import InputSpec
from hawkvision.models.manifest import Variant
from hawkvision.system.graph_limits import one_run
from hawkvision.tasks.boxes.rows import BOXES, SCORES
from hawkvision.tasks.decoders.decoder import READINGS, UNSTATED, Decoder
from hawkvision.tasks.decoders.registry import decoder_class, open_decoder
from hawkvision.tasks.kind import Output, TaskKind

MAX_PIXELS: Final = 50_000_000
Bodies = Sequence[tuple[str, bytes]]
"""Encoded images with their names."""


class StageRun:
    """One variant, with the file that runs it."""

    def __init__(self, kind: TaskKind[Any], variant: Variant, model: bytes) -> None:
        self._kind = kind
        self._variant = variant
        self._session = open_session(model, variant.name)
        outputs = [output.name for output in self._session.get_outputs()]
        self._names = outputs if len(outputs) > 1 else [LOGITS]
        self._fetched = outputs
        self._decode = open_decoder(variant, len(kind.labels))

    def on_inputs(self, pixels: Pixels) -> list[Output]:
        """The outputs for inputs (n, height, width, 3), with places as in the input.

        Raises:
            BackendError: if decoder and kind do not take what the model gives.
        """
        found = [self._run(np.ascontiguousarray(pixels[at : at + 1])) for at in range(len(pixels))]
        return [self._kind.output(self._decode(tensors), 0, 1.0) for tensors in found]

    def reach(self, pixels: Pixels) -> NDArray[np.float32]:
        """How far each box for inputs reaches to the right or down, as a share of the input; empty without boxes.

        Raises:
            BackendError: if the decoder does not take what the model gives.
        """
        found = [self._decode(self._run(np.ascontiguousarray(pixels[at : at + 1]))) for at in range(len(pixels))]
        boxes = [each[BOXES][each[SCORES] > 0] for each in found if BOXES in each]
        return np.concatenate([np.zeros(0, np.float32), *(each[:, 2:].max(axis=1) for each in boxes if each.size)])

    def _run(self, batch: Pixels) -> dict[str, NDArray[np.float32]]:
        with one_run(self._variant.name, len(batch)):
            found = self._session.run(self._fetched, {IMAGE: batch})
        return {name: each.astype(np.float32) for name, each in zip(self._names, found, strict=True)}

    def over(
        self, images: Bodies, spec: InputSpec | None = None, *, reversed_channels: bool = False
    ) -> tuple[list[Output], float]:
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
        chosen = spec or self._variant.input
        for pixels, header in _loaded(images, chosen):
            batch = pixels[np.newaxis, ..., ::-1] if reversed_channels else pixels[np.newaxis]
            before = time.thread_time()
            tensors = self._run(np.ascontiguousarray(batch))
            spent.append(time.thread_time() - before)
            to_image = placement(header, chosen).to_image
            outputs.append(self._kind.output(self._decode(tensors), 0, 1.0, to_image))
        return outputs, float(np.median(spent)) * 1e3

    def read_as(self, images: Bodies, changes: Sequence[dict[str, Any]]) -> Iterator[list[Output | None]]:
        """The outputs of each image by decoders with changed options; None where such a one refuses the tensors.

        Raises:
            ConfigError: naming an image that cannot be read.
        """
        options = [{**self._variant.decoder_options, **each} for each in changes]
        variants = [msgspec.structs.replace(self._variant, decoder_options=each) for each in options]
        decoders = [open_decoder(each, len(self._kind.labels)) for each in variants]
        for pixels, header in _loaded(images, self._variant.input):
            tensors = self._run(np.ascontiguousarray(pixels[np.newaxis]))
            to_image = placement(header, self._variant.input).to_image
            yield [self._read(decode, tensors, to_image) for decode in decoders]

    def _read(self, decode: Decoder, tensors: Tensors, to_image: ToImage) -> Output | None:
        try:
            return self._kind.output(decode(tensors), 0, 1.0, to_image)
        except BackendError:
            return None


def with_readings(variant: Variant) -> Variant:
    """The variant with the first valid value of each option of its decoder that is not stated."""
    options = {k: READINGS[k][0] if v == UNSTATED else v for k, v in variant.decoder_options.items()}
    return msgspec.structs.replace(variant, decoder_options=options)


def other_readings(variant: Variant) -> list[dict[str, Any]]:
    """All changes of the decoder's options whose wrong value may still give boxes, the smallest first.

    Each has a value for all options that are not stated.
    """
    declared = decoder_class(variant.decoder).options
    known = {each.name for each in msgspec.structs.fields(declared)}
    known -= {"first_class"} if "class_map" in variant.decoder_options else set()
    tried = {name: values for name, values in READINGS.items() if name in known}
    now = msgspec.convert(with_readings(variant).decoder_options, declared)
    changes = [
        {
            name: value
            for name, value in zip(tried, values, strict=True)
            if variant.decoder_options.get(name) == UNSTATED or getattr(now, name) != value
        }
        for values in itertools.product(*tried.values())
    ]
    return sorted(filter(None, changes), key=len)


def inputs_of(images: Bodies, spec: InputSpec) -> Iterator[Pixels]:
    """The images as inputs.

    Raises:
        ConfigError: naming an image that cannot be read.
    """
    return (pixels for pixels, _ in _loaded(images, spec))


def _loaded(images: Bodies, spec: InputSpec) -> Iterator[tuple[Pixels, ImageHeader]]:
    for name, body in images:
        try:
            yield load_input(body, spec, max_pixels=MAX_PIXELS)
        except RequestError as error:
            raise ConfigError(f"{name}: {error}") from None

"""The edge rung: a loaded model with all that turns a picture into scored classes, and what it says of one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.profile import RungProfile
from hawkvision.cascade.scores import Score, softmax, top_classes
from hawkvision.clock import Clock
from hawkvision.errors import ManifestError
from hawkvision.manifest import InputSpec, Manifest
from hawkvision.types import Pixels
from hawkvision.vision.backend import Backend
from hawkvision.vision.image import ImageHeader, load_input


@dataclass(frozen=True, slots=True)
class EdgeResult:
    """What the edge rung says of one picture; classes most probable first."""

    indices: tuple[int, ...]
    confidences: tuple[float, ...]
    score: float
    decode_ms: float
    infer_ms: float
    """Of all pictures that were run together with it."""


@dataclass(frozen=True, slots=True)
class Looked:
    """An edge result, how long the picture waited for a worker, and which model it is of."""

    result: EdgeResult
    queue_ms: float
    model: str


@dataclass(frozen=True, slots=True)
class Rung:
    """A loaded model, its input, its temperature, and which of its numbers says how sure it is."""

    name: str
    backend: Backend
    spec: InputSpec
    temperature: float
    score: Score
    wide: Backend | None = None
    """The same model on several threads, for one picture while no other is there (`vision.wide`)."""

    def look_together(self, looks: Sequence[Look]) -> list[EdgeResult | Exception]:
        """What it says of several pictures, in one run of the model: each one's result, or what it would have raised.

        Raises:
            BackendError: if the backend is broken.
        """
        clock = looks[0].clock
        inputs: list[Pixels | Exception] = []
        decode_ms: list[float] = []
        decoded = clock.now()
        for look in looks:
            before = decoded
            try:
                inputs.append(load_input(look.body, self.spec, max_pixels=look.max_pixels, header=look.header)[0])
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one picture is not the others' matter
                inputs.append(error)
            decoded = clock.now()
            decode_ms.append((decoded - before) * 1e3)
        whole = [pixels for pixels in inputs if not isinstance(pixels, Exception)]
        rows = iter(self._infer(whole, looks[0].alone) if whole else ())
        return [
            pixels if isinstance(pixels, Exception) else self._scored(look, next(rows), its_decode_ms, decoded)
            for look, pixels, its_decode_ms in zip(looks, inputs, decode_ms, strict=True)
        ]

    def _infer(self, whole: Sequence[Pixels], alone: Callable[[], bool]) -> NDArray[np.float32]:
        """Logits (n, classes) of n ≥ 1 pictures (height, width, 3)."""
        if len(whole) > 1:
            return self.backend.infer(np.stack(whole))
        backend = self.backend if self.wide is None or not alone() else self.wide
        return backend.infer(whole[0][np.newaxis])

    def close(self) -> None:
        """Give back memory and threads."""
        self.backend.close()
        if self.wide is not None:
            self.wide.close()

    def _scored(self, look: Look, logits: NDArray[np.float32], decode_ms: float, decoded: float) -> EdgeResult:
        """What its logits (classes,) say of one picture."""
        temperature = self.temperature if look.temperature is None else look.temperature
        probabilities = softmax(logits[np.newaxis], temperature)[0]
        order = top_classes(probabilities, max(2, look.top_k))  # the margin needs two
        confidences = probabilities[order]
        score = confidences[0] - confidences[1] if self.score is Score.MARGIN else confidences[0]
        return EdgeResult(
            indices=tuple(order.tolist()),
            confidences=tuple(confidences.tolist()),
            score=float(score),
            decode_ms=decode_ms,
            infer_ms=(look.clock.now() - decoded) * 1e3,
        )


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Look:
    """One picture to decode, resize, infer and score: a job that `Rung.look_together` can do with others.

    `temperature` takes the place of the rung's own where the picture was received in another condition than whole
    (`Route.temperature`). `alone` is asked on the worker's thread when the picture has been decoded: whether it may
    have several cores.
    """

    rung: Rung
    body: bytes
    header: ImageHeader
    top_k: int
    max_pixels: int
    clock: Clock
    temperature: float | None = None
    alone: Callable[[], bool] = _never

    def __call__(self) -> EdgeResult:
        """What the rung says of it. Runs on a worker thread.

        Raises:
            RequestError: if the picture is broken.
            BackendError: if the backend is.
        """
        (found,) = self.rung.look_together([self])
        if isinstance(found, Exception):
            raise found
        return found


def check_rung(measured: RungProfile, manifest: Manifest, where: str) -> None:
    """Refuse certificates that were made for other model files, or for the same files used differently.

    Raises:
        ManifestError: naming the variant and what differs.
    """
    mend = "rebuild it with `hawkvision models build` or certify it with `hawkvision calibrate`"
    for variant in manifest.members(measured.name):
        expected = measured.models.get(variant.name)
        if expected != variant.sha256:
            raise ManifestError(
                f"{where}: certificates were made for {variant.name} with sha256 {expected}, but the manifest has "
                f"{variant.sha256}; {mend}"
            )
    if measured.fingerprint != manifest.fingerprint(measured.name):
        raise ManifestError(
            f"{where}: certificates were made for {measured.name} with another input or temperature than the "
            f"manifest has; {mend}"
        )

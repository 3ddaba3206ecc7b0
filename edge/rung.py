"""The edge rung: a loaded model with all that turns a picture into scored classes, and what it says of one picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hawkvision.cascade.profile import RungProfile
from hawkvision.cascade.scores import Score, softmax, top_classes
from hawkvision.clock import Clock
from hawkvision.errors import ManifestError
from hawkvision.manifest import InputSpec, Manifest
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

    def look(
        self,
        body: bytes,
        header: ImageHeader,
        top_k: int,
        max_pixels: int,
        clock: Clock,
        temperature: float | None = None,
    ) -> EdgeResult:
        """Decode, resize, infer and score one picture. Runs on a worker thread.

        `temperature` takes the place of the rung's own where the picture was received in another condition than whole
        (`Route.temperature`).

        Raises:
            RequestError: if the picture is broken.
            BackendError: if the backend is.
        """
        before = clock.now()
        pixels, _ = load_input(body, self.spec, max_pixels=max_pixels, header=header)
        decoded = clock.now()
        logits = self.backend.infer(pixels[np.newaxis])
        probabilities = softmax(logits, self.temperature if temperature is None else temperature)[0]
        order = top_classes(probabilities, max(2, top_k))  # the margin needs two
        confidences = probabilities[order]
        score = confidences[0] - confidences[1] if self.score is Score.MARGIN else confidences[0]
        return EdgeResult(
            indices=tuple(order.tolist()),
            confidences=tuple(confidences.tolist()),
            score=float(score),
            decode_ms=(decoded - before) * 1e3,
            infer_ms=(clock.now() - decoded) * 1e3,
        )


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

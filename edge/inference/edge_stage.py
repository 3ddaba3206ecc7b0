"""The edge stage: a loaded model with all that turns an image into scored classes, and what it says of one image.

A stage may look again: where its first model is not sure of an image, others look as well, and their probabilities are
averaged (`manifest.Ensemble.accept_confidence`). Two networks of 5 MB that see a third of the images both leave the
datacenter a third of what one leaves it. Which images that are depends on the image alone: so the stage is one model
to whoever certifies it. Where a deadline leaves no time for the others, what the first said is a `truncated` result, of
which no certificate knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hawkvision.cascade.certification.profile import StageProfile
from hawkvision.cascade.confidence.scores import (
    Probabilities,
    Ranking,
    average,
    log_probabilities,
    most_probable,
    softmax,
)
from hawkvision.core.advice import advise
from hawkvision.core.clock import Clock
from hawkvision.core.errors import ManifestError
from hawkvision.core.types import Logits, Pixels, Score
from hawkvision.imaging.decoding_cost import SMALL, DecodingCost, DecodingRates
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.preprocessing import load_inputs
from hawkvision.inference.backends.interface import Backend, Prefetching
from hawkvision.models.manifest import InputSpec, Manifest


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What the edge stage says of one image; classes most probable first."""

    indices: tuple[int, ...]
    confidences: tuple[float, ...]
    score: float
    decode_ms: float
    infer_ms: float
    """Of all images that were run together with it."""
    full_ensemble: bool = False
    """Whether the others of a conditional ensemble looked as well."""
    truncated: bool = False
    """Whether they should have, and there was no time."""


@dataclass(frozen=True, slots=True)
class EdgePrediction:
    """An edge result, how long the image waited for a worker, and which model it is of."""

    result: StagePrediction
    queue_ms: float
    model: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded variant and its input."""

    name: str
    backend: Backend
    spec: InputSpec
    wide: Backend | None = None
    """The same variant on several threads, for one image while no other is there (`inference.adaptive_parallelism`).
    """
    expectant: Prefetching | None = field(init=False, repr=False, compare=False)
    """`wide`, if it can use the time in which that image is decoded."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "expectant", self.wide if isinstance(self.wide, Prefetching) else None)

    def expect(self, alone: Callable[[], bool]) -> None:
        """One image will follow, once it is decoded.

        What int8 kernels do then, another core fetching the weights meanwhile, makes a node's P50 over an emulated wire
        of 1 Gbit/s 0.01 to 0.08 ms lower, of 2.7 to 3.0 ms on two cores of an EPYC: four comparisons with a node that
        does not, asked in turns, each 400 to 1,000 times, one every 32 or 125 ms.
        """
        if self.expectant is not None and alone():
            self.expectant.expect()

    def infer(self, whole: Sequence[Pixels], alone: Callable[[], bool]) -> Logits:
        """Logits (n, classes) of n ≥ 1 images (height, width, 3)."""
        if len(whole) > 1:
            return self.backend.infer(np.stack(whole))
        backend = self.backend if self.wide is None or not alone() else self.wide
        return backend.infer(whole[0][np.newaxis])

    def close(self) -> None:
        """Give back memory and threads."""
        self.backend.close()
        if self.wide is not None:
            self.wide.close()


DURATION_GAIN: Final = 0.1
"""Weight of the newest second look in what one is expected to take."""
DURATION_DECAY: Final = 0.02
"""By how much that shrinks with each look that is left out: else one slow look would end all others."""


@dataclass(slots=True)
class DurationEstimate:
    """How long the others usually take, smoothed; 0 before the first time. Any worker writes it."""

    seconds: float = 0.0

    def took(self, seconds: float) -> None:
        """Learn from one more look."""
        self.seconds += (DURATION_GAIN if self.seconds else 1.0) * (seconds - self.seconds)

    def left_out(self) -> None:
        """Somebody had no time for as much as this."""
        self.seconds *= 1.0 - DURATION_DECAY


@dataclass(frozen=True, slots=True)
class ConditionalEnsemble:
    """What a conditional ensemble has beside its first member, and when they look."""

    models: tuple[LoadedModel, ...]
    temperatures: tuple[float, ...]
    """Of all members, the first included."""
    temperature: float
    """Of the average."""
    accept_confidence: float
    """The first member's confidence from which on it answers alone; rounded as confidences are."""
    duration: DurationEstimate = field(default_factory=DurationEstimate)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept_confidence", float(np.float32(self.accept_confidence)))


@dataclass(frozen=True, slots=True)
class EdgeStage:
    """A loaded model or conditional ensemble, its temperature, and which of its numbers says how sure it is."""

    name: str
    first: LoadedModel
    temperature: float
    score: Score
    others: ConditionalEnsemble | None = None
    ranking: Ranking = most_probable
    """What finds its most probable classes."""
    fingerprint: str | None = None
    """Of what was loaded and runs it (`hawkvision.models.fingerprints.stage_fingerprint`); None without a model file.
    """
    first_fingerprint: str | None = None
    """Of its first model by itself."""

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """All of its models, in the order in which they look."""
        return (self.first, *(() if self.others is None else self.others.models))

    def infer_batch(self, looks: Sequence[InferenceJob]) -> list[StagePrediction | Exception]:
        """What it says of several images, in one run of a model: each one's result, or what it would have raised.

        Raises:
            BackendError: if a backend is broken.
        """
        if len(looks) == 1:
            self.first.expect(looks[0].alone)
        clock = looks[0].clock
        specs = [model.spec for model in self.models]
        seen = [
            _Seen(look, load_inputs(look.body, specs, max_pixels=look.max_pixels, header=look.header)) for look in looks
        ]
        decoded = clock.now()
        for each in seen:
            before = decoded
            each.advance()
            decoded = clock.now()
            each.decode_ms = (decoded - before) * 1e3
            if each.error is None:
                each.look.decoded(decoded - before)
        whole = [each for each in seen if each.error is None]
        if whole:
            self._look(whole, looks[0].alone)
        return [each.error or self._scored(each, decoded) for each in seen]

    def _look(self, whole: Sequence[_Seen], alone: Callable[[], bool]) -> None:
        """Note what the first model says of the images, or all models where the first is not sure."""
        for each, logits in zip(whole, self.first.infer([each.pixels for each in whole], alone), strict=True):
            each.said = logits
        if self.others is not None:
            self._look_again([each for each in whole if not each.look.first_only], self.others, alone)

    def _look_again(self, seen: Iterable[_Seen], others: ConditionalEnsemble, alone: Callable[[], bool]) -> None:
        doubtful: list[_Seen] = []
        own = others.temperatures[0]
        for each in seen:
            each.before = own
            _, (confidence,) = self.ranking(each.said, own, 1)
            if confidence >= others.accept_confidence:
                continue
            each.truncated = each.look.in_time(0.0) and not each.look.in_time(others.duration.seconds)
            if each.truncated:
                others.duration.left_out()
            else:
                each.views.append(softmax(each.said[np.newaxis], own))
                doubtful.append(each)
        if not doubtful:
            return
        clock = doubtful[0].look.clock
        began = clock.now()
        for model, temperature in zip(others.models, others.temperatures[1:], strict=True):
            doubtful = [each for each in doubtful if each.advance()]
            if not doubtful:
                return
            for each, logits in zip(doubtful, model.infer([each.pixels for each in doubtful], alone), strict=True):
                each.views.append(softmax(logits[np.newaxis], temperature))
        for each in doubtful:
            each.said, each.before = log_probabilities(average(each.views, others.temperature))[0], 1.0
            each.full_ensemble = True
        others.duration.took(clock.now() - began)

    def close(self) -> None:
        """Give back memory and threads."""
        for model in self.models:
            model.close()

    def _scored(self, seen: _Seen, decoded: float) -> StagePrediction:
        """What was said of one image."""
        look = seen.look
        temperature = self.temperature if look.temperature is None else look.temperature
        most = max(2, look.top_k)  # the margin needs two
        indices, confidences = self.ranking(seen.said, temperature, most, seen.before)
        return StagePrediction(
            indices=indices,
            confidences=confidences,
            score=_lead(*confidences[:2]) if self.score is Score.MARGIN else confidences[0],
            decode_ms=seen.decode_ms,
            infer_ms=(look.clock.now() - decoded) * 1e3,
            full_ensemble=seen.full_ensemble,
            truncated=seen.truncated,
        )


@dataclass(slots=True)
class _Seen:
    """One image while it is looked at."""

    look: InferenceJob
    inputs: Iterator[Pixels]
    """As each of the stage's models takes it in, made when it is wanted."""
    pixels: Pixels = field(init=False)
    """For the model whose turn it is."""
    said: Logits = field(init=False)
    """Logits (classes,) of all that was seen so far."""
    before: float = 1.0
    """What they are to be divided by first: the temperature of the only member that has looked."""
    error: Exception | None = None
    decode_ms: float = 0.0
    views: list[Probabilities] = field(default_factory=list)
    """What each of a committee's members said."""
    full_ensemble: bool = False
    truncated: bool = False

    def advance(self) -> bool:
        """Have the pixels ready for the next model, or the error: whatever is wrong is not the other images' matter.

        Returns: whether they are.
        """
        try:
            self.pixels = next(self.inputs)
        except Exception as error:  # noqa: BLE001 - whoever asked gets it
            self.error = error
        return self.error is None


def _lead(first: float, second: float) -> float:
    """Of the first, as `scores.score` has it."""
    return float(np.float32(first) - np.float32(second))


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """One image to decode, resize, infer and score: a job that `EdgeStage.infer_batch` can do with others.

    `temperature` takes the place of the stage's own where the image was received in another condition than whole
    (`Route.temperature`). `alone` is asked on the worker's thread, before the image is decoded and after: whether it
    may have several cores. With `first_only` no other member of a conditional ensemble looks, and the first model's
    logits count as they are. They do not look either where that would end after `must_end`, on the clock, and the
    first's look did not: an answer that is late in any case may as well be a good one. `rates` learn what the image
    took that was expected to cost so much.
    """

    stage: EdgeStage
    body: bytes
    header: ImageHeader
    top_k: int
    max_pixels: int
    clock: Clock
    temperature: float | None = None
    alone: Callable[[], bool] = _never
    first_only: bool = False
    must_end: float | None = None
    rates: DecodingRates | None = None
    cost: DecodingCost = SMALL

    def decoded(self, seconds: float) -> None:
        """Learn what decoding took."""
        if self.rates is not None and self.cost.work:
            self.rates.learn(self.cost, seconds)

    def in_time(self, seconds: float) -> bool:
        """Whether what takes that long from now on still ends in time."""
        return self.must_end is None or self.clock.now() + seconds <= self.must_end

    def __call__(self) -> StagePrediction:
        """What the stage says of it. Runs on a worker thread.

        Raises:
            RequestError: if the image is broken.
            BackendError: if the backend is.
        """
        (found,) = self.stage.infer_batch([self])
        if isinstance(found, Exception):
            raise found
        return found


def check_stage(measured: StageProfile, manifest: Manifest, where: str) -> None:
    """Refuse certificates that were made for other model files, or for the same files used differently.

    Raises:
        ManifestError: naming the variant and what differs.
    """
    build, calibrate = advise("models build", "--task", manifest.task), advise("calibrate", "--task", manifest.task)
    mend = f"rebuild it with `{build}` or certify it with `{calibrate} --data IMAGES`"
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

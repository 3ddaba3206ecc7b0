"""The edge stage: a loaded model or conditional ensemble, and its prediction for an image.

In a conditional ensemble the other members run only if the first is not sure enough of an image, by the first score of
the task kind (`manifest.Ensemble.accept_confidence`), and the kind combines their outputs. Which images these are
depends on the image alone, so certificates treat the stage as one model. If a deadline leaves no time for the other
members, the first one's prediction is `truncated`, and no certificate covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from edge.inference.shared_models import ModelUse, OpenModel
from hawkvision.cascade.certification.profile import StageProfile
from hawkvision.core.advice import advise
from hawkvision.core.clock import Clock
from hawkvision.core.errors import ManifestError
from hawkvision.core.types import Pixels, Prediction, Tensors
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_inputs
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.manifest import InputSpec, Manifest
from hawkvision.tasks.kind import Output, TaskKind, ToImage, Weights
from hawkvision.tasks.last_answer import OwnOutputs


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """The edge stage's prediction for one image."""

    prediction: Prediction
    score: float
    decode_ms: float
    infer_ms: float
    """Of the whole batch."""
    full_ensemble: bool = False
    """Whether all members of a conditional ensemble ran."""
    truncated: bool = False
    """Whether they should have, but there was no time."""
    own: Callable[[], OwnOutputs] = dict
    """What each model that ran computed; made when it is asked for."""


@dataclass(frozen=True, slots=True)
class EdgePrediction:
    """A stage's prediction with the time the image waited for a worker, and the name of what ran."""

    result: StagePrediction
    queue_ms: float
    model: str


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A loaded variant and its input. Its backends leave memory with `close`, and come back with `open`."""

    name: str
    backend: Backend
    spec: InputSpec
    wide: Backend | None = None
    """The same variant on several threads, for an image that is alone (`inference.adaptive_parallelism`)."""
    decode: Callable[[Tensors], Tensors] | None = None
    """The variant's decoder; None leaves the tensors as they are."""
    use: ModelUse | None = None
    """What loads it; None for a model that cannot be loaded again."""
    is_open: bool = True

    def infer(self, whole: Sequence[Pixels], alone: Callable[[], bool]) -> Tensors:
        """The decoded tensors (n, ...) of n ≥ 1 images (height, width, 3)."""
        if len(whole) > 1:
            tensors = self.backend.infer(np.stack(whole))
        else:
            backend = self.backend if self.wide is None or not alone() else self.wide
            tensors = backend.infer(whole[0][np.newaxis])
        return tensors if self.decode is None else self.decode(tensors)

    def open(self) -> None:
        """Load it, unless it is.

        Raises:
            ArtifactError, BackendError: if it cannot be loaded.
        """
        if self.use is not None and not self.is_open:
            model = self.use.begin()
            self.backend, self.wide, self.is_open = model.backend, model.wide, True

    def close(self) -> None:
        """Give back memory and threads."""
        if self.use is None:
            OpenModel(self.backend, self.wide).close()
        elif self.is_open:
            self.is_open = False
            self.use.end()


DURATION_GAIN: Final = 0.1
"""Weight of the newest run in the estimate."""
DURATION_DECAY: Final = 0.02
"""Share by which the estimate shrinks with each skipped run; otherwise one slow run would prevent all later ones."""


@dataclass(slots=True)
class DurationEstimate:
    """Smoothed time of the other members; 0 before their first run. Any worker writes it."""

    seconds: float = 0.0

    def record(self, seconds: float) -> None:
        """Record one run."""
        self.seconds += (DURATION_GAIN if self.seconds else 1.0) * (seconds - self.seconds)

    def skipped(self) -> None:
        """Record that an image had less time than the estimate."""
        self.seconds *= 1.0 - DURATION_DECAY


@dataclass(frozen=True, slots=True)
class ConditionalEnsemble:
    """The other members of a conditional ensemble, and when they run."""

    models: tuple[LoadedModel, ...]
    temperatures: tuple[float, ...]
    """Of all members, including the first."""
    temperature: float
    """Of the average."""
    accept_confidence: float
    """From this score on the first member answers alone; rounded as scores are."""
    weights: Weights = ()
    """Of all members; empty where all weigh the same."""
    duration: DurationEstimate = field(default_factory=DurationEstimate)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept_confidence", float(np.float32(self.accept_confidence)))
        object.__setattr__(self, "weights", self.weights or (1.0,) * len(self.temperatures))


@dataclass(frozen=True, slots=True)
class EdgeStage:
    """A loaded model or conditional ensemble, with its temperature and its score."""

    name: str
    first: LoadedModel
    temperature: float
    score: str
    """One of `kind.scores`."""
    kind: TaskKind[Any]
    others: ConditionalEnsemble | None = None
    fingerprint: str | None = None
    """Of its models and what runs them (`models.fingerprints.stage_fingerprint`); None without a model file."""
    first_fingerprint: str | None = None
    """Of its first model alone."""

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """All models, in the order in which they run."""
        return (self.first, *(() if self.others is None else self.others.models))

    def infer_batch(self, jobs: Sequence[InferenceJob]) -> list[StagePrediction | Exception]:
        """The predictions for several images in one run of each model; an image that fails gets its error instead.

        Raises:
            BackendError: if a backend is broken.
        """
        clock = jobs[0].clock
        specs = [model.spec for model in self.models]
        runs = [_Run(job, load_inputs(job.body, specs, max_pixels=job.max_pixels, header=job.header)) for job in jobs]
        decoded = clock.now()
        for each in runs:
            before = decoded
            each.advance()
            decoded = clock.now()
            each.decode_ms = (decoded - before) * 1e3
        whole = [each for each in runs if each.error is None]
        if whole:
            self._run_models(whole, jobs[0].alone)
        return [each.error or self._scored(each, decoded) for each in runs]

    def _run_models(self, whole: Sequence[_Run], alone: Callable[[], bool]) -> None:
        """Run the first model, and the others if it is not confident of an image."""
        tensors = self.first.infer([each.pixels for each in whole], alone)
        for row, each in enumerate(whole):
            each.tensors, each.row = tensors, row
        if self.others is not None:
            self._run_others([each for each in whole if not each.job.first_only], self.others, alone)

    def _run_others(self, runs: Iterable[_Run], others: ConditionalEnsemble, alone: Callable[[], bool]) -> None:
        kind, uncertain = self.kind, list[_Run]()
        own = others.temperatures[0]
        for each in runs:
            each.before = own
            if kind.judge_tensors(each.tensors, each.row, 1, kind.scores[0], own)[1] >= others.accept_confidence:
                continue
            each.truncated = each.job.in_time(0.0) and not each.job.in_time(others.duration.seconds)
            if each.truncated:
                others.duration.skipped()
            else:
                each.outputs.append(kind.output(each.tensors, each.row, own, self._to_image(self.first, each.job)))
                uncertain.append(each)
        if not uncertain:
            return
        clock = uncertain[0].job.clock
        began = clock.now()
        for model, temperature in zip(others.models, others.temperatures[1:], strict=True):
            uncertain = [each for each in uncertain if each.advance()]
            if not uncertain:
                return
            tensors = model.infer([each.pixels for each in uncertain], alone)
            for row, each in enumerate(uncertain):
                each.outputs.append(kind.output(tensors, row, temperature, self._to_image(model, each.job)))
        for each in uncertain:
            each.combined = kind.combine(each.outputs, others.weights, others.temperature)
        others.duration.record(clock.now() - began)

    def open(self) -> None:
        """Load the models that are not in memory, all or none.

        Raises:
            ArtifactError, BackendError: if one cannot be loaded.
        """
        try:
            for model in self.models:
                model.open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back memory and threads."""
        for model in self.models:
            model.close()

    def _scored(self, run: _Run, decoded: float) -> StagePrediction:
        """The prediction for one image."""
        job, kind, score = run.job, self.kind, self.score
        temperature = self.temperature if job.temperature is None else job.temperature
        own: Callable[[], OwnOutputs]
        if run.combined is None:
            to_image = self._to_image(self.first, job)
            prediction, sure = kind.judge_tensors(
                run.tensors, run.row, job.top_k, score, temperature, run.before, to_image
            )
            own = partial(self._first_alone, run.tensors, run.row, run.before * temperature, to_image)
        else:
            prediction, sure = kind.judge(run.combined, job.top_k, score, temperature)
            own = partial(self._all_members, run.outputs)
        return StagePrediction(
            prediction=prediction,
            score=sure,
            decode_ms=run.decode_ms,
            infer_ms=(job.clock.now() - decoded) * 1e3,
            full_ensemble=run.combined is not None,
            truncated=run.truncated,
            own=own,
        )

    def _first_alone(self, tensors: Tensors, row: int, temperature: float, to_image: ToImage | None) -> OwnOutputs:
        return {self.first.name: (self.kind.output(tensors, row, temperature, to_image), 1.0)}

    def _all_members(self, outputs: Sequence[Output]) -> OwnOutputs:
        assert self.others is not None, "it has members"
        weighted = zip(outputs, self.others.weights, strict=True)
        return {model.name: each for model, each in zip(self.models, weighted, strict=True)}

    def _to_image(self, model: LoadedModel, job: InferenceJob) -> ToImage | None:
        """What maps places in the model's input to the image; None for kinds without places."""
        return placement(job.header, model.spec).to_image if self.kind.located else None


@dataclass(slots=True)
class _Run:
    """One image while the models run."""

    job: InferenceJob
    inputs: Iterator[Pixels]
    """The input of each model in turn, made on demand."""
    pixels: Pixels = field(init=False)
    """The input of the current model."""
    tensors: Tensors = field(init=False)
    """What the first model returned for all images of its run."""
    row: int = field(init=False)
    """Of this image in `tensors`."""
    before: float = 1.0
    """The first member's temperature, if this is an ensemble."""
    error: Exception | None = None
    decode_ms: float = 0.0
    outputs: list[Output] = field(default_factory=list)
    """Of each member of an ensemble, if all of them run."""
    combined: Output | None = None
    """Of the whole ensemble."""
    truncated: bool = False

    def advance(self) -> bool:
        """Make the next model's input; an error concerns this image only.

        Returns: whether the input is there.
        """
        try:
            self.pixels = next(self.inputs)
        except Exception as error:  # noqa: BLE001 - the caller of this image gets it
            self.error = error
        return self.error is None


@dataclass(frozen=True, slots=True)
class InferenceJob:
    """One image to decode, resize, infer and score; `EdgeStage.infer_batch` runs several together."""

    stage: EdgeStage
    body: bytes
    header: ImageHeader
    top_k: int
    max_pixels: int
    clock: Clock
    temperature: float | None = None
    """In place of the stage's own, for an image that was not received whole (`Route.temperature`)."""
    alone: Callable[[], bool] = bool  # never
    """Called on the worker's thread before and after decoding: whether the image may use several cores."""
    first_only: bool = False
    """Run no other member of a conditional ensemble, and take the first one's tensors as they are."""
    must_end: float | None = None
    """Clock time by which the other members must end; they are skipped if only they would be late. An answer that is
    late anyway comes from the whole ensemble."""

    def in_time(self, seconds: float) -> bool:
        """Whether work of that length still ends by `must_end`."""
        return self.must_end is None or self.clock.now() + seconds <= self.must_end

    def __call__(self) -> StagePrediction:
        """The prediction. Runs on a worker thread or the event loop.

        Raises:
            RequestError: if the image is broken.
            BackendError: if the backend is.
        """
        (found,) = self.stage.infer_batch([self])
        if isinstance(found, Exception):
            raise found
        return found


def check_stage(measured: StageProfile, manifest: Manifest, where: str) -> None:
    """Refuse certificates of other model files, or of the same files with another input or temperature.

    Raises:
        ManifestError: naming the variant and what differs.
    """
    build, calibrate = advise("models build", "--task", manifest.task), advise("calibrate", "--task", manifest.task)
    certify = f"certify it with `{calibrate} --data IMAGES`"
    for variant in manifest.members(measured.name):
        expected = measured.models.get(variant.name)
        if expected != variant.sha256:
            raise ManifestError(
                f"{where}: certificates were made for {variant.name} with sha256 {expected}, but the manifest has "
                f"{variant.sha256}; rebuild it with `{build}` or {certify}"
            )
    if measured.fingerprint != manifest.fingerprint(measured.name):
        raise ManifestError(
            f"{where}: certificates were made for {measured.name} with another input or temperature than the "
            f"manifest has; {certify}"
        )

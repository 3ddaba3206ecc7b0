"""Traffic that changes: images made worse, and a replay of requests through the controllers as a node drives them.

*Corruptions* follow Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and
perturbations" (ICLR 2019): Gaussian noise, Gaussian blur and lower contrast at severities from 1 to 5. The constants
are our own, and grow with the side of the input, so that severity 3 is as hard to see through at 32 as at 224 pixels.

*The replay* draws requests from a pool of images that nothing was trained or certified on, first clean ones, then
corrupted ones, then clean ones again, and drives monitors and controllers exactly as `edge.serving.request_handler`
does: of all requests a fixed share is audited, an escalated image is compared with the reference stage's answer. Labels
    are
used only to measure, afterwards, what was really given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.certificate import Sample
from hawkvision.cascade.certification.predictions import StagePredictions, make_sample
from hawkvision.cascade.certification.profile import Pair
from hawkvision.cascade.confidence.scores import Floats
from hawkvision.cascade.drift.monitor import Claims, Monitor
from hawkvision.cascade.drift.online import AUDIT_SHARE, ControllerSpec, DriftController
from hawkvision.cascade.route import Route
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.calibration.model_runner import Corruption
from hawkvision.models.datasets import LabelledImages
from hawkvision.system.files import sha256_of

SEVERITIES: Final = range(1, 6)

NOISE_STEP: Final = 0.02
"""Standard deviation of the noise per severity at 32 pixels, as a share of the full range. It grows with the square
root of the side: halfway between the same noise on every pixel, which large inputs average away, and the same noise
after averaging, which would be white."""

BLUR_LEAST: Final = 0.010
BLUR_STEP: Final = 0.004
"""Standard deviation of the blur, and what each severity adds, as shares of the side."""

CONTRAST_STEP: Final = 0.17
"""Share of the contrast that each severity takes."""

CORRUPTION_SEED: Final = 1903
SHIFT_SEVERITY: Final = 3


class CorruptionKind(StrEnum):
    """What may go wrong with a camera."""

    NOISE = "noise"
    BLUR = "blur"
    CONTRAST = "contrast"


def corrupt(kind: CorruptionKind, severity: int) -> Corruption:
    """A corruption of one kind.

    Noise is drawn by the image's number, so that every stage of a cascade with one input size sees the same.

    Raises:
        ValueError: if the severity is not from 1 to 5.
    """
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be from {SEVERITIES[0]} to {SEVERITIES[-1]}, got {severity}")

    def apply(pixels: Pixels, number: int) -> Pixels:
        side = math.sqrt(pixels.shape[0] * pixels.shape[1])
        wide = pixels.astype(np.float32)
        match kind:
            case CorruptionKind.NOISE:
                scale = np.float32(255.0 * NOISE_STEP * severity * math.sqrt(side / 32.0))
                rng = np.random.default_rng((CORRUPTION_SEED, number))
                wide += scale * rng.standard_normal(pixels.shape, np.float32)
            case CorruptionKind.BLUR:
                wide = np.asarray(
                    cv2.GaussianBlur(wide, (0, 0), (BLUR_LEAST + BLUR_STEP * severity) * side), np.float32
                )
            case CorruptionKind.CONTRAST:
                mean = wide.mean(axis=(0, 1))
                wide = mean + (wide - mean) * np.float32(1.0 - CONTRAST_STEP * severity)
        return np.clip(wide.round(), 0.0, 255.0).astype(np.uint8)

    return apply


def mixed(severity: int = SHIFT_SEVERITY) -> Corruption:
    """A third of the images each with noise, blur and lower contrast, in turn by number.

    Raises:
        ValueError: if the severity is not from 1 to 5.
    """
    corruptions = tuple(corrupt(kind, severity) for kind in CorruptionKind)
    return lambda pixels, number: corruptions[number % len(corruptions)](pixels, number)


def mixture_name(severity: int = SHIFT_SEVERITY) -> str:
    """What `mixed` is called where logits are kept: another name as soon as a constant changes."""
    constants = (NOISE_STEP, BLUR_LEAST, BLUR_STEP, CONTRAST_STEP, CORRUPTION_SEED, [*CorruptionKind])
    return f"mixed-{severity}-{sha256_of(repr(constants).encode())[:8]}"


def subset(images: LabelledImages, chosen: NDArray[np.intp]) -> LabelledImages:
    """The images of those numbers; its hash says which they are, so that what is kept of them is told apart."""
    return LabelledImages(
        images.name,
        sha256_of(images.sha256.encode() + chosen.astype("<i8").tobytes()),
        [images.bodies[i] for i in chosen],
        images.labels[chosen],
        images.sources[chosen],
        images.is_test[chosen],
    )


@dataclass(frozen=True, slots=True)
class LabelledPredictions:
    """What every stage said of some images, calibrated as served, and what is on them."""

    stages: Mapping[str, StagePredictions]
    labels: NDArray[np.int64]

    def sample(self, pair: Pair, chosen: NDArray[np.intp]) -> Sample:
        """The images `chosen`, scored as the pair is."""
        intermediate, kind = (
            (None, None)
            if pair.intermediate is None
            else (self.stages[pair.intermediate.name], pair.intermediate.score)
        )
        return make_sample(
            self.stages[pair.edge], pair.score, self.stages[pair.best], self.labels, chosen, intermediate, kind
        )  # fmt: skip


class Phase(NamedTuple):
    """A stretch of traffic."""

    name: str
    requests: int
    shifted: bool


PHASES: Final = (Phase("clean", 8_000, False), Phase("shifted", 14_000, True), Phase("clean again", 8_000, False))
"""As in the project's study of cascades."""

SETTLING: Final = 2_000
"""Requests after a change that are reported by themselves, and after which the guarantee must be kept again."""


class AnsweringStage(StrEnum):
    """Which stage answered."""

    EDGE = "edge"
    INTERMEDIATE = "intermediate"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of every request of one run, in order; all arrays are (requests,)."""

    seed: int
    shifted: NDArray[np.bool_]
    tier: NDArray[np.int8]
    """Place of the stage that answered in `AnsweringStage`."""
    audited: NDArray[np.bool_]
    loss: NDArray[np.int8]
    """right_best − right_answered: what was really given up."""
    suspended: NDArray[np.bool_]
    """Whether the guarantee was void when the request came."""
    threshold: Floats
    """From which score on the edge's answer was accepted."""

    @property
    def escalated(self) -> NDArray[np.bool_]:
        """Whether the image left the edge before it was answered."""
        return np.asarray(self.tier != _EDGE)

    @property
    def alarm(self) -> int | None:
        """The request at which the guarantee first became void; None if it never did."""
        found = np.flatnonzero(self.suspended)
        return int(found[0]) if len(found) else None


_EDGE, _INTERMEDIATE, _BEST = range(3)

MakeControl = Callable[[ControllerSpec], DriftController]


def replay(
    clean: Sample,
    shifted: Sample,
    route: Route,
    *,
    seed: int,
    phases: Sequence[Phase] = PHASES,
    control: MakeControl | None = DriftController,
) -> Replay:
    """Send requests through one route, each an image of the pool chosen at random.

    Args:
        clean: what the stages said of the pool as it is.
        shifted: what they said of the same or other images, corrupted.
        route: of the target, from `Policy.route`; a direct one has nothing to replay.
        seed: of the images' order and the audits.
        phases: what comes when.
        control: makes the controllers; None keeps the certified thresholds, come what may.
    """
    shift = np.repeat([phase.shifted for phase in phases], [phase.requests for phase in phases])
    rng = np.random.default_rng(seed)
    drawn = np.where(shift, rng.integers(0, len(shifted), len(shift)), rng.integers(0, len(clean), len(shift)))
    chances = rng.random((len(shift), 2)).tolist()
    node = _ReplayedNode(route, control)
    pools = (_images(clean), _images(shifted))
    taken = [
        node.take(pools[is_shifted][index], chance)
        for is_shifted, index, chance in zip(shift.tolist(), drawn.tolist(), chances, strict=True)
    ]
    return Replay(
        seed,
        shift,
        np.array([one.tier for one in taken], np.int8),
        np.array([one.audited for one in taken], np.bool_),
        np.array([one.loss for one in taken], np.int8),
        np.array([one.suspended for one in taken], np.bool_),
        np.array([one.threshold for one in taken]),
    )


class _ReplayedImage(NamedTuple):
    """One image: what the edge and the intermediate stage say, and what is given up if theirs is the answer."""

    score: float
    differs: bool
    loss: int
    intermediate_score: float
    intermediate_differs: bool
    intermediate_loss: int


class _ReplayedRequest(NamedTuple):
    """What became of one request."""

    tier: int
    loss: int
    audited: bool
    suspended: bool
    threshold: float


def _images(sample: Sample) -> list[_ReplayedImage]:
    """A sample as a list, from which single images are picked faster."""
    best = sample.best_right.astype(np.int8)
    columns = [
        column.tolist()
        for stage in (sample.edge, sample.intermediate or sample.edge)
        for column in (stage.scores, stage.differs, best - stage.right)
    ]
    return list(map(_ReplayedImage, *columns))


class _ReplayedNode:
    """One stream at one node, without images, network and time."""

    def __init__(self, route: Route, make: MakeControl | None) -> None:
        controls = None if make is None else route.controls
        self._route = route
        self._edge = None if make is None or controls is None or controls.edge is None else make(controls.edge)
        self._intermediate = (
            None if make is None or controls is None or controls.intermediate is None else make(controls.intermediate)
        )
        self._edge_log = None if controls is None else _log(controls.edge_claims)
        self._intermediate_log = None if controls is None else _log(controls.intermediate_claims)
        self._share = 0.0 if controls is None else AUDIT_SHARE

    def take(self, seen: _ReplayedImage, chances: Sequence[float]) -> _ReplayedRequest:
        suspended = any(log.suspended for log in (self._edge_log, self._intermediate_log) if log is not None)
        for control in (self._edge, self._intermediate):
            if control is not None:
                control.follow(suspended)
        threshold = self._route.threshold if self._edge is None else self._edge.threshold
        drawn = chances[0] < self._share
        if drawn and self._edge_log is not None:
            self._edge_log.record(seen.score, seen.differs)
        if seen.score >= threshold:
            _accept(self._edge, seen.score, self._share, seen.differs if drawn else None)
            return _ReplayedRequest(_EDGE, seen.loss, drawn, suspended, threshold)
        # The certificate covers the intermediate stage's answers to images that the certified threshold escalates only.
        if self._route.intermediate is None or seen.score >= self._route.threshold:
            _escalate(self._edge, seen.score, seen.differs)
            return _ReplayedRequest(_BEST, 0, False, suspended, threshold)
        # While the guarantee is suspended the intermediate stage is not believed, but still looked at: its log must
        # show when traffic is as certified again.
        if drawn and self._intermediate_log is not None:
            self._intermediate_log.record(seen.intermediate_score, seen.intermediate_differs)
        bar = self._route.intermediate.threshold if self._intermediate is None else self._intermediate.threshold
        if seen.intermediate_score >= bar and not suspended:
            _escalate(self._edge, seen.score, None)
            _accept(
                self._intermediate, seen.intermediate_score, self._share, seen.intermediate_differs if drawn else None
            )
            return _ReplayedRequest(_INTERMEDIATE, seen.intermediate_loss, drawn, suspended, threshold)
        _escalate(self._edge, seen.score, seen.differs)
        _escalate(self._intermediate, seen.intermediate_score, seen.intermediate_differs)
        return _ReplayedRequest(_BEST, 0, False, suspended, threshold)


def _log(claims: Claims | None) -> Monitor | None:
    return None if claims is None else Monitor(claims, shared=False)


def _accept(control: DriftController | None, score: float, share: float, differs: bool | None) -> None:
    if control is not None:
        control.accepted(score, 1.0 / share, differs)


def _escalate(control: DriftController | None, score: float, differs: bool | None) -> None:
    if control is not None:
        control.escalated(score, differs)


@dataclass(frozen=True, slots=True)
class Summary:
    """A stretch of traffic over several runs: means over the runs, and the standard error of the drop's."""

    name: str
    escalation: float
    audits: float
    """Share of requests whose answer was checked; with `escalation`, the traffic to the datacenter."""
    drop: float
    drop_error: float
    suspended: float

    @property
    def traffic(self) -> float:
        """Share of requests whose image was sent to the datacenter."""
        return self.escalation + self.audits


def summarise(runs: Sequence[Replay], phases: Sequence[Phase] = PHASES) -> tuple[Summary, ...]:
    """Every phase, those after the first in two parts: `SETTLING` requests and the rest. The whole comes last."""
    found: list[Summary] = []
    start = 0
    for index, phase in enumerate(phases):
        end = start + phase.requests
        decided = start if index == 0 else min(start + SETTLING, end)
        if decided > start:
            found.append(_summary(f"{phase.name}, first {decided - start:,}", runs, slice(start, decided)))
        if end > decided:
            found.append(_summary(phase.name if index == 0 else f"{phase.name}, rest", runs, slice(decided, end)))
        start = end
    return (*found, _summary("all", runs, slice(0, start)))


def _summary(name: str, runs: Sequence[Replay], part: slice) -> Summary:
    drops = np.array([run.loss[part].mean() for run in runs])
    return Summary(
        name,
        float(np.mean([run.escalated[part].mean() for run in runs])),
        float(np.mean([run.audited[part].mean() for run in runs])),
        float(drops.mean()),
        float(drops.std(ddof=1) / math.sqrt(len(drops))) if len(drops) > 1 else math.nan,
        float(np.mean([run.suspended[part].mean() for run in runs])),
    )


def alarm_delays(runs: Sequence[Replay]) -> tuple[int | None, ...]:
    """Of each run, requests from the first shifted one to the alarm; negative for a false one, None for none."""
    return tuple(None if run.alarm is None else run.alarm - int(np.argmax(run.shifted)) for run in runs)

"""A replay of changing traffic through monitors and controllers, as an edge node drives them.

Requests are drawn from images that nothing was trained or certified on: clean ones, then corrupted ones, then clean
ones again. As in `edge.serving.request_handler`, a fixed share of all requests is audited, and an escalated image is
compared with the reference stage's answer. Labels only measure the accuracy drop afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.certificate import Sample
from hawkvision.cascade.certification.predictions import Scored, StagePredictions, make_sample
from hawkvision.cascade.certification.profile import Pair
from hawkvision.cascade.drift.monitor import Claims, Monitor
from hawkvision.cascade.drift.online import AUDIT_SHARE, ControllerSpec, DriftController
from hawkvision.cascade.route import Route
from hawkvision.models.datasets import LabelledImages
from hawkvision.system.files import sha256_of
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import TaskKind, Truth


def subset(images: LabelledImages, chosen: NDArray[np.intp]) -> LabelledImages:
    """The images of those indices. Its hash covers the indices, so that cached tensors are not confused."""
    return images.part(chosen, sha256_of(images.sha256.encode() + chosen.astype("<i8").tobytes()))


@dataclass(frozen=True, slots=True)
class LabelledPredictions:
    """The predictions of every stage for some images as each tier serves them, and the labels."""

    kind: TaskKind[Any]
    edge: Mapping[str, StagePredictions]
    datacenter: Mapping[str, StagePredictions]
    truths: Sequence[Truth]

    def sample(self, pair: Pair, chosen: NDArray[np.intp]) -> Sample:
        """The images `chosen`, scored as the pair is."""
        between = pair.intermediate
        return make_sample(
            self.kind, Scored(self.edge[pair.edge], pair.score), self.datacenter[pair.best], self.truths, chosen,
            None if between is None else Scored(self.datacenter[between.name], between.score),
        )  # fmt: skip


class Phase(NamedTuple):
    """A stretch of traffic."""

    name: str
    requests: int
    shifted: bool


PHASES: Final = (Phase("clean", 8_000, False), Phase("shifted", 14_000, True), Phase("clean again", 8_000, False))
"""The default traffic."""

SETTLING: Final = 2_000
"""Requests after a change that are reported separately."""


class AnsweringStage(StrEnum):
    """The stage that answered."""

    EDGE = "edge"
    INTERMEDIATE = "intermediate"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of every request of one run, in order; all arrays are (requests,)."""

    seed: int
    shifted: NDArray[np.bool_]
    tier: NDArray[np.int8]
    """Index in `AnsweringStage` of the stage that answered."""
    audited: NDArray[np.bool_]
    loss: Floats
    """loss_answered − loss_reference: the accuracy given up."""
    suspended: NDArray[np.bool_]
    """Whether the guarantee was suspended when the request came."""
    threshold: Floats
    """The edge's accept threshold."""

    @property
    def escalated(self) -> NDArray[np.bool_]:
        """Whether the image left the edge before it was answered."""
        return np.asarray(self.tier != _EDGE)

    @property
    def alarm(self) -> int | None:
        """The request at which the guarantee was first suspended; None if it never was."""
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
        clean: predictions for the pool as it is.
        shifted: predictions for the same or other images, corrupted.
        route: of the target, from `Policy.route`; a direct one has nothing to replay.
        seed: of the images' order and the audits.
        phases: the stretches of traffic, in order.
        control: makes the controllers; None keeps the certified thresholds.
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
        np.array([one.loss for one in taken], np.float64),
        np.array([one.suspended for one in taken], np.bool_),
        np.array([one.threshold for one in taken]),
    )


class _ReplayedImage(NamedTuple):
    """One image: scores of edge and intermediate stage, their disagreement with the reference, and what they lose."""

    score: float
    disagreement: float
    loss: float
    intermediate_score: float
    intermediate_disagreement: float
    intermediate_loss: float


class _ReplayedRequest(NamedTuple):
    """The outcome of one request."""

    tier: int
    loss: float
    audited: bool
    suspended: bool
    threshold: float


def _images(sample: Sample) -> list[_ReplayedImage]:
    """A sample as a list, for faster access to single images."""
    columns = [
        column.tolist()
        for stage in (sample.edge, sample.intermediate or sample.edge)
        for column in (stage.scores, stage.disagreements, stage.losses - sample.reference_losses)
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

    def take(self, image: _ReplayedImage, chances: Sequence[float]) -> _ReplayedRequest:
        suspended = any(log.suspended for log in (self._edge_log, self._intermediate_log) if log is not None)
        for control in (self._edge, self._intermediate):
            if control is not None:
                control.follow(suspended)
        threshold = self._route.threshold if self._edge is None else self._edge.threshold
        drawn = chances[0] < self._share
        if drawn and self._edge_log is not None:
            self._edge_log.record(image.score, image.disagreement)
        if image.score >= threshold:
            _accept(self._edge, image.score, self._share, image.disagreement if drawn else None)
            return _ReplayedRequest(_EDGE, image.loss, drawn, suspended, threshold)
        # The certificate covers the intermediate stage only for images below the certified threshold.
        if self._route.intermediate is None or image.score >= self._route.threshold:
            _escalate(self._edge, image.score, image.disagreement)
            return _ReplayedRequest(_BEST, 0, False, suspended, threshold)
        # While the guarantee is suspended the intermediate stage is not accepted, but it is still monitored, so that
        # its log shows when traffic is as certified again.
        if drawn and self._intermediate_log is not None:
            self._intermediate_log.record(image.intermediate_score, image.intermediate_disagreement)
        bar = self._route.intermediate.threshold if self._intermediate is None else self._intermediate.threshold
        if image.intermediate_score >= bar and not suspended:
            _escalate(self._edge, image.score, None)
            _accept(
                self._intermediate,
                image.intermediate_score,
                self._share,
                image.intermediate_disagreement if drawn else None,
            )
            return _ReplayedRequest(_INTERMEDIATE, image.intermediate_loss, drawn, suspended, threshold)
        _escalate(self._edge, image.score, image.disagreement)
        _escalate(self._intermediate, image.intermediate_score, image.intermediate_disagreement)
        return _ReplayedRequest(_BEST, 0, False, suspended, threshold)


def _log(claims: Claims | None) -> Monitor | None:
    return None if claims is None else Monitor(claims, shared=False)


def _accept(control: DriftController | None, score: float, share: float, disagreement: float | None) -> None:
    if control is not None:
        control.accepted(score, 1.0 / share, disagreement)


def _escalate(control: DriftController | None, score: float, disagreement: float | None) -> None:
    if control is not None:
        control.escalated(score, disagreement)


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
    """For each run, requests from the first shifted one to the alarm; negative for a false alarm, None for none."""
    return tuple(None if run.alarm is None else run.alarm - int(np.argmax(run.shifted)) for run in runs)

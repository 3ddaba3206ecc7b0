"""Runs made in code: by hand, request by request, or plausible ones of any length from a seed."""

from __future__ import annotations

import numpy as np

from hawkvision.core.types import AccuracyStatus
from loadgen.workload.record import LinkSample, NoiseFloor, Origin, RequestOutcome, Run, TargetClass
from loadgen.workload.target_mix import parse

FIVE = tuple(parse("max_drop:0.01,max_drop:0.02,max_drop:0.04,quality:fast,quality:balanced", 100.0))


def origin(seed: int = 7, command: str = "python -m loadgen run --arrivals poisson:8") -> Origin:
    return Origin(command, "2026-11-21T15:00:00Z", "0.1.0", "3.11.7", "Some CPU @ 2.0 GHz", 2, 0.4, seed)


def run_of(
    outcomes: list[RequestOutcome],
    *,
    name: str = "hawkvision",
    targets: tuple[TargetClass, ...] = (TargetClass({}, 1.0),),
    deadline_ms: float | None = 100.0,
    duration_s: float = 10.0,
    warm_up_s: float = 0.0,
    reference: dict[int, bool] | None = None,
    links: tuple[LinkSample, ...] = (),
    noise: NoiseFloor | None = None,
    labelled: bool = True,
    schedule: str = "poisson:8",
    interrupted: bool = False,
    made: Origin | None = None,
) -> Run:
    return Run(
        name, "http://127.0.0.1:8080", "http", schedule, duration_s, warm_up_s, deadline_ms, "set.npz", labelled,
        list(targets), outcomes, made or origin(), noise, list(links), interrupted=interrupted, reference=reference,
    )  # fmt: skip


def answer(
    due_s: float,
    ms: float,
    *,
    right: bool | None = True,
    target: int = 0,
    image: int = 0,
    guarantee: AccuracyStatus | None = AccuracyStatus.CERTIFIED,
    degraded: bool = False,
    escalated: bool = False,
    sent_bytes: int = 1000,
    max_drop: float | None = None,
) -> RequestOutcome:
    return RequestOutcome(
        due_s, due_s, due_s + ms / 1000, target, image, 200, index=1, right=right, escalated=escalated,
        degraded=degraded, guarantee=guarantee, sent_bytes=sent_bytes, max_drop=max_drop,
    )  # fmt: skip


def refusal(
    due_s: float, ms: float, status: int = 429, error: str = "overloaded", *, target: int = 0, image: int = 0
) -> RequestOutcome:
    return RequestOutcome(due_s, due_s, due_s + ms / 1000, target, image, status, error)


def plausible(name: str, *, slow: float = 1.0, honest: bool = True) -> Run:
    """15 seconds over a link that drives: the requests are the same whatever the server does with them."""
    asking, serving = np.random.default_rng(7), np.random.default_rng([7, *name.encode()])
    due = np.cumsum(asking.exponential(1 / 8, 180))
    due = due[due < 15.0]
    target, image = asking.integers(0, 5, len(due)), asking.integers(0, 2_000, len(due))
    best = np.random.default_rng(8).random(2_000) < 0.78
    links = drive(15.0)
    outcomes = []
    for when, which, what in zip(due.tolist(), target.tolist(), image.tolist(), strict=True):
        now = [one for one in links if one.at_s <= when and one.link == "edge-dc"][-1]
        bad = not now.up or (now.rate_mbit_s or 0) < 2
        escalated = bool(serving.random() < 0.3) and not (bad and honest)
        ms = 18 * slow * serving.lognormal(0, 0.25)
        if escalated:
            ms += 45 * slow * serving.lognormal(0, 0.35) * (8 if bad else 1)
        right = bool(best[what]) and serving.random() > 0.01 / 0.78
        status = AccuracyStatus.CERTIFIED if honest and not bad else AccuracyStatus.BEST_EFFORT
        outcomes.append(answer(when, ms, right=right, target=which, image=what, escalated=escalated, guarantee=status,
                               degraded=bad and honest, max_drop=0.02,
                               sent_bytes=int(12_288 * serving.lognormal(0, 0.3))))  # fmt: skip
    return run_of(outcomes, name=name, targets=FIVE, duration_s=15.0, warm_up_s=3.0, links=links,
                  reference={place: bool(value) for place, value in enumerate(best)},
                  noise=NoiseFloor(0.4, 1.7, 900.0))  # fmt: skip


def drive(duration_s: float) -> tuple[LinkSample, ...]:
    """Both links of a drive: rate and loss change every three seconds, with an outage of two in the middle."""
    rng = np.random.default_rng(3)
    middle_s = duration_s / 2
    found = [LinkSample(middle_s, "edge-dc", 3.0, 30.0, 0.0, up=False), LinkSample(middle_s + 2, "edge-dc", 12, 30, 0)]
    for at in np.arange(0.0, duration_s, 3.0).tolist():
        rate = float(rng.choice([0.8, 3.0, 12.0, 25.0], p=[0.15, 0.25, 0.3, 0.3]))
        loss = 0.08 if rate < 1 else 0.01
        found.append(LinkSample(at, "client-edge", 4 * rate, 12.0, loss / 2))
        found.append(LinkSample(at, "edge-dc", rate, 30.0, loss))
    return tuple(sorted(found, key=lambda one: one.at_s))

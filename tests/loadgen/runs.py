"""Runs made in code: by hand, request by request, or plausible ones of any length from a seed."""

from __future__ import annotations

import numpy as np

from hawkvision.core.types import AccuracyStatus
from loadgen.workload.record import LinkSample, NoiseFloor, Origin, RequestOutcome, Run, TargetClass

FIVE = (
    TargetClass({"max_accuracy_drop": "0.01", "deadline_ms": "100"}, 0.2),
    TargetClass({"max_accuracy_drop": "0.02", "deadline_ms": "100"}, 0.2),
    TargetClass({"max_accuracy_drop": "0.04", "deadline_ms": "100"}, 0.2),
    TargetClass({"quality": "fast", "deadline_ms": "100"}, 0.2),
    TargetClass({"quality": "balanced", "deadline_ms": "100"}, 0.2),
)


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


def plausible(
    name: str,
    *,
    seed: int = 7,
    rate: float = 8.0,
    duration_s: float = 60.0,
    slow: float = 1.0,
    accuracy_lost: float = 0.01,
    escalating: float = 0.3,
    honest: bool = True,
    kib: float = 12.0,
    shed: float = 0.0,
    volatile: bool = True,
) -> Run:
    """A run over a link that drives: the requests of a seed are the same whatever the server does with them."""
    asking, serving = np.random.default_rng(seed), np.random.default_rng([seed, *name.encode()])
    due = np.cumsum(asking.exponential(1 / rate, int(rate * duration_s * 1.5)))
    due = due[due < duration_s]
    target, image = asking.integers(0, 5, len(due)), asking.integers(0, 2_000, len(due))
    best = np.random.default_rng(seed + 1).random(2_000) < 0.78
    links = drive(duration_s) if volatile else ()
    outcomes = []
    for when, which, what in zip(due.tolist(), target.tolist(), image.tolist(), strict=True):
        samples = [one for one in links if one.at_s <= when and one.link == "edge-dc"]
        bad = bool(samples) and (not samples[-1].up or (samples[-1].rate_mbit_s or 0) < 2)
        if serving.random() < shed * (4 if bad else 1):
            outcomes.append(refusal(when, 3.0, target=which, image=what))
            continue
        escalated = bool(serving.random() < escalating) and not (bad and honest)
        ms = 18 * slow * serving.lognormal(0, 0.25)
        if escalated:
            ms += 45 * slow * serving.lognormal(0, 0.35) * (8 if bad else 1)
        right = bool(best[what]) and serving.random() > accuracy_lost / 0.78
        status = AccuracyStatus.CERTIFIED if honest and not bad else AccuracyStatus.BEST_EFFORT
        outcomes.append(
            answer(
                when,
                ms,
                right=right,
                target=which,
                image=what,
                escalated=escalated,
                guarantee=status,
                degraded=bad and honest,
                sent_bytes=int(1024 * kib * serving.lognormal(0, 0.3)),
                max_drop=0.02,
            )
        )
    return run_of(
        outcomes,
        name=name,
        targets=FIVE,
        duration_s=duration_s,
        warm_up_s=3.0,
        reference={place: bool(value) for place, value in enumerate(best)},
        links=links,
        noise=NoiseFloor(0.4, 1.7, 900.0),
        made=origin(seed, f"python -m loadgen baselines --links lte-drive --policies {name} --rate {rate:g}"),
    )


def drive(duration_s: float) -> tuple[LinkSample, ...]:
    """Both links of a drive: rate and loss change every three seconds, with an outage of two in the middle."""
    rng = np.random.default_rng(3)
    found = []
    for at in np.arange(0.0, duration_s, 3.0).tolist():
        rate = float(rng.choice([0.8, 3.0, 12.0, 25.0], p=[0.15, 0.25, 0.3, 0.3]))
        loss = 0.08 if rate < 1 else 0.01
        found.append(LinkSample(at, "client-edge", 4 * rate, 12.0, loss / 2))
        found.append(LinkSample(at, "edge-dc", rate, 30.0, loss))
    intermediate = duration_s / 2
    found += [
        LinkSample(intermediate, "edge-dc", 3.0, 30.0, 0.0, up=False),
        LinkSample(intermediate + 2, "edge-dc", 12.0, 30.0, 0.0),
    ]
    return tuple(sorted(found, key=lambda one: one.at_s))

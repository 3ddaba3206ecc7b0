"""The time of a decision: from a target and a score to accept or escalate, with and without the controller.

    python -m tests.bench.cascade.decision_time [--requests N]

Per request: the target's route, the stream's controllers, the threshold, the decision, the draw of an audit, and the
update of the controller, in one thread. Scores are drawn from the profile's own curve. Streams are the node's own and a
thousand named ones, whose controllers are opened on the way. The no-op row is the clock itself. Goal: at most 50 µs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from edge.monitoring.stream import StageScore
from edge.monitoring.streams import Streams
from hawkvision.cascade.certification.profile_files import load_profile
from hawkvision.cascade.decision import Accept, decide
from hawkvision.cascade.drift.online import AUDIT_SHARE
from hawkvision.cascade.policy import Policy
from hawkvision.core.clock import Deadline
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import MaxAccuracyDrop, OnMiss, Prediction, Quality, Target

PROFILE: Final = Path(__file__).parents[3] / "models" / "imagenet" / "profile.json"
TARGETS: Final[tuple[Target, ...]] = (Quality.BALANCED, MaxAccuracyDrop(0.02), MaxAccuracyDrop(0.033))
STREAMS: Final = (None, *(f"camera {number}" for number in range(1_000)))
DEADLINE: Final = Deadline(0.2)

Decide = Callable[[Target, str | None, float], None]


def without_control(policy: Policy) -> Decide:
    """Fixed thresholds."""

    def run(target: Target, stream: str | None, score: float) -> None:
        decide(policy.route(target), score, deadline=DEADLINE, now=0.0, reachable=True, on_miss=OnMiss.DEGRADE)

    return run


def with_control(policy: Policy, streams: Streams, draws: random.Random) -> Decide:
    """As `edge.serving.request_handler` and `edge.monitoring.audits` do, except for carrying out what was decided."""

    def run(target: Target, stream: str | None, score: float) -> None:
        route = policy.route(target)
        controllers = streams.controllers(stream, route.controls)
        assert controllers.edge is not None
        assert controllers.edge_claims is not None
        decision = decide(
            route,
            score,
            deadline=DEADLINE,
            now=0.0,
            reachable=True,
            on_miss=OnMiss.DEGRADE,
            threshold=controllers.edge.control.threshold,
        )
        drawn = draws.random() < AUDIT_SHARE
        if drawn:
            controllers.audited((StageScore(controllers.edge_claims, score, Prediction()),), [0.0])
        else:
            controllers.not_due()
        if isinstance(decision, Accept):
            controllers.edge.accepted(score, False if drawn else None)
        else:
            controllers.edge.escalated(score, False)

    return run


def measure(run: Decide, scores: list[float], draws: random.Random) -> list[float]:
    """Microseconds of each request."""
    asked = [(draws.choice(TARGETS), draws.choice(STREAMS), score) for score in scores]
    taken = []
    for target, stream, score in asked:
        before = time.perf_counter_ns()
        run(target, stream, score)
        taken.append((time.perf_counter_ns() - before) / 1e3)
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    requests = parser.parse_args().requests
    profile = load_profile(PROFILE)
    pair = profile.pairs[0]
    policy = Policy(profile, pair.edge, pair.best)
    rng = random.Random(1)
    knots = pair.curve.scores
    scores = np.interp([rng.random() for _ in range(requests)], np.linspace(0.0, 1.0, len(knots)), knots).tolist()
    streams = Streams(profile.task, 4096, AUDIT_SHARE, EdgeMetrics(), None)
    rows: list[tuple[str, Decide]] = [
        ("no-op", lambda target, stream, score: None),
        ("fixed threshold", without_control(policy)),
        ("controller", with_control(policy, streams, rng)),
    ]
    print(f"{requests} requests, {pair.edge} → {pair.best}, {len(STREAMS)} streams, {len(TARGETS)} targets; µs each")
    print(f"{'':16} {'P50':>7} {'P99':>7} {'P99.9':>7} {'mean':>7}")
    for name, run in rows:
        taken = np.array(measure(run, scores, rng))
        shown = [*np.percentile(taken, [50, 99, 99.9]), taken.mean()]
        print(f"{name:16} " + " ".join(f"{value:7.1f}" for value in shown))


if __name__ == "__main__":
    main()

"""Does every answer state its guarantee truthfully? Targets by faults, and the delay until the guarantee is no longer
claimed.

    python -m tests.bench.guarantee.guarantees [--seeds 50] [--requests 100000] [--only simulated|node] [--fault NAME]

*The delay is derived before the run.* It follows from a log's claims, bets and threshold
(`hawkvision.guarantee.monitor`), the share of audits without suspicion, and the disagreement that the fault causes. Let
Z and W be the numbers of audits so far that differ and agree, Poisson variables. The delay is the first number of
requests at which one bet alone reaches the threshold with probability 1/2, or 0.95, for the best of the bets, plus a
block of audits, because bets start with blocks. All bets count together and suspicion raises the share, so this is an
upper bound.

*Simulated:* the same log and draws, `--seeds` times each: median and 95th percentile of the delay, and false
alarms in traffic on the exact bounds, per 100,000 requests; once with disagreements of 0 or 1, once with fractions.
*Node:* one run of each fault through an edge node over HTTP to a datacenter tier of this bench, for classification and
detection: `certified` counts the answers still certified after the derived 95th percentile; it must be 0.
Exit status 1 if one is counted, a simulated 95th percentile exceeds the derived one, or false alarms exceed theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import logging
import math
import random
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.stats import poisson

from hawkvision.cascade.policy import Policy
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    MaxAccuracyDrop,
    Prediction,
    Quality,
    Target,
    Tensors,
)
from hawkvision.guarantee.monitor import BETS, BLOCK, HORIZON, MOST_SHARE, Claims, Log
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind
from tests.edge.bench import SURE, Bench, bench, known, outcomes
from tests.edge.peer import ANSWER_CLASS, AS_LISTED, Peer, running_peer
from tests.hawkvision.cascade.synthetic import SHA, make_profile
from tests.hawkvision.tasks.classes import TEN
from tests.waiting import until

TARGETS: Final[tuple[tuple[str, Target], ...]] = (
    ("fast", Quality.FAST), ("balanced", Quality.BALANCED), ("drop 0.3", MaxAccuracyDrop(0.3)),
)  # fmt: skip
TIMES: Final = (2.0, 4.0, math.inf)
"""Disagreement as a multiple of what is claimed; infinite: with every answer."""
AUDIT_SHARE: Final = EdgeConfig().audit_share
FEWER: Final = 5
"""Fewer requests of traffic on the bounds where disagreements are fractions: each of them takes a test."""
NODE_SHARE: Final = 0.2
"""Of audits, at the node: the largest that a node can be set to, so that the bench is over in time."""
CALLERS_PART: Final = 0.25
"""Of δ, for the log of a caller."""
UNDER_WAY: Final = 16
"""Audits that may be under way when a fault begins."""
MOST_REQUESTS: Final = 1_000_000
CALLER: Final = "127.0.0.1"
EDGE_CLASS: Final = 3
OTHER_VERSION: Final = f"{'b' * 64}/int8"
OTHER_PROVIDER: Final = f"{SHA}/onnxruntime:CUDAExecutionProvider,CPUExecutionProvider:tf32"


def _said(times: float) -> str:
    return "always" if times == math.inf else f"{times:g} x as claimed"


@dataclass(frozen=True, slots=True)
class Delay:
    """Requests from the fault to the alarm."""

    median: float
    late: float
    """95th percentile."""


def derived(claims: Claims, rates: Sequence[float], share: float, *, fresh: bool = False) -> Delay:
    """An upper bound on the delay's quantiles; `rates` are what each claim's P(Z = 1) has become."""
    log = Log(claims, CALLERS_PART)
    on, off = map(np.log, log.alarm_bets)
    at = math.log(log.alarm_at * on.size)
    bets = [(rate, float(on[k, a]), float(off[k, a])) for k, rate in enumerate(rates) for a in range(len(BETS))]
    found = []
    for chance in (0.5, 0.95):
        times = [_requests(rate * share, (1.0 - rate) * share, up, down, at, chance) for rate, up, down in bets]
        found.append(min(times) + (0.0 if fresh else BLOCK / share))
    return Delay(*found)


def _requests(differing: float, agreeing: float, up: float, down: float, at: float, chance: float) -> float:
    """The first number of requests after which a bet is paid out with this chance; infinite if that is never."""
    if differing * up + agreeing * down <= 0.0:
        return math.inf

    def paid(requests: float) -> float:
        mean = agreeing * requests
        others = np.arange(int(poisson.ppf(1e-9, mean)), int(poisson.ppf(1.0 - 1e-9, mean)) + 1)
        needed = np.ceil((at - others * down) / up)
        return float((poisson.pmf(others, mean) * poisson.sf(needed - 1.0, differing * requests)).sum())

    low, high = 1.0, 2.0
    while paid(high) < chance:
        low, high = high, 2.0 * high
        if high > MOST_REQUESTS:
            return math.inf
    while high - low > 1.0:
        intermediate = (low + high) / 2.0
        low, high = (low, intermediate) if paid(intermediate) >= chance else (intermediate, high)
    return math.ceil(high)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Images between two claims' thresholds: how often they come, and how often the answers differ."""

    scores: tuple[float, ...]
    masses: tuple[float, ...]
    differs: tuple[float, ...]

    @property
    def rates(self) -> list[float]:
        """P(score ≥ τ_k and differs) of each claim."""
        parts = np.array(self.masses) * np.array(self.differs)
        return [float(parts[k:].sum()) for k in range(len(parts))]


def traffic(claims: Claims, times: float, accepted: Callable[[float], float], *, sure: float = 0.0) -> Traffic:
    """Traffic in which every claim's disagreement is `times` what is claimed, as far as there are images for it.

    Args:
        claims: by rising threshold.
        times: see `TIMES`.
        accepted: share of images with at least this score.
        sure: share of images that the edge has become surer of, from below the highest threshold to above it: drift.
    """
    thresholds = [claim.threshold for claim in claims.claims]
    bounds = [claim.disagreement for claim in claims.claims]
    shares = [accepted(threshold) for threshold in thresholds]
    masses = [share - after for share, after in zip(shares, [*shares[1:], 0.0], strict=True)]
    wanted = [max(0.0, bound - after) for bound, after in zip(bounds, [*bounds[1:], 0.0], strict=True)]
    differs = [
        1.0 if times == math.inf else min(1.0, times * part / mass) if mass > 0.0 else 0.0
        for part, mass in zip(wanted, masses, strict=True)
    ]
    if sure:
        moved = [sure * mass for mass in masses[:-1]]
        errors = sum(part * chance for part, chance in zip(moved, differs, strict=False))
        last = masses[-1] + sum(moved)
        differs[-1] = min(1.0, (masses[-1] * differs[-1] + 3.0 * errors) / last)
        masses = [*(mass - part for mass, part in zip(masses, moved, strict=False)), last]
    return Traffic(tuple(max(threshold, 0.0) for threshold in thresholds), tuple(masses), tuple(differs))


def simulate(
    claims: Claims,
    before: Traffic | None,
    after: Traffic,
    requests: int,
    rng: np.random.Generator,
    *,
    fractions: bool = False,
) -> tuple[int, int]:
    """Requests of traffic `after` until the alarm, after some of `before`, and audits; `requests` if none is raised.

    With `fractions` answers differ by fractions of the same mean, beta distributed.
    """
    log = Log(claims, CALLERS_PART)
    if before is not None:
        for score, differs in _audits(before, int(rng.integers(200, 600)), rng, fractions):
            log.record(score, differs)
        if log.alarm:
            return 0, 0
    at = audits = 0
    while True:
        for score, differs in _audits(after, 1000, rng, fractions):
            at += int(rng.geometric(min(AUDIT_SHARE * log.suspicion, MOST_SHARE)))
            if at > requests:
                return requests, audits
            log.record(score, differs)
            audits += 1
            if log.alarm:
                return at, audits


def _audits(traffic: Traffic, count: int, rng: np.random.Generator, fractions: bool) -> list[tuple[float, float]]:
    masses = np.array(traffic.masses)
    place = rng.choice(len(masses), size=count, p=masses / masses.sum())
    mean = np.array(traffic.differs)[place]
    differs = (rng.random(count) < mean).astype(np.float64)
    if fractions:
        inner = np.clip(mean, 1e-3, 1.0 - 1e-3)
        differs = np.where(mean == inner, rng.beta(2.0 * inner, 2.0 * (1.0 - inner)), differs)
    return list(zip(np.array(traffic.scores)[place].tolist(), differs.tolist(), strict=True))


def simulated(seeds: int, requests: int, *, fractions: bool = False) -> list[str]:
    """Derive, simulate and print; what was missed. Fractions of the same mean vary less, so that the bounds hold."""
    policy = Policy(make_profile(), "small", "large")
    curve = policy.pair.curve
    controls = policy.route(Quality.BALANCED).controls
    assert controls is not None
    assert controls.edge_claims is not None
    claims = controls.edge_claims

    def accepted(threshold: float) -> float:
        return sum(score >= threshold for score in curve.scores) / len(curve.scores)

    what = "fractions" if fractions else "0 or 1"
    print(f"{len(claims.claims)} claims of one stage, {AUDIT_SHARE:.0%} audited; requests to the alarm, of any target; "
          f"disagreements of {what}")  # fmt: skip
    print(f"{'fault':34} {'derived P50':>12} {'P95':>8} {'simulated P50':>14} {'P95':>8}  seeds")
    failures = []
    quiet = traffic(claims, 0.5, accepted)
    faults = [(f"reference disagrees {_said(times)}", traffic(claims, times, accepted)) for times in TIMES]
    faults.append(("drift: surer, and wrong more often", traffic(claims, 0.8, accepted, sure=0.3)))
    for name, fault in faults:
        expected = derived(claims, fault.rates, AUDIT_SHARE)
        limit = int(min(3.0 * expected.late, MOST_REQUESTS))
        delays = [
            simulate(claims, quiet, fault, limit, np.random.default_rng(seed), fractions=fractions)[0]
            for seed in range(seeds)
        ]
        median, late = np.percentile(delays, [50, 95])
        print(f"{name:34} {expected.median:12,.0f} {expected.late:8,.0f} {median:14,.0f} {late:8,.0f}  {seeds}")
        if late > expected.late:
            failures.append(f"{name}: simulated P95 {late:,.0f} > derived {expected.late:,.0f}")
    bound = traffic(claims, 1.0, accepted)
    ends = [
        simulate(claims, None, bound, requests, np.random.default_rng(seed), fractions=fractions)
        for seed in range(seeds)
    ]
    false, audits = sum(at < requests for at, _ in ends), sum(audits for _, audits in ends)
    share = audits / sum(at for at, _ in ends)
    most = claims.delta * CALLERS_PART * audits / HORIZON
    print(f"false alarms on the very bounds: {false} in {seeds} x {requests:,} requests, {share:.1%} of them audited; "
          f"stated: at most {most:.2f} on average")  # fmt: skip
    if false > most + 3.0 * math.sqrt(most) + 1.0:
        failures.append("more false alarms than stated")
    return failures


# ----------------------------------------------------------------------------------------------- through a node


BOXES: Final = np.array([[[0.1, 0.1, 0.4, 0.6], [0.5, 0.2, 0.9, 0.8]]], np.float32)
TENSORS: Final[dict[str, Tensors | None]] = {
    "classification": None,
    "detection": {
        "boxes": BOXES,
        "scores": np.full((1, 2), 0.9999, np.float32),
        "classes": np.zeros((1, 2), np.float32),
    },
}
"""What the edge's model gives, by the kind of task; None: what the bench's own does."""
DETECTION: Final = task_kind("detection", ["lamp"], {})


def node_of(peer: Peer, **options: Any) -> AbstractAsyncContextManager[Bench]:
    """A node for the peer's kind of task that is sure of its answers."""
    return bench(peer, SURE, kind=peer.kind, tensors=TENSORS[peer.kind.name], **options)


def weight_of(peer: Peer) -> float:
    """How far the reference's answers are from the edge's where they differ."""
    return 1.0 if peer.answers is None else peer.kind.disagreement(*peer.answers)


def detected(count: int) -> Prediction:
    """The first of the edge's boxes."""
    tensors = TENSORS["detection"]
    assert tensors is not None
    (output,) = DETECTION.outputs(tensors, 1.0)
    found: Prediction = DETECTION.predict(output[:count], 1)
    return found


def claims_at(it: Bench, target: Target) -> Claims:
    """What the target's stage claims."""
    controls = it.node.policy.route(target).controls
    assert controls is not None
    assert controls.edge_claims is not None
    return controls.edge_claims


async def ask(it: Bench, target: Target, requests: int, stream: str | None = None) -> list[Answer]:
    """So many answers, four at a time."""
    answers: list[Answer] = []
    while len(answers) < requests:
        answers += await asyncio.gather(*(it.ask(target=target, stream=stream) for _ in range(4)))
    return answers


def held(answers: Sequence[Answer]) -> int:
    """How many claim to be certified."""
    return sum(answer.accuracy.status is AccuracyStatus.CERTIFIED for answer in answers)


async def disagreeing(peer: Peer, target: Target, times: float) -> tuple[str, int]:
    """The reference disagrees: answers still held after the derived 95th percentile."""
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        claims = claims_at(it, target)
        at = it.node.policy.route(target).threshold
        bound = next(claim.disagreement for claim in claims.claims if claim.threshold == at)
        weight = weight_of(peer)
        rate = min(weight, times * bound)
        await ask(it, target, 100)
        late = derived(claims, [rate] * len(claims.claims), NODE_SHARE).late + UNDER_WAY / NODE_SHARE
        peer.differing = rate / weight
        try:
            answers = await ask(it, target, int(late) + 100)
        finally:
            peer.differing = 0.0
        alarm = next((n for n, a in enumerate(answers) if a.accuracy.status is AccuracyStatus.SUSPENDED), -1)
        return f"derived P95 {late:,.0f}, alarm after {alarm:,}", held(answers[int(late) :])


async def link_down(peer: Peer, target: Target) -> tuple[str, int]:
    """Audits wait while the link is down; then they raise an alarm, and the link is down again."""
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        peer.differing = 1.0
        await _without_link(it, peer, target, 400)
        waited = it.node.auditor.pending
        it.node.datacenter.lost.set()  # type: ignore[union-attr]
        await until(lambda: it.node.datacenter is not None and it.node.datacenter.up)
        await until(lambda: not it.node.auditor.pending)
        peer.differing = 0.0
        wrong = held(await ask(it, target, 20))
        await until(lambda: not it.node.auditor.pending)  # an answer that comes would bring the link back
        wrong += held(await _without_link(it, peer, target, 2_000))
        return f"{waited} audits wait and raise an alarm, which outlasts the next outage", wrong


async def _without_link(it: Bench, peer: Peer, target: Target, requests: int) -> list[Answer]:
    assert it.node.datacenter is not None
    peer.stages_delay_s = 30.0
    try:
        it.node.datacenter.link.connected = False
        return await ask(it, target, requests)
    finally:
        peer.stages_delay_s = 0.0


async def without_room(peer: Peer, target: Target) -> tuple[str, int]:
    """Every audit finds the only connection taken, until it is free."""
    async with node_of(peer, connections=1, audit_share=NODE_SHARE) as it:
        await known(it.node)
        peer.held, peer.differing = True, 1.0
        waiting = asyncio.create_task(it.ask(target=Quality.BEST))
        asked = len(peer.bodies)
        await until(lambda: len(peer.bodies) > asked)
        await ask(it, target, 400)
        waited = it.node.auditor.pending
        peer.held = False
        await waiting
        await until(lambda: not it.node.auditor.pending)
        peer.differing = 0.0
        return f"{waited} audits wait and raise an alarm", held(await ask(it, target, 20))


async def evicted(peer: Peer, target: Target) -> tuple[str, int]:
    """Five other names come after camera 1's alarm, and memory is for two."""
    async with node_of(peer, audit_share=NODE_SHARE, max_streams=2) as it:
        await known(it.node)
        peer.differing = 1.0
        await ask(it, target, 400, "camera 1")
        await until(lambda: not it.node.auditor.pending)
        peer.differing = 0.0
        for other in range(5):
            await ask(it, target, 4, f"camera {other + 2}")
        return "alarm outlasts five other names", held(await ask(it, target, 20, "camera 1"))


async def restarted(peer: Peer, target: Target) -> tuple[str, int]:
    """The node ends and begins again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.sqlite3"
        async with node_of(peer, audit_share=NODE_SHARE, state_file=file) as it:
            await known(it.node)
            peer.differing = 1.0
            await ask(it, target, 400)
            await until(lambda: not it.node.auditor.pending)
        peer.differing = 0.0
        async with node_of(peer, audit_share=NODE_SHARE, state_file=file) as it:
            await known(it.node)
            return "alarm outlasts the restart", held(await ask(it, target, 20))


async def rolling_update(peer: Peer, target: Target) -> tuple[str, int]:
    """Half of the replicas run the next version, which answers otherwise, then all; the listing says nothing of it.

    Wrong is an answer by the next version that is held, any at the edge once that runs the reference, and each of its
    outcomes in a log.
    """
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        before = held(await ask(it, target, 100))
        await until(lambda: not it.node.auditor.pending)
        certified, wrong, said = list(peer.top_k), 0, 0
        try:
            for turn in range(200):
                peer.states, peer.top_k = (
                    (OTHER_VERSION, [(ANSWER_CLASS, 0.99)]) if turn % 2 else (AS_LISTED, certified)
                )
                answer = await it.ask(target=Quality.BEST)
                wrong += held([answer]) if answer.index == ANSWER_CLASS else 0
                said += held([answer])
            peer.states = OTHER_VERSION
            await it.ask(target=Quality.BEST)
            learned = outcomes(it)
            wrong += held(await ask(it, target, 400))
            wrong += outcomes(it) - learned  # audits wait for the certified version
        finally:
            peer.states, peer.top_k = AS_LISTED, certified
        return f"held before: {before} of 100; while both run: {said} of 200, those of the certified", wrong


async def other_provider(peer: Peer, target: Target) -> tuple[str, int]:
    """The edge stage, then the reference, run on another provider."""
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        node, certified = it.node, it.node.stage
        node.guarantees.stage = dataclasses.replace(certified, fingerprint=OTHER_PROVIDER)
        wrong = held(await ask(it, target, 200)) + outcomes(it)
        node.guarantees.stage, peer.states = certified, OTHER_PROVIDER
        try:
            await it.ask(target=Quality.BEST)
            wrong += held(await ask(it, target, 200))
            wrong += outcomes(it)
        finally:
            peer.states = AS_LISTED
        return "none held", wrong


Run = Callable[[Peer, Target], Coroutine[Any, Any, tuple[str, int]]]

FAULTS: Final[tuple[tuple[str, Run], ...]] = (
    *((f"disagrees {_said(times)}", functools.partial(disagreeing, times=times)) for times in TIMES),
    ("link down", link_down),
    ("audits without room", without_room),
    ("eviction", evicted),
    ("restart", restarted),
    ("rolling update", rolling_update),
    ("other provider", other_provider),
)


OF_VERSIONS: Final = ("rolling update", "other provider")


def through_a_node(
    targets: Sequence[tuple[str, Target]], only: Sequence[str] = (), kind: TaskKind[Any] = TEN
) -> list[str]:
    """Run every fault, or those named, under every target, and print; return what was certified and must not be.

    Answers of detection differ by a part. Faults of versions are the same for all kinds, and run for classification.
    """
    failures = []
    answers = None if kind is TEN else (detected(2), detected(1))
    print(f"\n{kind.name}: one run each through a node, {NODE_SHARE:.0%} audited")
    print(f"{'target':14} {'fault':20} {'certified':>9}  what happened")
    with running_peer(model="large", fingerprint=SHA, top_k=[(EDGE_CLASS, 0.99)], kind=kind, answers=answers) as peer:
        assert ANSWER_CLASS != EDGE_CLASS
        for name, target in targets:
            for fault, run in FAULTS:
                if (only and fault not in only) or (kind is not TEN and fault in OF_VERSIONS):
                    continue
                peer.draws = random.Random(1)
                what, wrong = asyncio.run(run(peer, target))
                print(f"{name:14} {fault:20} {wrong:9}  {what}", flush=True)
                if wrong:
                    failures.append(f"{name}, {fault}: {wrong} answers certified")
    return failures


def main() -> int:
    """Run the bench; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--requests", type=int, default=100_000, help="per seed, for false alarms")
    parser.add_argument("--only", choices=["simulated", "node"])
    parser.add_argument(
        "--fault", action="append", choices=[name for name, _ in FAULTS], help="of a node; default: all"
    )
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    failures = [] if given.only == "node" else simulated(given.seeds, given.requests)
    failures += [] if given.only == "node" else simulated(given.seeds, given.requests // FEWER, fractions=True)
    if given.only != "simulated":
        failures += through_a_node(TARGETS, given.fault or ())
        failures += through_a_node(TARGETS, given.fault or (), DETECTION)
    print("\n".join(failures) or "\nno answer was held that must not be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

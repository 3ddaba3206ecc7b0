"""Does every answer of a node state its guarantee truthfully, whatever goes wrong?

    python -m tests.bench.guarantee node [--fault NAME]

One run of each fault under each target, through an edge node over HTTP to a datacenter tier of this bench, for
classification and detection. `certified` counts the answers that are certified and must not be: those after the 95th
percentile of the delay, derived before the run (`delays`), or of all. Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import numpy as np

from edge.monitoring.certificate_reload import Certification
from hawkvision.cascade.policy import Policy
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    MaxAccuracyDrop,
    MinAccuracy,
    Prediction,
    Quality,
    Target,
    Tensors,
)
from hawkvision.guarantee.bets import Claims
from hawkvision.models.fingerprints import CertifiedVersions
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind
from tests.bench.guarantee.delays import derived, written
from tests.edge.bench import EDGE_CLASS, SURE, UNSURE, Bench, bench, known, outcomes
from tests.edge.peer import ANSWER_CLASS, AS_LISTED, Peer, running_peer
from tests.hawkvision.cascade.synthetic import SHA, make_profile
from tests.hawkvision.tasks.classes import TEN
from tests.waiting import until

SUMMARY: Final = "does a node state its guarantee truthfully through faults"
TARGETS: Final[tuple[tuple[str, Target], ...]] = (
    ("fast", Quality.FAST), ("balanced", Quality.BALANCED), ("drop 0.3", MaxAccuracyDrop(0.3)),
)  # fmt: skip
TIMES: Final = (2.0, 4.0, math.inf)
"""Disagreement as a multiple of what is claimed; infinite: with every answer."""
NODE_SHARE: Final = 0.2
"""Of audits: the largest that a node can be set to, so that the bench is over in time."""
CALLERS_PART: Final = 0.25
NODES_PART: Final = 0.125
"""Of δ, for the log of a caller, and that of the node."""
UNDER_WAY: Final = 16
"""Audits that may be under way when a fault begins."""
CALLER: Final = "127.0.0.1"
OTHER_VERSION: Final = f"{'b' * 64}/int8"
OTHER_PROVIDER: Final = f"{SHA}/onnxruntime:CUDAExecutionProvider,CPUExecutionProvider:tf32"
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
    claims = it.node.policy.route(target).claims
    assert claims is not None
    assert claims.edge is not None
    return claims.edge


Who = Callable[[int], tuple[str, str | None]]
"""The caller and the stream of a request, by its number."""

NAMES: Final[tuple[tuple[str, Who, float], ...]] = (
    ("one stream per visit of 50", lambda n: (CALLER, f"visit {n // 50}"), CALLERS_PART),
    ("200 cameras", lambda n: (CALLER, f"camera {n % 200}"), CALLERS_PART),
    ("1,000 callers", lambda n: (f"caller {n % 1000}", None), NODES_PART),
    ("a caller per visit of 50", lambda n: (f"caller {n // 50}", None), NODES_PART),
)
"""With the part of δ of the log that sees them all."""


async def ask(
    it: Bench, target: Target, requests: int, stream: str | None = None, who: Who | None = None
) -> list[Answer]:
    """So many answers, four at a time."""
    name: Who = who or (lambda _: (CALLER, stream))

    async def one(number: int) -> Answer:
        caller, named = name(number)
        return await it.ask(target=target, caller=caller, stream=named)

    answers: list[Answer] = []
    while len(answers) < requests:
        answers += await asyncio.gather(*(one(len(answers) + extra) for extra in range(4)))
    return answers


def held(answers: Sequence[Answer]) -> int:
    """How many claim to be certified."""
    return sum(answer.accuracy.status is AccuracyStatus.CERTIFIED for answer in answers)


async def disagreeing(
    peer: Peer, target: Target, times: float, who: Who | None = None, part: float = CALLERS_PART
) -> tuple[str, int]:
    """The reference disagrees: answers still held after the derived 95th percentile."""
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        claims = claims_at(it, target)
        at = it.node.policy.route(target).threshold
        bound = next(claim.disagreement for claim in claims.claims if claim.threshold == at)
        weight = weight_of(peer)
        rate = min(weight, times * bound)
        await ask(it, target, 100)
        late = derived(claims, [rate] * len(claims.claims), NODE_SHARE, part) + UNDER_WAY / NODE_SHARE
        peer.differing = rate / weight
        try:
            answers = await ask(it, target, int(late) + 100, who=who)
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


async def killed(peer: Peer, target: Target) -> tuple[str, int]:
    """`kill -9` on the first answer that says so; then the reference agrees again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.sqlite3"
        peer.differing = 1.0
        words = (peer.url, peer.kind.name, str(file), str(target.value))
        command = [sys.executable, "-c", f"from {__name__} import suspended_and_killed as run; run()", *words]
        ended = await asyncio.to_thread(subprocess.run, command, check=False, timeout=120)
        assert ended.returncode == -signal.SIGKILL
        peer.differing = 0.0
        async with node_of(peer, audit_share=NODE_SHARE, state_file=file) as it:
            await known(it.node)
            return "alarm outlasts the restart", held(await ask(it, target, 20))


def suspended_and_killed() -> None:
    """What `killed` runs in a process of its own."""
    logging.disable(logging.CRITICAL)
    url, kind, file, value = sys.argv[1:]
    target = Quality(value) if value in set(Quality) else MaxAccuracyDrop(float(value))
    peer = Peer(url=url, kind=TEN if kind == TEN.name else DETECTION)

    async def scenario() -> None:
        async with node_of(peer, audit_share=NODE_SHARE, state_file=Path(file)) as it:
            await known(it.node)
            while (await it.ask(target=target)).accuracy.status is not AccuracyStatus.SUSPENDED:
                pass
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(scenario())


async def reloaded(peer: Peer, target: Target) -> tuple[str, int]:
    """Another certificate file is put in force, and the one before again."""
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        peer.differing = 1.0
        await ask(it, target, 400)
        await until(lambda: not it.node.auditor.pending)
        peer.differing, wrong, guarantees = 0.0, 0, it.node.guarantees
        before = guarantees.policy
        for policy in (Policy(make_profile(seed=8), "small", "large"), before):
            guarantees.adopt(
                Certification(
                    make_profile(), policy, CertifiedVersions({"small": SHA, "medium": SHA, "large": SHA}),
                    guarantees.stage.temperature, guarantees.stage.score,
                )
            )  # fmt: skip
            wrong += held(await ask(it, target, 20))
        return "alarm outlasts both", wrong


async def accuracy_target(peer: Peer, target: Target) -> tuple[str, int]:
    """`min_accuracy` is asked for, and the reference always disagrees, as when images become harder for both."""
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        peer.differing = 1.0
        answers = await ask(it, MinAccuracy(0.2), 400)
        peer.differing = 0.0
        return "none is certified from the first on", held(answers)


async def late(peer: Peer, target: Target) -> tuple[str, int]:
    """One image in five is escalated, and a deadline lets only the edge's answers through."""
    async with node_of(peer, audit_share=NODE_SHARE) as it:
        await known(it.node)
        before = held(await ask(it, target, 200))
        peer.delay_s = 30.0
        wrong, said = 0, []
        try:
            for number in range(500):
                it.backend.lead = UNSURE if number % 5 == 0 else SURE
                said.append(await it.ask(target=target, deadline_ms=60.0))
        finally:
            peer.delay_s = 0.0
        routed = it.node.policy.route(target)
        if routed.threshold > 0.0:  # `fast` escalates nothing
            wrong = held(said[100:])
        last = max((number for number, answer in enumerate(said) if held([answer])), default=-1)
        return f"held before: {before} of 200; the last one certified was the {last + 1}th", wrong


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
    *((f"disagrees {written(times)}", functools.partial(disagreeing, times=times)) for times in TIMES),
    *((name, functools.partial(disagreeing, times=math.inf, who=who, part=part)) for name, who, part in NAMES),
    ("link down", link_down),
    ("audits without room", without_room),
    ("eviction", evicted),
    ("restart", restarted),
    ("kill -9", killed),
    ("reload", reloaded),
    ("min_accuracy", accuracy_target),
    ("deadlines", late),
    ("rolling update", rolling_update),
    ("other provider", other_provider),
)


ONCE: Final = ("rolling update", "other provider", "reload", "deadlines")


def through_a_node(
    targets: Sequence[tuple[str, Target]], only: Sequence[str] = (), kind: TaskKind[Any] = TEN
) -> list[str]:
    """Run every fault, or those named, under every target, and print; return what was certified and must not be.

    Answers of detection differ by a part. Faults of versions and deadlines are the same for all kinds, and run for
    classification.
    """
    failures = []
    answers = None if kind is TEN else (detected(2), detected(1))
    print(f"\n{kind.name}: one run each through a node, {NODE_SHARE:.0%} audited")
    print(f"{'target':14} {'fault':27} {'certified':>9}  what happened")
    with running_peer(model="large", fingerprint=SHA, top_k=[(EDGE_CLASS, 0.99)], kind=kind, answers=answers) as peer:
        assert ANSWER_CLASS != EDGE_CLASS
        for name, target in targets:
            for fault, run in FAULTS:
                if (only and fault not in only) or (kind is not TEN and fault in ONCE):
                    continue
                peer.draws = random.Random(1)
                what, wrong = asyncio.run(run(peer, target))
                print(f"{name:14} {fault:27} {wrong:9}  {what}", flush=True)
                if wrong:
                    failures.append(f"{name}, {fault}: {wrong} answers certified")
    return failures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--fault", action="append", choices=[name for name, _ in FAULTS], help="default: all")


def run(given: argparse.Namespace) -> int:
    """Run the faults for both kinds."""
    failures = through_a_node(TARGETS, given.fault or ()) + through_a_node(TARGETS, given.fault or (), DETECTION)
    print("\n".join(failures) or "\nno answer was certified that must not be")
    return int(bool(failures))

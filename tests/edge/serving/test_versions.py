"""Whose certificate: an answer is certified only where what computed it states that it is what was certified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edge.monitoring.certificate_reload import Certification
from edge.monitoring.state_store import StateFile
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ManifestError
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    MaxAccuracyDrop,
    Quality,
    StatusReason,
    Tier,
)
from hawkvision.guarantee.answered import stated_drop
from hawkvision.models.fingerprints import CertifiedVersions
from hawkvision.network.transport_choice import Transport
from hawkvision.tasks.class_scores import Score
from tests.edge.bench import AGREES, SURE, UNSURE, Bench, audits, bench, known, many, run
from tests.edge.bench import outcomes as learned
from tests.edge.peer import ANSWER_CLASS, AS_LISTED, Peer, running_peer
from tests.hawkvision.cascade.synthetic import SHA, make_profile
from tests.waiting import until

CERTIFIED, OTHER = f"{SHA}/int8", f"{'b' * 64}/int8"
ON_CUDA = f"{SHA}/onnxruntime:CUDAExecutionProvider,CPUExecutionProvider:tf32:1.23.0:NVIDIA H100"
DROP = MaxAccuracyDrop(0.3)
UNCERTIFIED = (AccuracyStatus.BEST_EFFORT, StatusReason.UNCERTIFIED_VERSION)


def claim(guarantee: AccuracyGuarantee) -> tuple[AccuracyStatus, StatusReason | None]:
    return guarantee.status, guarantee.status_reason


def of_answer(answer: Answer) -> tuple[AccuracyStatus, StatusReason | None]:
    return claim(answer.accuracy)


@pytest.fixture(params=["tcp", "datagram"])
def either(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Transport]]:
    """A datacenter that is asked over TCP, and one that is asked by datagrams."""
    over = Transport(request.param)
    with running_peer(model="large", fingerprint=SHA, datagram=over is Transport.DATAGRAM) as peer:
        yield peer, over


@pytest.mark.parametrize("states", [OTHER, ON_CUDA, None, "", "garbage/", f"{SHA}/", SHA])
def test_what_a_replica_states_counts_and_not_what_the_tier_lists(
    either: tuple[Peer, Transport], states: str | None
) -> None:
    peer, transport = either

    async def scenario() -> list[Answer]:
        async with bench(peer, UNSURE, transport="datagram" if transport is Transport.DATAGRAM else "tcp") as it:
            await known(it.node)
            await until(lambda: it.node.datacenter is not None and it.node.datacenter.transport is transport)
            before = await it.ask(target=Quality.BEST)
            peer.states = states
            between = await it.ask(target=Quality.BEST)
            it.backend.lead = SURE
            at_edge = await it.ask(target=Quality.FAST)
            it.backend.lead = UNSURE
            peer.states = AS_LISTED
            return [before, between, at_edge, await it.ask(target=Quality.BEST)]

    before, between, at_edge, after = run(scenario)
    assert len(peer.datagrams if transport is Transport.DATAGRAM else peer.bodies) >= 3
    assert [a.tier for a in (before, between, after)] == [Tier.DATACENTER] * 3
    assert before.accuracy.status is after.accuracy.status is AccuracyStatus.CERTIFIED
    assert of_answer(between) == UNCERTIFIED
    assert (between.accuracy.max_drop, between.accuracy.delta, between.accuracy.n) == (None, None, None)
    assert of_answer(at_edge) == UNCERTIFIED, "its reference is another version"


def test_a_rolling_update_certifies_each_answer_for_the_version_that_gave_it_and_for_no_other(large: Peer) -> None:
    """Replicas of both versions answer in turns, over the same connections, before the listing says anything."""

    async def scenario() -> list[tuple[str, Answer]]:
        async with bench(large, UNSURE, connections=1) as it:
            await known(it.node)
            found = []
            for states in (CERTIFIED, OTHER) * 10:
                large.states = states
                found.append((states, await it.ask(target=Quality.BEST)))
            return found

    answers = run(scenario)
    assert len(large.ports) == 1
    assert {states: answer.accuracy.status for states, answer in answers} == {
        CERTIFIED: AccuracyStatus.CERTIFIED,
        OTHER: AccuracyStatus.BEST_EFFORT,
    }
    assert all(
        (answer.accuracy.status is AccuracyStatus.CERTIFIED) == (states == CERTIFIED) for states, answer in answers
    )


def test_a_datacenter_that_states_nothing_is_served_by_and_never_certified(large: Peer) -> None:
    large.old = True

    async def scenario() -> tuple[list[Answer], list[Answer], float, int]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            at_edge = await many(it, 100, target=Quality.FAST)
            it.backend.lead = UNSURE
            escalated = await many(it, 8, target=Quality.BEST)
            return at_edge, escalated, audits(it, "agree", "differ"), learned(it)

    at_edge, escalated, found, outcomes = run(scenario)
    assert {of_answer(answer) for answer in (*at_edge, *escalated)} == {UNCERTIFIED}
    assert {answer.tier for answer in escalated} == {Tier.DATACENTER}
    assert (found, outcomes) == (0.0, 0)


@pytest.mark.parametrize("lead", [SURE, UNSURE])
def test_outcomes_of_another_version_enter_no_log(large: Peer, lead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    large.states = OTHER
    monkeypatch.setattr("edge.monitoring.audits.RETRY_S", 0.0)

    async def scenario() -> tuple[int, int, float]:
        async with bench(large, lead, audit_share=0.2) as it:
            await known(it.node)
            await many(it, 100, target=DROP)
            await until(lambda: not it.node.auditor.pending)
            during = learned(it)
            large.states = AS_LISTED
            await many(it, 100, target=DROP)
            await until(lambda: not it.node.auditor.pending)
            return during, learned(it), audits(it, "missed")

    during, after, missed = run(scenario)
    assert during == 0
    assert missed > 0, "they were due"
    assert after > 0


def test_an_intermediate_stage_of_another_version_enters_no_log_and_certifies_nothing(large: Peer) -> None:
    large.intermediate, large.intermediate_fingerprint, large.intermediate_score = "medium", SHA, 0.0

    async def scenario() -> tuple[Answer, Answer, set[str]]:
        async with bench(large, UNSURE, intermediate=True, audit_share=0.2) as it:
            await known(it.node)
            large.states = OTHER
            passed_over = await it.ask(target=THREE_LEVELS)
            large.intermediate_score = 1.0
            by_intermediate = await it.ask(target=THREE_LEVELS)
            await many(it, 40, target=THREE_LEVELS)
            return (
                passed_over,
                by_intermediate,
                {key for stream in it.node.streams.monitor.all() for key in stream.logs},
            )

    passed_over, by_intermediate, logs = run(scenario)
    assert (passed_over.model, by_intermediate.model) == ("large", "medium")
    assert of_answer(passed_over) == of_answer(by_intermediate) == UNCERTIFIED
    assert not any("medium" in key for key in logs)


THREE_LEVELS = next(
    MaxAccuracyDrop(stated_drop(c.max_drop))
    for c in make_profile(intermediate=True).pairs[0].conditions[0].certificates
    if isinstance(c.intermediate_threshold, float) and isinstance(c.threshold, float)
)


# ----------------------------------------------------------------------------------------------- the edge stage


def edge_runs(it: Bench, fingerprint: str | None) -> None:
    it.node.guarantees.stage = replace(it.node.stage, fingerprint=fingerprint)


@pytest.mark.parametrize("fingerprint", [None, OTHER, f"{SHA}/other:CPU:f32:2026.4:Some CPU", f"{SHA}/int8+noop"])
def test_an_edge_stage_that_runs_otherwise_is_not_certified_and_teaches_nothing(
    large: Peer, fingerprint: str | None
) -> None:
    async def scenario() -> tuple[list[Answer], Answer, int]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            edge_runs(it, fingerprint)
            answers = await many(it, 60, target=Quality.FAST)
            return answers, await it.ask(target=Quality.BEST), learned(it)

    answers, best, outcomes = run(scenario)
    assert {of_answer(answer) for answer in answers} == {UNCERTIFIED}
    assert best.accuracy.status is AccuracyStatus.CERTIFIED, "the edge had no part in it"
    assert outcomes == 0


# --------------------------------------------------------------------------------------------- while it serves


def certification(models: str = SHA, edge: str = SHA, profile: Policy | None = None) -> Certification:
    made = make_profile()
    policy = profile or Policy(made, "small", "large")
    versions = CertifiedVersions({"small": edge, "medium": models, "large": models})
    return Certification(made, policy, versions, 1.0, Score.MARGIN)


def test_requests_under_way_claim_nothing_once_other_certificates_are_in_force(large: Peer) -> None:
    async def scenario() -> tuple[Answer, Answer, Answer]:
        async with bench(large, UNSURE) as it:
            await known(it.node)
            before = await it.ask(target=Quality.BEST)
            large.held = True
            asked = len(large.bodies)
            waiting = asyncio.create_task(it.ask(target=Quality.BEST))
            await until(lambda: len(large.bodies) > asked)
            it.node.guarantees.adopt(certification())
            large.held = False
            during = await waiting
            return before, during, await it.ask(target=Quality.BEST)

    before, during, after = run(scenario)
    assert before.accuracy.status is after.accuracy.status is AccuracyStatus.CERTIFIED
    assert of_answer(during) == UNCERTIFIED


def test_certificates_for_the_next_version_come_into_force_with_the_next_answer(large: Peer) -> None:
    async def scenario() -> list[AccuracyStatus]:
        async with bench(large, UNSURE) as it:
            await known(it.node)
            found = []
            for states, models in ((CERTIFIED, None), (OTHER, None), (OTHER, "b" * 64), (CERTIFIED, None)):
                large.states = states
                if models is not None:
                    it.node.guarantees.adopt(certification(models))
                found.append((await it.ask(target=Quality.BEST)).accuracy.status)
            return found

    held, effort = AccuracyStatus.CERTIFIED, AccuracyStatus.BEST_EFFORT
    assert run(scenario) == [held, effort, held, effort]


def test_certificates_of_other_models_than_the_loaded_ones_are_refused_and_change_nothing(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, SURE) as it:
            await known(it.node)
            before = it.node.policy, it.node.context.served.versions, it.node.stage
            with pytest.raises(ManifestError, match=f"small with fingerprint {'c' * 64}.*restart"):
                it.node.guarantees.adopt(certification(edge="c" * 64))
            assert (it.node.policy, it.node.context.served.versions, it.node.stage) == before
            return await it.ask()

    assert run(scenario).accuracy.status is AccuracyStatus.CERTIFIED


def renewed(fewer: int = 1, *, intermediate: bool = False) -> Certification:
    """Certificates with so many targets less."""
    made = make_profile(intermediate=intermediate)
    pair = made.pairs[0]
    condition = msgspec.structs.replace(pair.conditions[0], certificates=pair.conditions[0].certificates[:-fewer])
    made = msgspec.structs.replace(made, pairs=(msgspec.structs.replace(pair, conditions=(condition,)),))
    return certification(profile=Policy(made, "small", "large"))


def test_whoever_renews_certificates_all_the_time_delays_no_alarm(large: Peer) -> None:
    large.top_k = [(ANSWER_CLASS, 0.9)]

    async def scenario() -> AccuracyStatus:
        async with bench(large, SURE, audit_share=1.0) as it:
            await known(it.node)
            for number in range(8):
                await many(it, 4, target=Quality.FAST)
                await until(lambda: not it.node.auditor.pending)
                it.node.guarantees.adopt(renewed(1 + number % 2))
            return (await it.ask(target=Quality.FAST)).accuracy.status

    assert run(scenario) is AccuracyStatus.SUSPENDED


def test_audits_of_the_edge_stage_lift_no_alarm_of_the_intermediate_one_under_other_certificates(large: Peer) -> None:
    large.intermediate, large.intermediate_fingerprint, large.intermediate_score = "medium", SHA, 0.9
    large.top_k = AGREES

    async def scenario() -> AccuracyStatus:
        async with bench(large, UNSURE, intermediate=True, audit_share=1.0) as it:
            await known(it.node)
            while not it.node.streams.monitor.node.alarm:
                await many(it, 4, target=MaxAccuracyDrop(0.02))
            await until(lambda: not it.node.auditor.pending)
            it.node.guarantees.adopt(renewed(intermediate=True))
            watched = it.node.guarantees.watched(it.node.policy.route(Quality.FAST), None, "127.0.0.1")
            for _ in range(20_000):
                due = it.node.streams.monitor.draw(watched)
                assert due is not None
                assert watched.edge_claims is not None
                it.node.streams.monitor.settle(due, [(watched.edge_claims, 0.9, 0.0)])
            return (await it.ask(target=Quality.FAST)).accuracy.status

    assert run(scenario) is AccuracyStatus.SUSPENDED


def test_audits_under_way_enter_no_log_of_the_next_certificates(large: Peer, tmp_path: Path) -> None:
    large.top_k = [(ANSWER_CLASS, 0.9)]

    async def scenario() -> tuple[set[str], frozenset[str]]:
        async with bench(large, SURE, audit_share=0.2, state_file=tmp_path / "state.sqlite3") as it:
            await known(it.node)
            while it.counted("alarms_total") < 1.0:
                await many(it, 4, target=Quality.FAST)
            large.held = True
            while not it.node.auditor.pending:
                await it.ask(target=Quality.FAST)
            it.node.guarantees.adopt(renewed())
            status = (await it.ask(target=Quality.FAST)).accuracy.status
            assert status is AccuracyStatus.SUSPENDED, "other certificates lift no alarm"
            large.held = False
            await until(lambda: not it.node.auditor.pending)
            keys = {key for stream in it.node.streams.monitor.all() for key in stream.state.logs}
            return keys, it.node.policy.claims_in_force

    keys, in_force = run(scenario)
    assert keys <= in_force
    with closing(StateFile(tmp_path / "state.sqlite3")) as file:
        kept, _ = file.read()
    assert {key for state in kept.values() for key in state.logs} <= in_force
    assert any(state.alarm for state in kept.values())

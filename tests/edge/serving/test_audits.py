"""Audits of accepted answers: few, in the background, bounded, and silent when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

from edge.inference.edge_stage import ConditionalEnsemble, LoadedModel
from edge.monitoring.audits import MOST_AT_ONCE, MOST_ATTEMPTS, UNKNOWN_SCORE
from edge.monitoring.evidence_log import Audit, EvidenceLog
from hawkvision.core.errors import DeadlineMissed
from hawkvision.core.escalation_api import parse_escalation_headers
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    MaxAccuracyDrop,
    OnMiss,
    Quality,
    Reason,
    Tier,
)
from tests.edge.bench import (
    AGREES,
    EDGE_CLASS,
    SPEC,
    SURE,
    UNSURE,
    Bench,
    GatedBackend,
    audits,
    bench,
    known,
    many,
    outcomes,
    run,
)
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.images import encoded
from tests.waiting import until

# ------------------------------------------------------------------------------------------------------- audits


def test_audits_check_a_small_share_of_accepted_answers_and_show_in_no_answer(large: Peer) -> None:
    large.top_k = AGREES

    async def scenario() -> tuple[list[Answer], float, float]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            answers = await many(it, 400)
            await until(lambda: not it.node.auditor.pending)
            return answers, audits(it, "agree"), it.counted("escalations_total", reason="audit")

    answers, agreed, escalated = run(scenario)
    assert 0 < agreed == escalated == len(large.bodies) < 0.35 * len(answers)
    assert {(a.tier, a.escalated, a.reason) for a in answers} == {(Tier.EDGE, False, None)}
    assert answers[-1].accuracy.status is AccuracyStatus.CERTIFIED


def test_audits_ask_the_best_stage_and_are_bounded_in_time(large: Peer) -> None:
    large.top_k = AGREES

    async def scenario() -> None:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            while not large.headers:
                await it.ask()

    run(scenario)
    asked = parse_escalation_headers(_titled(large.headers[0]))
    assert (asked.variant, asked.intermediate, asked.top_k) == ("large", None, 1)
    assert asked.deadline_ms is not None


def _titled(headers: dict[str, str]) -> dict[str, str]:
    """Header names as `parse_escalation_headers` looks them up in a plain dict."""
    names = {
        "x-hawkvision-task": "X-HawkVision-Task",
        "x-hawkvision-variant": "X-HawkVision-Variant",
        "x-hawkvision-deadline-ms": "X-HawkVision-Deadline-Ms",
        "x-hawkvision-top-k": "X-HawkVision-Top-K",
        "x-hawkvision-accept-score": "X-HawkVision-Accept-Score",
        "x-hawkvision-score": "X-HawkVision-Score",
        "x-hawkvision-otherwise": "X-HawkVision-Otherwise",
    }
    return {names.get(name, name): value for name, value in headers.items()}


def test_audits_that_hang_delay_nobody_wait_and_end_with_the_node(large: Peer) -> None:
    large.delay_s = 30.0

    async def scenario() -> tuple[list[Answer], int, Bench]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            return await many(it, 400), it.node.auditor.pending, it

    answers, pending, it = run(scenario)
    assert {answer.tier for answer in answers} == {Tier.EDGE}
    assert MOST_AT_ONCE < pending == audits(it, "missed")
    assert len(large.bodies) == MOST_AT_ONCE


def test_the_images_that_wait_are_bounded_in_bytes(large: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.monitoring.audits.MOST_BYTES", 2 * len(encoded()))
    large.delay_s = 30.0

    async def scenario() -> tuple[int, float]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            await many(it, 200)
            return it.node.auditor.pending, audits(it, "missed")

    pending, missed = run(scenario)
    assert pending <= 2 < missed


def test_audits_leave_the_connections_to_escalations_and_are_made_later(large: Peer) -> None:
    large.top_k = AGREES

    async def scenario() -> None:
        async with bench(large, SURE, connections=1, audit_share=0.2) as it:
            await known(it.node)
            large.held = True
            waiting = asyncio.create_task(it.ask(target=Quality.BEST))
            await until(lambda: len(large.bodies) == 1)
            await many(it, 200)
            assert it.counted("escalations_total", reason="audit") == outcomes(it) == 0
            due = it.node.auditor.pending
            large.held = False
            await waiting
            await until(lambda: not it.node.auditor.pending)
            assert 0 < due == audits(it, "agree") == outcomes(it) / 2

    run(scenario)


def test_an_audit_is_missing_after_it_has_waited_for_the_certified_version_too_long(
    large: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large.states = f"{'b' * 64}/int8"

    async def scenario() -> tuple[int, float]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            await it.ask(target=Quality.BEST)  # which says what is running
            await many(it, 100)
            waiting, missed = it.node.auditor.pending, audits(it, "missed")
            assert waiting > 0 == missed
            monkeypatch.setattr("edge.monitoring.audits.RETRY_S", 0.0)
            monkeypatch.setattr("edge.monitoring.audits.LONGEST_WAIT_S", 0.0)
            await until(lambda: not it.node.auditor.pending)
            assert it.node.streams.monitor.node.missing == waiting
            return waiting, audits(it, "missed")

    waiting, missed = run(scenario)
    assert waiting == missed


def test_an_audit_that_goes_on_failing_is_missing_and_teaches_nothing(
    large: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.monitoring.audits.RETRY_S", 0.0)
    large.garbage = True

    async def scenario() -> tuple[float, int, AccuracyStatus]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            while not audits(it, "missed"):
                await it.ask()
            assert it.counted("escalations_total", reason="audit") >= MOST_ATTEMPTS
            return audits(it, "agree", "differ"), outcomes(it), (await it.ask()).accuracy.status

    assert run(scenario) == (0.0, 0, AccuracyStatus.BEST_EFFORT)


@pytest.mark.parametrize("says", [{"fingerprint": "b" * 64}, {"stages_delay_s": 30.0}])
def test_nothing_is_learned_from_a_datacenter_that_is_not_known_to_be_the_certified_one(
    large: Peer, says: dict[str, Any]
) -> None:
    for name, value in says.items():
        setattr(large, name, value)

    async def scenario() -> int:
        async with bench(large, SURE, audit_share=0.2) as it:
            if "fingerprint" in says:
                await known(it.node)
            await many(it, 200)
            it.backend.lead = UNSURE
            await it.ask()
            return outcomes(it)

    assert run(scenario) == 0


# ----------------------------------------------------------------------------------- evidence of all images


FAIRLY_SURE = 5.0


def evidence() -> EvidenceLog:
    return EvidenceLog(None, 0.2)


async def rows(it: Bench) -> list[Audit]:
    """The evidence, once no audit waits."""
    await until(lambda: not it.node.auditor.pending)
    assert it.node.auditor.evidence is not None
    return list((await it.node.auditor.evidence.read(0)).values())


@pytest.mark.parametrize("fields", [{}, {"deadline_ms": 20_000.0}, {"deadline_ms": 20_000.0, "on_miss": OnMiss.FAIL}])
def test_what_the_reference_stage_answers_directly_is_evidence_too(large: Peer, fields: dict[str, Any]) -> None:
    async def scenario() -> list[Audit]:
        async with bench(large, FAIRLY_SURE, audit_share=0.2, evidence=evidence) as it:
            await known(it.node)
            await it.ask(target=Quality.BEST)  # the link is known to be quick
            answers = await many(it, 200, target=Quality.BEST, **fields)
            assert {answer.tier for answer in answers} == {Tier.DATACENTER}
            return await rows(it)

    found = run(scenario)
    assert 20 <= len(found) <= 60
    assert len(large.bodies) == 201, "the answers are the audits' too"
    assert {(row.answer["index"], row.disagreement) for row in found} == {(EDGE_CLASS, 1.0)}
    assert {row.reference and row.reference["index"] for row in found} == {ANSWER_CLASS}
    assert {0.9 < row.score < UNKNOWN_SCORE for row in found} == {True}


def test_images_without_an_answer_in_time_are_evidence_too(large: Peer) -> None:
    large.delay_s = 0.3

    async def scenario() -> list[Audit]:
        async with bench(large, SURE, audit_share=0.2, evidence=evidence) as it:
            await known(it.node)
            for _ in range(40):
                with contextlib.suppress(DeadlineMissed):
                    await it.ask(target=Quality.BEST, deadline_ms=10.0, on_miss=OnMiss.FAIL)
            large.delay_s = 0.0
            return await rows(it)

    found = run(scenario)
    assert 2 <= len(found) <= 16
    assert {row.answer["index"] for row in found} == {EDGE_CLASS}


def test_what_is_asked_during_an_alarm_is_evidence_too(large: Peer) -> None:
    async def scenario() -> tuple[list[Answer], list[Audit]]:
        async with bench(large, SURE, audit_share=0.2, evidence=evidence) as it:
            await known(it.node)
            while (await it.ask()).accuracy.status is not AccuracyStatus.SUSPENDED:
                pass
            before = len(await rows(it))
            return await many(it, 200), (await rows(it))[before:]

    answers, found = run(scenario)
    assert {answer.reason for answer in answers} == {Reason.SUSPENDED}
    assert 20 <= len(found) <= 60


def test_what_the_first_member_answers_alone_is_evidence_of_the_whole_stage(large: Peer) -> None:
    large.top_k = AGREES
    others = ConditionalEnsemble((LoadedModel("second", GatedBackend(SURE), SPEC),), (1.0, 1.0), 1.0, 0.99)

    async def scenario() -> tuple[list[Answer], list[Audit], float]:
        async with bench(large, UNSURE, audit_share=0.2, evidence=evidence, others=others) as it:
            await known(it.node)
            fast = it.node.policy.route(Quality.FAST)
            it.node.policy._routes[Quality.FAST] = dataclasses.replace(fast, first_only=True)
            it.node.policy._whole.cache_clear()
            answers = await many(it, 200, target=Quality.FAST)
            return answers, await rows(it), it.counted("ensemble_runs_total")

    answers, found, runs = run(scenario)
    assert {answer.tier for answer in answers} == {Tier.EDGE}
    assert runs == 0.0, "no caller waited for the others"
    assert 20 <= len(found) <= 60
    assert {row.score > 0.3 for row in found} == {True}, "by both members"


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_busy_edge_leaves_to_the_datacenter_is_evidence_once_there_is_room(
    large: Peer, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    if not waits:
        monkeypatch.setattr("edge.monitoring.audits.LONGEST_WAIT_S", 0.0)

    async def scenario() -> list[Audit]:
        async with bench(large, FAIRLY_SURE, audit_share=0.2, evidence=evidence) as it:
            await known(it.node)
            await it.ask(target=Quality.BEST)
            first = len(await rows(it))
            queued = await it.occupy(20)
            before = it.backend.begun
            answers = await many(it, 100, target=Quality.BALANCED, deadline_ms=1_500.0)
            assert {answer.reason for answer in answers} == {Reason.EDGE_BUSY}
            assert it.backend.begun == before, "audits wait for callers"
            drawn = it.node.auditor.evidence.last  # type: ignore[union-attr]
            if not waits:
                await until(lambda: not it.node.auditor.pending)
            it.backend.gate.set()
            await asyncio.gather(*queued)
            return (await rows(it))[first:drawn]

    found = run(scenario)
    assert 10 <= len(found) <= 40
    assert {row.reference is not None for row in found} == {waits}
    assert {row.score == UNKNOWN_SCORE for row in found} == {not waits}
    assert {row.disagreement for row in found} == {1.0}


def test_a_caller_whose_target_is_not_certified_stays_in_the_evidence(large: Peer) -> None:
    """Else a block without these images would certify the target for them, too."""

    async def scenario() -> float:
        async with bench(large, SURE, audit_share=0.2, evidence=evidence) as it:
            await known(it.node)
            for _ in range(5):
                large.top_k = [(ANSWER_CLASS, 0.99)]
                await many(it, 40, caller="hard", target=MaxAccuracyDrop(0.001))
                await rows(it)
                large.top_k = AGREES
                await many(it, 40, caller="easy", target=Quality.FAST)
                await rows(it)
            found = await rows(it)
            return sum(row.disagreement for row in found) / len(found)

    assert 0.3 < run(scenario) < 0.7

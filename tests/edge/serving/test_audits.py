"""Audits of accepted answers: few, in the background, bounded, and silent when they fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edge.monitoring.audits import MOST_AT_ONCE, MOST_ATTEMPTS
from hawkvision.core.escalation_api import parse_escalation_headers
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    Quality,
    Tier,
)
from tests.edge.bench import (
    AGREES,
    SURE,
    UNSURE,
    Bench,
    audits,
    bench,
    known,
    many,
    outcomes,
    run,
)
from tests.edge.peer import Peer
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

"""The guarantee of every answer is true: through drift, outages and restarts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge.serving.targets_listing import ListedTarget, describe_targets
from hawkvision.core.errors import DeadlineMissed
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    DegradedReason,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    Quality,
    Reason,
    Received,
    StatusReason,
    Target,
    Tier,
)
from hawkvision.servers.bodies import CallerGone
from tests.clocks import ManualClock
from tests.edge.bench import (
    AGREES,
    SURE,
    UNSURE,
    Bench,
    audits,
    bench,
    known,
    many,
    run,
)
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.hawkvision.cascade.synthetic import make_profile, site_of
from tests.waiting import until

ME = "127.0.0.1"
DIFFERS = [(ANSWER_CLASS, 0.99)]


def balanced(it: Bench) -> ListedTarget:
    """The listing of `balanced`."""
    return next(
        entry for entry in describe_targets(it.node, ME).targets if entry.accuracy.target.quality is Quality.BALANCED
    )


def suspended(it: Bench, stream: str | None = None, target: Target = Quality.BALANCED, caller: str = ME) -> bool:
    return it.node.guarantees.watched(it.node.policy.route(target), stream, caller).suspended


# --------------------------------------------------------------------------------------------------------- age


def test_a_sites_certificate_expires_with_its_newest_image_and_what_needs_none_does_not(large: Peer) -> None:
    site, wall = site_of(make_profile()), ManualClock(datetime(2026, 11, 21, tzinfo=UTC).timestamp())
    days, large.top_k = 86_400.0, AGREES

    async def scenario() -> list[tuple[StatusReason | None, float]]:
        async with bench(large, SURE, site=site, wall=wall.now) as it:
            await known(it.node)
            found = []
            for passed in (0.0, 90.0, 0.001):
                wall.advance(passed * days)
                found.append(((await it.ask()).accuracy.status_reason, it.counted("certificates_valid")))
            assert (await it.ask(target=Quality.BEST)).accuracy.status is AccuracyStatus.CERTIFIED
            assert balanced(it).accuracy.status_reason is StatusReason.EXPIRED
            return found

    assert run(scenario) == [(None, 1.0), (None, 1.0), (StatusReason.EXPIRED, 0.0)]


@pytest.mark.parametrize("newest", [datetime(2026, 11, 21, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC)])
def test_a_clock_that_is_earlier_than_the_evidence_or_never_set_cannot_tell_a_certificates_age(
    large: Peer, newest: datetime
) -> None:
    site, large.top_k = msgspec.structs.replace(site_of(make_profile()), until=newest), AGREES

    async def scenario() -> tuple[StatusReason | None, float | None]:
        async with bench(large, SURE, site=site, wall=lambda: 0.0) as it:
            await known(it.node)
            said = (await it.ask()).accuracy
            return said.status_reason, said.max_drop

    assert run(scenario) == (StatusReason.EXPIRED, None)


# ------------------------------------------------------------------------------------------------------- drift


async def raise_alarm(it: Bench, stream: str | None = None, **fields: Any) -> None:
    """Until audits have found that the reference stage answers otherwise."""
    await known(it.node)
    while not suspended(it, stream, caller=fields.get("caller", ME)):
        await many(it, 4, stream=stream, **fields)


def test_a_reference_stage_that_begins_to_disagree_suspends_the_guarantee_and_answers_itself(large: Peer) -> None:
    async def scenario() -> tuple[Answer, Answer, ListedTarget, list[float]]:
        async with bench(large, SURE, audit_share=0.2) as it:
            large.top_k = AGREES
            before = (await many(it, 40))[-1]
            large.top_k = DIFFERS
            await raise_alarm(it)
            after = await it.ask()
            names = ("alarms_total", "streams_suspended")
            return before, after, balanced(it), [it.counted(name) for name in names]

    before, after, listed, counted = run(scenario)
    assert (before.tier, before.accuracy.status) == (Tier.EDGE, AccuracyStatus.CERTIFIED)
    assert (after.tier, after.reason, after.index) == (Tier.DATACENTER, Reason.SUSPENDED, ANSWER_CLASS)
    assert (after.degraded, after.accuracy.status) == (False, AccuracyStatus.SUSPENDED)
    assert (after.accuracy.max_drop, after.accuracy.delta, after.accuracy.n) == (None, None, None)
    said = listed.accuracy
    assert (said.status, said.status_reason, said.max_drop) == (AccuracyStatus.SUSPENDED, StatusReason.ALARM, None)
    assert min(counted) >= 1.0, "of the caller, and of the node if that was a tenth of its last requests"


def test_an_alarm_sends_damaged_images_to_the_reference_stage_too(large: Peer) -> None:
    damaged = Received(1.0, 80)

    async def scenario() -> list[Answer]:
        async with bench(large, SURE, audit_share=0.2, conditions=True) as it:
            large.top_k = DIFFERS
            before = await it.ask(received=damaged, target=MaxAccuracyDrop(0.3))
            await raise_alarm(it)
            after = [await it.ask(received=damaged, target=target) for target in (MaxAccuracyDrop(0.3), Quality.FAST)]
            return [before, *after]

    before, after, fast = run(scenario)
    assert (before.tier, before.accuracy.status) == (Tier.EDGE, AccuracyStatus.BEST_EFFORT)
    assert (after.tier, after.reason, after.accuracy.status) == (
        Tier.DATACENTER, Reason.SUSPENDED, AccuracyStatus.SUSPENDED,
    )  # fmt: skip
    assert (fast.tier, fast.accuracy.status) == (Tier.EDGE, AccuracyStatus.SUSPENDED)


def test_the_guarantee_returns_when_the_best_stage_agrees_again(large: Peer) -> None:
    async def scenario() -> tuple[AccuracyStatus, float]:
        async with bench(large, SURE, audit_share=0.2) as it:
            large.top_k = DIFFERS
            await raise_alarm(it)
            large.top_k = AGREES
            for _ in range(60):
                answers = await many(it, 100)
                if answers[-1].accuracy.status is AccuracyStatus.CERTIFIED:
                    break
            return answers[-1].accuracy.status, it.counted("streams_suspended")

    assert run(scenario) == (AccuracyStatus.CERTIFIED, 0.0)


def test_one_streams_alarm_is_not_anothers(large: Peer) -> None:
    async def scenario() -> tuple[AccuracyStatus, ...]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await raise_alarm(it, "rainy camera")
            answers = [await it.ask(stream=name) for name in ("rainy camera", "dry camera", None)]
            other = await it.ask(stream="rainy camera", target=Quality.BEST)
            return tuple(answer.accuracy.status for answer in (*answers, other))

    assert run(scenario) == (
        AccuracyStatus.SUSPENDED,
        AccuracyStatus.CERTIFIED,
        AccuracyStatus.CERTIFIED,
        AccuracyStatus.CERTIFIED,
    )


@pytest.mark.parametrize(
    "target", [Quality.FAST, MaxAccuracyDrop(0.3), MinAccuracy(0.2), Quality.BALANCED], ids=lambda target: str(target)
)
def test_every_target_is_audited_and_suspended_when_the_best_stage_disagrees(large: Peer, target: Target) -> None:
    async def scenario() -> tuple[Answer, Answer]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            before = await it.ask(target=target)
            await raise_alarm(it, target=target)
            return before, await it.ask(target=target)

    before, after = run(scenario)
    certified = AccuracyStatus.BEST_EFFORT if isinstance(target, MinAccuracy) else AccuracyStatus.CERTIFIED
    assert (before.tier, before.accuracy.status) == (Tier.EDGE, certified)
    expected = Tier.EDGE if target is Quality.FAST else Tier.DATACENTER
    assert (after.tier, after.degraded, after.accuracy.status) == (expected, False, AccuracyStatus.SUSPENDED)


def test_an_alarm_suspends_every_target_of_its_stream(large: Peer) -> None:
    async def scenario() -> list[AccuracyStatus]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await raise_alarm(it, target=MaxAccuracyDrop(0.3))
            return [(await it.ask(target=target)).accuracy.status for target in (Quality.FAST, Quality.BALANCED)]

    assert run(scenario) == [AccuracyStatus.SUSPENDED, AccuracyStatus.SUSPENDED]


def test_a_caller_suspends_itself_and_with_a_tenth_of_the_traffic_the_node(large: Peer) -> None:
    async def scenario() -> list[AccuracyStatus]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await raise_alarm(it, caller="mallory", target=Quality.FAST)
            answers = [await it.ask(caller=caller, target=Quality.FAST) for caller in ("mallory", "camera")]
            await many(it, 100, caller="mallory", target=Quality.FAST)
            answers.append(await it.ask(caller="camera", target=Quality.FAST))
            return [answer.accuracy.status for answer in answers]

    assert run(scenario) == [AccuracyStatus.SUSPENDED, AccuracyStatus.CERTIFIED, AccuracyStatus.SUSPENDED]


def test_grey_thumbnails_that_are_only_difficult_suspend_nobody(large: Peer) -> None:
    large.top_k = AGREES

    async def scenario() -> AccuracyStatus:
        async with bench(large, UNSURE, audit_share=0.2) as it:
            await known(it.node)
            await many(it, 100)
            it.backend.lead = SURE
            return (await it.ask()).accuracy.status

    assert run(scenario) is AccuracyStatus.CERTIFIED


# ------------------------------------------------------------------------------------------------- unmonitored

HELD = (AccuracyStatus.CERTIFIED, None)
UNMONITORED = (AccuracyStatus.BEST_EFFORT, StatusReason.UNMONITORED)


def said(answer: Answer) -> tuple[AccuracyStatus, StatusReason | None]:
    return answer.accuracy.status, answer.accuracy.status_reason


def test_without_audits_nothing_is_claimed_of_edge_answers(large: Peer) -> None:
    async def scenario() -> set[tuple[AccuracyStatus, StatusReason | None]]:
        async with bench(large, SURE, audit_share=0.0) as it:
            await known(it.node)
            return set(map(said, await many(it, 32)))

    assert run(scenario) == {UNMONITORED}


@pytest.mark.parametrize("target", [Quality.FAST, Quality.BALANCED, MaxAccuracyDrop(0.3)])
def test_a_node_without_a_datacenter_claims_nothing_of_edge_answers(target: Target) -> None:
    async def scenario() -> Answer:
        async with bench(None, SURE) as it:
            return await it.ask(target=target)

    answer = run(scenario)
    assert (said(answer), answer.accuracy.max_drop) == (UNMONITORED, None)


@pytest.mark.parametrize("target", [Quality.FAST, Quality.BALANCED])
def test_audits_wait_for_the_link_but_not_too_long(
    large: Peer, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    large.top_k = AGREES

    async def scenario() -> list[tuple[AccuracyStatus, StatusReason | None]]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            found = [said(await it.ask(target=target))]
            await until(lambda: not it.node.auditor.pending)
            assert it.node.datacenter is not None
            large.stages_delay_s = 30.0
            it.node.datacenter.link.connected = False
            found.append(said((await many(it, 200, target=target))[-1]))
            monkeypatch.setattr("hawkvision.guarantee.monitor.LONGEST_WAIT_S", 0.0)
            found.append(said(await it.ask(target=target)))
            it.node.datacenter.link.connected = True
            await until(lambda: not it.node.auditor.pending)
            assert audits(it, "missed") == 0
            return [*found, said(await it.ask(target=target))]

    held, waiting, too_long, again = run(scenario)
    assert held[0] is waiting[0] is again[0] is AccuracyStatus.CERTIFIED
    assert too_long == UNMONITORED


def test_nothing_lifts_an_alarm_while_the_link_is_down(large: Peer) -> None:
    """3,300 requests without one audit lifted it once."""

    async def scenario() -> tuple[Answer, float]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await raise_alarm(it)
            await until(lambda: not it.node.auditor.pending)
            assert it.node.datacenter is not None
            large.stages_delay_s = 30.0
            it.node.datacenter.link.connected = False
            done = audits(it, "agree", "differ")
            answers = await many(it, 4_000)
            assert audits(it, "agree", "differ") == done
            return answers[-1], it.counted("streams_suspended")

    answer, streams = run(scenario)
    assert (answer.accuracy.status, answer.tier, answer.degraded_reason, streams) == (
        AccuracyStatus.SUSPENDED, Tier.EDGE, DegradedReason.UNREACHABLE, 2.0,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- late


@pytest.mark.parametrize("how", ["degraded", "refused", "hung up"])
def test_where_only_the_edges_answers_are_in_time_they_are_not_certified(large: Peer, tmp_path: Path, how: str) -> None:
    large.top_k = AGREES
    late, path = (AccuracyStatus.BEST_EFFORT, StatusReason.LATE), tmp_path / "state.sqlite3"

    async def before() -> None:
        async with bench(large, SURE, audit_share=0.001, state_file=path) as it:
            await known(it.node)
            assert said(await it.ask()) == HELD
            large.delay_s, it.backend.lead, gone = 30.0, UNSURE, asyncio.Event()
            gone.set()
            for _ in range(6):
                with suppress(DeadlineMissed, CallerGone):
                    if how == "hung up":
                        await it.ask(gone.wait)
                    else:
                        await it.ask(deadline_ms=50.0, on_miss=OnMiss.FAIL if how == "refused" else OnMiss.DEGRADE)
            large.delay_s, it.backend.lead = 0.0, SURE
            assert said(await it.ask()) == late
            assert balanced(it).accuracy.status_reason is StatusReason.LATE
            assert said(await it.ask(caller="with few requests, too")) == late
            assert said(await it.ask(target=MaxAccuracyDrop(0.3))) == HELD, "another target"

    async def after() -> None:
        async with bench(large, SURE, audit_share=0.001, state_file=path) as it:
            await known(it.node)
            assert said(await it.ask()) == late
            assert said((await many(it, 120))[-1]) == HELD, "6 of 120 are missing"

    run(before)
    run(after)


# ---------------------------------------------------------------------------------------------------- restarts


def test_a_restart_resumes_an_alarm(large: Peer, tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"

    async def before() -> None:
        async with bench(large, SURE, audit_share=0.2, state_file=path) as it:
            await raise_alarm(it)

    async def after() -> tuple[bool, float]:
        async with bench(large, SURE, audit_share=0.2, state_file=path) as it:
            return suspended(it), it.counted("streams_suspended")

    run(before)
    assert run(after) == (True, 1.0)


def test_a_restart_with_other_certificates_lifts_no_alarm(large: Peer, tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"

    async def before() -> None:
        async with bench(large, SURE, audit_share=0.2, state_file=path) as it:
            await raise_alarm(it)

    async def after() -> object:
        async with bench(large, SURE, intermediate=True, state_file=path) as it:
            return suspended(it)

    run(before)
    assert run(after) is True


@pytest.mark.parametrize("fields", [{}, {"deadline_ms": 300.0, "on_miss": OnMiss.FAIL}])
def test_images_that_got_no_answer_are_audited_like_others(large: Peer, fields: dict[str, Any]) -> None:
    """The caller hangs up, or is told of the missed deadline."""
    large.delay_s = 30.0

    async def scenario() -> int:
        async with bench(large, UNSURE, audit_share=1.0) as it:
            await known(it.node)
            gone = asyncio.Event()
            if not fields:
                gone.set()
            with pytest.raises((CallerGone, DeadlineMissed)):
                await it.ask(gone.wait, **fields)
            return it.node.auditor.pending

    assert run(scenario) == 1


# --------------------------------------------------------------------------------------------- what is listed


def test_answers_are_counted_by_the_status_of_their_guarantee(large: Peer) -> None:
    async def scenario() -> list[float]:
        async with bench(large, SURE) as it:
            await known(it.node)
            await it.ask()
            await it.ask(target=MinConfidence(0.5))
            return [
                it.counted("guarantees_total", status=status) for status in ("certified", "best_effort", "suspended")
            ]

    assert run(scenario) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "target", [Quality.BALANCED, Quality.BEST, MaxAccuracyDrop(0.02), MinAccuracy(0.85), MinConfidence(0.999)]
)
def test_whatever_falls_short_claims_nothing(target: object) -> None:
    async def scenario() -> Answer:
        async with bench(None, UNSURE) as it:
            it.node.policy.alone = False  # so that absolute targets beyond the edge are not refused at once
            return await it.ask(target=target)

    answer = run(scenario)
    guarantee = answer.accuracy
    assert (answer.degraded, guarantee.status) == (True, AccuracyStatus.BEST_EFFORT)
    assert (guarantee.basis, guarantee.status_reason) == (None, StatusReason.DEGRADED)
    assert (guarantee.max_drop, guarantee.delta, guarantee.n) == (None, None, None)

"""What the live view says of a guarantee: its audits, and why and when it was suspended."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from edge.monitoring.stream_keys import stream_key
from edge.serving.recent_answers import MOST_COUNTED, LastMinute, RecentAnswers
from edge.serving.status import MOST_STREAMS, Status, TaskStatus, describe_status
from edge.serving.tasks import ServedTasks
from hawkvision.core.types import AccuracyStatus, Basis, Quality, StatusReason, Timing
from tests.edge.bench import AGREES, SURE, UNSURE, Bench, bench, known, many, run
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.hawkvision.client.client_node import ANSWER
from tests.waiting import until

DIFFERS = [(ANSWER_CLASS, 0.99)]
ME = "127.0.0.1"
YARD = stream_key("yard", ME).hex()


def status(it: Bench) -> Status:
    return describe_status(
        ServedTasks([it.node]), it.clock.now(), datetime.now(UTC).timestamp(), 1.0, (0, 1), draining=False
    )


def shown(it: Bench) -> TaskStatus:
    return status(it).tasks[0]


async def suspend(it: Bench, large: Peer, stream: str | None = None) -> None:
    """Until audits have found that the reference stage answers otherwise; others' traffic is as certified."""
    await known(it.node)
    large.top_k = DIFFERS
    while not any(row.status is AccuracyStatus.SUSPENDED for row in shown(it).guarantee):
        await many(it, 4, stream=stream)


def test_a_certified_guarantee_is_shown_with_its_audits(large: Peer) -> None:
    large.top_k = AGREES

    async def scenario() -> TaskStatus:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            await many(it, 60, stream="yard")
            await until(lambda: not it.node.streams.monitor.waiting())
            return shown(it)

    found = run(scenario)
    assert [(row.stream, row.named) for row in found.guarantee] == [
        (None, False), (stream_key(None, ME).hex(), False), (YARD, True),
    ]  # fmt: skip
    for row in found.guarantee:
        assert (row.status, row.reason, row.basis) == (AccuracyStatus.CERTIFIED, None, Basis.SHIPPED)
        assert row.audits_due == row.audits_made > 0 == row.audits_waiting
        assert row.disagreement == 0.0 < (row.certified_disagreement or 0.0)
        assert row.max_drop is not None
    assert found.alarms == ()


def test_audits_that_wait_are_shown(large: Peer) -> None:
    async def scenario() -> TaskStatus:
        async with bench(large, SURE, audit_share=0.2) as it:
            await known(it.node)
            large.held = True
            await many(it, 40)
            found = shown(it)
            large.held = False
            return found

    node = run(scenario).guarantee[0]
    assert node.audits_due == node.audits_waiting > 0 == node.audits_made


def test_an_alarm_is_shown_with_its_time_and_cause_and_so_is_its_end(large: Peer) -> None:
    async def scenario() -> tuple[TaskStatus, TaskStatus]:
        async with bench(large, SURE, audit_share=0.2) as it:
            await suspend(it, large)
            raised = shown(it)
            large.top_k = AGREES
            while any(row.status is AccuracyStatus.SUSPENDED for row in shown(it).guarantee):
                await many(it, 20, target=Quality.FAST)
            return raised, shown(it)

    begun, raised, ended = datetime.now(UTC), *run(scenario)
    caller = next(row for row in raised.guarantee if row.status is AccuracyStatus.SUSPENDED)
    assert caller.reason is StatusReason.ALARM
    assert (caller.disagreement or 0.0) > (caller.certified_disagreement or 0.0)
    alarm = raised.alarms[0]
    assert (alarm.stream, alarm.ended) == (caller.stream, None)
    assert alarm.time is not None
    assert begun - timedelta(seconds=1) < alarm.time <= datetime.now(UTC)
    assert alarm.cause.startswith("small differs from the reference stage in ")
    assert "more often than certified: " in alarm.cause
    assert {(each.stream, each.cause) for each in ended.alarms} >= {(alarm.stream, alarm.cause)}
    assert all(each.ended is not None and each.time is not None and each.time < each.ended for each in ended.alarms)


def test_an_alarm_of_before_the_start_is_shown_as_it_was(large: Peer, tmp_path: Path) -> None:
    async def scenario() -> list[TaskStatus]:
        found: list[TaskStatus] = []
        for _ in range(2):
            async with bench(large, SURE, audit_share=0.2, state_file=tmp_path / "state") as it:
                if not found:
                    await suspend(it, large, "yard")
                found.append(shown(it))
        return found

    before, after = run(scenario)
    assert [each for each in after.alarms if each.stream == YARD] == [
        each for each in before.alarms if each.stream == YARD
    ]
    assert after.guarantee[1].stream == YARD or not any(each.stream == YARD for each in before.alarms)


def test_no_more_streams_are_shown_than_stated_those_in_alarm_first(large: Peer) -> None:
    large.top_k = AGREES

    async def scenario() -> TaskStatus:
        async with bench(large, SURE, audit_share=0.2) as it:
            await suspend(it, large, "yard")
            large.top_k = AGREES
            for number in range(MOST_STREAMS + 5):
                await it.ask(stream=f"camera {number}", target=Quality.FAST)
            return shown(it)

    found = run(scenario)
    assert len(found.guarantee) == 1 + MOST_STREAMS
    suspended = [row.status is AccuracyStatus.SUSPENDED for row in found.guarantee[1:]]
    assert suspended == sorted(suspended, reverse=True)
    assert any(suspended)


def test_the_last_answers_are_the_newest_of_all(large: Peer) -> None:
    async def scenario() -> tuple[list[str], Status]:
        async with bench(large, UNSURE) as it:
            await known(it.node)
            answers = await many(it, 28)
            return [answer.id for answer in answers], status(it)

    asked, found = run(scenario)
    assert len(found.answers) == 24
    assert {answer.id for answer in found.answers} <= set(asked)
    times = [answer.time for answer in found.answers]
    assert times == sorted(times, reverse=True)


def test_rates_are_of_the_last_minute_and_of_the_requests_that_are_remembered() -> None:
    recent = RecentAnswers(0.0)
    for number in range(2 * MOST_COUNTED):
        recent.add(replace(ANSWER, timing_ms=Timing(total=float(number % 100))), number / 1000, None, "me", b"")
    found = recent.last_minute(2 * MOST_COUNTED / 1000)
    assert 4000 <= found.answers <= MOST_COUNTED
    assert 950.0 <= found.per_s <= 1050.0
    assert found.p50_ms is not None
    assert 49.0 <= found.p50_ms <= 50.0
    assert found.p99_ms is not None
    assert 97.0 <= found.p99_ms <= 99.0
    assert recent.last_minute(100.0) == LastMinute()

"""The engine: what is sent when, what is noted of it, and what an interrupt leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.clients.engine import GENERATOR_FULL, Engine, LoadJob, ServerAddress, SharedImages
from loadgen.workload.record import INTERRUPTED, UNANSWERED, RequestOutcome

LOADED = SharedImages([b"a", b"b", b"c"], [10, 20, 30], [0, 1, 2])


@dataclass
class Clerk:
    """Answers what the image's first letter says, when the gate is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    waiting: int = 0
    crowd_of: int = 4
    crowd: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when so many wait."""
    at_once: int = 0
    reply: ClientReply = field(
        default_factory=lambda: ClientReply(200, index=1, confidence=0.5, tier="edge", sent_bytes=7)
    )

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> ClientReply:
        times.send()
        self.asked.append((image, dict(fields)))
        self.waiting += 1
        self.at_once = max(self.at_once, self.waiting)
        if self.waiting == self.crowd_of:
            self.crowd.set()
        await asyncio.sleep(0)
        await self.gate.wait()
        self.waiting -= 1
        return self.reply


def job(due: list[float], callers: int = 0, duration_s: float = 1.0, in_flight: int = 100) -> LoadJob:
    n = max(len(due), 6 if callers else 0)
    return LoadJob(
        ServerAddress("http://127.0.0.1:1"),
        [{"quality": "fast"}, {}], [i % 2 for i in range(n)], [i % 3 for i in range(n)],
        duration_s, in_flight, due, callers,
    )  # fmt: skip


def run(given: LoadJob, clerk: Clerk, loaded: SharedImages = LOADED, began_ago_s: float = 0.0) -> list[RequestOutcome]:
    clerk.gate.set()
    return asyncio.run(Engine(given, loaded, clerk).run(time.monotonic() - began_ago_s))


def test_every_request_is_sent_with_its_image_and_fields_and_scored() -> None:
    clerk = Clerk()
    outcomes = run(job([0.0, 0.01, 0.02, 0.03]), clerk)
    assert clerk.asked == [(b"a", {"quality": "fast"}), (b"b", {}), (b"c", {"quality": "fast"}), (b"a", {})]
    assert [(each.image, each.right, each.target) for each in outcomes] == [
        (10, False, 0), (20, True, 1), (30, False, 0), (10, False, 1)
    ]  # fmt: skip
    assert (outcomes[0].tier, outcomes[0].confidence, outcomes[0].sent_bytes) == ("edge", 0.5, 7)


def test_an_answer_counts_from_when_it_was_whole_not_from_when_it_was_read() -> None:
    class Prompt(Clerk):
        async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> ClientReply:
            replied = await super().ask(image, fields, times)
            assert times.sent is not None
            times.done = times.sent + 0.002
            while time.monotonic() < times.sent + 0.02:  # the generator has much to do
                pass
            return replied

    outcomes = run(job([0.0, 0.05]), Prompt())
    assert [each.done_s - each.sent_s for each in outcomes] == pytest.approx([0.002, 0.002])


def test_latency_counts_from_when_a_request_was_due() -> None:
    outcomes = run(job([0.0, 0.1]), Clerk(), began_ago_s=1.0)
    assert all(each.latency_s >= 0.9 for each in outcomes)
    assert all(each.sent_s - each.due_s >= 0.9 for each in outcomes)


def test_requests_do_not_wait_for_answers() -> None:
    async def scenario() -> tuple[int, int]:
        clerk = Clerk(crowd_of=20)
        running = asyncio.create_task(Engine(job([0.0] * 20), LOADED, clerk).run(time.monotonic()))
        await clerk.crowd.wait()
        clerk.gate.set()
        return clerk.at_once, len(await running)

    assert asyncio.run(scenario()) == (20, 20)


def test_what_exceeds_the_bound_counts_as_unanswered() -> None:
    async def scenario() -> list[RequestOutcome]:
        clerk = Clerk()
        engine = Engine(job([0.0] * 20, in_flight=5), LOADED, clerk)
        running = asyncio.create_task(engine.run(time.monotonic()))
        while engine.tally.done < 15:  # noqa: ASYNC110 - a count, and no waiting in between
            await asyncio.sleep(0)
        clerk.gate.set()
        return await running

    outcomes = asyncio.run(scenario())
    full = [each for each in outcomes if each.error == GENERATOR_FULL]
    assert (len(full), len(outcomes)) == (15, 20)
    assert all(each.status == UNANSWERED and each.right is None for each in full)


def test_callers_wait_for_their_answers_and_begin_the_plan_anew() -> None:
    clerk = Clerk()
    outcomes = run(job([], callers=3, duration_s=0.05), clerk)
    assert clerk.at_once <= 3
    assert len(outcomes) > 6
    assert {each.image for each in outcomes} == {10, 20, 30}
    assert all(each.sent_s - each.due_s < each.latency_s + 1e-9 for each in outcomes)


@pytest.mark.parametrize("callers", [0, 4])
def test_interrupt_sends_nothing_more_and_notes_what_had_no_answer(callers: int) -> None:
    async def scenario() -> list[RequestOutcome]:
        clerk = Clerk()
        due = [] if callers else [0.0] * 4 + [60.0] * 4
        engine = Engine(job(due, callers=callers, duration_s=60.0), LOADED, clerk, grace_s=0.01)
        running = asyncio.create_task(engine.run(time.monotonic()))
        await clerk.crowd.wait()
        engine.stop()
        return await running

    outcomes = asyncio.run(scenario())
    assert [(each.status, each.error) for each in outcomes] == [(UNANSWERED, INTERRUPTED)] * 4


def test_answers_are_still_taken_after_an_interrupt() -> None:
    async def scenario() -> list[RequestOutcome]:
        clerk = Clerk()
        engine = Engine(job([0.0] * 4 + [60.0]), LOADED, clerk)
        running = asyncio.create_task(engine.run(time.monotonic()))
        await clerk.crowd.wait()
        engine.stop()
        clerk.gate.set()
        return await running

    assert [each.status for each in asyncio.run(scenario())] == [200] * 4

"""Bodies are timed by progress and share one memory; time passes at once here (`instantly`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from starlette.types import Message

from hawkvision.core.errors import Overloaded, RequestTimeout, TooLarge
from hawkvision.servers.bodies import MAX_BUFFERED_BYTES, Bodies, Body, UploadPace
from tests.hawkvision.servers.instantly import run_instantly

PACE = UploadPace()
LIMIT = 10 * 1024 * 1024


def bodies(limit: int = LIMIT) -> Bodies:
    return Bodies(limit)


class Sender:
    """Sends pieces of these sizes, each so long after the one before; then, if it stalls, nothing more."""

    def __init__(self, pieces: Sequence[tuple[float, int]], *, stalls: bool = False) -> None:
        self._pieces = list(pieces)
        self._stalls = stalls

    async def __call__(self) -> Message:
        if not self._pieces:
            await asyncio.sleep(1e9)
        gap_s, size = self._pieces.pop(0)
        await asyncio.sleep(gap_s)
        return {"type": "http.request", "body": bytes(size), "more_body": self._stalls or bool(self._pieces)}


async def received(sender: Sender, shared: Bodies | None = None) -> tuple[int, float]:
    """How many bytes came, and how long that took."""
    body = Body(shared or bodies(), sender)
    try:
        return len(await body.read(None)), asyncio.get_running_loop().time()
    finally:
        body.release()


def test_a_body_may_take_as_long_as_it_comes_on() -> None:
    size, took_s = run_instantly(received(Sender([(0.45, 15_000)] * 600)))
    assert size == 9_000_000
    assert took_s == pytest.approx(270.0)


@pytest.mark.parametrize("length", ["2000", "0" * 5000 + "2000", None, "", "0"])
def test_a_length_may_have_zeros_in_front(length: str | None) -> None:
    body = Body(bodies(), Sender([(0.0, 1000), (0.0, 1000)]))
    assert len(run_instantly(body.read(length))) == 2000


@pytest.mark.parametrize("length", [str(LIMIT + 1), "0" * 5000 + str(LIMIT + 1), "9" * 5000])
def test_a_length_beyond_the_limit_is_refused_however_it_is_written(length: str) -> None:
    with pytest.raises(TooLarge, match=f"at most {LIMIT}"):
        run_instantly(Body(bodies(), Sender([], stalls=True)).read(length))


def test_a_body_at_the_slowest_pace_is_received() -> None:
    size, took_s = run_instantly(received(Sender([(1.0, 520)] * 2000)))
    assert size == 1_040_000
    assert took_s == pytest.approx(2000.0)


@pytest.mark.parametrize(
    "sender",
    [
        Sender([(1.0, 1)] * 1_000_000),
        Sender([(1.0, 480)] * 20_000),
        Sender([], stalls=True),
        Sender([(0.0, 9_000_000)], stalls=True),
        Sender([(0.01, 15_000)] * 600, stalls=True),
    ],
    ids=["a byte a second", "slightly too slow", "nothing", "stalled near its end", "stalled after many steps"],
)
def test_a_body_that_does_not_come_on_is_ended(sender: Sender) -> None:
    async def timed() -> float:
        with pytest.raises(RequestTimeout, match="500 bytes a second"):
            await received(sender)
        return asyncio.get_running_loop().time()

    assert run_instantly(timed()) <= 36.1


def test_a_body_above_its_limit_is_ended_at_once() -> None:
    with pytest.raises(TooLarge):
        run_instantly(received(Sender([(0.0, 60_000)] * 10, stalls=True), bodies(500_000)))


def test_where_memory_is_full_those_who_stall_make_room() -> None:
    size = 9_000_000
    many = MAX_BUFFERED_BYTES // size

    async def crowded() -> list[object]:
        shared = bodies()
        stalled = [asyncio.ensure_future(received(Sender([(0.0, size)], stalls=True), shared)) for _ in range(many)]
        await asyncio.sleep(PACE.grace_s + 0.1)
        good = [asyncio.ensure_future(received(Sender([(0.1, size // 2)] * 2), shared)) for _ in range(5)]
        sizes = [(await one)[0] for one in good]
        assert sizes == [size] * 5
        ended = await asyncio.gather(*stalled, return_exceptions=True)
        assert shared.held == 0
        return list(ended)

    ended = run_instantly(crowded())
    assert all(isinstance(one, Overloaded | RequestTimeout) for one in ended)
    assert 1 <= sum(isinstance(one, Overloaded) for one in ended) <= 5, "no more than was needed"


def test_where_memory_is_full_of_those_who_come_on_the_newest_is_refused() -> None:
    size = 9_000_000

    async def crowded() -> None:
        shared = bodies()
        busy = [
            asyncio.ensure_future(received(Sender([(0.0, size), *[(1.0, 20_000)] * 10]), shared))
            for _ in range(MAX_BUFFERED_BYTES // size)
        ]
        await asyncio.sleep(5.0)
        with pytest.raises(Overloaded):
            await received(Sender([(0.0, size)]), shared)
        assert [(await one)[0] for one in busy] == [size + 200_000] * len(busy)

    run_instantly(crowded())

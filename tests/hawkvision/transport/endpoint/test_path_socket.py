"""Datagrams that leave by one system call: the same arrive in the same order, whether the kernel cuts them or not."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.endpoint.udp import MAX_SEGMENTS, PathSocket, UdpRoute, bind, bursts, open_path, runs
from tests.waiting import until

T = TypeVar("T")

SO_NO_CHECK = 11
"""Linux's: without checksums the kernel refuses to cut datagrams apart."""
SIZES = [1200, 1200, 1200, 700, 1200, 1100, 1100, *[90] * 20, 1200]
SENT = [bytes([number]) * size for number, size in enumerate(SIZES)]


@pytest.fixture
def receiver() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as bound:
        bound.settimeout(5.0)
        yield bound


@given(st.lists(st.integers(1, 4).map(bytes), max_size=30))
def test_runs_are_the_same_datagrams_and_each_can_be_cut(datagrams: list[bytes]) -> None:
    found = list(runs(datagrams))
    assert [each for run in found for each in run] == datagrams
    for run in found:
        assert {len(each) for each in run[:-1]} <= {len(run[0])}
        assert 0 < len(run[-1]) <= len(run[0])
        assert len(run) <= MAX_SEGMENTS


@given(st.lists(st.tuples(st.integers(0, 1), st.binary(min_size=1, max_size=2)), max_size=40))
def test_bursts_are_the_same_datagrams_and_each_is_of_one_path(datagrams: list[tuple[int, bytes]]) -> None:
    found = list(bursts(datagrams))
    assert [(path, each) for path, burst in found for each in burst] == datagrams
    assert all(0 < len(burst) <= MAX_SEGMENTS for _, burst in found)


def test_as_few_runs_as_can_be_are_made() -> None:
    assert [[len(each) for each in run] for run in runs(SENT)] == [
        [1200, 1200, 1200, 700],
        [1200, 1100],
        [1100, 90],
        [90] * 8,
        [90] * 8,
        [90] * 3,
        [1200],
    ]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def opened(receiver: socket.socket) -> PathSocket:
    host, port = receiver.getsockname()[:2]
    return await open_path(asyncio.get_running_loop(), UdpRoute(None, host), port, lambda _: None)


def run_on_both(scenario: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
    """What comes of it on asyncio's own loop, and on the one that servers use."""
    return [asyncio.run(scenario()), uvloop.run(scenario())]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's options")
@pytest.mark.parametrize(("options", "segmented"), [({}, True), ({SO_NO_CHECK: 1}, False)], ids=["cut", "one by one"])
def test_all_arrive_in_order_whether_the_kernel_cuts_them_or_not(
    receiver: socket.socket, options: dict[int, int], segmented: bool
) -> None:
    async def scenario() -> tuple[list[bytes], bool]:
        path = await opened(receiver)
        for option, value in options.items():
            path.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)
        path.send(SENT)
        came = [receiver.recv(2000) for _ in SENT]
        could = path.send_segmented([b"one", b"two", b"6"])
        if could:
            assert [receiver.recv(2000) for _ in range(3)] == [b"one", b"two", b"6"]
        path.transport.close()
        return came, could

    assert run_on_both(scenario) == [(SENT, segmented)] * 2


def test_a_closed_path_leaves_no_descriptor_and_sends_nothing(receiver: socket.socket) -> None:
    async def scenario() -> bool:
        before = descriptors()
        path = await opened(receiver)
        assert descriptors() > before
        path.transport.close()
        await until(lambda: descriptors() <= before)
        return path.send_segmented([b"one", b"two"])

    assert run_on_both(scenario) == [False, False]

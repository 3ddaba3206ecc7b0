"""Datagrams that leave by one system call: the same arrive in the same order, whether the kernel cuts them or not."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.udp import MOST_AT_ONCE, Outlet, bind, bursts, runs

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
        assert len(run) <= MOST_AT_ONCE


@given(st.lists(st.tuples(st.integers(0, 1), st.binary(min_size=1, max_size=2)), max_size=40))
def test_bursts_are_the_same_datagrams_and_each_is_of_one_path(datagrams: list[tuple[int, bytes]]) -> None:
    found = list(bursts(datagrams))
    assert [(path, each) for path, burst in found for each in burst] == datagrams
    assert all(0 < len(burst) <= MOST_AT_ONCE for _, burst in found)


async def sent(receiver: socket.socket, options: dict[int, int], *, connected: bool) -> tuple[list[bytes], bool]:
    """What arrives of `SENT`, and whether the kernel still counts as one that cuts."""
    address = receiver.getsockname()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        asyncio.DatagramProtocol,
        local_addr=None if connected else ("127.0.0.1", 0),
        remote_addr=address if connected else None,
    )
    for option, value in options.items():
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)
    outlet = Outlet(transport)
    try:
        outlet.send(SENT, None if connected else address)
        return [receiver.recv(2000) for _ in SENT], outlet._cuts
    finally:
        outlet.close()
        transport.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's options")
@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize(("options", "cuts"), [({}, True), ({SO_NO_CHECK: 1}, False)], ids=["cut", "one by one"])
def test_all_arrive_in_order_whether_the_kernel_cuts_them_or_not(
    receiver: socket.socket, options: dict[int, int], cuts: bool, connected: bool
) -> None:
    assert asyncio.run(sent(receiver, options, connected=connected)) == (SENT, cuts)


def test_a_closed_outlet_leaves_no_descriptor(receiver: socket.socket) -> None:
    async def scenario() -> int:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=receiver.getsockname()
        )
        outlet = Outlet(transport)
        outlet.close()
        transport.close()
        return outlet._socket.fileno()

    assert asyncio.run(scenario()) == -1

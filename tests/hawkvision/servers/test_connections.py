"""Connections have a time and a number: callers who are slow, silent or many."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from hawkvision.servers.connections import ConnectionRegistry, Limits, address_of, connections_for
from hawkvision.servers.protocol import MAX_DRAINED_BYTES
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller
from tests.hawkvision.servers.impatient import PER_ADDRESS
from tests.hawkvision.servers.raw_http import (
    GET,
    answer,
    ask,
    connect,
    healthy,
    refusal,
    replies,
    until_closed,
)
from tests.waiting import wait_until

FILES = 144
"""Leaves 16 connections."""


@pytest.fixture
def limited() -> Iterator[ServerProcess]:
    with running("tests.edge.limited", str(FILES), "--port", "0", "--backend", "noop") as node:
        yield node


@pytest.fixture(scope="module", autouse=True)
def unfinished(node: ServerProcess) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A request half sent and a connection without one, opened first, so that their time passes during other tests."""
    with connect(node, b"GET /hea") as half, connect(node) as silent:
        yield half, silent


def resets(connection: socket.socket) -> bool:
    """Whether the server stops taking what is sent, within half a minute."""
    poll = select.poll()
    poll.register(connection, 0)  # errors are always reported
    try:
        for _ in range(600):
            connection.sendall(b"x")
            if poll.poll(50):
                return True
    except ConnectionError:
        return True
    return False


# ------------------------------------------------------------------------------------------------- time


def test_unfinished_heads_are_told_that_time_is_up(impatient: ServerProcess) -> None:
    with ExitStack() as stack:
        begun = (b"G", b"GET /hea", GET[:-2], GET + b"GET /hea")
        for sends, connection in [(sends, stack.enter_context(connect(impatient, sends))) for sends in begun]:
            found = replies(until_closed(connection))
            assert len(found) == 1 + sends.startswith(GET)
            assert refusal(found[-1:]) == (408, "request_timeout")


@pytest.mark.parametrize(("begins", "drips"), [(b"GET / HTTP/1.1\r\n", b"X-A: b\r\n"), (b"", b"\r\n")])
def test_a_head_that_drips_is_told_that_time_is_up(impatient: ServerProcess, begins: bytes, drips: bytes) -> None:
    with connect(impatient, begins) as connection:
        connection.settimeout(0.05)
        said = b""
        for _ in range(600):
            try:
                said = connection.recv(65536)
                break
            except TimeoutError:
                connection.sendall(drips)
    assert refusal(replies(said)) == (408, "request_timeout")


def test_a_connection_that_never_speaks_is_closed(impatient: ServerProcess) -> None:
    with connect(impatient) as connection:
        assert until_closed(connection) == b""


def test_the_rest_of_a_refused_body_has_its_time(impatient: ServerProcess) -> None:
    (answer,) = ask(impatient, b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")
    assert answer.status == 200, "and then the connection was closed, without a second answer"


def test_a_refused_body_that_comes_on_is_let_finish(impatient: ServerProcess) -> None:
    size = 3 * MAX_DRAINED_BYTES // 4
    with connect(impatient, b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size) as connection:
        assert answer(connection) == 200
        until, step = time.monotonic() + 2.0, size // 400
        for left in range(400, 0, -1):
            connection.sendall(bytes(step))
            while time.monotonic() < until - 2.0 * (left / 400):
                assert healthy_too(impatient)
        connection.sendall(bytes(size - 400 * step) + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(connection) == 200, "after four times what it may take without"


def healthy_too(server: ServerProcess) -> bool:
    with closing(Caller(server)) as caller:
        return caller.get("/").status == 200


def test_a_body_that_stops_is_told_that_it_came_too_slowly(impatient: ServerProcess) -> None:
    head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    for begins in (b"", b"x", bytes(80_000)):
        with connect(impatient, head + begins) as connection:
            assert answer(connection) == 408


def test_a_refused_caller_that_does_not_hang_up_is_cut_off(impatient: ServerProcess) -> None:
    with connect(impatient, b"nonsense\r\n\r\n") as connection:
        assert refusal(replies(until_closed(connection))) == (400, "bad_field")
        assert resets(connection)


def test_callers_that_never_read_are_cut_off(impatient: ServerProcess) -> None:
    with ExitStack() as stack:
        for version in (b"1.0", b"1.1"):
            for behind in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /"):
                stack.enter_context(connect(impatient, b"GET /large HTTP/" + version + b"\r\n\r\n" + behind))
        wait_until(lambda: open_connections(impatient) == 1)


def open_connections(server: ServerProcess) -> int:
    """With the one that asks."""
    with closing(Caller(server)) as caller:
        return int(caller.get("/open").body)


def test_a_caller_that_reads_late_gets_all_of_its_answer_and_may_ask_again(impatient: ServerProcess) -> None:
    with (
        connect(impatient, b"GET /medium HTTP/1.1\r\nHost: x\r\n\r\n") as connection,
        connection.makefile("rb") as said,
    ):
        while (line := said.readline()) != b"\r\n":
            assert line
        assert len(said.read(8 << 20)) == 8 << 20
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(connection) == 200


# ------------------------------------------------------------------------------------------------- number


def working(server: ServerProcess) -> socket.socket:
    """A connection whose request is being read: the node has asked for the rest."""
    head = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    connection = connect(server, head)
    assert connection.recv(65536).startswith(b"HTTP/1.1 100")
    return connection


def resting(server: ServerProcess) -> socket.socket:
    """A kept-alive connection that has had an answer."""
    connection = connect(server, GET)
    assert answer(connection) == 200
    return connection


def test_when_all_connections_work_a_new_one_is_turned_away_and_may_come_back(limited: ServerProcess) -> None:
    room = connections_for(FILES)
    with ExitStack() as stack:
        busy = [stack.enter_context(working(limited)) for _ in range(room)]
        for _ in range(3 * room):
            found = ask(limited, b"")
            assert refusal(found) == (503, "not_ready")
            assert found[0].headers["retry-after"] == "1"
        busy[0].sendall(bytes(100))
        assert answer(busy[0]) == 415
        assert healthy(limited)
        busy[1].sendall(bytes(100))
        assert answer(busy[1]) == 415, "those at work were left alone"


def test_the_connection_idle_longest_makes_room_for_a_new_one(limited: ServerProcess) -> None:
    with ExitStack() as stack:
        first, second, *_ = [stack.enter_context(resting(limited)) for _ in range(connections_for(FILES))]
        first.sendall(GET)  # no longer the one that has been idle longest
        assert answer(first) == 200
        newest = stack.enter_context(resting(limited))
        assert until_closed(second) == b""
        for kept in (first, newest):
            kept.sendall(GET)
            assert answer(kept) == 200


def test_half_open_connections_do_not_keep_out_those_that_finish(limited: ServerProcess) -> None:
    room = connections_for(FILES)
    with ExitStack() as stack:
        half_open = [stack.enter_context(connect(limited, b"GET /hea")) for _ in range(10 * room)]
        answered = False
        until = time.monotonic() + 9.0
        while not answered and time.monotonic() < until:  # the oldest have a second to finish
            found = ask(limited, GET.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            answered = [reply.status for reply in found] == [200]
        assert answered
        half_open[room - 1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it made room before the ten seconds were over
            half_open[room - 1].recv(1)


@pytest.mark.parametrize(
    ("client", "counts_for"),
    [
        (None, None),
        (("127.0.0.1", 1), None),
        (("127.8.9.1", 1), None),
        (("::1", 1), None),
        (("::ffff:127.0.0.1", 1), None),
        (("10.1.2.3", 1), "10.1.2.3"),
        (("::ffff:10.1.2.3", 1), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
    ],
)
def test_a_connection_counts_for_its_address_and_those_of_this_machine_for_none(
    client: tuple[str, int] | None, counts_for: str | None
) -> None:
    assert address_of(client) == counts_for


def test_one_address_never_gets_more_than_half_of_all_connections() -> None:
    bounds = [
        ConnectionRegistry(Limits(all_of_them, asked)).per_address for all_of_them, asked in ((4096, 512), (16, 512))
    ]
    assert bounds == [512, 8]
    assert ConnectionRegistry(Limits(16, 0)).per_address == 0


@pytest.mark.slow
def test_one_address_holds_its_share_and_no_more_and_others_do_not_notice() -> None:
    own = "ip link set lo up; ip address add 192.0.2.1/32 dev lo; ip address add 192.0.2.2/32 dev lo; exec "
    inside = ["unshare", "-rn", "sh", "-c"]
    if subprocess.run([*inside, own + "true"], capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces")
    asks = f"{sys.executable} -m tests.hawkvision.servers.two_addresses"
    done = subprocess.run([*inside, own + asks], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["of one"] == [200] * PER_ADDRESS
    assert seen["one more"] == [429, "overloaded"]
    assert seen["of another"] == [200] * PER_ADDRESS
    assert seen["of this machine"] == [200] * (2 * PER_ADDRESS)
    assert seen["after one has left"] == 200


def test_connections_follow_from_the_files_that_may_be_open() -> None:
    assert [connections_for(files) for files in (64, FILES, 256, 1024, 65_536)] == [16, 16, 128, 896, 4096]


@pytest.mark.slow
def test_half_open_and_silent_connections_to_a_node_are_closed_after_ten_seconds(
    node: ServerProcess, unfinished: tuple[socket.socket, socket.socket]
) -> None:
    half, silent = unfinished
    assert healthy(node)
    assert refusal(replies(until_closed(half))) == (408, "request_timeout")
    assert until_closed(silent) == b""

"""The link between two namespaces: real kernel TCP and UDP over it, and nothing left behind."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from hawkvision.core.errors import ConfigError, NotReady
from loadgen.network.link_spec import LinkSpec
from loadgen.network.namespaces import Side, available, sweep
from loadgen.network.tun_link import TunLink

ANSWER_S = 30.0
"""A bound on waiting for what must come, not on how fast it does."""

needs_a_link = pytest.mark.skipif(available() is not None, reason=f"no TUN link here: {available()}")


def udp(link: TunLink, side: Side, address: str, port: int = 0) -> socket.socket:
    with link.inside(side):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(ANSWER_S)
    made.bind((address, port))
    return made


def listening(link: TunLink) -> socket.socket:
    with link.inside("server"):
        return socket.create_server((link.server_address, 0))


def congestion_of(connection: socket.socket) -> str:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def send_through_tcp(link: TunLink, data: bytes) -> tuple[bytes, str]:
    """(what the server received, its congestion control) of one connection from the client."""
    listener = listening(link)
    with link.inside("client"):
        client = socket.create_connection(listener.getsockname(), ANSWER_S)
    received = bytearray()
    with listener, client, listener.accept()[0] as server:

        def send() -> None:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)

        sending = threading.Thread(target=send)
        sending.start()
        while piece := server.recv(65536):
            received += piece
        sending.join()
        return bytes(received), congestion_of(server)


def namespaces() -> set[str]:
    return {entry.name for entry in Path("/run/netns").iterdir()}


@needs_a_link
def test_kernel_answers_pings_after_both_delays_however_well_the_relay_knows_what_waking_takes() -> None:
    with TunLink(LinkSpec.parse("delay=2ms"), LinkSpec.parse("delay=1ms")) as link:
        with link.inside("client"):
            ping = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        with ping:
            ping.settimeout(ANSWER_S)
            for _ in range(300):
                begun_at = time.monotonic()
                ping.sendto(struct.pack("!BBHHH", 8, 0, 0xF7FF - 1, 0, 1), (link.server_address, 0))
                answer = ping.recv(1500)
                assert time.monotonic() - begun_at >= 0.003
                assert answer[20] == 0  # echo reply
        assert [way.delivered for way in link.counts()] == [300, 300]


@needs_a_link
@pytest.mark.parametrize("congestion", ["cubic", "bbr", "reno"])
def test_tcp_delivers_every_byte_over_a_datagram_link(congestion: str) -> None:
    if congestion not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        pytest.skip(f"this kernel has no {congestion}")
    data = os.urandom(300_000)
    with TunLink(LinkSpec.parse("rate=50mbit,delay=2ms,loss=2%"), congestion=congestion) as link:
        assert send_through_tcp(link, data) == (data, congestion)
        assert link.counts()[0].lost_air > 0


@needs_a_link
def test_sockets_choose_their_congestion_control_unless_the_link_does() -> None:
    with TunLink(LinkSpec()) as link, listening(link) as listener:
        chosen = []
        for choice in (None, "cubic", None):
            link.set_congestion(choice)
            with link.inside("client"):
                client = socket.socket()
            with client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
                client.connect(listener.getsockname())
                chosen.append(congestion_of(client))
    assert chosen == ["reno", "cubic", "reno"]


@needs_a_link
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_side_reaches_nothing_but_the_other(side: Side) -> None:
    with TunLink(LinkSpec()) as link:
        with link.inside(side):
            assert {name for _, name in socket.if_nameindex()} == {"lo", "link0"}
        with udp(link, side, "0.0.0.0") as lonely, pytest.raises(OSError, match="unreachable"):
            lonely.sendto(b"x", ("192.0.2.1", 9))
        with udp(link, side, "127.0.0.1") as itself:
            itself.sendto(b"x", itself.getsockname())
            assert itself.recv(10) == b"x"


@needs_a_link
def test_links_make_a_chain_whose_intermediate_talks_to_both_ends() -> None:
    with TunLink(LinkSpec(), LinkSpec()) as near, TunLink(LinkSpec(), LinkSpec(), behind=near) as far:
        with (
            udp(near, "client", near.client_address) as first,
            udp(near, "server", near.server_address) as intermediate,
            udp(far, "client", far.client_address) as out,
            udp(far, "server", far.server_address) as last,
        ):
            first.sendto(b"to the middle", intermediate.getsockname())
            assert intermediate.recv(20) == b"to the middle"
            out.sendto(b"to the end", last.getsockname())
            assert last.recvfrom(20) == (b"to the end", out.getsockname())
        with near.inside("client"), pytest.raises(OSError, match="unreachable"):
            socket.create_connection((far.server_address, 80), ANSWER_S)
        assert (near.counts()[0].delivered, far.counts()[0].delivered) == (1, 1)
        assert far.namespace("client") == near.namespace("server")


@needs_a_link
def test_nothing_is_left_behind() -> None:
    deaf = [sys.executable, "-c", IGNORING_SIGTERM]
    with TunLink(LinkSpec()) as link:
        stubborn = subprocess.Popen(link.command("client", deaf), stdout=PIPE)
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == b"deaf\n"
        relay = link._relay.pid
    stubborn.stdout.close()
    assert stubborn.wait(ANSWER_S) == -signal.SIGKILL
    assert not Path(f"/proc/{relay}").exists()
    assert not namespaces() & {link.namespace("client"), link.namespace("server")}


IGNORING_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
signal.pause()
"""


@needs_a_link
def test_dead_relay_is_reported_and_cleaned_up() -> None:
    with TunLink(LinkSpec()) as link:
        os.kill(link._relay.pid, signal.SIGKILL)
        with pytest.raises(NotReady, match="relay"):
            link.counts()
    assert not namespaces() & {link.namespace("client"), link.namespace("server")}


@needs_a_link
def test_failed_start_leaves_nothing() -> None:
    link = TunLink(LinkSpec(), congestion="telepathy")
    with pytest.raises(ConfigError, match="this kernel has"), link:
        pass
    assert not namespaces() & {link.namespace("client"), link.namespace("server")}


@needs_a_link
def test_namespaces_of_a_killed_owner_are_swept() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        theirs = {name for name in namespaces() if name.startswith(f"hvlink-{owner.pid}-")}
        assert len(theirs) == 2
        assert not set(sweep()) & theirs  # its owner lives
        owner.kill()
    sweep()  # unless another link, as it was made, has done so
    assert not namespaces() & theirs


OWNER = """
import signal
from loadgen.network.link_spec import LinkSpec
from loadgen.network.tun_link import TunLink
with TunLink(LinkSpec()):
    print("up", flush=True)
    signal.pause()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who is not")
def test_without_root_the_reason_is_given() -> None:
    say = "import os; from loadgen.network.namespaces import available; os.setuid(65534); print(available())"
    ran = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    assert ran.stdout == "needs root\n"

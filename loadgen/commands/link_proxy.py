"""`python -m loadgen link-proxy`: any server behind a bad link, at a loopback address.

    callers ─► 127.0.0.2:8080 ─► namespace "client" ─ link of a profile ─► namespace "server" ─► the server itself

Between the namespaces is real kernel TCP, with the windows, retransmissions and handshakes of the link; each connection
of a caller has one of its own there. It differs from a caller at the far end of a link in one way: a connection is
accepted, and its data taken, before they have crossed.

Datagrams cross unchanged and keep their ports, because a server names its datagram port over HTTP, at the same host. So
the proxy has a loopback address to itself, by default 127.0.0.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import struct
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Annotated, Final

import aiohttp
import msgspec

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.core.escalation_api import TRANSPORT_PATH, Transports
from loadgen.clients.connections import check_server
from loadgen.clients.processes import LEAD_S
from loadgen.commands.command_line import option
from loadgen.network.link_model import PacketCounts
from loadgen.network.link_spec import LinkSpec
from loadgen.network.namespaces import Side
from loadgen.network.profiles import LinkProfile, load_profile, names
from loadgen.network.tun_link import DISCARD_PORT, TunLink
from loadgen.network.udp_relay import UdpRelay
from loadgen.workload.record import CLIENT_EDGE, LinkSample

LISTEN: Final = "127.0.0.2"
MAX_CONNECTIONS: Final = 1024
"""At a time; a caller beyond that is hung up on. Each takes four sockets."""
PIECE_BYTES: Final = 64 * 1024
"""Read at once, and the most that waits in this process for each way of a connection, beside the kernel's buffers."""
MAX_UDP_PORTS: Final = 8
DISCOVERY_S: Final = 5.0


class LinkProxy:
    """A server behind a link, while the context is entered.

    The link is calm (`LinkProfile.calm`) until `begin`.
    """

    def __init__(
        self,
        url: str,
        profile: LinkProfile,
        *,
        listen: str = LISTEN,
        port: int = 0,
        udp_ports: Sequence[int] = (),
    ) -> None:
        """Prepare; nothing is made yet.

        Args:
            url: of the server, plain HTTP.
            profile: of the link between callers and it.
            listen: a loopback address, which callers use.
            port: for TCP; 0 takes a free one.
            udp_ports: of the server, offered at the same ports of `listen`.

        Raises:
            ConfigError: naming what does not fit.
        """
        self._target, self._path = _address_of(url)
        self._listen = _loopback(listen)
        if len(udp_ports) > MAX_UDP_PORTS:
            raise ConfigError(f"{len(udp_ports)} UDP ports; expected at most {MAX_UDP_PORTS}")
        self._port = port
        self._udp_ports = tuple(udp_ports)
        self._profile = profile
        self._link = TunLink(*profile.calm())
        self._connections: set[asyncio.Task[None]] = set()
        self._pokes: list[tuple[socket.socket, str]] = []
        self._stack = contextlib.AsyncExitStack()
        self.url = ""
        """What callers use, once the context is entered."""
        self.refused = 0
        """Callers that were hung up on, for too many were there."""

    async def __aenter__(self) -> LinkProxy:
        """Raises ConfigError where there can be no such link or the address is taken, NotReady if it fails to come."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._link)
            ends: dict[Side, str] = {"client": self._link.server_address, "server": self._link.client_address}
            for side, other in ends.items():
                with self._link.inside(side):
                    poke = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                self._pokes.append((poke, other))
            stack.push_async_callback(self._hang_up)
            with self._link.inside("server"):
                far = _listener(self._link.server_address, 0)
            self._far: tuple[str, int] = far.getsockname()
            arriving = await asyncio.start_server(self._arrived, sock=far, limit=PIECE_BYTES)
            stack.callback(arriving.close)
            near = _listener(self._listen, self._port)
            self.url = f"http://{self._listen}:{near.getsockname()[1]}{self._path}"
            called = await asyncio.start_server(self._called, sock=near, limit=PIECE_BYTES)
            stack.callback(called.close)
            for port in self._udp_ports:
                await self._carry_datagrams(stack, port)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def begin(self) -> None:
        """The link trace begins with the next packet."""
        up, down = self._profile.specs()
        self._link.set(up=up, down=down)
        for packet, address in self._pokes:  # a trace begins with the first packet that crosses
            packet.sendto(b"\0", (address, DISCARD_PORT))

    def counts(self) -> tuple[PacketCounts, PacketCounts]:
        """What happened to packets (up, down)."""
        return self._link.counts()

    async def _carry_datagrams(self, stack: contextlib.AsyncExitStack, port: int) -> None:
        far = UdpRelay(
            (self._target[0], port),
            LinkSpec(),
            listen=(self._link.server_address, port),
            listens_in=lambda: self._link.inside("server"),
        )
        await stack.enter_async_context(far)
        near = UdpRelay(
            far.address, LinkSpec(), listen=(self._listen, port), sends_in=lambda: self._link.inside("client")
        )
        await stack.enter_async_context(near)

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A caller's connection: on over the link."""

        async def across() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            with self._link.inside("client"):
                made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            made.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(made, self._far)
            except BaseException:
                made.close()
                raise
            return await asyncio.open_connection(sock=made, limit=PIECE_BYTES)

        await self._join(reader, writer, across())

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection that has crossed the link: on to the server."""
        await self._join(reader, writer, asyncio.open_connection(*self._target, limit=PIECE_BYTES))

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        opening: Coroutine[None, None, tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> None:
        """What comes from either goes to the other, until both have said all or one breaks off."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= 2 * MAX_CONNECTIONS:  # each is joined at both ends of the link
            self.refused += 1
            opening.close()
            _reset(writer)
            return
        self._connections.add(task)
        writers = [writer]
        try:
            other_reader, other_writer = await opening
            writers.append(other_writer)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_carry(reader, other_writer))
                ways.create_task(_carry(other_reader, writer))
        except* (OSError, asyncio.CancelledError):  # cancelled: everybody is hung up on, and nothing awaits this
            for each in writers:
                _reset(each)  # the other end hears that this one broke off
        finally:
            self._connections.discard(task)
            for each in writers:
                each.close()

    async def _hang_up(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off: aborted with no time to linger, TCP resets it instead of saying that all was said."""
    made: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed already: the other end broke off first
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens, in the namespace that the calling thread is in.

    Raises:
        ConfigError: if the address is taken, or is none of this machine's.
    """
    # With its protocol named: asyncio leaves Nagle's algorithm on where it cannot see that it is TCP.
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another address") from None
    made.setblocking(False)
    return made


def _address_of(url: str) -> tuple[tuple[str, int], str]:
    """Host and port of a server, and the path below which it answers."""
    parts = check_server(url, None)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"{url!r}: expected http://HOST[:PORT][/PATH]; behind a link there is plain HTTP only")
    return (parts.hostname, 80 if parts.port is None else parts.port), parts.path.rstrip("/")


def _loopback(address: str) -> str:
    try:
        found = ipaddress.IPv4Address(address)
    except ValueError:
        found = None
    if found is None or not found.is_loopback:
        raise ConfigError(f"{address!r}: expected an address 127.x.y.z; nothing is offered beyond this machine")
    return address


def link_samples(profile: LinkProfile, duration_s: float) -> list[LinkSample]:
    """What a link of a run is like, for its record; its trace begins `LEAD_S` before the run."""
    found = profile.samples(CLIENT_EDGE, duration_s + LEAD_S, at_s=-LEAD_S)
    return [msgspec.structs.replace(sample, at_s=max(0.0, sample.at_s)) for sample in found]


async def udp_port_of(url: str, api_key: str | None) -> int:
    """At which UDP port a node takes images as datagrams.

    Raises:
        NotReady: if it cannot be asked, or takes none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    where = f"{url.rstrip('/')}{TRANSPORT_PATH}"
    try:
        timeout = aiohttp.ClientTimeout(total=DISCOVERY_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session, session.get(where) as response:
            status, payload = response.status, await response.read()
        offer = msgspec.json.decode(payload, type=Transports).datagram if status == 200 else None
    except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotReady(f"{where}: {str(error) or type(error).__name__}") from None
    if offer is None:
        raise NotReady(f"{where}: HTTP {status}; the server says no port for datagrams")
    return offer.port


class LinkProxyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `python -m loadgen link-proxy`."""

    url: Annotated[str, option("Server", "Address of the server, such as http://127.0.0.1:8090; plain HTTP.")]
    link: Annotated[
        str,
        option("Link", f"Link between callers and the server: {', '.join(names())}, or a TOML file."),
    ]
    listen: Annotated[str, option("Server", "Loopback address to offer the server at.")] = LISTEN
    port: Annotated[int | None, option("Server", "Port to offer the server at. Default: the server's own.")] = None
    udp_port: Annotated[
        list[int],
        option("Server", "Also carry datagrams to this UDP port of the server; may be repeated."),
    ] = []


async def run(given: LinkProxyOptions) -> None:
    """Offer the server until interrupted; then print what happened to packets.

    Raises:
        HawkVisionError: for options that do not fit, or a link that cannot be had here.
    """
    for named, port in (("--port", given.port), *(("--udp-port", port) for port in given.udp_port)):
        if port is not None and not 1 <= port <= 65535:
            raise ConfigError(f"{named}: expected a port from 1 to 65535, got {port}")
    behind = LinkProxy(
        given.url,
        load_profile(given.link),
        listen=given.listen,
        port=_address_of(given.url)[0][1] if given.port is None else given.port,
        udp_ports=given.udp_port,
    )
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with behind:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, ending.set)
        behind.begin()
        print(f"ready: {behind.url} is {given.url} behind {given.link}", flush=True)  # noqa: T201
        await ending.wait()
        for way, counts in zip(("up", "down"), behind.counts(), strict=True):
            print(way, msgspec.json.encode(counts).decode(), flush=True)  # noqa: T201

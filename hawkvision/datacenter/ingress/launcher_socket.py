"""The connection between the launcher and an ingress replica on its machine, and how both accept callers.

    launcher                                                    ingress replica
      listens on a Unix socket in its private folder  ◄──────── connects
      accept, with the HTTP socket  ──────────────────────────► accepts callers
                                        ◄────────────────────── its state, every `BEAT_S` and whenever it changes
      datagrams, with the UDP socket, to one replica  ────────► serves datagrams; its state says where
      offer: what that replica says, to the others  ──────────► say it too
      reload (SIGHUP), drain  ────────────────────────────────► at last it closes the connection

A message is JSON and keeps its boundaries (SOCK_SEQPACKET); a socket travels beside it (SCM_RIGHTS, unix(7)). A path
crosses network namespaces, an abstract name does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

import msgspec

from hawkvision.core.escalation_api import Transports

BEAT_S: Final = 0.5
MESSAGE_BYTES: Final = 64 * 1024
"""The longest message. An offer with its certificate takes some 2 kB."""
_CREDENTIALS: Final = struct.Struct("=iII")
"""`struct ucred` (unix(7)): process, user, group."""


class Instruction(msgspec.Struct, frozen=True):
    """What the launcher wants of a replica."""

    do: Literal["accept", "datagrams", "offer", "reload", "drain"]
    restarts: int = 0
    """With `accept`: how many tier processes preceded this one; for the metrics."""
    transports: Transports | None = None
    """With `offer`: what `GET /v1/transport` says of the datagram server, whichever replica has it."""
    within_s: float = 0.0
    """With `drain`: the time for the requests inside."""


class IngressState(msgspec.Struct, frozen=True):
    """That a replica's event loop runs, and what it does."""

    serves: bool
    """It accepts callers at the HTTP socket."""
    transports: Transports | None = None
    """What its datagram server offers; None if it has none."""


ReceivedT = TypeVar("ReceivedT")


class MessageSocket(Generic[ReceivedT]):
    """One end of a connection between the launcher and an ingress replica. Close it."""

    def __init__(self, connection: socket.socket, received: msgspec.json.Decoder[ReceivedT]) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._decoder = received

    def send(self, message: msgspec.Struct, passed: socket.socket | None = None) -> bool:
        """Send a message, and a socket with it, without waiting; False if the other end is gone or reads nothing."""
        data = msgspec.json.encode(message)
        assert len(data) <= MESSAGE_BYTES, "messages are small"
        try:
            socket.send_fds(self._socket, [data], [] if passed is None else [passed.fileno()])
        except OSError:
            return False
        return True

    async def receive(self) -> tuple[ReceivedT, socket.socket | None]:
        """The next message, and the socket that came with it.

        Raises:
            ConnectionError: if the other end is gone, or does not keep to the protocol.
        """
        while True:
            try:
                data, numbers, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
                break
            except BlockingIOError:
                await self._readable()
        passed = socket.socket(fileno=numbers[0]) if numbers else None
        if passed is not None:
            passed.set_inheritable(False)
        try:
            if not data:
                raise ConnectionError("the other end is gone")
            return self._decoder.decode(data), passed
        except (msgspec.DecodeError, ConnectionError) as error:
            if passed is not None:
                passed.close()
            raise ConnectionError(str(error)) from None

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._socket.fileno(), _set, arrived)
        try:
            await arrived
        finally:
            if self._socket.fileno() >= 0:
                loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        """End the connection. A `receive` that waits must have been cancelled before."""
        self._socket.close()


def _set(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


def socket_path(folder: Path) -> Path:
    """Where the launcher of a tier listens: beside its folder for Ray, which Ray makes accessible to all."""
    return folder.parent / "ingress"


def connect_to_launcher(path: Path) -> MessageSocket[Instruction]:
    """A connection of an ingress replica.

    Raises:
        OSError: if no launcher listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return MessageSocket(connection, msgspec.json.Decoder(Instruction))


def listen_for_ingress(path: Path, backlog: int) -> socket.socket:
    """The launcher's listening socket, which only its own user may reach.

    Raises:
        OSError: if it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of the previous tier process
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def accept_ingress(listener: socket.socket) -> MessageSocket[IngressState] | None:
    """A connection of an ingress replica; None if there is none, or a process of another user made it."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        connection.close()
        return None
    return MessageSocket(connection, msgspec.json.Decoder(IngressState))


log = logging.getLogger("hawkvision.datacenter")

_PAUSE_S: Final = 0.1
"""The pause after a failed `accept`."""


class Acceptor:
    """Hands out one connection after the other while it is open.

    asyncio's server is not used: closed, it may leave an accepted connection open and its caller waiting; and it
    accepts all waiting connections at once, which would go to one of several processes.
    """

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._on_connection = on_connection
        self._is_open = False
        self._pause: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether it accepts."""
        return self._is_open

    def open(self) -> None:
        """Accept callers from now on."""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Leave the socket to other processes."""
        if self._pause is not None:
            self._pause.cancel()
        if self._is_open:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._is_open = False

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # another process has accepted it, or the caller is gone
            return
        except OSError as error:  # no file descriptor is free
            log.warning("cannot accept a connection: %s", error)
            self.close()
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self.open)
            return
        self._on_connection(caller)

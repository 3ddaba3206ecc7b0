"""The frames of the local socket and what they carry."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from hawkvision.core.errors import NotReady
from hawkvision.core.logs import RequestIds
from hawkvision.datacenter.stages.ensemble import EvaluationRequest, VariantAnswer

Part: TypeAlias = tuple[VariantAnswer, ...]

KEY_BYTES: Final = 32
PING_NUMBER: Final = 0
_HEAD: Final = struct.Struct(">II")
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group (unix(7), `struct ucred`)."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """One image for a replica; see `Replica.classify` and `Replica.classify_streaming`."""

    image: bytes
    evaluations: tuple[EvaluationRequest, ...]
    remaining_ms: float | None
    """Of the deadline, when this is sent."""
    streaming: bool
    request: RequestIds | None = None
    """The caller's request, for the log."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An unexpected exception of the replica as text: exceptions need not survive pickling."""

    text: str


@dataclass(frozen=True, slots=True)
class SocketPing:
    """Sent to a replica, which sends it back."""


@dataclass(frozen=True, slots=True)
class RegistrationFrame:
    """The first frame of a replica: its group and its statement (`hawkvision.models.fingerprints.statement`)."""

    group: str
    statement: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens for replicas, and the key that it expects. Secret."""

    name: str
    key: bytes


class PeerClosed(NotReady):
    """The replica is gone; another one may take the request."""


def no_replica(group: str) -> NotReady:
    """The error for a group without a live replica."""
    return NotReady(f"{group!r} has no live replica")


class FrameProtocol(asyncio.Protocol):
    """One end of a connection: bytes to numbered objects, and back. Closes at once if another user has the other end.

    Subclasses implement `frame`.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    @property
    def closed(self) -> bool:
        """Whether the connection is closed, or was never made."""
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have another base class
        if _peer_user(self._transport.get_extra_info("socket")) != os.getuid():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.closed:
            return
        self._received += data
        while len(self._received) >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._received)
            end = _HEAD.size + length
            if len(self._received) < end:
                return
            with memoryview(self._received) as received:
                body = pickle.loads(received[_HEAD.size : end])  # noqa: S301 - from a process of the same user
            del self._received[:end]
            self.frame(number, body)

    def frame(self, number: int, body: Any) -> None:
        """Handle one frame."""
        raise NotImplementedError

    def send(self, number: int, body: object) -> None:
        """Send one frame, unless the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            data = pickle.dumps(body, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_HEAD.pack(len(data), number) + data)


def _peer_user(connected: socket.socket) -> int:
    """The user id of the process at the other end, from the kernel."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])

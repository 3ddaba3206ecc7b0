"""A short way from the server to replicas on the same machine, and how the server knows which of them live.

    server ◄── key, group ─────────────────────────────────────────────── replica, once it has loaded its models
         ── 7: image, errands, when it expires, whether piecemeal ──►
         ◄────────────────── 7: part ─── 7: part ─── 7: end, or error ──
         ── 7: never mind ──►
         ── 0: are you there? ──►   ◄── 0: yes ──

Through a handle of Ray Serve an image takes 2.1 ms to the replica, and the last of its answer 1.5 ms back. This way
ImageNet's ensemble answers 3.1 ms sooner, its upright views 2.7, of 29.5 and 21.7 ms over HTTP (means of 200 images
in turns, two shared cores of an AMD EPYC). Serve starts, watches and replaces replicas all the same. Where it also
decides how many there are, images go through its handles, which count them, and only the last line is made use of.

A replica that dies closes its connection, which the server learns at once. One that is asked whether it is there and
says nothing for `SILENT_S`, neither that nor an answer, counts as absent until it does: what it was asked is asked of
another.

A frame is its length and the question's number, both unsigned 32-bit big-endian, and a pickled body. The server's
socket has a random name in Linux's abstract namespace (unix(7)), so no file is left behind. Names can be listed there,
so either end hangs up unless the kernel says that the other is run by the same user (SO_PEERCRED), and the server does
unless the first bytes are its key, which replicas are told through Serve's deployment record alone.

What goes this way, Serve does not count: a replica that it stops, because its health check fails, does not finish what
it was asked here, and the server asks the next one.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import pickle
import secrets
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from hawkvision.core.errors import DeadlineMissed, HawkVisionError, NotReady, Overloaded, RequestError
from hawkvision.core.logs import RequestIds, resume
from hawkvision.datacenter.execution.ensemble import Errand, VariantAnswer

log = logging.getLogger("hawkvision.datacenter")

Part: TypeAlias = tuple[VariantAnswer, ...]

_HEAD: Final = struct.Struct(">II")
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group (unix(7), `struct ucred`)."""
_KEY_BYTES: Final = 32
PROBE_S: Final = 0.5
"""Between an answer of a replica and the next question whether it is there."""
SILENT_S: Final = 2.0
"""How long it may take to answer that. Its event loop does nothing that takes milliseconds; a machine that is full may
keep it from its turn for some hundred of them."""
_MOST_CONNECTIONS: Final = 4096
"""Of replicas, whose number the settings bound by 1024 a group."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a replica is asked; see `Replica.classify` and `Replica.piecemeal`."""

    image: bytes
    errands: tuple[Errand, ...]
    expires_at: float
    piecemeal: bool
    request: RequestIds | None = None
    """Whose it is, for the log."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A defect of the replica's, in words: exceptions need not survive pickling."""

    words: str


@dataclass(frozen=True, slots=True)
class _Presence:
    """Asked of a replica, and said by it: that it is there."""


_PRESENCE_NUMBER: Final = 0


@dataclass(frozen=True, slots=True)
class _Report:
    """The first frame of a replica: to which group it belongs."""

    group: str
    stated: str = ""
    """What it runs (`hawkvision.models.fingerprints.statement`)."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens for replicas, and the key that it asks for. To be told in confidence."""

    name: str
    key: bytes


class HungUp(NotReady):
    """The replica is gone; what it was asked may as well be asked of the next one."""


Answering: TypeAlias = Callable[[Question], AsyncGenerator[Part]]
"""Gives the parts of an answer, or raises."""


async def report(address: Address, group: str, stated: str, answering: Answering) -> Reported:
    """Tell the server that a replica of this group is there and what it runs, and answer what it asks from now on.

    Raises:
        OSError: if no server listens there.
    """
    loop, connected = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    connected.setblocking(False)
    try:
        await loop.sock_connect(connected, address.name)
        _, connection = await loop.create_unix_connection(
            lambda: _Asked(answering, address.key, _Report(group, stated)), sock=connected
        )
    except BaseException:
        connected.close()
        raise
    return Reported(connection)


class Reported:
    """The replica's end. Whoever is connected may ask any number of questions at once; the server sets the bound."""

    def __init__(self, connection: _Asked) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        """Whether the server is gone."""
        return self._connection.closed

    def close(self) -> None:
        """Hang up: the server asks others."""
        self._connection.close()


class Replicas:
    """The server's end: which replicas there are of each group, and the way to them."""

    def __init__(
        self,
        groups: Sequence[str],
        *,
        max_ongoing: int,
        max_queued: int,
        retry_after_s: float = 1.0,
        changed: Callable[[str, int], None] = lambda *_: None,
        states: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Nobody is there yet.

        Args:
            groups: whose replicas there may be.
            max_ongoing: questions that a replica may have at once.
            max_queued: questions that may wait for that, for each replica; -1 is any number.
            retry_after_s: what those are told that find no place.
            changed: told of a group and how many live replicas it has, whenever that changes.
            states: told what a replica states that it runs, when it reports.
        """
        self._live: dict[str, list[Direct]] = {group: [] for group in groups}
        self._gone: dict[str, asyncio.Event] = {group: asyncio.Event() for group in groups}
        """Set while none lives; of a group that has had none yet, too."""
        for event in self._gone.values():
            event.set()
        self._bounds = max_ongoing, max_queued, retry_after_s
        self._changed = changed
        self._states = states
        self._server: asyncio.AbstractServer | None = None
        self._connected: set[_Asking] = set()
        self._address: Address | None = None

    async def listen(self) -> None:
        """Let replicas report at `address`, on a socket of a random name."""
        address = Address(f"\0hawkvision-{secrets.token_hex(16)}", secrets.token_bytes(_KEY_BYTES))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.name)  # here, for uvloop takes no such name
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Asking(self, address.key), sock=listener)
        self._address = address

    @property
    def address(self) -> Address:
        """Where replicas report."""
        assert self._address is not None, "listen first"
        return self._address

    @property
    def absent(self) -> tuple[str, ...]:
        """Groups without a live replica."""
        return tuple(group for group, live in self._live.items() if not live)

    def live(self, group: str) -> int:
        """How many replicas of a group there are that answer."""
        return len(self._live[group])

    async def gone(self, group: str) -> None:
        """Until no replica of the group lives."""
        await self._gone[group].wait()

    def heard(self, group: str) -> None:
        """One has answered somebody through Serve; nothing new."""

    async def ask(self, group: str, question: Question) -> AsyncGenerator[Part]:
        """The parts of an answer, of the replica that has the least to do; closing ends it.

        If that is gone before it has said anything, of the next one.

        Raises:
            HawkVisionError: what the replica said.
            Overloaded: if all places are taken, those to wait in as well.
            NotReady: if there is none, or it is gone within its answer.
        """
        while live := self._live[group]:
            heard, direct = False, min(live, key=lambda each: each.load)
            try:
                async with aclosing(direct.ask(question)) as parts:
                    async for part in parts:
                        heard = True
                        yield part
            except HungUp:
                self.present(direct, live=False)
                if heard:
                    raise
            else:
                return
        raise no_replica(group)

    def close(self) -> None:
        """Hang up on all, which give up what they are still asked; nobody may report any more."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connected):
            connection.close()

    def connected(self, connection: _Asking) -> None:
        """Somebody has connected, perhaps no replica."""
        if len(self._connected) >= _MOST_CONNECTIONS:
            connection.close()
        self._connected.add(connection)

    def reported(self, connection: _Asking, group: str, stated: str) -> Direct | None:
        """A replica is there, and states what it runs; None if it is of no group that is known."""
        if group not in self._live:
            return None
        self._states(stated)
        max_ongoing, max_queued, retry_after_s = self._bounds
        direct = Direct(connection, group, max_ongoing=max_ongoing, max_queued=max_queued, retry_after_s=retry_after_s)
        self.present(direct, live=True)
        return direct

    def present(self, direct: Direct, *, live: bool) -> None:
        """A replica lives, or does not."""
        group, them = direct.group, self._live[direct.group]
        if live == (direct in them):
            return
        if live:
            them.append(direct)
        else:
            them.remove(direct)
        if them:
            self._gone[group].clear()
        else:
            self._gone[group].set()
        self._changed(group, len(them))

    def disconnected(self, connection: _Asking) -> None:
        """Somebody is gone."""
        self._connected.discard(connection)


def no_replica(group: str) -> NotReady:
    """What a caller is told for whom there is nobody to ask."""
    return NotReady(f"{group!r} has no live replica just now")


class Direct:
    """The server's way to one replica. Of no use once that is gone."""

    def __init__(
        self, connection: _Asking, group: str, max_ongoing: int, max_queued: int, retry_after_s: float
    ) -> None:
        self._connection = connection
        self.group = group
        self._places = asyncio.Semaphore(max_ongoing)
        self._queued = 0
        self._inside = 0
        self._max_queued = max_queued
        self._retry_after_s = retry_after_s

    @property
    def load(self) -> int:
        """Questions that it has been asked and has not answered, waiting ones included."""
        return self._inside + self._queued

    async def ask(self, question: Question) -> AsyncGenerator[Part]:
        """The parts of the answer; closing ends it.

        Raises:
            HawkVisionError: what the replica said.
            HungUp: if it is gone.
            Overloaded: if all places are taken, those to wait in as well.
            NotReady: if the replica is gone before it has answered.
        """
        async with self._place(), aclosing(self._connection.ask(question)) as parts:
            async for part in parts:
                yield part

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        if self._places.locked() and 0 <= self._max_queued <= self._queued:
            raise Overloaded(f"the queue of {self.group!r} is full", self._retry_after_s)
        self._queued += 1
        try:
            await self._places.acquire()
        finally:
            self._queued -= 1
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._places.release()


class _Frames(asyncio.Protocol):
    """One end of a connection: bytes to numbered objects, and back."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._arrived = bytearray()

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's have another ancestor
        if _user(self._transport.get_extra_info("socket")) != os.getuid():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        self._arrived += data
        while len(self._arrived) >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._arrived)
            end = _HEAD.size + length
            if len(self._arrived) < end:
                return
            with memoryview(self._arrived) as arrived:
                body = pickle.loads(arrived[_HEAD.size : end])  # noqa: S301 - of a process of our own user's
            del self._arrived[:end]
            self.frame(number, body)

    def frame(self, number: int, body: Any) -> None:
        raise NotImplementedError

    def send(self, number: int, body: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            data = pickle.dumps(body, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_HEAD.pack(len(data), number) + data)


class _Asking(_Frames):
    """The server's end of a connection."""

    def __init__(self, replicas: Replicas, key: bytes) -> None:
        super().__init__()
        self._replicas = replicas
        self._awaited = key
        """Empty once it was given."""
        self._given = b""
        self._direct: Direct | None = None
        self._numbers = itertools.count(_PRESENCE_NUMBER + 1)
        self._asked: dict[int, asyncio.Queue[Part | HawkVisionError | _Failed | None]] = {}
        """What has come of each question; at most a part for every view, and the end."""
        self._probe: asyncio.TimerHandle | None = None
        self._heard_at = self._asked_at = self._due_at = 0.0
        self._silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._replicas.connected(self)
        if not self.closed:
            self._probe = asyncio.get_running_loop().call_later(SILENT_S, self._still_unknown)

    def _still_unknown(self) -> None:
        """Close a connection over which nobody has reported; the first probe takes the place of this otherwise."""
        self.close()

    def data_received(self, data: bytes) -> None:
        if self._awaited:
            self._given += data
            if len(self._given) < len(self._awaited):
                return
            given, data = self._given[: len(self._awaited)], self._given[len(self._awaited) :]
            if not hmac.compare_digest(given, self._awaited):
                self.close()
                return
            self._awaited = self._given = b""
        self._heard()
        super().data_received(data)

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._silent = False
        if self._direct is not None:
            self._replicas.present(self._direct, live=True)

    def _ask_presence(self) -> None:
        self._asked_at = asyncio.get_running_loop().time()
        self.send(_PRESENCE_NUMBER, _Presence())
        self._check_in(SILENT_S)

    def _check_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + seconds
        self._probe = loop.call_at(self._due_at, self._check_presence)

    def _check_presence(self) -> None:
        """Judge, unless this process was itself away: then what has been said may not have been read yet."""
        loop = asyncio.get_running_loop()
        if self._heard_at >= self._asked_at:
            self._probe = loop.call_later(PROBE_S, self._ask_presence)
            return
        if not self._silent and self._direct is not None and loop.time() < self._due_at + PROBE_S:
            self._silent = True
            self._replicas.present(self._direct, live=False)
            self._give_up()
        self._check_in(PROBE_S)

    async def ask(self, question: Question) -> AsyncGenerator[Part]:
        if self.closed or self._silent:
            raise self._gone()
        number = next(self._numbers) & 0xFFFFFFFF
        answers = self._asked[number] = asyncio.Queue()
        self.send(number, question)
        try:
            while (answer := await answers.get()) is not None:
                match answer:
                    case HawkVisionError():
                        raise answer
                    case _Failed(words):
                        raise RuntimeError(f"{'' if self._direct is None else self._direct.group}: {words}")
                    case part:
                        yield part
        finally:
            if self._asked.pop(number, None) is not None:
                self.send(number, None)

    def frame(self, number: int, body: Any) -> None:
        if isinstance(body, _Report) and self._direct is None:
            self._direct = self._replicas.reported(self, body.group, body.stated)
            if self._probe is not None:
                self._probe.cancel()
            self._probe = asyncio.get_running_loop().call_later(PROBE_S, self._ask_presence)
            return
        answers = self._asked.get(number)
        if answers is None or isinstance(body, _Presence):  # nobody waits for it any more
            return
        answers.put_nowait(body)
        if not isinstance(body, tuple):
            del self._asked[number]

    def connection_lost(self, *_: object) -> None:
        if self._probe is not None:
            self._probe.cancel()
        if self._direct is not None:
            self._replicas.present(self._direct, live=False)
        self._replicas.disconnected(self)
        self._give_up()

    def _give_up(self) -> None:
        asked, self._asked = self._asked, {}
        for number, answers in asked.items():
            answers.put_nowait(self._gone())
            self.send(number, None)

    def _gone(self) -> HungUp:
        group = "" if self._direct is None else self._direct.group
        return HungUp(f"a replica of {group!r} is gone, or says nothing")


class _Asked(_Frames):
    """The replica's end of a connection."""

    def __init__(self, answering: Answering, key: bytes, about: _Report) -> None:
        super().__init__()
        self._answering = answering
        self._key = key
        self._about = about
        self._answers: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._transport is not None and not self.closed:
            self._transport.write(self._key)
            self.send(_PRESENCE_NUMBER, self._about)

    def frame(self, number: int, body: Any) -> None:
        if isinstance(body, Question):
            self._answers[number] = asyncio.create_task(self._answer(number, body))
            self._answers[number].add_done_callback(lambda _: self._answers.pop(number))
        elif isinstance(body, _Presence):
            self.send(number, body)
        elif number in self._answers:
            self._answers[number].cancel()

    async def _answer(self, number: int, question: Question) -> None:
        end: HawkVisionError | _Failed | None = None
        resume(question.request)
        try:
            async with aclosing(self._answering(question)) as parts:
                async for part in parts:
                    self.send(number, part)
        except (RequestError, DeadlineMissed, Overloaded) as error:
            end = error
        except HawkVisionError as error:
            log.exception("an image could not be looked at")
            end = error
        except Exception as error:
            log.exception("an image could not be looked at")
            end = _Failed(f"{type(error).__name__}: {error}")
        self.send(number, end)

    def connection_lost(self, *_: object) -> None:
        for task in self._answers.values():
            task.cancel()


def _user(connected: socket.socket) -> int:
    """Who runs the process at the other end, as the kernel knows."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])

"""The fast path through HTTP: a request that arrives at once is answered without ASGI.

    data_received ─► head ──┬─► body ─► complete within HOLD_S? ──┬─ yes ─► FastPathApp.answer ─► one write
                            │ held                                └─ no ──► uvicorn's cycle, from the same head on
                            └─ anything else ─────────────────────────────► uvicorn's cycle

An image of some ten kilobytes arrives in one or two reads, and its answer fits into one write. For such a request most
of the event loop's work would be ASGI's: a scope, a cycle, an event and a task that wait for the body, and a check of
the headers on the way out.

The protocol therefore holds the head of an eligible request back, and `FastPathApp` starts on it. If the body completes
in time, `FastPathApp` answers; otherwise uvicorn handles the request from its head on, as if nothing had happened.
Slow, large, pipelined and malformed requests always go to uvicorn. The bounds of `hawkvision.servers.protocol` apply to
both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from edge.servers.shared.http_messages import Headers, Reply
from hawkvision.core.errors import HawkVisionError
from hawkvision.servers.bodies import Bodies, Body, CallerGone, nonempty
from hawkvision.servers.connections import ConnectionRegistry, Limits
from hawkvision.servers.protocol import BoundedProtocol

LOCAL: Final = "127.0.0.1"
"""The address of callers without one, which connect over a Unix socket."""
HOLD_S: Final = 0.005
"""How long the protocol waits for the rest of a body: longer than a client needs that writes head and body
separately. A client on a slow network gains nothing from the fast path."""
MAX_HELD_BYTES: Final = 64 * 1024
"""Largest part of an incomplete body that is held; uvicorn buffers as much before the application reads."""


class FastPathApp(Protocol):
    """An application that answers complete requests to some paths."""

    @property
    def fast_paths(self) -> tuple[bytes, ...]:
        """The paths; only POST requests are answered."""
        ...

    async def answer(
        self,
        path: bytes,
        query: bytes,
        headers: Headers,
        body: asyncio.Future[bytes | None],
        begun: Callable[[], bytes],
        hang_up: Callable[[], Awaitable[object]],
        address: str,
    ) -> Reply | None:
        """Answer one request; None if the caller is gone. Never raises, and returns only after `body` is done.

        Args:
            path: one of `fast_paths`.
            query: the URL's query, undecoded.
            headers: the request's headers.
            body: the complete body; None if uvicorn takes the request over, and this call must have no effect.
            begun: gives the first piece of the body, or nothing if none has arrived.
            hang_up: returns when the caller is gone.
            address: the caller's address.
        """
        ...


class WholeBody(Body):
    """A body that arrives completely or not at all (see `FastPathApp.answer`)."""

    def __init__(
        self,
        bodies: Bodies,
        coming: asyncio.Future[bytes | None],
        begun: Callable[[], bytes],
        hang_up: Callable[[], Awaitable[Any]],
    ) -> None:
        super().__init__(bodies, hang_up)
        self._most = bodies.max_body_bytes
        self._coming = coming
        self._begun = begun

    def begun(self) -> bytes:
        """See `Body.begun`."""
        return self._begun()

    async def read(self, declared: str | None) -> bytes:  # noqa: ARG002 - the protocol bounds it
        """See `Body.read`."""
        data = await self._coming
        if data is None:
            raise CallerGone
        self.take(len(data), self._most)
        return nonempty(data)

    async def arrived(self) -> bool:
        """See `Body.arrived`."""
        return await self._coming is not None


class _Request:
    """A held request; offers the attributes of uvicorn's cycle that uvicorn's protocol reads."""

    __slots__ = ("body", "disconnected", "keep_alive", "message_event", "pieces", "response_complete")

    more_body: Final = False
    response_started: Final = False
    """Of an incomplete response; this one is written at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, keep_alive: bool) -> None:
        self.pieces: list[bytes] = []
        """The body so far."""
        self.body: asyncio.Future[bytes | None] = loop.create_future()
        """See `FastPathApp.answer`."""
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.message_event = asyncio.Event()
        """Set when the caller is gone; nothing else sets it once the body is complete."""

    @property
    def whole(self) -> bool:
        """Whether the body is complete and the request is answered here."""
        return self.body.done() and not self.body.cancelled() and self.body.result() is not None

    def begun(self) -> bytes:
        """The first piece of the body."""
        return self.pieces[0] if self.pieces else b""

    def joined(self) -> bytes:
        """The body so far."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


class FastPathProtocol(BoundedProtocol):
    """One connection. Use `fast_path_protocol` to tie the class to a server."""

    fast_app: ClassVar[FastPathApp]
    answers_pages: ClassVar[bool] = True
    """Whether requests with an `Origin` are answered here; otherwise by uvicorn's application, which adds the CORS
    headers."""

    _held: _Request | None = None
    """The held request."""
    _until: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Process a read; if it leaves the held request incomplete, wait `HOLD_S` for the rest."""
        super().data_received(data)
        if self._held is None:
            return
        if sum(map(len, self._held.pieces)) > MAX_HELD_BYTES:
            self._hand_over()
        elif self._until is None:
            self._until = self.loop.call_later(HOLD_S, self._hand_over)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._held is not None:
            self._let_go(self._held, None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Stop; started requests are still answered."""
        if self._held is not None:
            self._hand_over()
        super().shutdown()

    def begin(self) -> None:
        """Hold the request if it is eligible for the fast path."""
        parser, paths = self.parser, self.fast_app.fast_paths
        if (
            self.url.startswith(paths)
            and (url := httptools.parse_url(self.url)).path in paths
            and not self._answering()
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and (self.answers_pages or not any(name == b"origin" for name, _ in self.headers))
        ):
            self._held = held = _Request(self.loop, keep_alive=parser.should_keep_alive())
            task = self.loop.create_task(self._answer(held, url, self.headers))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        else:
            super().begin()

    def keep(self, body: bytes) -> None:
        """Keep a piece of the body."""
        if self._held is None:
            super().keep(body)
        else:
            self._held.pieces.append(body)

    def complete(self) -> None:
        """Answer the held request: its body is complete."""
        held = self._held
        if held is None:
            super().complete()
            return
        self.cycle = held  # type: ignore[assignment]
        self._let_go(held, held.joined())

    def _refuse(self, error: HawkVisionError) -> None:
        if self._held is not None:
            self._hand_over()
        super()._refuse(error)

    def _hand_over(self) -> None:
        """Pass the held request to uvicorn."""
        held = self._held
        assert held is not None, "the timer is cancelled with the hold"
        self._let_go(held, None)
        super().begin()
        if held.pieces:
            super().keep(held.joined())

    def _let_go(self, held: _Request, body: bytes | None) -> None:
        """Stop holding the request; its answer gets `body`, or None if uvicorn takes over."""
        self._held = None
        if self._until is not None:
            self._until.cancel()
            self._until = None
        if not held.body.done():  # a stopping server cancels it
            held.body.set_result(body)

    async def _answer(self, cycle: _Request, url: Any, headers: Headers) -> None:
        try:
            address = LOCAL if self.client is None else self.client[0]
            gone = cycle.message_event.wait
            reply = await self.fast_app.answer(
                url.path, url.query or b"", headers, cycle.body, cycle.begun, gone, address
            )
            if not cycle.whole:
                return
            if self.flow.write_paused and not cycle.disconnected:
                await self.flow.drain()
            if reply is None or cycle.disconnected:
                return
            self._write(reply, close=not cycle.keep_alive)
            cycle.response_complete = True
        finally:
            # The caller is gone, or there is a defect: the connection must not hang.
            if cycle.whole and not cycle.response_complete:
                self.transport.abort()
        self.on_response_complete()

    def _write(self, reply: Reply, *, close: bool) -> None:
        parts = [STATUS_LINE[reply.status]]
        for name, value in reply.headers:
            parts += (name, b": ", value, b"\r\n")
        parts += (b"connection: close\r\n\r\n" if close else b"\r\n", reply.body)
        self.transport.write(b"".join(parts))
        if close:
            self.transport.close()


def fast_path_protocol(limits: Limits, app: FastPathApp, *, answers_pages: bool = True) -> type[asyncio.Protocol]:
    """The protocol class of one server, for `uvicorn.Config(http=…)`; `answers_pages`: see `FastPathProtocol`."""

    class Bound(FastPathProtocol):
        registry = ConnectionRegistry(limits)

    Bound.fast_app = app
    Bound.answers_pages = answers_pages
    return Bound

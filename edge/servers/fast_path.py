"""The short way through HTTP: an image that arrived at once is answered without ASGI between.

                              ┌─► Express.answer, begun ────────────────┐
    data_received ─► head ────┴─► body ─► whole in 5 ms? ── yes ────────┴─► one write
                       │ held                        └─ no ──► uvicorn's cycle, from the same head on
                       └─ anything else ────────────────────► uvicorn's cycle

A camera's image of some ten kilobytes comes in one read, or in two if its sender writes head and body apart, and its
answer fits into one write. What an ASGI server does for requests that come and go in parts (a scope, a cycle, an event
and a task that wait for the body, headers checked on the way out) is much of what such a request costs the event loop.
So the head of a request that may be answered here is held back for a moment, while `Express` begins with what it says:
an image of 16 KB takes 0.15 ms on a wire of 1 Gbit/s. If its body is whole by then, `Express` gets it; if not, uvicorn
goes on with it as if nothing had happened. Whatever is slow, large, pipelined or malformed takes uvicorn's
way. The bounds of `hawkvision.servers.protocol` hold for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from hawkvision.core.errors import HawkVisionError
from hawkvision.servers.bodies import Bodies, Body, CallerGone, nonempty
from hawkvision.servers.connections import ConnectionRegistry, Limits
from hawkvision.servers.protocol import BoundedProtocol

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""

LOCAL: Final = "127.0.0.1"
"""Where callers are that have no address: they come over a Unix socket."""
HOLD_S: Final = 0.005
"""How long the rest of a body is waited for. Who writes head and body apart does so within microseconds, and who sends
over a slow network gains nothing here."""
MAX_HELD_BYTES: Final = 64 * 1024
"""Of a body that is not whole; as much as uvicorn takes in before somebody asks for it."""


class Reply(NamedTuple):
    """A response, all of it; `headers` have no line breaks in them."""

    status: int
    headers: Headers
    body: bytes


class Express(Protocol):
    """What answers requests."""

    @property
    def express_path(self) -> bytes:
        """Requests to POST there are answered."""
        ...

    async def answer(
        self,
        query: bytes,
        headers: Headers,
        body: asyncio.Future[bytes | None],
        begun: Callable[[], bytes],
        hang_up: Callable[[], Awaitable[object]],
        address: str,
    ) -> Reply | None:
        """The response to a request, None if nobody waits for it; never raises, and returns once the body is there.

        Args:
            query: of the URL, as it came.
            headers: of the request.
            body: of the request, once it is whole; None if it is not answered here, as if nothing had been begun.
            begun: the first piece of it, if that has come.
            hang_up: returns when the caller is gone.
            address: of the caller.
        """
        ...


class WholeBody(Body):
    """A body that comes whole, or not at all (`Express.answer`)."""

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

    async def read(self, declared: str | None) -> bytes:  # noqa: ARG002 - it is bounded by who gives it
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
    """A request whose answer is begun; has the parts of uvicorn's cycle that its protocol looks at once it is whole."""

    __slots__ = ("body", "disconnected", "keep_alive", "message_event", "pieces", "response_complete")

    more_body: Final = False
    response_started: Final = False
    """Of a response that is not complete: they are written at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, keep_alive: bool) -> None:
        self.pieces: list[bytes] = []
        """Of the body, so far."""
        self.body: asyncio.Future[bytes | None] = loop.create_future()
        """See `Express.answer`."""
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.message_event = asyncio.Event()
        """Set when the caller is gone; nothing else sets it once the body is whole."""

    @property
    def whole(self) -> bool:
        """Whether it is answered here."""
        return self.body.done() and not self.body.cancelled() and self.body.result() is not None

    def begun(self) -> bytes:
        """The first piece of the body."""
        return self.pieces[0] if self.pieces else b""

    def joined(self) -> bytes:
        """The body so far."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


class ExpressProtocol(BoundedProtocol):
    """One connection. Use `bounded_express` to tie the class to a server."""

    express: ClassVar[Express]
    answers_pages: ClassVar[bool] = True
    """Whether requests of pages in browsers (`Origin`) are answered here; else by uvicorn's application, which adds
    what browsers ask for."""

    _held: _Request | None = None
    """Whose head is held back; None while there is none."""
    _until: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """See `BoundedProtocol`; what is not whole by the end may be so soon."""
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
        """The server stops: what was begun is still answered."""
        if self._held is not None:
            self._hand_over()
        super().shutdown()

    def begin(self) -> None:
        """Hold the head back if its request may be answered here."""
        parser, path = self.parser, self.express.express_path
        if (
            self.url.startswith(path)
            and (url := httptools.parse_url(self.url)).path == path
            and not self._answering()
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and (self.answers_pages or not any(name == b"origin" for name, _ in self.headers))
        ):
            self._held = held = _Request(self.loop, keep_alive=parser.should_keep_alive())
            task = self.loop.create_task(self._answer(held, url.query or b"", self.headers))
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
        """Answer, if the request was held back; it is whole."""
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
        """Let uvicorn go on with the request that is held back."""
        held = self._held
        assert held is not None, "the timer ends with what is held"
        self._let_go(held, None)
        super().begin()
        if held.pieces:
            super().keep(held.joined())

    def _let_go(self, held: _Request, body: bytes | None) -> None:
        """Hold it no longer, and tell whoever answers it."""
        self._held = None
        if self._until is not None:
            self._until.cancel()
            self._until = None
        if not held.body.done():  # by the server, which stops
            held.body.set_result(body)

    async def _answer(self, cycle: _Request, query: bytes, headers: Headers) -> None:
        try:
            address = LOCAL if self.client is None else self.client[0]
            gone = cycle.message_event.wait
            reply = await self.express.answer(query, headers, cycle.body, cycle.begun, gone, address)
            if not cycle.whole:
                return
            if self.flow.write_paused and not cycle.disconnected:
                await self.flow.drain()
            if reply is None or cycle.disconnected:
                return
            self._write(reply, close=not cycle.keep_alive)
            cycle.response_complete = True
        finally:
            # Nobody waits for an answer, or there is a defect: it must not hang.
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


def bounded_express(limits: Limits, express: Express, *, answers_pages: bool = True) -> type[asyncio.Protocol]:
    """The protocol class of one server, for `uvicorn.Config(http=…)`; `answers_pages` as `ExpressProtocol` has it."""

    class Bound(ExpressProtocol):
        registry = ConnectionRegistry(limits)

    Bound.express = express
    Bound.answers_pages = answers_pages
    return Bound

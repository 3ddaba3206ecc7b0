"""The short way through HTTP: a picture that arrived in one piece is answered without ASGI between.

    data_received ─► head ─► body ─► whole?  ── yes ─► Express.answer ─► one write
                       │ held                 └─ no ──► uvicorn's cycle, from the same head on
                       └─ anything else ─────────────► uvicorn's cycle

A camera's picture of some ten kilobytes comes in one read, and its answer fits into one write. What an ASGI server does
for requests that come and go in parts (a scope, a cycle, an event and a task that wait for the body, headers checked on
the way out) is half of what such a request costs the event loop. So the head of a request that may be answered here is
held back until all that was read has been parsed. If its body is whole by then, `Express` gets it; if not, uvicorn goes
on with it as if nothing had happened. Whatever is slow, large, pipelined, upgraded or malformed takes uvicorn's way.
The bounds of `edge.protocol` hold for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar, Final, NamedTuple, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from edge.protocol import BoundedProtocol, Connections, Limits
from hawkvision.errors import HawkVisionError

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""


class Reply(NamedTuple):
    """A response, all of it; `headers` have no line breaks in them."""

    status: int
    headers: Headers
    body: bytes


class Express(Protocol):
    """What answers whole requests."""

    @property
    def express_path(self) -> bytes:
        """Requests to POST there are answered."""
        ...

    async def answer(
        self, query: bytes, headers: Headers, body: bytes, hang_up: Callable[[], Awaitable[object]]
    ) -> Reply | None:
        """The response to a whole request, None if nobody waits for it; never raises.

        Args:
            query: of the URL, as it came.
            headers: of the request.
            body: of the request.
            hang_up: returns when the caller is gone.
        """
        ...


class _Whole:
    """A whole request that is being answered; has the parts of uvicorn's cycle that its protocol looks at."""

    __slots__ = ("disconnected", "keep_alive", "message_event", "response_complete")

    more_body: Final = False
    response_started: Final = False
    """Of a response that is not complete: they are written at once."""

    def __init__(self, *, keep_alive: bool) -> None:
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.message_event = asyncio.Event()
        """Set when the caller is gone; nothing else sets it once the body is whole."""


class ExpressProtocol(BoundedProtocol):
    """One connection. Use `bounded_express` to tie the class to a server."""

    express: ClassVar[Express]

    _held: list[bytes] | None = None
    """The body so far of a request whose head is held back; None while there is none."""
    _keep_alive = True

    def data_received(self, data: bytes) -> None:
        """See `BoundedProtocol`; what is not whole by the end goes uvicorn's way."""
        super().data_received(data)
        if self._held is not None:
            self._hand_over()

    def begin(self) -> None:
        """Hold the head back if its request may be answered here."""
        parser, (path, _, query) = self.parser, self.url.partition(b"?")
        if (
            path == self.express.express_path
            and b"#" not in query
            and not self._answering()
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and not parser.should_upgrade()
        ):
            self._held = []
            self._keep_alive = parser.should_keep_alive()
        else:
            super().begin()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        if self._held is None:
            super().on_body(body)
        else:
            self._held.append(body)

    def on_message_complete(self) -> None:
        """Answer, if the request was held back; it is whole."""
        held, self._held = self._held, None
        if held is None:
            super().on_message_complete()
            return
        self._in_body = False
        cycle = _Whole(keep_alive=self._keep_alive)
        self.cycle = cycle  # type: ignore[assignment]
        task = self.loop.create_task(
            self._answer(
                cycle, self.url.partition(b"?")[2], self.headers, held[0] if len(held) == 1 else b"".join(held)
            )
        )
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _refuse(self, error: HawkVisionError) -> None:
        if self._held is not None:
            self._hand_over()
        super()._refuse(error)

    def _hand_over(self) -> None:
        """Let uvicorn go on with the request that is held back."""
        held, self._held = self._held, None
        super().begin()
        for piece in held or ():
            super().on_body(piece)

    async def _answer(self, cycle: _Whole, query: bytes, headers: Headers, body: bytes) -> None:
        reply = await self.express.answer(query, headers, body, cycle.message_event.wait)
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if reply is None or cycle.disconnected:
            return
        parts = [STATUS_LINE[reply.status]]
        for name, value in reply.headers:
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n", reply.body)
        self.transport.write(b"".join(parts))
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()


def bounded_express(limits: Limits, express: Express) -> type[asyncio.Protocol]:
    """The protocol class of one server, for `uvicorn.Config(http=…)`."""

    class Bound(ExpressProtocol):
        book = Connections(limits)

    Bound.express = express
    return Bound

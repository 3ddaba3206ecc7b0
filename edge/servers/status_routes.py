"""The routes of the live view: the status of the node, once or again and again, and images of the last answers.

All who watch get the same lines: a line is made once in `TICK_S`, by the first of them, and never while
nobody watches. Who reads slowly misses lines: the next one is not made before the last one has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edge.servers.shared.frontend import Frontend
from edge.servers.shared.page_messages import fresh_image, fresh_json, query_of
from edge.serving.status import ANSWERS_PATH, Status, describe_status
from hawkvision.core.errors import NotFound, Overloaded
from hawkvision.servers.keys import OBSERVE

STATUS_PATH: Final = "/v1/status"
LINES: Final = "application/x-ndjson"
"""The media type of one JSON value a line."""
TICK_S: Final = 0.5
MOST_WATCHERS: Final = 32
"""Each takes a connection, and some ten kilobytes twice a second."""


class StatusQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /v1/status`."""

    watch: Annotated[
        bool,
        Meta(description="Go on, with a line of JSON at most every half second, until the node stops."),
    ] = False


OPERATIONS: Final = (
    ("get", STATUS_PATH, "What the node does now", "status", StatusQuery, None, Status),
    ("get", f"{ANSWERS_PATH}/{{id}}/image", "The image of one of the last answers", "answerImage", None, None, None),
)
"""As `review_routes.OPERATIONS`."""


def routes(frontend: Frontend) -> list[Route]:
    """The routes, for this front end."""
    watchers = _Watchers(frontend)

    async def status(request: Request) -> Response:
        watch = query_of(request, StatusQuery).watch and request.method == "GET"
        return watchers.admit(request.headers.get("authorization")) if watch else fresh_json(watchers.now())

    async def image(request: Request) -> Response:
        number, now = request.path_params["id"], frontend.clock.now()
        for node in frontend.ready_tasks().nodes:
            if (body := node.recent.images(now).get(number)) is not None:
                return fresh_image(body)
        raise NotFound(
            f"no image of the answer {number[:40]!r} is kept: only those of the last answers are, while somebody "
            f"watches ({STATUS_PATH}?watch=true) and where review_max_bytes and review_max_days allow it"
        )

    return [
        Route(STATUS_PATH, status, methods=["GET"]),
        Route(f"{ANSWERS_PATH}/{{id}}/image", image, methods=["GET"]),
    ]


class _Watchers:
    """Those who watch a node. For one event loop."""

    def __init__(self, frontend: Frontend) -> None:
        self._front = frontend
        self._number = 0
        self._made: tuple[int, bool] | None = None
        """The tick of the last line, and whether the node was stopping."""
        self._line = b""

    def now(self) -> Status:
        """The status."""
        front = self._front
        now, bodies = front.clock.now(), (front.bodies_held_bytes, front.bodies_limit_bytes)
        draining = front.stopping.is_set()
        return describe_status(front.tasks, now, time.time(), now - front.started, bodies, draining=draining)

    def admit(self, authorization: str | None) -> Response:
        """The response to one who watches.

        Raises:
            Overloaded: if there are too many.
        """
        if self._number >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} watch this node already", 1.0)
        return _Lines(self, self._lines(authorization))

    def count(self, change: int) -> None:
        """Count one who comes or leaves."""
        self._number += change
        if not self._number:
            self._remember_images(watched=False)

    async def _lines(self, authorization: str | None) -> AsyncIterator[bytes]:
        keys, stopping = self._front.keys, self._front.stopping
        while (caller := keys.caller_of(authorization)) is not None and caller.scopes & OBSERVE:
            yield self._shared_line()
            if stopping.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await stopping.wait()

    def _shared_line(self) -> bytes:
        tick = int(self._front.clock.now() / TICK_S), self._front.stopping.is_set()
        if tick != self._made:
            self._remember_images(watched=True)
            self._made, self._line = tick, msgspec.json.encode(self.now()) + b"\n"
        return self._line

    def _remember_images(self, *, watched: bool) -> None:
        for node in self._front.tasks.nodes if self._front.tasks is not None else ():
            node.recent.watch(watched=watched)


class _Lines(StreamingResponse):
    """The lines for one who watches; it counts from its first byte to its last."""

    def __init__(self, watchers: _Watchers, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type=LINES, headers={"cache-control": "no-store"})
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        self._watchers.count(1)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._watchers.count(-1)

"""The datacenter's HTTP server: a request in, a reply out, whoever owns the socket.

`HttpServer.respond` is given Starlette's `Request` and returns its `Response`. On one machine uvicorn calls it through
`HttpServer.asgi`; in a cluster Ray Serve's ingress deployment calls it. The wire is described in
`hawkvision.core.escalation_api`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hawkvision.core.errors import (
    HawkVisionError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    Unauthorized,
    UnsupportedMedia,
)
from hawkvision.core.escalation_api import (
    INFER_PATH,
    PREVIOUS_STAGES_PATH,
    PROGRESSIVE_TYPE,
    STAGES_PATH,
    TRACE_HEADER,
    TRANSPORT_PATH,
    VARIANT_HEADER,
    EscalationReply,
    EscalationRequest,
    PreviousStages,
    Transports,
    parse_escalation_headers,
)
from hawkvision.core.logs import REQUEST_ID_HEADER, bind_request
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.trace import parse_traceparent, start_trace
from hawkvision.datacenter.catalog import Catalog
from hawkvision.datacenter.service import Tier
from hawkvision.servers.bodies import Bodies, Body, CallerGone
from hawkvision.servers.keys import Keys, needed_scopes

log = logging.getLogger(__name__)

METRICS_PATH: Final = "/metrics"

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a caller may send: bytes of one body, and requests inside the tier at once."""

    max_body_bytes: int
    max_in_flight: int


class HttpServer:
    """Parses, checks, hands images to the tier and answers."""

    def __init__(self, catalog: Catalog, limits: ServerLimits, keys: Keys) -> None:
        self.tier = Tier(catalog, limits.max_in_flight)
        self.keys = keys
        self.tier.metrics.watch_keys(keys.counts)
        self.transports: Callable[[], Transports] = Transports
        """What else the tier listens to, for whoever asks."""
        self._limits = limits
        self._bodies = Bodies(limits.max_body_bytes, self.tier.metrics.received_bytes)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server as an ASGI application for HTTP; uvicorn is told to send nothing else."""
        response = await self.respond(Request(scope, receive))
        await response(scope, receive, send)

    async def respond(self, request: Request) -> Response:
        """The reply to one request; errors become their documented bodies and statuses."""
        trace = parse_traceparent(request.headers.get(TRACE_HEADER))
        span = trace.child() if trace else start_trace()
        request_id = bind_request(request.headers.get(REQUEST_ID_HEADER), span)
        started = time.perf_counter()
        try:
            response = await self._route(request)
        except HawkVisionError as error:
            response = _error(error)
        except (CallerGone, ClientDisconnect):
            response = Response(status_code=499)  # nobody reads it; nginx's number, for the metrics
        except Exception:  # process boundary: one request's defect must not reach the next
            log.exception("unexpected failure")
            response = _error(InternalError("internal error; the datacenter's log has the details"))
        response.headers[TRACE_HEADER] = span.header()
        response.headers[REQUEST_ID_HEADER] = request_id
        self._count(request, response.status_code, time.perf_counter() - started)
        return response

    def _count(self, request: Request, status: int, seconds: float) -> None:
        path = request.url.path
        if path == INFER_PATH:
            self.tier.count(path, request.headers.get(VARIANT_HEADER), status, seconds)
        else:
            self.tier.metrics.requests.labels(path if path in _PATHS else "other", "none", str(status)).inc()

    async def _route(self, request: Request) -> Response:
        path, method = request.url.path, request.method
        wanted = _PATHS.get(path)
        if wanted is None:
            raise NotFound(f"no path {path[:80]!r}; the datacenter tier answers {', '.join(_PATHS)}")
        if method != wanted:
            raise MethodNotAllowed(f"{path} takes {wanted}, not {method}")
        if path == "/healthz":
            return Response(b"ok", media_type="text/plain")
        if path == "/readyz":
            self.tier.check_ready()
            return Response(b"ready", media_type="text/plain")
        if path == TRANSPORT_PATH:
            return _json(self.transports())
        self.keys.authorize(request.headers.get("authorization"), needed_scopes(method, path))
        if path in (STAGES_PATH, PREVIOUS_STAGES_PATH):
            self.tier.check_ready()
            listing = self.tier.listing()
            return _json(listing if path == STAGES_PATH else PreviousStages.of(listing))
        if path == METRICS_PATH:
            metrics = self.tier.metrics
            return Response(metrics.exposition(), headers={"content-type": metrics.content_type})
        return await self._infer(request)

    async def _infer(self, request: Request) -> Response:
        asked = parse_escalation_headers(request.headers)
        if asked.progressive:
            return await self._progressively(request, asked)
        visit = self.tier.visit(asked)
        with self._body(request) as body:
            image = await visit.in_time(_read(body, request))
            with visit.inside():
                return _json(await _unless_gone(request, visit.look(image)))

    async def _progressively(self, request: Request, asked: EscalationRequest) -> Response:
        """A line for every answer, from the first on; a plain reply if that is the last one already.

        Raises:
            HawkVisionError: for what goes wrong before the first.
        """
        visit = self.tier.visit(asked)
        with ExitStack() as stack:
            body = stack.enter_context(self._body(request))
            image = await visit.in_time(_read(body, request))
            stack.enter_context(visit.inside())
            inside = stack.pop_all()
        # The visit lasts as long as this task, which the deadline ends, not as long as anybody reads what it says.
        looking = asyncio.create_task(visit.look(image, lambda reply: lines.put_nowait(_line(reply))))
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        """At most one line for every view of every member; None at the end."""

        def ended(task: asyncio.Task[EscalationReply]) -> None:
            inside.close()
            lines.put_nowait(None)
            if not task.cancelled():
                task.exception()  # where nobody waits any more, nobody wants to know

        looking.add_done_callback(ended)
        try:
            first = await _unless_gone(request, lines.get())
        except BaseException:
            looking.cancel()
            raise
        if first is None:
            return _json(await looking)

        async def said() -> AsyncIterator[bytes]:
            try:
                yield first
                while (line := await lines.get()) is not None:
                    yield line
                yield _line(await looking)
            finally:
                looking.cancel()

        return StreamingResponse(said(), media_type=PROGRESSIVE_TYPE)

    @contextmanager
    def _body(self, request: Request) -> Iterator[Body]:
        """The body of a request for an image, which takes memory as long as the block lasts.

        Raises:
            UnsupportedMedia: if it says that it is something else.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("", "application/octet-stream") and not kind.startswith("image/"):
            raise UnsupportedMedia(f"Content-Type {kind[:60]!r}: expected image/* or application/octet-stream")
        body = Body(self._bodies, request.receive)
        try:
            yield body
        finally:
            body.release()


_PATHS = {
    INFER_PATH: "POST",
    STAGES_PATH: "GET",
    PREVIOUS_STAGES_PATH: "GET",
    TRANSPORT_PATH: "GET",
    METRICS_PATH: "GET",
    "/healthz": "GET",
    "/readyz": "GET",
}


def make_http_server(config: DatacenterConfig, catalog: Catalog) -> HttpServer:
    """The server that the settings describe; it says 503 until its tier is given its variants.

    Raises:
        ConfigError: if the keys cannot be read.
    """
    keys = Keys(config.api_key, config.keys_file, where="dc.api_key")
    return HttpServer(catalog, ServerLimits(config.max_body_bytes, max_in_flight(config, catalog)), keys)


def max_in_flight(config: DatacenterConfig, catalog: Catalog) -> int:
    """What all groups together can hold, running and queued; anything more would be shed further in."""
    per_group = config.max_replicas * config.max_ongoing_requests + max(config.max_queued_requests, 0)
    return per_group * len(catalog.groups)


async def _read(body: Body, request: Request) -> bytes:
    return await body.read(request.headers.get("content-length"))


async def _unless_gone(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """The work's result, or its cancellation as soon as the caller hangs up."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _line(reply: EscalationReply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(error: HawkVisionError) -> Response:
    response = Response(msgspec.json.encode(error.body()), error.status, media_type="application/json")
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    elif isinstance(error, NotReady):
        response.headers["Retry-After"] = "1"
    elif isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response

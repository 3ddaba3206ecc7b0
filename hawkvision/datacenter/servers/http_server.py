"""The datacenter's HTTP server: a request in, a reply out.

`HttpServer.respond` takes Starlette's `Request` and returns its `Response`. On one machine uvicorn calls it through
`HttpServer.asgi`; in a cluster Ray Serve's ingress deployment calls it. `hawkvision.core.escalation_api` describes the
wire. All paths are below `dc.route_prefix`, which is ASGI's `root_path`: Serve's proxies set it and leave it in the
path; at a listener of our own `HttpServer.asgi` sets it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hawkvision.core.errors import (
    HawkVisionError,
    MethodNotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    Unauthorized,
    UnsupportedMedia,
)
from hawkvision.core.escalation_api import (
    INFER_PATH,
    PROGRESSIVE_TYPE,
    STAGES_PATH,
    TASK_HEADER,
    TRACE_HEADER,
    TRANSPORT_PATH,
    VARIANT_HEADER,
    EscalationReply,
    Transports,
    check_wire_version,
    parse_escalation_headers,
)
from hawkvision.core.logs import REQUEST_ID_HEADER
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.trace_context import parse_traceparent
from hawkvision.datacenter.servers.service import CALLER_GONE, AdmittedRequest, ObservedRequest, TierService
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, loaded
from hawkvision.servers.bodies import Bodies, Body, CallerGone
from hawkvision.servers.connections import waited_s
from hawkvision.servers.keys import Keys, needed_scopes
from hawkvision.tasks.serving import encode_reply

METRICS_PATH: Final = "/metrics"

ResultT = TypeVar("ResultT")


class HttpServer:
    """Routes requests, reads images, and writes replies."""

    def __init__(
        self,
        catalogs: Mapping[str, Catalog | TaskFailure],
        keys: Keys,
        *,
        max_body_bytes: int,
        max_in_flight: int,
        route_prefix: str = "/",
    ) -> None:
        """Every task is still loading; `max_in_flight` requests may be inside the tier at once."""
        self.tier = TierService(catalogs, max_in_flight)
        self.keys = keys
        self.tier.metrics.watch_keys(keys.counts)
        self.transports: Callable[[], Transports] = Transports
        """The reply to `GET /v1/transport`."""
        self._root_path = route_prefix.rstrip("/")
        self._bodies = Bodies(max_body_bytes)

    def set_max_body_bytes(self, most: int) -> None:
        """Read bodies of at most this many bytes from now on."""
        self._bodies.max_body_bytes = most

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server as an ASGI application for HTTP at a listener of its own; uvicorn is told to send nothing else."""
        if self._root_path:
            scope = {**scope, "root_path": self._root_path}
        response = await self.respond(Request(scope, receive))
        await response(scope, receive, send)

    async def respond(self, request: Request) -> Response:
        """The reply to one request; errors become their documented bodies and statuses."""
        path, headers = _path_of(request.scope), request.headers
        trace = parse_traceparent(headers.get(TRACE_HEADER))
        named = path if path in _METHODS else "other"
        try:
            with ObservedRequest(self.tier, named, trace, headers.get(REQUEST_ID_HEADER)) as observed:
                observed.task, observed.stage = headers.get(TASK_HEADER), headers.get(VARIANT_HEADER)
                try:
                    response = await self._route(request, path)
                except (CallerGone, ClientDisconnect):
                    response = Response(status_code=CALLER_GONE)  # nobody reads it
                observed.status = response.status_code
        except HawkVisionError as error:
            response = _error(error)
        response.headers[TRACE_HEADER] = observed.span.header()
        response.headers[REQUEST_ID_HEADER] = observed.request_id
        return response

    async def _route(self, request: Request, path: str) -> Response:
        method = request.method
        expected = _METHODS.get(path)
        if expected is None:
            below = request.scope.get("root_path") or "/"
            found = request.scope["path"][:80]
            raise NotFound(f"no path {found!r}; the datacenter tier answers {', '.join(_METHODS)} below {below}")
        if method != expected:
            raise MethodNotAllowed(f"{path} takes {expected}, not {method}")
        if path == "/healthz":
            return Response(b"ok", media_type="text/plain")
        if path == "/readyz":
            known = self.keys.caller_of(request.headers.get("authorization")) is not None
            return _json({"status": "ready", "tasks": self.tier.readiness(_task_of(request), with_reason=known)})
        if path == TRANSPORT_PATH:
            return _json(self.transports())
        caller = self.keys.authorize(request.headers.get("authorization"), needed_scopes(method, path))
        if path == METRICS_PATH:
            metrics = self.tier.metrics
            return Response(metrics.exposition(), headers={"content-type": metrics.content_type})
        check_wire_version(request.headers)
        if path == STAGES_PATH:
            return _json(self.tier.listing(_task_of(request)))
        return await self._infer(request, caller.name)

    async def _infer(self, request: Request, caller: str) -> Response:
        asked = parse_escalation_headers(request.headers)
        admitted = self.tier.admit(asked, caller, waited_s(request.scope))
        with ExitStack() as stack:
            body = stack.enter_context(self._body(request))
            image = await admitted.within_deadline(_read(body, request))
            stack.enter_context(admitted.in_flight())
            if asked.progressive:
                return await _progressive_response(request, admitted, image, stack.pop_all())
            return _reply(admitted, await _unless_gone(request, admitted.run(image)))

    @contextmanager
    def _body(self, request: Request) -> Iterator[Body]:
        """The body of a request for an image; it takes memory while the block lasts.

        Raises:
            UnsupportedMedia: if its Content-Type is not that of an image.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("", "application/octet-stream") and not kind.startswith("image/"):
            raise UnsupportedMedia(f"Content-Type {kind[:60]!r}: expected image/* or application/octet-stream")
        body = Body(self._bodies, request.receive)
        try:
            yield body
        finally:
            body.release()


_METHODS = {
    INFER_PATH: "POST",
    STAGES_PATH: "GET",
    TRANSPORT_PATH: "GET",
    METRICS_PATH: "GET",
    "/healthz": "GET",
    "/readyz": "GET",
}


def make_http_server(config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> HttpServer:
    """The server for these settings; it replies 503 for each task until its tier has that task's variants.

    Raises:
        ConfigError: if the keys cannot be read.
    """
    keys = Keys(config.api_key, config.keys_file, where="dc.api_key")
    return HttpServer(
        catalogs,
        keys,
        max_body_bytes=config.max_body_bytes,
        max_in_flight=max_in_flight(config, catalogs),
        route_prefix=config.route_prefix,
    )


def max_in_flight(config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> int:
    """The requests that all groups of all tasks together can run and queue."""
    per_group = config.max_replicas * config.max_ongoing_requests + max(config.max_queued_requests, 0)
    return per_group * sum(len(catalog.groups) for catalog in loaded(catalogs).values())


def _task_of(request: Request) -> str | None:
    """The task that a GET is about; None if it names none."""
    return request.query_params.get("task") or None


def _path_of(scope: Scope) -> str:
    """The path below the server's `root_path`; empty for a path that is not below it."""
    path, root_path = str(scope["path"]), str(scope.get("root_path", ""))
    if not root_path:
        return path
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else ""


async def _progressive_response(request: Request, admitted: AdmittedRequest, image: bytes, held: ExitStack) -> Response:
    """A line per reply, from the first one on; a plain reply if the first is the last.

    `held` is closed when the work ends, which the deadline bounds, not when the caller has read the lines.

    Raises:
        HawkVisionError: for a failure before the first reply.
    """
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    """At most one line per view of each member; None at the end."""
    running = asyncio.create_task(admitted.run(image, lambda reply: lines.put_nowait(_line(admitted, reply))))

    def ended(task: asyncio.Task[EscalationReply]) -> None:
        held.close()
        lines.put_nowait(None)
        if not task.cancelled():
            task.exception()  # taken, so that asyncio does not log it if the caller is gone

    running.add_done_callback(ended)
    try:
        first = await _unless_gone(request, lines.get())
    except BaseException:
        running.cancel()
        raise
    if first is None:
        return _reply(admitted, await running)

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            while (line := await lines.get()) is not None:
                yield line
            yield _line(admitted, await running)
        finally:
            running.cancel()

    return StreamingResponse(body(), media_type=PROGRESSIVE_TYPE)


async def _read(body: Body, request: Request) -> bytes:
    return await body.read(request.headers.get("content-length"))


async def _unless_gone(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """The work's result; cancels the work as soon as the caller disconnects."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for each in (working, gone):
            each.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _line(admitted: AdmittedRequest, reply: EscalationReply) -> bytes:
    return encode_reply(admitted.kind, reply) + b"\n"


def _reply(admitted: AdmittedRequest, reply: EscalationReply) -> Response:
    return Response(encode_reply(admitted.kind, reply), media_type="application/json")


def _json(value: object) -> Response:
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

"""The HTTP server: DESIGN §3 as an ASGI application.

`POST /v1/classify` and inference by the Open Inference Protocol are plain ASGI; everything else is Starlette
(`edge.servers.routes`). Whatever goes wrong leaves as `{"error", "code"}` with its status. Bounds: bodies, as
`hawkvision.servers.bodies` has them; waiting images, at most `max_queue`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
from prometheus_client import Counter, Histogram
from starlette.types import Message, Receive, Scope, Send

from edge.monitoring.streams import caller_of
from edge.servers import oip_routes
from edge.servers.fast_path import LOCAL, Headers, Reply, WholeBody
from edge.servers.forms import read_form
from edge.servers.oip_codec import encode_answers
from edge.servers.oip_extensions import extension_routes
from edge.servers.request_fields import parse_request, read_headers, read_query, read_request
from edge.servers.routes import CALLER, pages
from edge.serving.admission import WorkFull
from edge.serving.node import EdgeNode
from hawkvision.core.clock import Clock
from hawkvision.core.errors import (
    BackendUnavailable,
    HawkVisionError,
    InternalError,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    Unauthorized,
    UnsupportedMedia,
)
from hawkvision.core.escalation_api import Transports
from hawkvision.core.logs import bind_request
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace import TraceContext, parse_traceparent, start_trace
from hawkvision.core.types import Answer, ClassifyRequest, Tier, Timing
from hawkvision.imaging.image_header import ImageHeader, probe_begun
from hawkvision.servers.bodies import Bodies, Body, CallerGone, MemoryFull
from hawkvision.servers.keys import INFER, OPEN_PATHS, Keys, RateExceeded, Scopes, needed_scopes

log = logging.getLogger("hawkvision.edge")

CLASSIFY_PATH: Final = "/v1/classify"

_encode = msgspec.json.encode
_NOT_IMAGES: Final = ("application/json", "text/", "application/xml", "video/", "audio/")


class EdgeApp:
    """One node's HTTP server. Serves health at once, and everything else after `mark_ready`."""

    express_path: Final = CLASSIFY_PATH.encode()
    """See `Express`."""

    def __init__(self, metrics: EdgeMetrics, clock: Clock, keys: Keys, max_body_bytes: int) -> None:
        self._metrics = metrics
        self._clock = clock
        self.keys = keys
        """Of all servers together."""
        metrics.watch_keys(keys.counts)
        self.bodies = Bodies(max_body_bytes, metrics.received_bytes)
        """Those of all servers together."""
        self._in_flight = 0
        metrics.in_flight.set_function(lambda: self._in_flight)
        metrics.bodies_bytes.set_function(lambda: self.bodies.held)
        self._node: EdgeNode | None = None
        self.transports: Callable[[], Transports] = Transports
        """What else the node listens to now."""
        self._last_answer: float | None = None
        """When (the clock's time)."""
        more = extension_routes(self.ready_node, metrics, self.bodies, self._last_answer_ms)
        self._rest = pages(self.ready_node, lambda: self.transports(), metrics, more)

    def mark_ready(self, node: EdgeNode) -> None:
        """Start answering images: the models are loaded and warm."""
        self._node = node

    def start_draining(self) -> None:
        """Stop taking images; those under way are still answered."""
        self._node = None

    def ready_node(self) -> EdgeNode:
        """The node.

        Raises:
            NotReady: before the server was opened, and after it was closed.
        """
        if self._node is None:
            raise NotReady("the models are still loading, or the node is shutting down")
        return self._node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        path: str = scope["path"]
        if path == CLASSIFY_PATH:
            await _reply(send, await self._answered(self._classify, scope, Body(self.bodies, receive)))
            return
        if oip_routes.is_infer(path):
            await _reply(send, await self._answered(self._infer, scope, Body(self.bodies, receive)))
            return
        _, named = _name(scope["headers"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *named]
            await send(message)

        try:
            if path not in OPEN_PATHS:
                scope[CALLER] = self._authorize(scope, needed_scopes(scope["method"], path))
        except HawkVisionError as error:
            await _reply(send_named, _reply_of(error.status, _encode(error.body()), _error_headers(error)))
            return
        await self._rest(scope, receive, send_named)

    # ------------------------------------------------------------------------------------------ the hot path

    async def answer(
        self,
        query: bytes,
        headers: Headers,
        body: asyncio.Future[bytes | None],
        begun: Callable[[], bytes],
        hang_up: Callable[[], Awaitable[object]],
        address: str,
    ) -> Reply | None:
        """See `Express`."""
        client = (address, 0)
        scope = {"method": "POST", "path": CLASSIFY_PATH, "query_string": query, "headers": headers, "client": client}
        return await self._answered(self._classify, scope, WholeBody(self.bodies, body, begun, hang_up))

    async def _answered(self, work: _Work, scope: Scope, body: Body) -> Reply | None:
        """The reply to one request for answers, whatever goes wrong; None if the caller is gone."""
        started = self._clock.now()
        trace, headers = _name(scope["headers"])
        self._in_flight += 1
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowed(f"{scope['path'][:100]} takes POST, not {scope['method']}")
            caller = self._authorize(scope, INFER)
            answered = await work(self.ready_node(), scope, body, started, trace, caller)
        except asyncio.CancelledError:  # by the server, which stops; this is the end of its task anyway
            return self._refusal(NotReady("the node had to stop before it could answer"), started, headers)
        except Exception as error:  # noqa: BLE001 - the server: everything leaves as a documented error body
            return self._refusal(error, started, headers) if await body.arrived() else None
        finally:
            body.release()
            self._in_flight -= 1
        for answer in answered.answers:
            self.count(answer)
        headers += answered.headers
        return _reply_of(200, answered.body, headers, answered.media_type)

    async def _classify(
        self, node: EdgeNode, scope: Scope, body: Body, started: float, trace: TraceContext, caller: str
    ) -> _Answered:
        image, request, header = await self._read(scope, body)
        answer = await node.classify(image, request, started, trace, body.hang_up, header=header, caller=caller)
        timing = (b"server-timing", _server_timing(answer.timing_ms))
        return _Answered((answer,), _encode(answer.to_json()), [timing])

    async def _infer(
        self, node: EdgeNode, scope: Scope, body: Body, started: float, trace: TraceContext, caller: str
    ) -> _Answered:
        task = oip_routes.asked_task(scope["path"], node)
        headers = scope["headers"]
        data = await body.read(_header(headers, b"content-length"))
        encoding = _header(headers, b"content-encoding")
        if encoding is not None:  # in a thread: ten megabytes take some ten milliseconds
            data = await asyncio.to_thread(oip_routes.inflate, data, encoding, self.bodies.max_body_bytes)
            body.hold(len(data))
        elsewhere = read_query(scope["query_string"]) + read_headers(headers)
        json_bytes = _header(headers, b"inference-header-content-length")
        asked = await oip_routes.read_infer(task, data, json_bytes, elsewhere)
        del data  # the images have been copied out of it
        answers = await oip_routes.classify_all(node, asked, started, trace, body.hang_up, caller)
        written, json_written = encode_answers(asked, answers)
        if json_written is None:
            return _Answered(answers, written, [])
        length = (b"inference-header-content-length", b"%d" % json_written)
        return _Answered(answers, written, [length], b"application/octet-stream")

    async def _read(self, scope: Scope, body: Body) -> tuple[bytes, ClassifyRequest, ImageHeader | None]:
        """The image and what is asked of it, from wherever the caller wrote it.

        With the image's header, if that could be read while the rest was on its way.
        """
        raw_headers = scope["headers"]
        ours = tuple(header for header in raw_headers if header[0].startswith(b"x-hawkvision-"))
        content_type = (_header(raw_headers, b"content-type") or "").lower()
        declared = _header(raw_headers, b"content-length")
        if content_type.startswith("multipart/form-data"):
            data = await body.read(declared)
            image, fields = await read_form(_header(raw_headers, b"content-type") or "", data)
            return image, parse_request(read_query(scope["query_string"]) + read_headers(ours) + fields), None
        if content_type.startswith(_NOT_IMAGES):
            raise UnsupportedMedia(
                f"Content-Type {content_type[:60]!r}: send the image itself (JPEG, PNG or WebP) as the body, "
                "or a multipart form with the image in 'image'"
            )
        request = read_request(scope["query_string"], ours)
        header = probe_begun(body.begun())
        return await body.read(declared), request, header

    def _authorize(self, scope: Scope, needed: Scopes) -> str:
        """Whose evidence the request is, see `caller_of`."""
        client = scope.get("client")
        caller = self.keys.authorize(_header(scope["headers"], b"authorization"), needed)
        return caller_of(caller.name, client[0] if client else LOCAL)

    def _refusal(self, error: Exception, started: float, headers: Headers) -> Reply | None:
        if isinstance(error, CallerGone):
            return None
        refused = self.count_refusal(error)
        total_ms = (self._clock.now() - started) * 1e3
        headers += [*_error_headers(refused), (b"server-timing", b"total;dur=%.3f" % total_ms)]
        return _reply_of(refused.status, _encode(refused.body()), headers)

    def count_refusal(self, error: Exception) -> HawkVisionError:
        """Count and log an error that ends a request; gives what the caller is told."""
        if not isinstance(error, HawkVisionError):
            log.error("internal error", exc_info=error)
            error = InternalError("the node failed on this request; its log says why")
        elif error.status >= 500 and error.status not in (503, 504):
            log.error("internal error: %s", error)
        if isinstance(error, Overloaded):
            self._metrics.shed.labels(_shed_by(error)).inc()
        self._metrics.requests.labels(self._task(), "none", "none", str(error.status)).inc()
        return error

    def _task(self) -> str:
        return self._node.task if self._node else "none"

    def count(self, answer: Answer) -> None:
        """Count an answer and how long it took."""
        self._last_answer = self._clock.now()
        counted, observed = self._counters(answer.task, answer.model, answer.tier)
        counted.inc()
        observed.observe(answer.timing_ms.total * 1e-3)

    def _last_answer_ms(self) -> int:
        if self._last_answer is None:
            return 0
        return round((time.time() - (self._clock.now() - self._last_answer)) * 1e3)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - an app lives as long as its process
    def _counters(self, task: str, model: str, tier: Tier) -> tuple[Counter, Histogram]:
        """The two series of an answer; a cascade has a handful of stages."""
        metrics = self._metrics
        return metrics.requests.labels(task, model, tier.value, "200"), metrics.duration.labels(task, tier.value)


def _shed_by(error: Overloaded) -> str:
    """The bound that was reached."""
    if isinstance(error, MemoryFull):
        return "memory"
    if isinstance(error, RateExceeded):
        return "rate"
    return "work" if isinstance(error, WorkFull) else "queue_full"


class _Answered(NamedTuple):
    """What a request came to, and how it is written."""

    answers: Sequence[Answer]
    body: bytes
    headers: Headers
    media_type: bytes = b"application/json"


_Work: TypeAlias = "Callable[[EdgeNode, Scope, Body, float, TraceContext, str], Awaitable[_Answered]]"


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def _name(headers: Iterable[tuple[bytes, bytes]]) -> tuple[TraceContext, Headers]:
    """The request's span, and the headers that tell the caller of it; the log is told, too."""
    traceparent = given = None
    for key, value in headers:
        if key == b"traceparent":
            traceparent = value.decode("latin-1")
        elif key == b"x-request-id":
            given = value.decode("latin-1")
    caller = parse_traceparent(traceparent)
    trace = caller.child() if caller else start_trace()
    request_id = bind_request(given, trace)
    return trace, [(b"traceparent", trace.header().encode()), (b"x-request-id", request_id.encode())]


def _error_headers(error: HawkVisionError) -> Headers:
    if isinstance(error, Overloaded):
        return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))]
    if isinstance(error, NotReady | BackendUnavailable):
        return [(b"retry-after", b"1")]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", b"POST")]
    return []


def _server_timing(timing: Timing) -> bytes:
    return b"decode;dur=%.3f, queue;dur=%.3f, infer;dur=%.3f, uplink;dur=%.3f, dc;dur=%.3f, total;dur=%.3f" % (
        timing.decode,
        timing.queue,
        timing.infer,
        timing.uplink,
        timing.dc,
        timing.total,
    )


def _reply_of(status: int, body: bytes, headers: Headers, media_type: bytes = b"application/json") -> Reply:
    return Reply(status, [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *headers], body)


async def _reply(send: Send, reply: Reply | None) -> None:
    if reply is None:
        return
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body})

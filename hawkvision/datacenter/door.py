"""The datacenter's HTTP door: a request in, a reply out, whoever owns the socket.

`Door.respond` is given Starlette's `Request` and returns its `Response`. On one machine uvicorn calls it through
`Door.asgi`; in a cluster Ray Serve's ingress deployment calls it. The wire is described in `hawkvision.hop`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hawkvision.cascade.scores import top_classes
from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.catalog import Catalog, ServedRung
from hawkvision.datacenter.looks import Look, Second, Variants, look_up_to_twice
from hawkvision.datacenter.metrics import DatacenterMetrics
from hawkvision.errors import (
    DeadlineMissed,
    HawkVisionError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthorized,
    UnsupportedMedia,
)
from hawkvision.hop import (
    INFER_PATH,
    RUNGS_PATH,
    TRACE_HEADER,
    VARIANT_HEADER,
    HopClass,
    HopReply,
    HopRequest,
    HopTiming,
    PassedOver,
    parse_hop_headers,
)
from hawkvision.trace import parse_traceparent, start_trace
from hawkvision.types import Score

log = logging.getLogger(__name__)

NEVER: Final = math.inf
METRICS_PATH: Final = "/metrics"

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """What a caller may send: bytes of one body, requests inside the tier at once, and the key that is asked for."""

    max_body_bytes: int
    max_in_flight: int
    api_key: str | None


class Door:
    """Parses, checks, sends to the rung's members and answers. Not ready until `variants` is set."""

    def __init__(self, catalog: Catalog, limits: DoorLimits) -> None:
        self.catalog = catalog
        self.variants: Variants | None = None
        self._limits = limits
        self._in_flight = 0
        self._metrics = DatacenterMetrics()
        self._metrics.in_flight.set_function(lambda: self._in_flight)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The door as an ASGI application for HTTP; uvicorn is told to send nothing else."""
        response = await self.respond(Request(scope, receive))
        await response(scope, receive, send)

    async def respond(self, request: Request) -> Response:
        """The reply to one request; errors become their documented bodies and statuses."""
        trace = parse_traceparent(request.headers.get(TRACE_HEADER))
        span = trace.child() if trace else start_trace()
        started = time.perf_counter()
        try:
            response = await self._route(request)
        except HawkVisionError as error:
            response = _error(error)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; nginx's number, for the metrics
        except Exception:  # process boundary: one request's defect must not reach the next
            log.exception("trace %s: unexpected failure", span.trace_id)
            response = _error(InternalError("internal error; the datacenter's log has the details"))
        response.headers[TRACE_HEADER] = span.header()
        self._count(request, response.status_code, time.perf_counter() - started)
        return response

    def _count(self, request: Request, status: int, seconds: float) -> None:
        path, label = request.url.path, "none"
        if path == INFER_PATH:
            rung = self.catalog.rung(request.headers.get(VARIANT_HEADER) or self.catalog.best.name)
            if rung is not None:
                label = rung.name
            if status == 200:
                self._metrics.duration.labels(label).observe(seconds)
        self._metrics.requests.labels(path if path in _PATHS else "other", label, str(status)).inc()

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
            self._ready_variants()
            return Response(b"ready", media_type="text/plain")
        self._authorize(request.headers.get("authorization"))
        if path == RUNGS_PATH:
            return _json(self.catalog.listing())
        if path == METRICS_PATH:
            return Response(self._metrics.exposition(), headers={"content-type": self._metrics.content_type})
        return _json(await self._infer(request))

    def _authorize(self, header: str | None) -> None:
        key = self._limits.api_key
        if key is not None and not hmac.compare_digest((header or "").encode(), f"Bearer {key}".encode()):
            raise Unauthorized("missing or wrong key; expected the header Authorization: Bearer KEY")

    def _ready_variants(self) -> Variants:
        if self.variants is None:
            raise NotReady("the datacenter tier is still loading its models, or draining")
        return self.variants

    async def _infer(self, request: Request) -> HopReply:
        started = time.perf_counter()
        asked = parse_hop_headers(request.headers)
        first, second = self._rungs(asked)
        variants = self._ready_variants()
        expires_at = NEVER if asked.deadline_ms is None else time.time() + asked.deadline_ms / 1e3
        if asked.deadline_ms is not None and asked.deadline_ms <= 0.0:
            raise DeadlineMissed(f"the deadline had passed by {-asked.deadline_ms:g} ms when the request came")
        if self._in_flight >= self._limits.max_in_flight:
            raise Overloaded(f"{self._in_flight} requests are already inside the tier", retry_after_s=1.0)
        self._in_flight += 1
        try:
            async with asyncio.timeout(None if asked.deadline_ms is None else asked.deadline_ms / 1e3):
                picture = await self._body(request)
                looks = await _unless_gone(request, look_up_to_twice(variants, first, second, picture, expires_at))
        except TimeoutError:
            raise DeadlineMissed(f"no answer within the {asked.deadline_ms:g} ms that were left") from None
        finally:
            self._in_flight -= 1
        self._observe(looks)
        return _reply(looks, asked, (time.perf_counter() - started) * 1e3)

    def _observe(self, looks: tuple[Look, ...]) -> None:
        metrics = self._metrics
        metrics.answers.labels(looks[-1].rung.name).inc()
        if len(looks) > 1:
            metrics.second_looks.labels(looks[0].rung.name).inc()
        for variant, answer in ((v, a) for look in looks for v, a in look.asked.items()):
            metrics.decode_duration.labels(variant).observe(answer.decode_ms / 1e3)
            metrics.queue_duration.labels(variant).observe(answer.queue_ms / 1e3)
            metrics.inference_duration.labels(variant).observe(answer.infer_ms / 1e3)
            metrics.batch_size.labels(variant).observe(answer.batch_size)

    def _rungs(self, asked: HopRequest) -> tuple[ServedRung, Second | None]:
        """Who looks first, and who looks next if that one is not sure enough."""
        if asked.task not in (None, self.catalog.task):
            raise NotFound(f"no task {asked.task!r} here; this tier serves {self.catalog.task!r}")
        first = self.catalog.best if asked.variant is None else self._rung(asked.variant)
        middle = asked.middle
        if middle is None:
            return first, None
        return first, Second(self._rung(middle.otherwise), middle.score, middle.accept_score)

    def _rung(self, name: str) -> ServedRung:
        rung = self.catalog.rung(name)
        if rung is None:
            known = ", ".join(r.name for r in self.catalog.rungs)
            raise NotFound(f"task {self.catalog.task!r} has no rung {name[:80]!r} here; it has {known}")
        return rung

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in ("", "application/octet-stream") and not kind.startswith("image/"):
            raise UnsupportedMedia(f"Content-Type {kind[:60]!r}: expected image/* or application/octet-stream")
        limit = self._limits.max_body_bytes
        stated = request.headers.get("content-length", "")
        if stated.isdigit() and int(stated) > limit:
            raise TooLarge(f"the body has {stated} bytes; at most {limit} are read")
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body has more than the {limit} bytes that are read")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


_PATHS = {INFER_PATH: "POST", RUNGS_PATH: "GET", METRICS_PATH: "GET", "/healthz": "GET", "/readyz": "GET"}


def make_door(config: DatacenterConfig, catalog: Catalog) -> Door:
    """The door that the settings describe; it says 503 until it is given its variants."""
    return Door(catalog, DoorLimits(config.max_body_bytes, max_in_flight(config, catalog), config.api_key))


def max_in_flight(config: DatacenterConfig, catalog: Catalog) -> int:
    """What all variants together can hold, running and queued; anything more would be shed further in."""
    per_variant = config.max_replicas * config.max_ongoing_requests + max(config.max_queued_requests, 0)
    return per_variant * len(catalog.variants)


def _reply(looks: tuple[Look, ...], asked: HopRequest, total_ms: float) -> HopReply:
    """The last look's answer, with the time that all looks took."""
    counts = looks[-1]
    row = counts.probabilities[0]
    work = [tuple(look.asked.values()) for look in looks]
    timing = HopTiming(
        decode=round(sum(max((a.decode_ms for a in answers), default=0.0) for answers in work), 3),
        queue=round(sum(max((a.queue_ms for a in answers), default=0.0) for answers in work), 3),
        infer=round(sum(max((a.infer_ms for a in answers), default=0.0) for answers in work), 3),
        total=round(total_ms, 3),
    )
    return HopReply(
        top_k=tuple(HopClass(int(i), float(row[i])) for i in top_classes(row, asked.top_k)),
        model=counts.rung.name,
        timing_ms=timing,
        batch_size=max(a.batch_size for answers in work for a in answers),
        score=None if asked.middle is None else counts.score(asked.middle.score),
        passed_over=None if asked.middle is None or len(looks) == 1 else _passed_over(looks[0], asked.middle.score),
    )


def _passed_over(look: Look, kind: Score) -> PassedOver:
    (index,) = top_classes(look.probabilities[0], 1)
    return PassedOver(int(index), look.score(kind))


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

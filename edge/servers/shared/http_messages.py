"""HTTP requests and responses of the answering paths: headers, the request's name, and error responses."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
from starlette.types import Scope, Send

from edge.serving.tasks import ServedTasks
from hawkvision.core.errors import (
    BackendUnavailable,
    BadField,
    HawkVisionError,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthorized,
    UnsupportedMedia,
)
from hawkvision.core.logs import bind_request
from hawkvision.core.trace_context import TraceContext, parse_traceparent, start_trace
from hawkvision.core.types import Answer, Timing
from hawkvision.servers.bodies import Body

encode = msgspec.json.encode

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""


class Reply(NamedTuple):
    """A complete response; `headers` contain no line breaks."""

    status: int
    headers: Headers
    body: bytes


class Answered(NamedTuple):
    """The answers to one request, and the response that carries them."""

    answers: Sequence[Answer]
    body: bytes
    headers: Headers
    media_type: bytes = b"application/json"


Handler: TypeAlias = "Callable[[ServedTasks, Scope, Body, float, TraceContext, str], Awaitable[Answered]]"
"""Answers one request: tasks, ASGI scope, body, time of its first byte, its span, and its caller (`caller_of`)."""


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """The value of the first header of that name, which is in lower case."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def name_request(headers: Iterable[tuple[bytes, bytes]]) -> tuple[TraceContext, Headers]:
    """The request's span, and the response headers that name it; later log lines carry both names."""
    traceparent = given = None
    for key, value in headers:
        if key == b"traceparent":
            traceparent = value.decode("latin-1")
        elif key == b"x-request-id":
            given = value.decode("latin-1")
    caller = parse_traceparent(traceparent)
    trace = caller.child() if caller else start_trace()
    request_id = bind_request(given, trace)
    return trace.named(request_id), [(b"traceparent", trace.header().encode()), (b"x-request-id", request_id.encode())]


def error_headers(error: HawkVisionError) -> Headers:
    """The headers that HTTP requires or recommends with this error."""
    if isinstance(error, Overloaded):
        return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))]
    if isinstance(error, NotReady | BackendUnavailable):
        return [(b"retry-after", b"1")]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", b"POST")]
    return []


def server_timing(timing: Timing) -> bytes:
    """The value of `Server-Timing`."""
    return b"decode;dur=%.3f, queue;dur=%.3f, infer;dur=%.3f, uplink;dur=%.3f, dc;dur=%.3f, total;dur=%.3f" % (
        timing.decode,
        timing.queue,
        timing.infer,
        timing.uplink,
        timing.dc,
        timing.total,
    )


def reply_of(status: int, body: bytes, headers: Headers, media_type: bytes = b"application/json") -> Reply:
    """A complete response."""
    return Reply(status, [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *headers], body)


def error_reply(error: HawkVisionError, headers: Headers) -> Reply:
    """The response to a refused request."""
    return reply_of(error.status, encode(error.body()), [*headers, *error_headers(error)])


async def send_reply(send: Send, reply: Reply | None) -> None:
    """Send a response over ASGI; None sends nothing, because the caller is gone."""
    if reply is None:
        return
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body})


# -------------------------------------------------------------------------------------------------------- bodies

_WINDOW_BITS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's numbers for the two formats (RFC 1952 and RFC 1950)."""


async def read_body(body: Body, headers: Headers, limit: int) -> bytes:
    """The whole body of a request, decoded.

    Args:
        body: of the request.
        headers: of the request.
        limit: most bytes of the decoded body.

    Raises:
        HawkVisionError: as `Body.read` and `inflate`.
    """
    data = await body.read(header(headers, b"content-length"))
    encoding = header(headers, b"content-encoding")
    if encoding is None:
        return data
    data = await asyncio.to_thread(inflate, data, encoding, limit)  # ten megabytes take some ten milliseconds
    body.hold(len(data))
    return data


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo the Content-Encoding of a body.

    Raises:
        UnsupportedMedia: for an encoding other than gzip and deflate.
        BadField: if the body is not in that encoding, or is cut off.
        TooLarge: if it inflates to more than `limit` bytes; inflation stops there.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    bits = _WINDOW_BITS.get(name)
    if bits is None:
        raise UnsupportedMedia(f"Content-Encoding {name[:60]!r} is not read; gzip and deflate are")
    inflater = zlib.decompressobj(bits)
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadField(f"Content-Encoding: the body is not {name}: {error}") from None
    if len(inflated) > limit:
        raise TooLarge(f"the body has more than {limit} bytes once it is inflated")
    if not inflater.eof or inflater.unused_data:
        raise BadField(f"Content-Encoding: the {name} body is cut off or has bytes behind its end")
    return inflated

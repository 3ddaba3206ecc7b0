"""The Open Inference Protocol's paths on the HTTP server; `edge.servers.oip_codec` knows what their bodies mean.

There is no second way to an answer: each image of a request is one `EdgeNode.classify`, with its admission, its
deadline, its controllers and its metrics.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edge.servers import oip_codec
from edge.servers.request_fields import Source
from edge.serving.admission import Turns
from edge.serving.node import EdgeNode
from hawkvision.core.errors import BadField, BadImage, NotFound, TooLarge, UnsupportedMedia
from hawkvision.core.trace import TraceContext
from hawkvision.core.types import Answer
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.imaging.preprocessing import ImageHeader, probe

_INFER: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_WINDOW_BITS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""What zlib calls the two formats (RFC 1952 and RFC 1950)."""
JSON_ON_LOOP_BYTES: Final = 64 * 1024
"""Of a request; takes about 0.1 ms with its base64."""


def is_infer(path: str) -> bool:
    """Whether a path is that of an inference."""
    return path.startswith("/v2/models/") and path.endswith("/infer")


def asked_task(path: str, node: EdgeNode) -> str:
    """The task in an inference's path.

    Raises:
        NotFound: if the path names none, or one that this node does not serve.
    """
    found = _INFER.fullmatch(path)
    if found is None:
        raise NotFound(f"no such path {path[:100]!r}; inferences are at /v2/models/{node.task}/infer")
    task, version = found.groups()
    return known(node, task, version)


def known(node: EdgeNode, task: str, version: str | None = None) -> str:
    """The task, if this node serves it in this version.

    Raises:
        NotFound: else.
    """
    if task != node.task:
        raise NotFound(f"task {task[:100]!r} is not served here; this node serves {node.task!r}")
    if version not in (None, oip_codec.MODEL_VERSION):
        raise NotFound(f"task {task!r} has only version {oip_codec.MODEL_VERSION!r}")
    return task


def inflate(body: bytes, encoding: str | None, limit: int) -> bytes:
    """The body without its Content-Encoding.

    Raises:
        UnsupportedMedia: for an encoding other than gzip and deflate.
        BadField: if it is not what it says, or is cut off.
        TooLarge: if it has more than `limit` bytes; no more than these are ever made.
    """
    name = (encoding or "identity").strip().lower()
    if name == "identity":
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


async def read_infer(
    task: str, body: bytes, json_bytes: str | None, elsewhere: Sequence[Source]
) -> oip_codec.InferRequest:
    """As `oip_codec.parse_infer`; off the event loop where there is much JSON."""
    if oip_codec.json_length(json_bytes, len(body)) <= JSON_ON_LOOP_BYTES:
        return oip_codec.parse_infer(task, body, json_bytes, elsewhere)
    return await asyncio.to_thread(oip_codec.parse_infer, task, body, json_bytes, elsewhere)


async def classify_all(
    node: EdgeNode,
    asked: oip_codec.InferRequest,
    started: float,
    trace: TraceContext,
    hang_up: Callable[[], Awaitable[object]],
    caller: str,
) -> list[Answer]:
    """The answers to all images of a request, in order; the first error of any of them ends it.

    Raises:
        HawkVisionError, CallerGone: as `EdgeNode.classify`.
    """
    if len(asked.images) == 1:
        return [await node.classify(asked.images[0], asked.request, started, trace, hang_up, caller=caller)]

    admission = node.admission
    weighed = [_weighed(node, number, image) for number, image in enumerate(asked.images)]

    async def one(number: int, image: bytes, header: ImageHeader) -> Answer:
        with _numbered(number):
            return await node.classify(
                image, asked.request, started, trace.child(), hang_up, header=header, turns=turns, caller=caller
            )

    with admission.admit([cost for _, cost in weighed]) as admitted:
        turns = Turns(node.pool.threads, admitted)
        if asked.request.deadline_ms is not None and not node.policy.route(asked.request.target).direct:
            # Heavy ones are decoded one after the other.
            left_ms = asked.request.deadline_ms - (node.clock.now() - started) * 1e3
            admission.check_time(sum(cost.heavy_s for _, cost in weighed), left_ms, asked.request.on_miss)
        waiting = [
            asyncio.ensure_future(one(number, image, header))
            for number, (image, (header, _)) in enumerate(zip(asked.images, weighed, strict=True))
        ]
        try:
            return list(await asyncio.gather(*waiting))
        finally:
            for task in waiting:
                task.cancel()
            # Retrieve what the others raised, so that nothing is logged as never retrieved.
            await asyncio.gather(*waiting, return_exceptions=True)


def _weighed(node: EdgeNode, number: int, image: bytes) -> tuple[ImageHeader, DecodingCost]:
    with _numbered(number):
        header = probe(image)
        return header, node.admission.cost(image, header)


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Say which image of a request is at fault."""
    try:
        yield
    except (BadImage, TooLarge, UnsupportedMedia) as error:
        raise type(error)(f"{oip_codec.INPUT}[{number}]: {error.message}") from None


def routes(ready_node: Callable[[], EdgeNode]) -> list[BaseRoute]:
    """What can be asked about the server and its model."""

    def said(value: object) -> Response:
        return Response(msgspec.json.encode(value), media_type="application/json")

    async def live(_: Request) -> Response:
        return said({"live": True})

    async def ready(_: Request) -> Response:
        ready_node()
        return said({"ready": True})

    async def server(_: Request) -> Response:
        return said(oip_codec.server_metadata())

    async def model(request: Request) -> Response:
        return said(oip_codec.model_metadata(_asked(request)))

    async def config(request: Request) -> Response:
        return said(oip_codec.model_config(_asked(request)))

    async def model_ready(request: Request) -> Response:
        return said({"name": _asked(request), "ready": True})

    def _asked(request: Request) -> str:
        return known(ready_node(), request.path_params["task"], request.path_params.get("version"))

    get = ["GET"]
    of_model = {"": model, "/config": config, "/ready": model_ready}
    return [
        Route("/v2/health/live", live, methods=get),
        Route("/v2/health/ready", ready, methods=get),
        Route("/v2", server, methods=get),
        *(
            Route(f"/v2/models/{{task}}{version}{tail}", endpoint, methods=get)
            for version in ("", "/versions/{version}")
            for tail, endpoint in of_model.items()
        ),
    ]

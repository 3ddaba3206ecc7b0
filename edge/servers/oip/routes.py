"""The Open Inference Protocol over HTTP; `decoding` and `encoding` know the bodies.

Each image of a request is one `EdgeNode.infer`, with its own admission, deadline, controllers and metrics.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from edge.inference.admission import Turns
from edge.servers.oip import decoding, encoding
from edge.servers.oip.images import INPUT
from edge.servers.shared.content_encoding import read_body
from edge.servers.shared.http_messages import Answered, header
from edge.servers.shared.request_fields import Source, read_headers, read_query
from edge.serving.node import EdgeNode
from edge.serving.request import ImageRequest
from edge.serving.tasks import ServedTasks
from hawkvision.core.errors import BadImage, NotFound, TooLarge, UnsupportedMedia
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import Answer
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.servers.bodies import Body
from hawkvision.tasks.kind import TaskKind

_INFER: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
JSON_ON_LOOP_BYTES: Final = 64 * 1024
"""JSON of a request that is parsed on the event loop; more is parsed in a thread."""


def is_infer(path: str) -> bool:
    """Whether this is the path of an inference."""
    return path.startswith("/v2/models/") and path.endswith("/infer")


async def infer(
    node: EdgeNode,
    scope: Scope,
    body: Body,
    started: float,
    trace: TraceContext,
    caller: str,
    *,
    max_body_bytes: int,
) -> Answered:
    """Answer an inference request; see `http_messages.Handler`.

    Args:
        node: of the task that the path names (`asked_task`).
        scope: the request.
        body: its body, in JSON or with binary tensors behind the JSON.
        started: clock time of its first byte.
        trace: its span.
        caller: see `caller_of`.
        max_body_bytes: bound of the body after inflation.

    Raises:
        HawkVisionError, CallerGone: as `EdgeNode.infer`, and for a malformed request.
    """
    headers = scope["headers"]
    data = await read_body(body, headers, max_body_bytes)
    elsewhere = read_query(scope["query_string"]) + read_headers(headers)
    json_bytes = header(headers, b"inference-header-content-length")
    asked = await read_infer(node, data, json_bytes, elsewhere)
    del data  # `asked` holds copies of the images
    answers = await classify_all(node, asked, started, trace, body.hang_up, caller)
    written, json_written = encoding.encode_answers(asked, node.kind, answers)
    if json_written is None:
        return Answered(answers, written, [])
    length = (b"inference-header-content-length", b"%d" % json_written)
    return Answered(answers, written, [length], b"application/octet-stream")


def asked_task(path: str, tasks: ServedTasks) -> str:
    """The task in the path of an inference.

    Raises:
        NotFound: if the path names no task, or one that this node does not serve.
    """
    found = _INFER.fullmatch(path)
    if found is None:
        raise NotFound(f"no such path {path[:100]!r}; inferences are at /v2/models/{tasks.names[0]}/infer")
    task, version = found.groups()
    return known(tasks, task, version).task


def known(tasks: ServedTasks, task: str, version: str | None = None) -> EdgeNode:
    """The node of a task.

    Raises:
        NotFound: if the task is not served here, or not in this version.
        NotReady: if it could not be loaded.
    """
    node = tasks.node(task)
    if version not in (None, encoding.MODEL_VERSION):
        raise NotFound(f"task {task!r} has only version {encoding.MODEL_VERSION!r}")
    return node


async def read_infer(
    node: EdgeNode, body: bytes, json_bytes: str | None, elsewhere: Sequence[Source]
) -> decoding.InferRequest:
    """As `decoding.parse_infer`, in a thread if there is much JSON."""
    task, kind = node.task, type(node.kind)
    if decoding.json_length(json_bytes, len(body)) <= JSON_ON_LOOP_BYTES:
        return decoding.parse_infer(task, kind, body, json_bytes, elsewhere)
    return await asyncio.to_thread(decoding.parse_infer, task, kind, body, json_bytes, elsewhere)


async def classify_all(
    node: EdgeNode,
    asked: decoding.InferRequest,
    started: float,
    trace: TraceContext,
    hang_up: Callable[[], Awaitable[object]],
    caller: str,
) -> list[Answer]:
    """The answers to all images of a request, in order; the first error ends the request.

    Raises:
        HawkVisionError, CallerGone: as `EdgeNode.infer`.
    """
    fields, admission = asked.request, node.admission
    if len(asked.images) == 1:
        return [await node.infer(ImageRequest(asked.images[0], fields, started, trace, caller, hang_up=hang_up))]

    requests = [ImageRequest(image, fields, started, trace.child(), caller, hang_up=hang_up) for image in asked.images]
    costs = [_cost(node, number, request) for number, request in enumerate(requests)]

    async def one(number: int, request: ImageRequest) -> Answer:
        with _numbered(number):
            return await node.infer(request, turns)

    with admission.admit(costs) as admitted:
        turns = Turns(node.pool.threads, admitted)
        if fields.deadline_ms is not None and not node.policy.route(fields.target).direct:
            # Heavy images of one request are decoded one after the other.
            left_ms = fields.deadline_ms - (node.clock.now() - started) * 1e3
            admission.check_time(sum(cost.heavy_s for cost in costs), left_ms, fields.on_miss)
        waiting = [asyncio.ensure_future(one(number, request)) for number, request in enumerate(requests)]
        try:
            return list(await asyncio.gather(*waiting))
        finally:
            for task in waiting:
                task.cancel()
            # Retrieve what the others raised, so that nothing is logged as never retrieved.
            await asyncio.gather(*waiting, return_exceptions=True)


def _cost(node: EdgeNode, number: int, request: ImageRequest) -> DecodingCost:
    with _numbered(number):
        return node.admission.cost(request.body, request.header)


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Add the number of the image to its error."""
    try:
        yield
    except (BadImage, TooLarge, UnsupportedMedia) as error:
        raise type(error)(f"{INPUT}[{number}]: {error.message}") from None


def routes(ready_tasks: Callable[[], ServedTasks]) -> list[BaseRoute]:
    """The routes of health, metadata and configuration."""

    def reply(value: object) -> Response:
        return Response(msgspec.json.encode(value), media_type="application/json")

    async def live(_: Request) -> Response:
        return reply({"live": True})

    async def ready(_: Request) -> Response:
        ready_tasks()
        return reply({"ready": True})

    async def server(_: Request) -> Response:
        return reply(encoding.server_metadata())

    async def model(request: Request) -> Response:
        return reply(encoding.model_metadata(*described(request)))

    async def config(request: Request) -> Response:
        return reply(encoding.model_config(*described(request)))

    async def model_ready(request: Request) -> Response:
        return reply({"name": described(request)[0], "ready": True})

    def described(request: Request) -> tuple[str, type[TaskKind[Any]]]:
        node = known(ready_tasks(), request.path_params["task"], request.path_params.get("version"))
        return node.task, type(node.kind)

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

"""The Open Inference Protocol over HTTP; `decoding` and `encoding` know the bodies.

Each image of a request is one `EdgeNode.infer`, with its own admission, deadline, streams and metrics.
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

from edge.servers.oip import decoding, encoding
from edge.servers.oip.decoding import INPUT
from edge.servers.shared.frontend import Frontend
from edge.servers.shared.http_messages import Answered, header, read_body
from edge.servers.shared.request_fields import Source, read_headers, read_query
from edge.serving.node import EdgeNode
from edge.serving.request import ImageRequest
from edge.serving.tasks import ServedTasks
from hawkvision.core.errors import BadField, BadImage, NotFound, TooLarge, UnsupportedMedia
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import Answer
from hawkvision.servers.bodies import Body
from hawkvision.tasks.kind import TaskKind

_INFER: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_STATES: Final = {"ready": "READY", "loading": "LOADING", "unloaded": "UNAVAILABLE", "failed": "UNAVAILABLE"}
"""Of models, as Triton names them."""
_NOTHING: Final = {"count": 0, "ns": 0}
IMAGES_AT_ONCE: Final = 2
"""Images of one request in the queue at once, for each worker: one runs, and one is ready."""
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
    fields = asked.request
    if len(asked.images) == 1:
        return [await node.infer(ImageRequest(asked.images[0], fields, started, trace, caller, hang_up=hang_up))]

    requests = [ImageRequest(image, fields, started, trace.child(), caller, hang_up=hang_up) for image in asked.images]
    for number, request in enumerate(requests):  # an image that is too large ends the request before any is decoded
        with _numbered(number):
            node.limits.cost(request.body, request.header)
    turns = asyncio.Semaphore(IMAGES_AT_ONCE * node.pool.threads)

    async def one(number: int, request: ImageRequest) -> Answer:
        async with turns:
            with _numbered(number):
                return await node.infer(request)

    waiting = [asyncio.ensure_future(one(number, request)) for number, request in enumerate(requests)]
    try:
        return list(await asyncio.gather(*waiting))
    finally:
        for task in waiting:
            task.cancel()
        # Retrieve what the others raised, so that nothing is logged as never retrieved.
        await asyncio.gather(*waiting, return_exceptions=True)


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Add the number of the image to its error."""
    try:
        yield
    except (BadImage, TooLarge, UnsupportedMedia) as error:
        raise type(error)(f"{INPUT}[{number}]: {error.message}") from None


def routes(frontend: Frontend) -> list[BaseRoute]:
    """The routes of health, metadata and configuration, and of Triton's extensions for statistics and models."""

    async def live(_: Request) -> Response:
        return _json({"live": True})

    async def ready(_: Request) -> Response:
        frontend.ready_tasks()
        return _json({"ready": True})

    async def server(_: Request) -> Response:
        return _json(encoding.server_metadata())

    async def model(request: Request) -> Response:
        return _json(encoding.model_metadata(*_described(frontend, request)))

    async def config(request: Request) -> Response:
        return _json(encoding.model_config(*_described(frontend, request)))

    async def model_ready(request: Request) -> Response:
        task, _ = _described(frontend, request)
        frontend.ready_tasks().node(task).models.check()
        return _json({"name": task, "ready": True})

    async def statistics(request: Request) -> Response:
        return _json({"model_stats": [_statistics(frontend, _described(frontend, request)[0])]})

    async def all_statistics(_: Request) -> Response:
        return _json({"model_stats": [_statistics(frontend, node.task) for node in frontend.ready_tasks().nodes]})

    async def index(_: Request) -> Response:
        tasks, version = frontend.ready_tasks(), encoding.MODEL_VERSION
        states = {node.task: (_STATES[node.models.state], node.models.reason or "") for node in tasks.nodes}
        states |= {each.task: ("UNAVAILABLE", each.reason) for each in tasks.failures}
        return _json([{"name": n, "version": version, "state": s, "reason": r} for n, (s, r) in states.items()])

    async def load(request: Request) -> Response:
        task, headers = request.path_params["task"], request.headers
        if "transfer-encoding" in headers or headers.get("content-length", "0") not in ("0", "2"):  # nothing, or {}
            raise BadField(
                f"cannot load {task[:100]!r} with parameters: set edge.task_settings, and start the node again"
            )
        await frontend.ready_tasks().node(task).models.load()
        return _json({})

    async def unload(request: Request) -> Response:
        await frontend.ready_tasks().node(request.path_params["task"]).models.unload()
        return _json({})

    get, post = ["GET"], ["POST"]
    of_model = {"": model, "/config": config, "/ready": model_ready, "/stats": statistics}
    return [
        Route("/v2/health/live", live, methods=get),
        Route("/v2/health/ready", ready, methods=get),
        Route("/v2", server, methods=get),
        Route("/v2/models/stats", all_statistics, methods=get),  # first: `stats` is no task
        *(
            Route(f"/v2/models/{{task}}{version}{tail}", endpoint, methods=get)
            for version in ("", "/versions/{version}")
            for tail, endpoint in of_model.items()
        ),
        Route("/v2/repository/index", index, methods=post),
        Route("/v2/repository/models/{task}/load", load, methods=post),
        Route("/v2/repository/models/{task}/unload", unload, methods=post),
    ]


def _described(frontend: Frontend, request: Request) -> tuple[str, type[TaskKind[Any]]]:
    """The task that a path names, and its kind."""
    node = known(frontend.ready_tasks(), request.path_params["task"], request.path_params.get("version"))
    return node.task, type(node.kind)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _statistics(frontend: Frontend, task: str) -> dict[str, Any]:
    """The counts since the node started, as an entry of `model_stats`.

    Failures have a number but no time, and the time of decoding is in no part.
    """
    metrics = frontend.metrics
    return {
        "name": task,
        "version": encoding.MODEL_VERSION,
        "last_inference": frontend.last_answer_ms(task),
        "inference_count": int(_total(metrics.duration, "_count", task)),
        "execution_count": int(_total(metrics.inference_duration, "_count", task)),
        "inference_stats": {
            "success": _duration(metrics.duration, task),
            "fail": {"count": int(_total(metrics.requests, "_total", task, but="200")), "ns": 0},
            "queue": _duration(metrics.queue_duration, task),
            "compute_input": _NOTHING,
            "compute_infer": _duration(metrics.inference_duration, task),
            "compute_output": _NOTHING,
            "cache_hit": _NOTHING,
            "cache_miss": _NOTHING,
        },
        "batch_stats": [],
    }


def _duration(histogram: Any, task: str) -> dict[str, int]:
    return {"count": int(_total(histogram, "_count", task)), "ns": round(_total(histogram, "_sum", task) * 1e9)}


def _total(metric: Any, ending: str, task: str, but: str | None = None) -> float:
    """Sum of a task's samples of a metric whose names end so, without those of the status code `but`."""
    samples = [s for family in metric.collect() for s in family.samples if s.labels["task"] == task]
    return float(sum(s.value for s in samples if s.name.endswith(ending) and (but is None or s.labels["code"] != but)))

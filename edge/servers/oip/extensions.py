"""Triton's extensions of the protocol: statistics, the model repository, logging, tracing, shared memory.

Queries are answered in Triton's form. Requests that would change a node, which only its settings may, are refused with
400 and a message that names the setting. Sources: Triton's protocol extensions `statistics`, `model_repository`,
`logging`, `trace` and `shared_memory`.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edge.servers.oip import encoding
from edge.servers.oip.images import NO_SHARED_MEMORY
from edge.servers.oip.routes import known
from edge.servers.shared.frontend import Frontend
from hawkvision.core.errors import MALFORMED, BadField, NotFound
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.servers.bodies import Bodies, Body

log = logging.getLogger("hawkvision.edge")

MAX_ASKED_BYTES: Final = 64 * 1024
"""Largest body of a request to load a model; a configuration is some kilobytes."""

_NOTHING: Final = {"count": 0, "ns": 0}
_LOADED_AT_START: Final = (
    "this node loads its models when it starts; set edge.tasks and edge.task_settings, and start it again"
)


def extension_routes(frontend: Frontend) -> list[BaseRoute]:
    """The routes of the extensions."""
    return [
        *_statistics_routes(frontend),
        *_repository_routes(frontend),
        *_settings_routes(frontend),
        *_memory_routes(),
    ]


def _statistics_routes(frontend: Frontend) -> list[Route]:
    async def statistics(request: Request) -> Response:
        task, tasks = request.path_params.get("task"), frontend.ready_tasks()
        named = [node.task for node in tasks.nodes]
        if task is not None:
            named = [known(tasks, task, request.path_params.get("version")).task]
        return _json(
            {"model_stats": [model_statistics(each, frontend.metrics, frontend.last_answer_ms(each)) for each in named]}
        )

    paths = ("/v2/models/stats", "/v2/models/{task}/stats", "/v2/models/{task}/versions/{version}/stats")
    return [Route(path, statistics, methods=["GET"]) for path in paths]


def _repository_routes(frontend: Frontend) -> list[Route]:
    async def index(_: Request) -> Response:
        version, tasks = encoding.MODEL_VERSION, frontend.ready_tasks()
        ready = {"version": version, "state": "READY", "reason": ""}
        return _json(
            [{"name": node.task, **ready} for node in tasks.nodes]
            + [
                {"name": failed.task, "version": version, "state": "UNAVAILABLE", "reason": failed.reason}
                for failed in tasks.failures
            ]
        )

    async def load(request: Request) -> Response:
        task, tasks = request.path_params["task"], frontend.ready_tasks()
        if task not in [node.task for node in tasks.nodes]:
            raise BadField(f"cannot load {task[:100]!r}: {_LOADED_AT_START}")
        if await _has_parameters(request, frontend.bodies):
            raise BadField(f"cannot load {task!r} with parameters: {_LOADED_AT_START}")
        return _json({})  # it is loaded already

    async def unload(request: Request) -> Response:
        task, names = request.path_params["task"], frontend.ready_tasks().names
        if task not in names:
            raise BadField(f"cannot unload {task[:100]!r}: this node serves {', '.join(map(repr, names))}")
        raise BadField(f"cannot unload {task!r}: a node serves its tasks until it is stopped")

    return [
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{task}/load", load, methods=["POST"]),
        Route("/v2/repository/models/{task}/unload", unload, methods=["POST"]),
    ]


def _settings_routes(frontend: Frontend) -> list[Route]:
    """Logging and tracing, which callers can read and not change."""

    async def log_settings(_: Request) -> Response:
        return _json(_log_settings())

    async def trace_settings(request: Request) -> Response:
        task = request.path_params.get("task")
        if task is not None:
            known(frontend.ready_tasks(), task)
        off = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0"}
        return _json({**off, "trace_file": "", "trace_mode": "triton"})

    async def refused(_: Request) -> Response:
        raise BadField(
            "logging and tracing are set when the node starts; callers trace requests with the header traceparent"
        )

    return [
        route
        for path, shown in (
            ("/v2/logging", log_settings),
            ("/v2/trace/setting", trace_settings),
            ("/v2/models/{task}/trace/setting", trace_settings),
        )
        for route in (Route(path, shown, methods=["GET"]), Route(path, refused, methods=["POST"]))
    ]


def _memory_routes() -> list[Route]:
    """Shared memory, which a node does not offer."""

    async def no_regions(_: Request) -> Response:
        return _json([])

    async def no_region(request: Request) -> Response:
        raise NotFound(f"no shared memory region {request.path_params['region'][:100]!r}: {NO_SHARED_MEMORY}")

    async def register(_: Request) -> Response:
        raise BadField(f"cannot register shared memory: {NO_SHARED_MEMORY}")

    async def unregister(_: Request) -> Response:
        return _json({})  # there is none

    get, post = ["GET"], ["POST"]
    return [
        route
        for kind in ("/v2/systemsharedmemory", "/v2/cudasharedmemory")
        for route in (
            Route(f"{kind}/status", no_regions, methods=get),
            Route(f"{kind}/region/{{region}}/status", no_region, methods=get),
            Route(f"{kind}/region/{{region}}/register", register, methods=post),
            Route(f"{kind}/region/{{region}}/unregister", unregister, methods=post),
            Route(f"{kind}/unregister", unregister, methods=post),
        )
    ]


def _log_settings() -> dict[str, Any]:
    """The node's log level, as Triton states one."""
    level = log.getEffectiveLevel()
    return {
        "log_file": "",
        "log_info": level <= logging.INFO,
        "log_warning": level <= logging.WARNING,
        "log_error": level <= logging.ERROR,
        "log_verbose_level": int(level <= logging.DEBUG),
        "log_format": "default",
    }


async def _has_parameters(request: Request, bodies: Bodies) -> bool:
    """Whether a request to load has parameters.

    Raises:
        HawkVisionError: if its body cannot be read.
    """
    length = request.headers.get("content-length")
    if length == "0" or (length is None and "transfer-encoding" not in request.headers):
        return False
    body = Body(bodies, request.receive)
    try:
        data = await body.read(length)
        if len(data) > MAX_ASKED_BYTES:
            raise BadField(f"body: expected at most {MAX_ASKED_BYTES} bytes, got {len(data)}")
        asked = msgspec.json.decode(data, type=_Load)
    except MALFORMED as error:
        raise BadField(f"body: expected JSON with parameters: {type(error).__name__}") from None
    finally:
        body.release()
    return bool(asked.parameters)


class _Load(msgspec.Struct, frozen=True):
    """The body of a request to load."""

    parameters: dict[str, Any] | None = None


def model_statistics(task: str, metrics: EdgeMetrics, last_answer_ms: int) -> dict[str, Any]:
    """The counts since the node started, as an entry of `model_stats`.

    Failures have a number but no time, and the time of decoding is in no part.
    """
    return {
        "name": task,
        "version": encoding.MODEL_VERSION,
        "last_inference": last_answer_ms,
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


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

"""What can be read about a node: health, targets, transports, metrics and the API's description.

Whatever goes wrong leaves as `{"error", "code"}` with its status, unknown paths and methods included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from edge.servers import oip_routes, openapi
from edge.serving.node import EdgeNode
from edge.serving.targets import describe_targets
from hawkvision.core.errors import BadField, HawkVisionError, InternalError, MethodNotAllowed, NotFound
from hawkvision.core.escalation_api import TRANSPORT_PATH, Transports
from hawkvision.core.metrics import EdgeMetrics

CALLER: Final = "hawkvision.caller"
"""In a request's scope: whose evidence the caller's requests are (`edge.monitoring.stream_keys.caller_of`)."""

log = logging.getLogger("hawkvision.edge")


def pages(
    ready_node: Callable[[], EdgeNode],
    transports: Callable[[], Transports],
    metrics: EdgeMetrics,
    more: Sequence[BaseRoute],
) -> Starlette:
    """The application that answers everything but images.

    Args:
        ready_node: gives the node, or raises `NotReady`.
        transports: what else the node listens to now.
        metrics: what `/metrics` shows.
        more: further routes, whose errors leave in the same way.
    """

    async def healthz(_: Request) -> Response:
        return _json({"status": "alive"})

    async def readyz(_: Request) -> Response:
        node = ready_node()
        return _json({"status": "ready", "task": node.task, "variant": node.stage.name})

    async def targets(request: Request) -> Response:
        return _json(describe_targets(ready_node(), request.scope.get(CALLER, "")))

    async def transport(_: Request) -> Response:
        ready_node()
        return _json(transports())

    async def exposition(_: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": metrics.content_type})

    async def schema(_: Request) -> Response:
        return _json(openapi.document())

    async def docs(request: Request) -> Response:
        return HTMLResponse(openapi.page(str(request.base_url).rstrip("/")))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            ours: HawkVisionError = MethodNotAllowed(f"{request.url.path} does not take {request.method}")
        elif error.status_code == 404:
            ours = NotFound(f"no such path {request.url.path[:100]!r}; /docs lists what there is")
        else:
            ours = BadField(str(error.detail))
        return _json(ours.body(), ours.status, error.headers)

    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, HawkVisionError)
        return _json(error.body(), error.status)

    async def on_defect(_: Request, error: Exception) -> Response:
        log.error("internal error", exc_info=error)
        return _json(InternalError("the node failed on this request; its log says why").body(), 500)

    get = ["GET"]
    rest = Starlette(
        routes=[
            Route("/healthz", healthz, methods=get),
            Route("/readyz", readyz, methods=get),
            *more,  # first: `/v2/models/stats` is no task
            *oip_routes.routes(ready_node),
            Route("/v1/targets", targets, methods=get),
            Route(TRANSPORT_PATH, transport, methods=get),
            Route("/metrics", exposition, methods=get),
            Route("/openapi.json", schema, methods=get),
            Route("/docs", docs, methods=get),
        ],
        exception_handlers={
            HTTPException: on_http_error,
            HawkVisionError: on_refusal,
            Exception: on_defect,
        },
    )
    # A redirect would carry the caller's own Host header back to it; a wrong path is simply not found.
    rest.router.redirect_slashes = False
    return rest


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")

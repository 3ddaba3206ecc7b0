"""The pages of a node: health, targets, transports, metrics and the description of the API.

Every error leaves as `{"error", "code"}` with its status, including those of unknown paths and methods.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from edge.page import files as page_files
from edge.servers import openapi, review_routes, status_routes
from edge.servers.oip import routes as oip_routes
from edge.servers.shared.frontend import Frontend, internal_error
from edge.servers.shared.http_messages import error_headers
from edge.servers.shared.request_fields import read_task
from edge.serving.targets_listing import describe_targets
from edge.serving.tasks import describe_tasks, readiness
from hawkvision.core.errors import BadField, HawkVisionError, MethodNotAllowed, NotFound
from hawkvision.core.escalation_api import TRANSPORT_PATH
from hawkvision.tasks.registry import DEEPSTACK_CUSTOM, DEEPSTACK_PATH, KIND_OF_FORM

CALLER: Final = "hawkvision.caller"
"""Key of the caller in a request's scope (`edge.monitoring.stream_keys.caller_of`)."""


def pages(frontend: Frontend, *, page: bool) -> Starlette:
    """The application that answers every request without an image, for this front end; with the page at `/` or not."""
    ready_tasks, metrics = frontend.ready_tasks, frontend.metrics

    async def readyz(request: Request) -> Response:
        known = frontend.keys.caller_of(request.headers.get("authorization")) is not None
        return _json(readiness(ready_tasks(), read_task(request.scope["query_string"]), with_reasons=known))

    async def tasks(_: Request) -> Response:
        return _json(describe_tasks(ready_tasks()))

    async def load(request: Request) -> Response:
        models = ready_tasks().node(request.path_params["task"]).models
        await (models.load() if request.url.path.endswith("/load") else models.unload())
        return _json(describe_tasks(ready_tasks()))

    async def targets(request: Request) -> Response:
        node = ready_tasks().node(read_task(request.scope["query_string"]))
        return _json(describe_targets(node, request.scope.get(CALLER, "")))

    async def custom_list(_: Request) -> Response:
        served = [each.task for each in ready_tasks().nodes if each.kind.name == KIND_OF_FORM[DEEPSTACK_PATH]]
        return _json({"success": True, "models": served})

    async def transport(_: Request) -> Response:
        ready_tasks()
        return _json(frontend.transports())

    async def exposition(_: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": metrics.content_type})

    async def schema(_: Request) -> Response:
        return _json(openapi.document(keys=frontend.keys.required))

    async def docs(_: Request) -> Response:
        return FileResponse(openapi.SWAGGER_UI / "index.html", headers=openapi.DOCS_HEADERS)

    get = ["GET"]
    rest = Starlette(
        routes=[
            Route("/healthz", _healthz, methods=get),
            Route("/readyz", readyz, methods=get),
            Route("/v1/status/ping", _ping, methods=get),
            Route(f"{DEEPSTACK_CUSTOM}list", custom_list, methods=["POST"]),
            *oip_routes.routes(frontend),
            Route("/v1/tasks", tasks, methods=get),
            Route("/v1/tasks/{task}/load", load, methods=["POST"]),
            Route("/v1/tasks/{task}/unload", load, methods=["POST"]),
            Route("/v1/targets", targets, methods=get),
            Route(TRANSPORT_PATH, transport, methods=get),
            *review_routes.routes(review_routes.reviewers(frontend)),
            *status_routes.routes(frontend),
            Route("/metrics", exposition, methods=get),
            Route("/openapi.json", schema, methods=get),
            Route("/docs", docs, methods=get),
            *(page_files.routes(frontend.browsers) if page else ()),
            Mount("/docs", StaticFiles(directory=openapi.SWAGGER_UI)),
        ],
        exception_handlers=HANDLERS,
    )
    # A redirect would send the caller's own Host header back; a wrong path is not found.
    rest.router.redirect_slashes = False
    return rest


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        ours: HawkVisionError = MethodNotAllowed(f"{request.url.path} does not take {request.method}")
    elif error.status_code == 404:
        ours = NotFound(f"no such path {request.url.path[:100]!r}; /docs lists what there is")
    else:
        ours = BadField(str(error.detail))
    return _json(ours.body(), ours.status, error.headers)


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HawkVisionError)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return _json(error.body(), error.status, headers)


async def _on_defect(_: Request, error: Exception) -> Response:
    return _json(internal_error(error).body(), 500)


async def _healthz(_: Request) -> Response:
    return _json({"status": "alive"})


async def _ping(_: Request) -> Response:
    return _json({"success": True})


HANDLERS: Final = {HTTPException: _on_http_error, HawkVisionError: _on_refusal, Exception: _on_defect}
"""What answers each error of a route."""

"""Serves the review of a folder on this machine, for people at a browser, until it is stopped."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from hawkvision.cli.certification import by_node
from hawkvision.cli.options import Authority, Compared, ModelsDir, OperateKey, Profile, Task
from hawkvision.core.command_line import ARGUMENT
from hawkvision.core.settings.config import Port
from hawkvision.system.files import CacheDir

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edge.monitoring.labelling import Reviewer

LOOPBACK: Final = "127.0.0.1"
MOST_AT_ONCE: Final = 64
"""Connections; a page holds six."""


def review(
    folder: Annotated[Path, Meta(description="The site's images.", extra=ARGUMENT)],
    task: Task = "imagenet",
    labels: Annotated[
        Path, Meta(description="The CSV file that labels are written to; an earlier review's is continued.")
    ] = Path("labels.csv"),
    edge: Annotated[str | None, Meta(description="The edge stage to certify; default: the cascade's.")] = None,
    compared: Compared = 1,
    out: Annotated[Path, Meta(description="Where certificates go.")] = Path("certificates.json"),
    port: Annotated[Port, Meta(description="Port on this machine; 0 takes a free one.")] = 8081,
    node: Annotated[
        str | None,
        Meta(
            description="URL of an edge node that answers the images with its datacenter, in place of this machine.",
            extra={"name": "--from"},
        ),
    ] = None,
    api_key: OperateKey = None,
    ca: Authority = None,
    profile: Profile = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Label a folder of images in a browser on this machine, and certify a cascade by these labels."""
    from hawkvision.cli.review.folder import FolderReview
    from hawkvision.core.clock import MonotonicClock
    from hawkvision.core.errors import ConfigError
    from hawkvision.model_zoo.calibration.certify import load_cascade, no_list, run_site
    from hawkvision.models import manifest
    from hawkvision.models.datasets import read_unlabelled
    from hawkvision.models.image_sets.folder_classes import class_numbers

    models, cache = manifest.models_dir(models_dir, task), manifest.cache_dir(cache_dir)
    cascade = load_cascade(task, (edge,) if edge else (), profile, models)
    if not cascade.kind.one_class:
        raise ConfigError(no_list(cascade.kind, "review"))
    if edge is None:
        cascade = cascade.of_default_edge()
    comparing = None if node is None else by_node(node, api_key, ca)
    with contextlib.closing(_listen(port)) as listener:
        site = run_site(
            cascade, folder, read_unlabelled(folder), out, compared=compared, comparing=comparing, cache=cache
        )
        numbers = class_numbers(cascade.kind.labels)
        _serve(application(task, FolderReview(task, site, labels, numbers, MonotonicClock())), listener)


def application(task: str, reviewer: Reviewer) -> ASGIApp:
    """The routes of review and the page, for requests of this machine's programs and of the page itself."""
    import msgspec
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

    from edge.page import files
    from edge.servers import info_routes, review_routes
    from hawkvision.core.errors import Forbidden, NotFound
    from hawkvision.servers.browsers import Browsers

    browsers = Browsers()

    def known(asked: str | None) -> Reviewer:
        if asked not in (None, task):
            raise NotFound(f"task {asked!r} is not reviewed here; this is {task!r}")
        return reviewer

    async def tasks(_: Request) -> Response:
        return Response(
            msgspec.json.encode({"tasks": [{"task": task, "status": "ready"}]}), media_type="application/json"
        )

    routes = [Route("/v1/tasks", tasks, methods=["GET"]), *review_routes.routes(known), *files.routes(browsers)]
    inner = Starlette(routes=routes, exception_handlers=info_routes.HANDLERS)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            browsers.check(scope["headers"])
        except Forbidden as error:
            await Response(msgspec.json.encode(error.body()), error.status)(scope, receive, send)
        else:
            await inner(scope, receive, send)

    return guarded


def _listen(port: int) -> socket.socket:
    from hawkvision.core.errors import ConfigError

    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {LOOPBACK}:{port}: {error.strerror}; --port takes another") from None


def _serve(app: ASGIApp, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app, ws="none", lifespan="off", access_log=False, log_config=None, log_level="warning", proxy_headers=False,
        server_header=False, limit_concurrency=MOST_AT_ONCE,
    )  # fmt: skip
    print(f"ready: http://{LOOPBACK}:{listener.getsockname()[1]}/#review", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])

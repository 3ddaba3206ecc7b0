"""Deploys the application to the Ray that this process is connected to, and waits until it serves."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Final

from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from hawkvision.core.errors import BackendError
from hawkvision.core.settings.config import DatacenterConfig

_OURS: Final = re.compile(r"^hawkvision\.core\.errors\.\w+: (.+)$", re.MULTILINE)
_REPLY_S: Final = 10.0
"""For an ingress replica to say whether it is ready."""


def run_application(app: Application, config: DatacenterConfig, http: HTTPOptions) -> None:
    """Make Serve start the application, or update it; returns before it runs. Blocks for some seconds.

    Raises:
        BackendError: if Serve refuses it; gives its message.
    """
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    try:
        serve.start(http_options=http, logging_config=quiet)
        serve.run_many(
            [serve.RunTarget(app, name=config.app_name, route_prefix=config.route_prefix, logging_config=quiet)],
            wait_for_applications_running=False,
        )
    except (RuntimeError, RayError, RayServeException) as error:
        raise BackendError(f"Serve did not take the application {config.app_name!r}: {_one_line(error)}") from None


def is_running(app_name: str) -> bool:
    """Whether Serve calls the application running. Blocks.

    Raises:
        BackendError: if it failed to start; gives Serve's message.
    """
    state = serve.status().applications.get(app_name)
    if state is None:
        return False
    if state.status == ApplicationStatus.DEPLOY_FAILED:
        failed = [
            f"{name}: {cause_of(each.message)}"
            for name, each in state.deployments.items()
            if each.status == "DEPLOY_FAILED"
        ]
        raise BackendError(f"{app_name!r} did not start: {'; '.join(failed) or _one_line(state.message)}")
    return bool(state.status == ApplicationStatus.RUNNING)


def cause_of(message: str) -> str:
    """The error of ours in Serve's message about a replica, which is a traceback; the whole message if there is none.

    In one line.
    """
    ours = _OURS.findall(message)
    return _one_line(ours[-1] if ours else message)


async def why_not_ready(app_name: str) -> str | None:
    """Why callers of a running application would get 503 now, as `Ingress.unready`; None if they are served."""
    try:
        async with asyncio.timeout(_REPLY_S):
            reason: str | None = await serve.get_app_handle(app_name).unready.remote()
    except (TimeoutError, RayError, RayServeException) as error:
        return f"the ingress does not respond: {_one_line(error) or type(error).__name__}"
    return reason


def readiness(app_name: str) -> str | None:
    """As `why_not_ready`, for a process without an event loop. Blocks."""
    return _event_loop().run_until_complete(why_not_ready(app_name))


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls in this process, because Serve's handles keep the one that they were first used on."""
    return asyncio.new_event_loop()


def _one_line(error: object) -> str:
    return " ".join(str(error).split())

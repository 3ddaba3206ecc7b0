"""Deploys the application to the Ray that this process is connected to, and waits until it serves."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Final

from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from hawkvision.core.errors import BackendError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.serve_states import FAILED, cause_of, one_line
from hawkvision.datacenter.ingress.application import INGRESS
from hawkvision.datacenter.servers.readiness import TaskState
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, loaded

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
        raise BackendError(f"Serve did not take the application {config.app_name!r}: {one_line(error)}") from None


class Progress:
    """How far the start, or an update, of an application is."""

    def __init__(self, config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> None:
        """The application of these settings, which Serve has been told to run; `catalogs` by task."""
        self._app_name = config.app_name
        self._groups = [{group.name for group in catalog.groups} for catalog in loaded(catalogs).values()]

    def is_running(self) -> bool:
        """Whether Serve has started the ingress, and each group that can be started. Blocks.

        Raises:
            BackendError: if the ingress, or a group of each task, failed to start; gives Serve's messages.
        """
        state = serve.status().applications.get(self._app_name)
        if state is None:
            return False
        failed = {name: cause_of(each.message) for name, each in state.deployments.items() if each.status == FAILED}
        if state.status == ApplicationStatus.DEPLOY_FAILED and (
            not failed or INGRESS in failed or all(groups & failed.keys() for groups in self._groups)
        ):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise BackendError(f"{self._app_name!r} did not start: {reasons or one_line(state.message)}")
        if state.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            return all(each.status != "UPDATING" for each in state.deployments.values())
        return bool(state.status == ApplicationStatus.RUNNING)


async def task_states(app_name: str) -> tuple[TaskState, ...] | str:
    """The state of each task of an application, or why the ingress does not say it."""
    try:
        async with asyncio.timeout(_REPLY_S):
            states: tuple[TaskState, ...] | None = await serve.get_app_handle(app_name).states.remote()
    except (TimeoutError, RayError, RayServeException) as error:
        return f"the ingress does not respond: {one_line(error) or type(error).__name__}"
    return "no ingress replica serves at the public sockets" if states is None else states


def task_states_blocking(app_name: str) -> tuple[TaskState, ...] | str:
    """As `task_states`, for a process without an event loop. Blocks."""
    return _event_loop().run_until_complete(task_states(app_name))


def missing(states: tuple[TaskState, ...] | str) -> str | None:
    """What a start still waits for; None once each task is ready or has failed.

    Raises:
        BackendError: if all tasks have failed; gives the reasons.
    """
    if isinstance(states, str):
        return states
    failed = failures(states)
    if len(failed) == len(states):
        raise BackendError("; ".join(failed))
    return "; ".join(state.reason for state in states if state.status == "starting") or None


def failures(states: tuple[TaskState, ...]) -> list[str]:
    """Why each task that has failed cannot be served."""
    return [state.reason for state in states if state.status == "failed"]


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls in this process, because Serve's handles keep the one that they were first used on."""
    return asyncio.new_event_loop()

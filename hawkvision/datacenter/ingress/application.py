"""The Ray Serve application: an ingress, and a deployment per group of variants.

    caller ──HTTP──▶ ingress ──handle──▶ the members of an ensemble  (1..n replicas, each decodes and batches)
                         └───handle──▶ a variant that is in no ensemble

On one machine the ingress also serves at the public sockets of a launcher (`launch`). Everything else is the same in a
cluster.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview, LoggingConfig

from hawkvision.core.errors import BackendError, ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.group_deployments import SCALE_DOWN_AFTER_S, SCALE_UP_AFTER_S, group_apps
from hawkvision.datacenter.deployment.presence import FAILED, REASON_CHARS, cause_of, one_line
from hawkvision.datacenter.deployment.routers import REFUSING
from hawkvision.datacenter.execution.group_settings import replica_cpus
from hawkvision.datacenter.ingress.replica import DRAIN_S, INGRESS, Ingress, IngressSettings
from hawkvision.datacenter.servers.served_task import TaskState
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, load_catalogs, loaded
from hawkvision.transport.settings import DatagramSettings

_HEALTH_PERIOD_S: Final = 1.0
"""How soon Serve notices and replaces a dead replica, instead of 10 s."""
INGRESS_CPUS: Final = 1.0
"""Cores that Ray reserves for an ingress replica, which has one busy thread."""
_ONGOING_REQUESTS: Final = 64.0
"""Ongoing requests per ingress replica that Ray Serve scales for."""
_DRAIN_CHECK_S: Final = 0.2
"""Between Serve's looks at the requests inside a replica that stops, instead of 2 s."""


class ServedIngress(Ingress):
    """An ingress replica in one of Ray's processes."""

    async def __del__(self) -> None:
        """Serve awaits this when it stops the replica, once its own requests are answered."""
        await self.drain()


# Wrapped by name, not by decorator, so that the class stays plain for tests and the type checker.
_INGRESS: Any = serve.deployment(ServedIngress)


def application(
    config: DatacenterConfig, launcher: Path | None = None, catalogs: Mapping[str, Catalog | TaskFailure] | None = None
) -> Application:
    """The whole application under these settings.

    Args:
        config: the tier's settings.
        launcher: the Unix socket of the launcher on this machine; None for a cluster.
        catalogs: of the tasks; by default they are loaded here.

    Raises:
        ConfigError: if the stages are unknown, or if a datagram port is set for a cluster, whose proxies speak HTTP
            only.
    """
    port = config.feature(DatagramSettings).port
    if launcher is None and port is not None:
        raise ConfigError(
            f"dc.datagram_port = {port}: in a cluster the tier speaks HTTP only; the datagram transport needs a "
            "tier on one machine (`hawkvision dc up`)"
        )
    if catalogs is None:
        catalogs = load_catalogs(config)
    settings = IngressSettings.of(config, catalogs)
    served = loaded(catalogs)
    groups = {task: group_apps(config, catalog, alone=len(served) == 1) for task, catalog in served.items()}
    return _INGRESS.options(
        name=INGRESS,
        # Above the server's own bound, so that the server sheds, with 429 and Retry-After.
        max_ongoing_requests=2 * settings.max_in_flight,
        max_queued_requests=settings.max_in_flight,
        # HAProxy has a router of its own, and Serve takes no other beside it.
        **({} if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else {"request_router_config": REFUSING}),
        user_config=msgspec.to_builtins(settings),
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_wait_loop_s=_DRAIN_CHECK_S,
        graceful_shutdown_timeout_s=2 * DRAIN_S,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        **_scale(config, launcher),
    ).bind(config, catalogs, groups, None if launcher is None else str(launcher))


def _scale(config: DatacenterConfig, launcher: Path | None) -> dict[str, Any]:
    """The number of ingress replicas, and how many of them share a machine."""
    least, most = config.ingress_min_replicas, config.ingress_max_replicas
    # Serve does not see the requests at a launcher's sockets, so it could only scale down.
    if launcher is not None:
        return {"num_replicas": least}
    per_node, spread = config.max_replicas_per_node, {}
    if per_node is not None:  # as few on a machine as on the machines that the stages' replicas need
        spread = {"max_replicas_per_node": min(per_node, math.ceil(most / math.ceil(config.max_replicas / per_node)))}
    if least == most:
        return {"num_replicas": least, **spread}
    return {
        **spread,
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": _ONGOING_REQUESTS,
            "upscale_delay_s": SCALE_UP_AFTER_S,
            "downscale_delay_s": SCALE_DOWN_AFTER_S,
        },
    }


_FAILED_TO_START: Final = "failed to start"
"""In Serve's message about a deployment of which a replica did not start."""
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
        groups = [catalog.groups for catalog in loaded(catalogs).values()]
        self._groups = [{group.name for group in of_task} for of_task in groups]
        self._least = {name: config.min_replicas for of_task in self._groups for name in of_task}
        self._least[INGRESS] = config.ingress_min_replicas
        self._cores = {group.name: replica_cpus(group, config) for of_task in groups for group in of_task}
        self._cores[INGRESS] = INGRESS_CPUS

    def waits_for(self) -> str | None:
        """What Serve has yet to start, as far as it can be started; None once all runs. Blocks.

        Raises:
            BackendError: if the ingress, or a group of each task, failed to start; gives Serve's messages.
        """
        state = serve.status().applications.get(self._app_name)
        if state is None:
            return "Serve takes the application"
        failed = {name: cause_of(each.message) for name, each in state.deployments.items() if each.status == FAILED}
        if state.status == ApplicationStatus.DEPLOY_FAILED and (
            not failed or INGRESS in failed or all(groups & failed.keys() for groups in self._groups)
        ):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise BackendError(f"{self._app_name!r} did not start: {reasons or one_line(state.message)}")
        waiting = [each for name, of in state.deployments.items() if (each := self._described(name, of)) is not None]
        if not waiting and state.status == ApplicationStatus.DEPLOYING:
            return "Serve starts the application"
        return "; ".join(waiting) or None

    def _described(self, name: str, state: DeploymentStatusOverview) -> str | None:
        """The states of a deployment's replicas, and why one did not start; None if it is complete or has failed."""
        running, least = state.replica_states.get("RUNNING", 0), self._least.get(name, 0)
        if state.status == FAILED or (state.status != "UPDATING" and running >= least):
            return None
        others = [f"{count} {each.lower()}" for each, count in state.replica_states.items() if each != "RUNNING"]
        failed = _FAILED_TO_START in state.message
        reason = f"; a replica did not start: {cause_of(state.message)[:REASON_CHARS]}" if failed else ""
        found = ", ".join([f"{running} of {least} replicas run", *others])
        return f"{name}: {found} ({self._cores.get(name, 0.0):g} cores each){reason}"


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

"""Deploys the tier to an existing Ray cluster."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from hawkvision.core.errors import BackendError, ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.ray_address import check_address
from hawkvision.datacenter.deployment.ray_settings import CONNECTION_RETRIES, TUNING
from hawkvision.datacenter.deployment.ray_version import check_ray
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, load_catalogs

if TYPE_CHECKING:
    from hawkvision.datacenter.servers.readiness import TaskState

log = logging.getLogger("hawkvision.datacenter")

DEPLOY_TIMEOUT_S: Final = 600.0
"""For each stage to have a replica. The cluster goes on if it passes."""
_POLL_S: Final = 0.5


def deploy(config: DatacenterConfig, address: str) -> None:
    """Deploy or update the application on the Ray cluster at `address`, and wait until it is ready.

    It is the application that `hawkvision dc up` runs. Each node that may run a replica needs the same version of
    `hawkvision[datacenter]` as this machine, and the model files under `config.cache_dir`; nothing is uploaded. A
    cluster with a key needs `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN` here. Serve listens on `config.host` and
    `config.port` of each node, unless it already listens elsewhere. `TUNING` takes effect only if the cluster's own
    processes were started with it (`hawkvision dc environment`).

    Args:
        config: the tier's settings.
        address: as `ray.init` takes it: `auto`, `HOST:6379` on a node of the cluster, `ray://HOST:10001` elsewhere.

    Raises:
        ConfigError: if the stages are unknown, or the cluster cannot be reached, refuses the key or runs another Ray.
        BackendError: if a task cannot be served there, with the reason; once all others are, if there are any. Or if
            they are not ready within `DEPLOY_TIMEOUT_S`.
    """
    check_ray()
    check_address(address)
    if os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning(
            "RAY_AUTH_MODE is not 'token': a Ray that takes this deployment runs the code of anybody who reaches its "
            "ports"
        )
    for name, value in {**TUNING, **CONNECTION_RETRIES}.items():
        os.environ.setdefault(name, value)
    import ray
    from ray.exceptions import RayError
    from ray.serve.config import HTTPOptions

    from hawkvision.datacenter.ingress.application import application
    from hawkvision.datacenter.ingress.deploying import run_application

    catalogs = load_catalogs(config)
    app = application(config, catalogs=catalogs)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"dc.address: cannot use the Ray at {address!r}: {_one_line(error)}") from None
    try:
        run_application(app, config, HTTPOptions(host=config.host, port=config.port, location="EveryNode"))
        _wait_until_ready(config, catalogs)
    finally:
        ray.shutdown()


def _wait_until_ready(config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> None:
    """Wait until each task is served or has failed; log what is missing.

    Raises:
        BackendError: if a task has failed, or if they are not ready in time.
    """
    import ray

    from hawkvision.datacenter.ingress.deploying import Progress, missing, task_states_blocking

    # On the cluster: the ingress can be called from there, and perhaps not from here (ray://).
    asked = ray.remote(num_cpus=0)(task_states_blocking)
    progress = Progress(config, catalogs)
    ends = time.monotonic() + DEPLOY_TIMEOUT_S
    shown = None
    while True:
        waits_for: str | None = "Serve starts its replicas"
        if progress.is_running():
            states = ray.get(asked.remote(config.app_name))
            waits_for = missing(states)
            if waits_for is None:
                _check_all_served(states)
                return
        if waits_for != shown:
            log.info("%s: %s", config.app_name, waits_for)
            shown = waits_for
        if time.monotonic() > ends:
            raise BackendError(f"{config.app_name!r} is not ready after {DEPLOY_TIMEOUT_S:g} s: {waits_for}")
        time.sleep(_POLL_S)


def _check_all_served(states: tuple[TaskState, ...]) -> None:
    """Report the tasks that are not served beside others that are.

    Raises:
        BackendError: names all of them.
    """
    from hawkvision.datacenter.ingress.deploying import failures

    if failed := failures(states):
        served = ", ".join(state.task for state in states if state.status == "ready")
        raise BackendError(f"{'; '.join(failed)}; served: {served}")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())

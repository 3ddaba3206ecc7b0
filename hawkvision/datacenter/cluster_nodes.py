"""The nodes of a Ray cluster that may run replicas: settings that suit them, and which of them lack models."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from hawkvision.core.errors import BackendError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.execution.group_settings import replica_cpus
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, lacking_models, loaded

log = logging.getLogger("hawkvision.datacenter")

ReadSettings: TypeAlias = Callable[[Mapping[str, Any]], DatacenterConfig]
"""Reads the tier's settings; what it takes stands in the place of the settings' own defaults."""
COPIES: Final = 2
"""Replicas of each deployment, on as many nodes, so that any node may be lost."""
_HEAD: Final = "node:__internal_head__"
"""The resource that only the head has."""
_LOOK_S: Final = 120.0
"""For all nodes to look for their models; each first starts a process, and may read gigabytes."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster."""

    id: str
    name: str
    address: str
    is_head: bool
    cores: float
    """For replicas and ingresses."""


def living_nodes() -> tuple[Node, ...]:
    """The nodes of the cluster that this process is connected to."""
    import ray

    return tuple(
        Node(each["NodeID"], each["NodeName"], each["NodeManagerAddress"], _HEAD in has, float(has.get("CPU", 0.0)))
        for each in ray.nodes()
        if each["Alive"] and (has := each["Resources"]) is not None
    )


def replica_nodes() -> tuple[Node, ...]:
    """Those that may run replicas."""
    return tuple(node for node in living_nodes() if node.cores > 0.0)


def fitted(
    read: ReadSettings, catalogs: Mapping[str, Catalog | TaskFailure], nodes: Sequence[Node]
) -> DatacenterConfig:
    """The settings, with defaults for these nodes; what somebody chose stays.

    Of several nodes any one may be lost: each deployment has two replicas, and no node has more of one than it must,
    so that the replicas of a lost node take no cores of those that stay. Replicas ask for no more cores than the nodes
    have beside an ingress.
    """
    copies = min(COPIES, max(1, len(nodes)))
    most = {"max_replicas": copies, "ingress_max_replicas": copies}
    config = read(most)
    least = {
        "min_replicas": min(copies, config.max_replicas),
        "ingress_min_replicas": min(copies, config.ingress_max_replicas),
    }
    config = read({**most, **least})
    if config.max_replicas_per_node is None and len(nodes) > 1:
        config = msgspec.structs.replace(config, max_replicas_per_node=math.ceil(config.max_replicas / len(nodes)))
    return _with_cores(config, catalogs, nodes)


def _with_cores(
    config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure], nodes: Sequence[Node]
) -> DatacenterConfig:
    groups = [group for catalog in loaded(catalogs).values() for group in catalog.groups]
    if config.num_cpus is not None or not groups or not nodes:
        return config
    per_node = config.max_replicas_per_node or config.max_replicas
    needed = math.ceil(config.max_replicas / per_node)
    largest = sorted((node.cores for node in nodes), reverse=True)[:needed]
    room = largest[-1] - 1.0  # an ingress takes one
    if not 0.0 < room < per_node * sum(replica_cpus(group, config) for group in groups):
        return config
    share = room / (per_node * len(groups))
    cores = float(math.floor(share)) if share >= 1.0 else share
    log.info("dc.num_cpus = %g: a node has %g cores, for %d replicas and an ingress", cores, room + 1.0, len(groups))
    return msgspec.structs.replace(config, num_cpus=cores)


def check_models_on(
    nodes: Sequence[Node], config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]
) -> None:
    """Look on each node for the model files; those of some tasks may be missing, which is logged.

    Raises:
        BackendError: names the nodes that lack the models of all tasks, and a file of each.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def asked(node: Node) -> Any:
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(missing_here).remote(config, catalogs)

    replies = {node.address: asked(node) for node in nodes}
    ray.wait(list(replies.values()), num_returns=len(replies), timeout=_LOOK_S)
    lacking: list[str] = []
    for address, reply in replies.items():
        try:
            missing: dict[str, str] = ray.get(reply, timeout=1.0)
        except Exception as error:  # noqa: BLE001 - a node of another version, one that dies: whatever Ray raises
            log.warning("%s does not say whether it has the models: %s", address, " ".join(str(error).split())[-300:])
            continue
        if missing and len(missing) == len(loaded(catalogs)):
            lacking.append(f"{address} lacks models: {next(iter(missing.values()))}")
            continue
        for task, reason in missing.items():
            log.warning("%s lacks models of task %s: %s", address, task, reason)
    if lacking:
        raise BackendError("; ".join(lacking))


def missing_here(config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> dict[str, str]:
    """The tasks of which this machine lacks a model file, and why."""
    return {task: error.message for task, error in lacking_models(config, catalogs).items()}


def free_cores(config: DatacenterConfig) -> str:
    """How many cores replicas can still get, in words."""
    import ray

    nodes, free = replica_nodes(), ray.available_resources().get("CPU", 0.0)
    spread = config.max_replicas_per_node
    most = "" if spread is None else f", and a node takes at most {spread} of a kind"
    return f"{free:g} of {sum(node.cores for node in nodes):g} cores on {len(nodes)} nodes are free{most}"

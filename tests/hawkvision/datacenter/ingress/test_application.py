"""The application as Ray gets it: what its deployments ask for, on one machine and on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from ray.serve import Application
from ray.serve._private.build_app import build_app
from ray.serve.deployment import deployment_to_schema

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.app import build
from hawkvision.datacenter.ingress.application import application
from hawkvision.datacenter.ingress.replica import INGRESS
from hawkvision.datacenter.launch.local_ray import cpus_for
from hawkvision.datacenter.stages.catalog import load_catalogs, loaded
from hawkvision.transport.settings import DatagramSettings

LAUNCHER = Path("/run/launcher")


def planned(app: Application) -> dict[str, Any]:
    """What Serve's config file would say of each deployment."""
    return {each.name: deployment_to_schema(each) for each in build_app(app, name="planned").deployments}


def test_one_machine_and_a_cluster_run_the_same_deployments(config: DatacenterConfig) -> None:
    here, there = planned(application(config, LAUNCHER)), planned(application(config))
    groups = {group.name for catalog in loaded(load_catalogs(config)).values() for group in catalog.groups}
    assert here == there
    assert here.keys() == {INGRESS, *groups}


def test_the_ingress_scales_in_a_cluster_and_not_at_the_sockets_of_a_launcher(config: DatacenterConfig) -> None:
    scaled = msgspec.structs.replace(config, ingress_min_replicas=2, ingress_max_replicas=5)
    there, here = planned(application(scaled))[INGRESS], planned(application(scaled, LAUNCHER))[INGRESS]
    assert there.ray_actor_options.num_cpus == here.ray_actor_options.num_cpus == 1.0
    assert (there.autoscaling_config.min_replicas, there.autoscaling_config.max_replicas) == (2, 5)
    assert here.num_replicas == 2


@pytest.mark.parametrize(
    ("ingresses", "replicas", "per_node", "expected"),
    [(2, 2, 1, 1), (2, 4, 2, 1), (4, 4, 2, 2), (2, 1, 1, 1), (6, 4, 1, 1)],
)
def test_ingresses_are_on_as_many_machines_as_the_stages_need(
    config: DatacenterConfig, ingresses: int, replicas: int, per_node: int, expected: int
) -> None:
    numbers = {"ingress_min_replicas": ingresses, "ingress_max_replicas": ingresses, "max_replicas": replicas}
    spread = msgspec.structs.replace(config, **numbers, max_replicas_per_node=per_node)
    assert planned(application(spread))[INGRESS].max_replicas_per_node == expected


def test_ray_has_a_core_for_each_that_is_reserved_and_a_worker_for_each_replica(config: DatacenterConfig) -> None:
    many = msgspec.structs.replace(config, max_replicas=3, num_cpus=2.5)
    assert cpus_for(application(many, LAUNCHER)) == 3 * 2.5 + 0.5 + 1
    assert cpus_for(application(msgspec.structs.replace(many, num_cpus=0.0), LAUNCHER)) == 3 + 1 + 1


def test_datagrams_need_a_launcher(config: DatacenterConfig) -> None:
    datagrams = msgspec.structs.replace(config, features=(DatagramSettings(port=0),))
    assert INGRESS in planned(application(datagrams, LAUNCHER))
    with pytest.raises(ConfigError, match=r"dc\.datagram_port = 0: in a cluster the tier speaks HTTP only"):
        application(datagrams)


def test_what_serve_imports_builds_it_from_settings(models: Path) -> None:
    built = build({"tasks": ["shapes"], "models_dir": str(models), "backend": "noop", "ingress_max_replicas": 3})
    scaling = planned(built)[INGRESS].autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)

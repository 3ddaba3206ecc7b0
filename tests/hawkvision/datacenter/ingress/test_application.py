"""The application as Ray gets it: what its deployments ask for, on one machine and on a cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.app import build
from hawkvision.datacenter.ingress.application import INGRESS, application
from hawkvision.datacenter.ingress.planned_deployments import PlannedDeployment, planned_deployments
from hawkvision.datacenter.stages.catalog import load_catalogs, loaded
from hawkvision.transport.settings import DatagramSettings

LAUNCHER = Path("/run/launcher")


def planned(config: DatacenterConfig, launcher: Path | None) -> dict[str, PlannedDeployment]:
    return {each.name: each for each in planned_deployments(application(config, launcher))}


def test_one_machine_and_a_cluster_run_the_same_deployments(config: DatacenterConfig) -> None:
    here, there = planned(config, LAUNCHER), planned(config, None)
    groups = {group.name for catalog in loaded(load_catalogs(config)).values() for group in catalog.groups}
    assert here == there
    assert here.keys() == {INGRESS, *groups}


def test_the_ingress_scales_in_a_cluster_and_not_at_the_sockets_of_a_launcher(config: DatacenterConfig) -> None:
    scaled = msgspec.structs.replace(config, ingress_min_replicas=2, ingress_max_replicas=5, ingress_num_cpus=0.5)
    assert planned(scaled, None)[INGRESS] == PlannedDeployment(INGRESS, cpus=0.5, gpus=0.0, least=2, most=5)
    assert planned(scaled, LAUNCHER)[INGRESS] == PlannedDeployment(INGRESS, cpus=0.5, gpus=0.0, least=2, most=2)


def test_datagrams_need_a_launcher(config: DatacenterConfig) -> None:
    datagrams = msgspec.structs.replace(config, features=(DatagramSettings(port=0),))
    assert INGRESS in planned(datagrams, LAUNCHER)
    with pytest.raises(ConfigError, match=r"dc\.datagram_port = 0: in a cluster the tier speaks HTTP only"):
        application(datagrams)


def test_what_serve_imports_builds_it_from_settings(models: Path) -> None:
    built = build({"tasks": ["shapes"], "models_dir": str(models), "backend": "noop", "ingress_max_replicas": 3})
    ingress = next(each for each in planned_deployments(built) if each.name == INGRESS)
    assert (ingress.least, ingress.most) == (1, 3)

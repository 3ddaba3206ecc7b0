"""Which node `dc drain` takes, and what `dc deploy` makes of the nodes. tests/system/cluster has real ones."""

from __future__ import annotations

from typing import Any

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.datacenter.cluster import find_node
from hawkvision.datacenter.cluster_nodes import Node, fitted
from hawkvision.datacenter.stages.catalog import load_catalogs

OWN, ELSEWHERE = "127.0.0.1", "192.0.2.7"


def node(number: int, address: str = OWN, cores: float = 2.0) -> Node:
    return Node(f"{number:056x}", f"machine-{number}", address, is_head=number == 0, cores=cores)


NODES = [node(0, ELSEWHERE), node(1, OWN), node(2, "192.0.2.8")]


@pytest.mark.parametrize("wanted", [NODES[2].id, "machine-2", "192.0.2.8"])
def test_a_node_is_found_by_its_id_name_or_address(wanted: str) -> None:
    assert find_node(NODES, wanted) is NODES[2]


def test_without_a_name_it_is_the_node_of_this_machine() -> None:
    assert find_node(NODES, None) is NODES[1]


@pytest.mark.parametrize(
    ("nodes", "wanted", "said"),
    [
        ([], None, "--node: 0 nodes of this machine; expected one of"),
        (NODES, "machine-9", "--node: 0 nodes called 'machine-9'; expected one of machine-0 "),
        ([NODES[1], node(3, OWN)], None, "--node: 2 nodes of this machine; expected one of machine-1 "),
        ([NODES[1], node(3, OWN)], OWN, "--node: 2 nodes called '127.0.0.1'"),
        (NODES, "machine-0", "--node: machine-0 is the head"),
    ],
)
def test_any_other_wish_is_refused_and_the_nodes_are_named(nodes: list[Node], wanted: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_node(nodes, wanted)
    assert str(refused.value).startswith(said)


NAMES = ("min_replicas", "max_replicas", "ingress_min_replicas", "ingress_max_replicas", "max_replicas_per_node")


@pytest.mark.parametrize(
    ("cores", "given", "numbers", "num_cpus"),
    [
        ([2], {}, (1, 1, 1, 1, None), 1.0),
        ([16], {}, (1, 1, 1, 1, None), None),
        ([2, 2], {}, (2, 2, 2, 2, 1), 1.0),
        ([16, 2, 16], {}, (2, 2, 2, 2, 1), None),
        ([4, 4], {"num_cpus": 0.5}, (2, 2, 2, 2, 1), 0.5),
        ([8, 8], {"tasks": ["imagenet", "cifar10"]}, (2, 2, 2, 2, 1), 3.0),
        ([2, 2], {"tasks": ["imagenet", "cifar10"]}, (2, 2, 2, 2, 1), 0.5),
        ([16, 16], {"max_replicas": 1}, (1, 1, 2, 2, 1), None),
        ([32, 32], {"max_replicas": 4}, (2, 4, 2, 2, 2), None),
        ([16, 16], {"min_replicas": 1, "ingress_min_replicas": 1}, (1, 2, 1, 2, 1), None),
        ([16, 16], {"max_replicas_per_node": 2}, (2, 2, 2, 2, 2), None),
        ([1, 1], {}, (2, 2, 2, 2, 1), None),
        ([], {}, (1, 1, 1, 1, None), None),
    ],
)
def test_any_of_several_nodes_may_be_lost_unless_somebody_chose_otherwise(
    cores: list[float], given: dict[str, Any], numbers: tuple[int | None, ...], num_cpus: float | None
) -> None:
    def read(defaults: Any) -> DatacenterConfig:
        return load_config(DatacenterConfig, overrides={"backend": "noop", **given}, environ={}, defaults=defaults)

    nodes = [node(number, cores=each) for number, each in enumerate(cores)]
    config = fitted(read, load_catalogs(read({})), nodes)
    assert tuple(getattr(config, name) for name in NAMES) == numbers
    assert config.num_cpus == num_cpus

"""Which node `hawkvision dc drain` takes. That no request is lost is shown on two machines (tests/system)."""

from __future__ import annotations

import pytest
from ray.util.state.common import NodeState

from hawkvision.core.errors import ConfigError
from hawkvision.datacenter.cluster import find_node

OWN, ELSEWHERE = "127.0.0.1", "192.0.2.7"


def node(number: int, address: str) -> NodeState:
    return NodeState(
        node_id=f"{number:056x}",
        node_ip=address,
        is_head_node=number == 0,
        state="ALIVE",
        state_message=None,
        node_name=f"machine-{number}",
        resources_total={},
        labels={},
        start_time_ms=None,
        end_time_ms=None,
    )


NODES = [node(0, ELSEWHERE), node(1, OWN), node(2, "192.0.2.8")]


@pytest.mark.parametrize("wanted", [NODES[2].node_id, "machine-2", "192.0.2.8"])
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
def test_any_other_wish_is_refused_and_the_nodes_are_named(nodes: list[NodeState], wanted: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_node(nodes, wanted)
    assert str(refused.value).startswith(said)

"""A tier of two tasks below a path, and nodes of both: over HTTP and by datagrams, with what operators use."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic
from urllib.parse import urlsplit

import pytest

from hawkvision.client.blocking import Client
from hawkvision.core.types import Tier
from hawkvision.doctor import network
from hawkvision.doctor.findings import Level
from hawkvision.system.child_server import ServerProcess, running
from loadgen.commands.link_proxy import udp_port_of
from tests.hawkvision.datacenter.conftest import image
from tests.waiting import WAIT_LIMIT_S

pytestmark = pytest.mark.slow
NODES = {"imagenet": "tcp", "cifar10": "datagram"}
LOST = "letters"
"""A task without a manifest."""


@pytest.fixture(scope="module")
def nodes(noop_tier: ServerProcess) -> Iterator[dict[str, ServerProcess]]:
    with ExitStack() as stack:
        yield {
            task: stack.enter_context(
                running(
                    *("edge", "--backend", "noop", "--port", "0", "--task", task),
                    *("--datacenter-url", noop_tier.url, "--datacenter-transport", transport),
                )
            )
            for task, transport in NODES.items()
        }


def get(server: ServerProcess, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def escalated(node: ServerProcess) -> None:
    """Ask for the best answer until it comes from the datacenter: the node first looks for it."""
    with Client(node.url) as client:
        ends = monotonic() + WAIT_LIMIT_S
        while client.classify(image(), quality="best").tier is not Tier.DATACENTER:
            assert monotonic() < ends, node.output()


def test_nodes_of_two_tasks_escalate_to_one_tier_below_a_path(
    noop_tier: ServerProcess, nodes: dict[str, ServerProcess]
) -> None:
    assert noop_tier.url.endswith("/vision")

    def answered(task: str, path: str) -> float:
        counter = rf'hawkvision_datacenter_requests_total{{code="200",path="{path}",stage="[^"]+",task="{task}"}} (\S+)'
        return sum(map(float, re.findall(counter, get(noop_tier, "/vision/metrics")[1])))

    before = answered("imagenet", "/v1/infer"), answered("imagenet", "datagram"), answered("cifar10", "datagram")
    for node in nodes.values():
        escalated(node)
    ends = monotonic() + WAIT_LIMIT_S
    while answered("cifar10", "datagram") == before[2]:  # until then its images go over HTTP
        assert monotonic() < ends, nodes["cifar10"].output()
        escalated(nodes["cifar10"])
    assert answered("imagenet", "/v1/infer") > before[0]
    assert answered("imagenet", "datagram") == before[1]


def test_nothing_is_answered_outside_the_path(noop_tier: ServerProcess) -> None:
    status, body = get(noop_tier, "/v1/stages")
    assert (status, json.loads(body)["error"].endswith("below /vision")) == (404, True)


def test_a_task_that_cannot_be_loaded_is_named_and_the_tier_is_ready_with_the_others(noop_tier: ServerProcess) -> None:
    status, body = get(noop_tier, "/vision/readyz")
    states = {each["task"]: each["status"] for each in json.loads(body)["tasks"]}
    assert (status, states) == (200, dict.fromkeys(NODES, "ready") | {LOST: "failed"})
    assert "task 'letters' cannot be served: no task 'letters' under" in body
    assert [get(noop_tier, f"/vision/readyz?task={task}")[0] for task in (*NODES, LOST)] == [200, 200, 503]


def test_the_doctor_and_the_load_generator_find_a_tier_below_a_path(noop_tier: ServerProcess) -> None:
    first, *_ = network.datacenter(noop_tier.url, None, {}, task="cifar10")
    assert first.level is Level.OK
    (unknown,) = network.datacenter(noop_tier.url, None, {}, task="shapes")
    assert unknown.level is Level.PROBLEM
    assert "no task 'shapes' here; this tier serves 'imagenet', 'cifar10', 'letters'" in unknown.found
    (lost,) = network.datacenter(noop_tier.url, None, {}, task=LOST)
    assert lost.level is Level.WARNING
    assert "task 'letters' cannot be served: no task 'letters' under" in lost.found
    offered = json.loads(get(noop_tier, "/vision/v1/transport")[1])["datagram"]["port"]
    assert asyncio.run(udp_port_of(noop_tier.url, None)) == offered
    assert f"datagram: udp://127.0.0.1:{offered}" in noop_tier.output()


def test_a_node_whose_task_the_tier_does_not_serve_says_which_it_serves(noop_tier: ServerProcess) -> None:
    said: list[str] = []
    words = ("--backend", "noop", "--port", "0", "--task", "fashion_mnist", "--datacenter-url", f"{noop_tier.url}/")
    with running("edge", *words, on_line=said.append):
        ends = monotonic() + WAIT_LIMIT_S
        while not any("this tier serves 'imagenet', 'cifar10', 'letters'" in line for line in tuple(said)):
            assert monotonic() < ends, said

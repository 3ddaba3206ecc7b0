"""Edge and datacenter as real processes with images between them as datagrams: Ray's tier, and one that restarts."""

from __future__ import annotations

import re
import urllib.request
from contextlib import AbstractContextManager
from time import monotonic

import pytest

from hawkvision.client.blocking import Client
from hawkvision.core.types import Tier
from hawkvision.system.child_server import ServerProcess, running
from tests.bench.ports import free_port
from tests.edge.peer import running_peer
from tests.images import encoded

pytestmark = pytest.mark.slow
IMAGE = encoded(height=400, width=500)


def node_of(url: str, transport: str) -> AbstractContextManager[ServerProcess]:
    asked = ("--port", "0", "--backend", "noop", "--datacenter-url", url, "--datacenter-transport", transport)
    return running("edge", *asked, "--audit-share", "0")


def wait_for(client: Client, transport: str) -> None:
    """Until the node says that images go over this transport."""
    until = monotonic() + 60
    while client.targets()["datacenter"]["transport"] != transport:
        assert monotonic() < until


def answered(tier: ServerProcess, path: str) -> float:
    """Images that the tier has answered at one of its servers."""
    with urllib.request.urlopen(f"{tier.url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    counted = re.compile(rf'hawkvision_datacenter_requests_total{{code="200",path="{path}",.*}} (\S+)')
    return sum(float(found.group(1)) for found in map(counted.match, lines) if found)


def test_escalations_go_as_datagrams_and_are_answered_as_over_http(noop_tier: ServerProcess) -> None:
    before = answered(noop_tier, "datagram"), answered(noop_tier, "/v1/infer")
    with node_of(noop_tier.url, "datagram") as node, Client(node.url) as client:
        wait_for(client, "datagram")
        whole = client.classify(IMAGE, quality="best")
        hurried = client.classify(IMAGE, quality="best", deadline_ms=5_000)
    after = answered(noop_tier, "datagram"), answered(noop_tier, "/v1/infer")
    assert (whole.tier, whole.model) == (Tier.DATACENTER, "reference")
    # That one was encoded anew, so the edge's models count as well, if they had run by then.
    assert (hurried.tier, hurried.model.split("+")[-1]) == (Tier.DATACENTER, "reference")
    assert whole.received_fraction == hurried.received_fraction == 1.0
    assert (after[0] - before[0], after[1] - before[1]) == (2.0, 0.0)


def test_a_clean_link_is_left_to_tcp_and_what_it_is_like_is_known(noop_tier: ServerProcess) -> None:
    with node_of(noop_tier.url, "auto") as node, Client(node.url) as client:
        until = monotonic() + 60
        # A machine that stands still for a moment looks like a link that loses.
        while (datacenter := client.targets()["datacenter"])["loss"] != 0.0:
            client.classify(IMAGE, quality="best")  # probes are frequent while images are escalated
            assert monotonic() < until
    assert (datacenter["transport"], datacenter["up"]) == ("tcp", True)
    assert 0.0 < datacenter["rtt_ms"] < 1_000.0


def test_a_datacenter_that_was_started_anew_is_found_again() -> None:
    port = free_port()
    with node_of(f"http://127.0.0.1:{port}", "datagram") as node, Client(node.url) as client:
        for _ in range(2):  # each has a UDP port and a certificate of its own
            with running_peer(port, datagram=True) as peer:
                wait_for(client, "datagram")
                assert client.classify(IMAGE, quality="best").tier is Tier.DATACENTER
                assert len(peer.datagrams) == 1
            wait_for(client, "tcp")
            assert client.classify(IMAGE, quality="best").tier is Tier.EDGE

"""When the event loop of a node may run inference itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from edge.factory import BRIEF_PIXELS, on_loop
from edge.inference.edge_stage import InferenceJob
from hawkvision.core.escalation_api import EscalationRequest
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.trace_context import start_trace
from hawkvision.imaging.image_header import probe
from hawkvision.transport.settings import DatagramSettings
from tests.edge.bench import bench
from tests.edge.peer import Peer, running_peer
from tests.images import encoded
from tests.waiting import until


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with running_peer() as peer:
        yield peer


@pytest.mark.parametrize(
    "config",
    [
        EdgeConfig(features=(DatagramSettings(port=0),)),
        EdgeConfig(backend="fpga-device"),
        EdgeConfig(onnx_providers=("CUDAExecutionProvider",)),
    ],
)
def test_with_datagrams_or_a_device_no_image_runs_on_the_loop(config: EdgeConfig) -> None:
    assert on_loop(config, None) is None


def test_small_images_run_on_the_loop_while_no_escalation_is_pending(peer: Peer) -> None:
    async def scenario() -> list[bool]:
        async with bench(peer, audit_share=0.0) as asked:
            datacenter = asked.node.datacenter
            assert datacenter is not None
            may = on_loop(EdgeConfig(), datacenter)
            assert may is not None
            header = probe(encoded())
            look = InferenceJob(asked.node.stage, encoded(), header, 5, 10 * BRIEF_PIXELS, asked.clock)
            large = replace(look, header=replace(header, width=BRIEF_PIXELS + 1, height=1))
            said = [may(look), may(large)]
            peer.held = True
            asking = asyncio.create_task(
                datacenter.infer(encoded(), EscalationRequest(variant="committee"), start_trace(), timeout_s=30.0)
            )
            await until(lambda: not datacenter.quiet)
            said.append(may(look))
            peer.held = False
            await asking
            return [*said, may(look)]

    try:
        assert asyncio.run(scenario()) == [True, False, False, True]
    finally:
        peer.held = False

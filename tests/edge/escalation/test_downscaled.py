"""Images much larger than the stages use: what is sent is the part of them that the stages need."""

from __future__ import annotations

import threading

import pytest

from hawkvision.core.errors import BadImage
from hawkvision.core.types import Answer, MaxAccuracyDrop, Quality, Tier
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.preprocessing import probe
from tests.edge.bench import SPEC, SURE, UNSURE, Bench, bench, known, run
from tests.edge.peer import Peer, running_peer
from tests.edge.serving.test_node import doubted
from tests.hawkvision.cascade.synthetic import SHA
from tests.images import encoded
from tests.waiting import until

REDUCER = Reducer((SPEC,), 1_000_000)
CAMERA = encoded(height=480, width=640)
SMALL = encoded(height=20, width=20)
SEEN = (16, 16)
"""What the datacenter's stages take in."""


def sizes(bodies: list[bytes]) -> list[tuple[int, int]]:
    headers: list[ImageHeader] = [probe(body) for body in bodies]
    return [(header.height, header.width) for header in headers]


def sent_bytes(it: Bench) -> float:
    return it.node.metrics.registry.get_sample_value("hawkvision_uplink_bytes_total", {"task": "digits"}) or 0.0


@pytest.mark.parametrize("target", [Quality.BEST, MaxAccuracyDrop(0.01)])
@pytest.mark.parametrize("deadline_ms", [None, 20_000.0])
def test_a_cameras_image_is_escalated_as_the_square_that_the_stage_uses(
    large: Peer, target: Quality | MaxAccuracyDrop, deadline_ms: float | None
) -> None:
    async def scenario() -> tuple[Answer, float]:
        async with bench(large, UNSURE, reducer=REDUCER) as it:
            return await it.ask(body=CAMERA, target=target, deadline_ms=deadline_ms), sent_bytes(it)

    answer, counted = run(scenario)
    assert (answer.tier, answer.degraded, answer.received_fraction) == (Tier.DATACENTER, False, 1.0)
    assert sizes(large.bodies) == [SEEN]
    assert counted == len(large.bodies[0]) < len(CAMERA) / 10


def test_a_small_image_is_escalated_unchanged(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, UNSURE, reducer=REDUCER) as it:
            return await it.ask(body=SMALL)

    assert run(scenario).tier is Tier.DATACENTER
    assert large.bodies == [SMALL]


def test_audits_and_probes_send_reduced_images_too(large: Peer) -> None:
    async def audited() -> None:
        async with bench(large, SURE, audit_share=1.0, reducer=REDUCER) as it:
            await known(it.node)
            await it.ask(body=CAMERA)
            await until(lambda: len(large.bodies) == 1)

    async def tried() -> None:
        async with bench(large, UNSURE, reducer=REDUCER) as it:
            await doubted(it)
            before = len(large.bodies)
            answer = await it.ask(body=CAMERA, target=MaxAccuracyDrop(0.01), deadline_ms=200.0)
            assert answer.tier is Tier.EDGE
            await until(lambda: len(large.bodies) > before)

    run(audited)
    large.delay_s = 30.0
    run(tried)
    assert sizes(large.bodies)[0] == sizes(large.bodies)[-1] == SEEN


def test_over_datagrams_a_lossless_image_travels_as_reduced() -> None:
    with running_peer(datagram=True) as peer:
        peer.model, peer.fingerprint = "large", SHA

        async def scenario() -> Answer:
            async with bench(peer, UNSURE, transport="datagram", reducer=REDUCER) as it:
                datacenter = it.node.datacenter
                assert datacenter is not None
                await until(lambda: datacenter.transport.value == "datagram")
                return await it.ask(body=CAMERA, target=Quality.BEST)

        assert run(scenario).tier is Tier.DATACENTER
        assert [body for _, body in peer.datagrams] == [REDUCER.reduced(CAMERA, probe(CAMERA))]


def test_a_large_broken_image_is_refused_and_the_next_is_answered(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, UNSURE, reducer=REDUCER) as it:
            with pytest.raises(BadImage):
                await it.ask(body=CAMERA[: len(CAMERA) // 2], target=Quality.BEST)
            assert large.bodies == []
            return await it.ask(body=CAMERA, target=Quality.BEST)

    assert run(scenario).tier is Tier.DATACENTER


def test_the_time_of_a_reduction_is_subtracted_from_the_datacenters(large: Peer) -> None:
    class Slow(Reducer):
        def reduced(self, body: bytes, header: ImageHeader) -> bytes:
            threading.Event().wait(1.0)  # as a huge image would take
            return super().reduced(body, header)

    async def scenario() -> Answer:
        async with bench(large, UNSURE, reducer=Slow((SPEC,), 1_000_000)) as it:
            return await it.ask(body=CAMERA, target=Quality.BEST, deadline_ms=20_000.0)

    assert run(scenario).deadline_met
    assert float(large.headers[0]["x-hawkvision-deadline-ms"]) < 19_000.0

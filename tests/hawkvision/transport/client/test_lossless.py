"""How well images travel: as they are where there is time for every byte, else as well as the link has room for."""

from __future__ import annotations

import asyncio
from typing import Final

import cv2
import msgspec
import numpy as np

from hawkvision.client.datagram import DatagramConnection
from hawkvision.client.request import TimeLimit, query_fields
from hawkvision.client.response import Reply
from hawkvision.core.escalation_api import Transports
from hawkvision.core.types import Quality
from hawkvision.transport.client.datagram_client import DatagramLink
from hawkvision.transport.coding.image_coding import Complete, Partial
from hawkvision.transport.coding.rate_fec_control import FINE, QUALITIES
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.transport.client.test_datagram_client import serving
from tests.hawkvision.transport.client.test_encoding_plan import ROOM
from tests.images import with_restarts

SIDE: Final = 256
KNOWN_AFTER: Final = 12
"""Images of a dozen datagrams each, after which a link's loss is known."""


def noisy(side: int = SIDE) -> bytes:
    """A JPEG without restart segments, larger than at the best quality that is coded anew."""
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)
    smooth = cv2.GaussianBlur(pixels, (0, 0), 2.0)
    return bytes(cv2.imencode(".jpg", smooth, (cv2.IMWRITE_JPEG_QUALITY, 93))[1].data)


BODY: Final = noisy()


async def arrivals(
    body: bytes, spec: LinkSpec, deadline_ms: float | None, n: int, quality: Quality | None = None
) -> list[Complete | Partial]:
    """What arrived of an image that a client sent n times, each after the answer to the one before."""
    async with serving() as server, UdpRelay(("127.0.0.1", server.udp.port), spec) as relay:
        server.port = relay.address[1]

        async def offered() -> Reply:
            return 200, None, msgspec.json.encode(Transports(await server.discover()))

        way = DatagramConnection("http://127.0.0.1", offered, paths=(), api_key=None, timeout_s=30.0)
        for _ in range(n):
            await way.exchange(body, query_fields(deadline_ms=deadline_ms, quality=quality), TimeLimit(30.0))
        await way.close()
    return [each.arrived for each in server.arrived if isinstance(each.arrived, Complete | Partial)]


QUICK, SLOW = (LinkSpec.parse(f"rate={rate},delay=2ms,seed=1") for rate in ("100mbit", "1mbit"))


def test_before_a_deadline_it_travels_as_it_is_once_the_link_is_known_to_be_quick() -> None:
    came = asyncio.run(arrivals(BODY, QUICK, deadline_ms=4_000.0, n=2 * KNOWN_AFTER))
    assert came[0] != Complete(BODY, None)
    assert Complete(BODY, None) in came, "at least once, should the machine stall"


def test_a_caller_with_a_fallback_may_risk_more_for_unchanged_images() -> None:
    async def carried() -> list[bool]:
        async with serving() as server:
            spec = LinkSpec.parse("rate=100mbit,delay=20ms,loss=30%,burst=6,seed=3")
            async with UdpRelay(("127.0.0.1", server.udp.port), spec) as relay:
                server.port = relay.address[1]
                link = DatagramLink("127.0.0.1", server.discover, may_miss=1.0)
                # Too little time to send again all that is lost, but not for half as much parity. How much is lost is
                # measured, so at first it may be taken for less, of which parity mends enough for both.
                found: list[bool] = []
                async with asyncio.timeout(30.0):
                    while found != [True, False]:
                        await link.ask(b"", BODY, lossless=True)
                        found = [link.fits_lossless(BODY, 0.2, strict=strict) for strict in (False, True)]
                await link.close()
                return found

    assert asyncio.run(carried()) == [True, False]


def test_a_jpeg_that_is_cut_along_its_restart_markers_stays_so_over_a_quick_link_for_parts_of_it_can_be_shown() -> None:
    body = with_restarts(quality=90)
    came = asyncio.run(arrivals(body, QUICK, deadline_ms=4_000.0, n=2 * KNOWN_AFTER))
    assert Complete(body, None) not in came


def test_on_a_slow_link_or_for_speed_an_image_is_encoded_anew_at_the_quality_that_fits() -> None:
    fast = asyncio.run(arrivals(BODY, QUICK, deadline_ms=4_000.0, n=2 * KNOWN_AFTER, quality=Quality.FAST))
    assert Complete(BODY, None) not in fast
    assert QUALITIES[0] in {each.quality for each in fast}, "at least once, should the machine stall"
    coarse = asyncio.run(arrivals(BODY, SLOW, deadline_ms=400.0, n=4))[-1].quality
    assert coarse is not None
    assert coarse < FINE


def test_without_a_deadline_the_first_one_travels_as_it_is() -> None:
    datagram = LinkSpec.parse("rate=20mbit,delay=2ms,loss=10%,queue=100kB,seed=1")
    assert asyncio.run(arrivals(BODY, datagram, deadline_ms=None, n=1)) == [Complete(BODY, None)]


def test_without_a_deadline_an_image_that_does_not_fit_is_encoded_anew() -> None:
    body = noisy(8 * SIDE)
    assert len(body) > MAX_SYMBOLS * ROOM
    (arrived,) = asyncio.run(arrivals(body, LinkSpec(), deadline_ms=None, n=1))
    assert arrived.quality is not None
    assert len(arrived.body) < len(body)

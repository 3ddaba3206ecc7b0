"""How well pictures travel: as they are where there is time for every byte, else as well as the link has room for."""

from __future__ import annotations

import asyncio
from typing import Final

import cv2
import numpy as np
import pytest

from hawkvision.lossy_plan import MOST_SPARE, SMALL_FRAGMENTS, plain_bytes, prepare
from hawkvision.transport.coding import Complete, Kind, Partial
from hawkvision.transport.erasure import MAX_SYMBOLS
from hawkvision.transport.redundancy import FINE, QUALITIES
from loadgen.link import UdpRelay
from loadgen.link_spec import LinkSpec
from tests.hawkvision.test_lossy import FINE as PLAN
from tests.hawkvision.test_lossy import ROOM, linked, with_restarts

SIDE: Final = 256
KNOWN_AFTER: Final = 12
"""Pictures of a dozen datagrams each, after which a link's loss is known."""


def noisy(side: int = SIDE) -> bytes:
    """A JPEG without restart segments, larger than at the best quality that is coded anew."""
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)
    smooth = cv2.GaussianBlur(pixels, (0, 0), 2.0)
    return bytes(cv2.imencode(".jpg", smooth, (cv2.IMWRITE_JPEG_QUALITY, 93))[1].data)


BODY: Final = noisy()


async def arrivals(body: bytes, spec: LinkSpec, deadline_s: float | None, n: int) -> list[Complete | Partial]:
    """What arrived of a picture that was sent n times, each after the answer to the one before; whole if unhurried."""
    async with linked() as (server, link), UdpRelay(("127.0.0.1", server.udp.port), spec) as relay:
        server.port = relay.address[1]
        for _ in range(n):
            await link.ask(b"", body, deadline_s=deadline_s, whole=deadline_s is None)
        found = [incoming.arrived for incoming in server.arrived]
    return [each for each in found if isinstance(each, Complete | Partial)]


def test_before_a_deadline_it_is_coded_anew_as_well_as_the_link_allows() -> None:
    quick, slow = (LinkSpec.parse(f"rate={rate},delay=2ms,seed=1") for rate in ("100mbit", "1mbit"))
    assert asyncio.run(arrivals(BODY, quick, deadline_s=4.0, n=KNOWN_AFTER))[-1].quality == QUALITIES[0]
    coarse = asyncio.run(arrivals(BODY, slow, deadline_s=0.4, n=4))[-1].quality
    assert coarse is not None
    assert coarse < FINE


def test_without_a_deadline_the_first_one_does_already() -> None:
    lossy = LinkSpec.parse("rate=20mbit,delay=2ms,loss=10%,queue=100kB,seed=1")
    (first,) = asyncio.run(arrivals(BODY, lossy, deadline_s=None, n=1))
    assert first == Complete(BODY, None)


@pytest.mark.parametrize("side", [4 * SIDE, 8 * SIDE])
def test_what_is_much_larger_than_coded_anew_is_coded_anew(side: int) -> None:
    body = noisy(side)
    assert len(body) > MOST_SPARE * plain_bytes(body, SIDE)
    (arrived,) = asyncio.run(arrivals(body, LinkSpec(), deadline_s=None, n=1))
    assert arrived.quality is not None
    assert len(arrived.body) < len(body)


def test_a_jpeg_that_can_be_cut_is_cut_all_the_same() -> None:
    assert prepare(with_restarts(), PLAN, SIDE, ROOM, whole=True).coded.format.kind is Kind.SEGMENTS
    assert prepare(BODY, PLAN, SIDE, ROOM, whole=True).coded.format.kind is Kind.OPAQUE


def test_a_picture_that_does_not_fit_is_coded_anew() -> None:
    body = noisy(8 * SIDE)
    assert len(body) > MAX_SYMBOLS * ROOM
    assert prepare(body, PLAN, SIDE, ROOM, whole=True).coded.format.kind is Kind.SEGMENTS


def test_the_picture_of_these_tests_is_neither_small_nor_too_large() -> None:
    assert SMALL_FRAGMENTS * ROOM < len(BODY) <= MOST_SPARE * plain_bytes(BODY, SIDE)

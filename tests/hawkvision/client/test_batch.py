"""Many images in one call: in order, within a bound, and one that fails stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.client.batch import AHEAD, in_order
from hawkvision.client.blocking import Client
from hawkvision.client.request import Image
from hawkvision.core.errors import BadField, BadImage, ConfigError
from hawkvision.core.types import Answer
from tests.hawkvision.client.client_node import ANSWER, Start, ok, refusal


def test_outcomes_come_in_order_and_a_failure_stands_in_its_place(start: Start, tmp_path: Path) -> None:
    node = start(ok(), refusal(BadImage("no image")), ok())
    with Client(node.url) as client:
        outcomes = list(client.classify_batch([b"1", b"2", tmp_path / "none", b"4"], concurrency=1, quality="fast"))
    assert outcomes[0] == outcomes[3] == ANSWER
    assert isinstance(outcomes[1], BadImage)
    assert isinstance(outcomes[2], FileNotFoundError)
    assert node.bodies == [b"1", b"2", b"4"]


def test_contradictory_fields_are_refused_before_anything_is_sent(start: Start) -> None:
    node = start()
    with Client(node.url) as client, pytest.raises(BadField):
        next(client.classify_batch([b"x"], quality="fast", min_accuracy=0.5))
    assert node.bodies == []


@pytest.mark.parametrize("concurrency", [0, -1])
def test_concurrency_must_be_positive(start: Start, concurrency: int) -> None:
    with Client(start().url) as client, pytest.raises(ConfigError, match="at least 1"):
        next(client.classify_batch([b"x"], concurrency=concurrency))


def test_endless_images_are_taken_as_there_is_room_and_no_more_after_the_caller_stops(start: Start) -> None:
    node, taken = start(), 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x"

    with Client(node.url) as client:
        outcomes = client.classify_batch(endless(), concurrency=2)
        assert next(outcomes) == ANSWER
        assert taken == 2 * AHEAD
        outcomes.close()
    assert taken == 2 * AHEAD


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 6))
def test_never_more_under_way_than_allowed_and_always_in_order(steps: list[int], concurrency: int) -> None:
    """`steps`: how many turns of the loop each call takes."""
    under_way = most = 0

    async def call(image: Image) -> Answer:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(steps[int(bytes(image))]):  # type: ignore[arg-type]
            await asyncio.sleep(0)
        under_way -= 1
        return ANSWER if int(bytes(image)) % 3 else raised(image)  # type: ignore[arg-type]

    def raised(image: Image) -> Answer:
        raise BadImage(str(image))

    async def scenario() -> list[object]:
        return [each async for each in in_order([b"%d" % i for i in range(len(steps))], call, concurrency)]

    outcomes = asyncio.run(scenario())
    assert [type(each) for each in outcomes] == [Answer if i % 3 else BadImage for i in range(len(steps))]
    assert most <= concurrency

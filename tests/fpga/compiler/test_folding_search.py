"""The folding search: what it finds keeps the rate, fits the device, and is no worse than any other."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpga.compiler.devices import device
from fpga.compiler.folding import Folding, check_folding, interval
from fpga.compiler.folding_search import ROUTABLE, cost, fastest, foldings, slowest_that_keeps_up
from fpga.compiler.resource_model import of_graph
from hawkvision.core.errors import CompileError
from tests.fuzz.examples import examples
from tests.hawkvision.integer.graphs import cifar_shape, fashion_shape, random_graph

SMALL = device("lfe5u-25f")


@given(rate=st.integers(200, 20_000))
@settings(max_examples=examples(15), deadline=None)
def test_found_folding_keeps_the_rate_and_fits(rate: int) -> None:
    graph, chip = fashion_shape(), device("lfe5u-85f")
    found = slowest_that_keeps_up(graph, chip, rate, 120.0)
    check_folding(graph, found)
    assert 120e6 / interval(graph, found) >= rate
    needed = of_graph(graph, found)
    assert needed.luts <= ROUTABLE * chip.resources.luts
    assert needed.fits(chip.resources)


def test_no_other_folding_is_cheaper_at_the_rate() -> None:
    graph, limit = random_graph(side=6, channels=(4,), pools=(0,), classes=2), 400
    found = slowest_that_keeps_up(graph, SMALL, 1e6 / limit, 1.0)
    stages = [stage.name for stage in graph.stages]
    cheapest = None
    for folds in itertools.product(*(list(foldings(stage)) for stage in graph.stages)):
        folding = Folding(stages=dict(zip(stages, folds, strict=True)))
        try:
            check_folding(graph, folding)
        except CompileError:
            continue
        if interval(graph, folding) <= limit:
            price = cost(of_graph(graph, folding), SMALL)
            cheapest = price if cheapest is None else min(cheapest, price)
    assert cheapest is not None
    assert cost(of_graph(graph, found), SMALL) == pytest.approx(cheapest)


def test_larger_device_is_faster_and_a_lower_rate_takes_less() -> None:
    graph = cifar_shape()
    small, large = (interval(graph, fastest(graph, device(f"lfe5u-{size}f"))) for size in (25, 85))
    assert large < small
    graph = fashion_shape()
    dear, cheap = (of_graph(graph, slowest_that_keeps_up(graph, SMALL, rate, 120.0)) for rate in (2_000, 200))
    assert cost(cheap, SMALL) < cost(dear, SMALL)


def test_device_without_room_for_the_slowest_folding_is_refused() -> None:
    chip = msgspec.structs.replace(SMALL, resources=msgspec.structs.replace(SMALL.resources, block_rams=5))
    with pytest.raises(CompileError, match="no folding of it fits lfe5u-25f"):
        fastest(fashion_shape(), chip)


def test_impossible_rate_is_refused_with_what_is_possible() -> None:
    with pytest.raises(
        CompileError, match=r"1,000,000 a second at 120 MHz would need 120 cycles .* holds no more than"
    ):
        slowest_that_keeps_up(fashion_shape(), SMALL, 1e6, 120.0)


def test_block_rams_and_multipliers_follow_the_rules_of_the_modules() -> None:
    graph = fashion_shape()
    slowest = Folding(stages={stage.name: next(iter(foldings(stage))) for stage in graph.stages})
    assert of_graph(graph, slowest).multipliers == 4 + 3  # one for each stage and each requantiser

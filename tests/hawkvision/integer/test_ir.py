"""Integer graphs: what is refused, that bytes give the same graph back, and what the reference computes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpga.compiler.folding import Folding, StageFolding, check_folding, cycles_of, format_folding, parse_folding
from hawkvision.core.errors import CompileError
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph, from_bytes, to_bytes
from hawkvision.integer.nodes import ActivationShape, Conv, Requantise
from tests.fuzz.examples import examples
from tests.hawkvision.integer.graphs import random_graph, random_images


def slow_logits(graph: IntegerGraph, image: np.ndarray) -> list[int]:
    """One image's logits in plain Python integers, loop by loop, as the top of `hawkvision/integer/ir.py` says."""
    maps = image.astype(int).tolist()
    for stage in graph.stages:
        conv, pad = stage.conv, stage.conv.pad
        made = []
        for y in range(stage.convolved.height):
            row = []
            for x in range(stage.convolved.width):
                point = []
                for out in range(conv.channels):
                    total = int(conv.bias[out])
                    for ky in range(conv.kernel):
                        for kx in range(conv.kernel):
                            at_y, at_x = y + ky - pad, x + kx - pad
                            if 0 <= at_y < stage.taken.height and 0 <= at_x < stage.taken.width:
                                for c in range(stage.taken.channels):
                                    total += int(conv.weights[out, ky, kx, c]) * maps[at_y][at_x][c]
                    if stage.requantise is not None:
                        node = stage.requantise
                        kept = min(max(total >> node.pre_shift, 0), 2**17 - 1)
                        scaled = (kept * int(node.multiplier[out]) + 2 ** (node.shift - 1)) >> node.shift
                        total = min(scaled, 2**node.bits - 1)
                    point.append(total)
                row.append(point)
            made.append(row)
        maps = made
        if stage.pool is not None:
            maps = [
                [
                    [max(maps[2 * y + j][2 * x + i][c] for j in (0, 1) for i in (0, 1)) for c in range(conv.channels)]
                    for x in range(len(maps[0]) // 2)
                ]
                for y in range(len(maps) // 2)
            ]
    return maps[0][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("side", [6, 7, 9])
@pytest.mark.parametrize("weight_bits", [3, 4, 8])
def test_reference_computes_what_the_definition_says(side: int, weight_bits: int) -> None:
    graph = random_graph(side, side=side, planes=3, channels=(3, 4), pools=(0,), classes=4, weight_bits=weight_bits)
    images = random_images(graph, 3)
    found = reference.logits(graph, images)
    assert found.tolist() == [slow_logits(graph, image) for image in images]


@given(seed=st.integers(0, 1000), planes=st.sampled_from([1, 3]), bits=st.integers(2, 8), side=st.integers(5, 12))
@settings(max_examples=examples(150), deadline=None)
def test_bytes_give_the_same_graph_back(seed: int, planes: int, bits: int, side: int) -> None:
    graph = random_graph(seed, side=side, planes=planes, weight_bits=bits)
    again = from_bytes(to_bytes(graph), "here")
    assert to_bytes(again) == to_bytes(graph)
    images = random_images(graph, 1, seed)
    assert (reference.logits(again, images) == reference.logits(graph, images)).all()


WHOLE = to_bytes(random_graph())


@given(st.binary(max_size=200) | st.integers(0, len(WHOLE) - 1).map(lambda length: WHOLE[:length]))
@settings(max_examples=examples(300), deadline=None)
def test_bytes_of_something_else_are_refused(content: bytes) -> None:
    with pytest.raises(CompileError, match=r"^here: not an integer graph"):
        from_bytes(content, "here")


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
@settings(max_examples=examples(300), deadline=None)
def test_bytes_with_a_wrong_one_are_refused_or_a_graph_that_reads_back(at: int, value: int) -> None:
    with contextlib.suppress(CompileError):
        graph = from_bytes(WHOLE[:at] + bytes([value]) + WHOLE[at + 1 :], "here")
        assert to_bytes(from_bytes(to_bytes(graph), "here")) == to_bytes(graph)


def changed(position: int, **changes: Any) -> dict[str, Any]:
    """Other fields of one node."""
    nodes = list(random_graph().nodes)
    nodes[position] = dataclasses.replace(nodes[position], **changes)
    return {"nodes": tuple(nodes)}


NODES = random_graph().nodes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nodes": NODES[1:]}, "requantise0: expected a convolution here, found Requantise"),
        ({"nodes": NODES[:-1]}, "the last node must be a convolution that gives logits"),
        ({"nodes": (NODES[0], *NODES[2:])}, "pool0: a convolution must be requantised"),
        ({"nodes": (*NODES[:2], NODES[0])}, "distinct names"),
        (changed(0, weights=np.zeros((4, 3, 3, 2), np.int8)), "conv0: it reads 2 channels, but is given 8x8x1"),
        (changed(0, weights=np.full((4, 3, 3, 1), -8, np.int8)), "conv0: a weight is beyond ±7"),
        (changed(0, bias=np.zeros(3, np.int32)), "conv0: bias: expected int32 (4,), got int32 (3,)"),
        (changed(0, bias=np.full(4, 2**31 - 1, np.int32), weight_bits=8), "conv0: the accumulator would need more"),
        (changed(0, weight_bits=9), "conv0: expected weights of 2 to 8 bits, got 9"),
        (changed(0, pad=5), "conv0: a kernel of 3 with padding 5 does not fit"),
        (changed(1, multiplier=np.zeros(4, np.int32)), "requantise0: multiplier: expected 1..511"),
        (changed(1, shift=0), "requantise0: shifts out of range"),
        (changed(1, bits=9), "requantise0: expected activations of 2 to 8 bits"),
        (changed(-1, pad=1), "head: the last convolution must cover its whole input"),
        ({"input": ActivationShape(8, 8, 2, 8)}, "expected 1 or 3 planes"),
        ({"input": ActivationShape(8, 8, 1, 7)}, "expected pixels of 8 bits"),
        ({"fill": (1, 2)}, "fill: expected 1 values"),
        ({"logit_scale": 0.0}, "logit_scale: expected a positive number"),
    ],
)
def test_what_breaks_the_rules_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError) as caught:
        dataclasses.replace(random_graph(), **change)
    assert says in caught.value.message


def test_accumulator_is_as_wide_as_its_worst_sum() -> None:
    conv = Conv("c", np.array([[[[7]]], [[[-7]]]], np.int8), np.array([0, -1], np.int32), 4)
    assert conv.accumulator_range(8) == (-7 * 255 - 1, 7 * 255)
    assert conv.accumulator_bits(8) == 12


def test_requantiser_rounds_to_nearest_and_saturates() -> None:
    node = Requantise("r", np.array([3], np.int32), pre_shift=1, shift=2)
    found = reference.requantise(node, np.array([[[[-5]], [[0]], [[3]], [[5]], [[1000]]]]))
    assert found.ravel().tolist() == [0, 0, 1, 2, 255]


def test_missing_pixels_show_the_row_above_or_the_fill() -> None:
    graph = random_graph(side=6)
    pixels = random_images(graph, 1)
    mask = np.ones((1, 6, 6), np.bool_)
    mask[0, 0, 1] = mask[0, 2:4, 3] = False
    out = reference.filled(graph, pixels, mask)
    assert out[0, 0, 1, 0] == graph.fill[0]
    assert (out[0, 2:4, 3, 0] == pixels[0, 1, 3, 0]).all()
    assert (out[mask] == pixels[mask]).all()


def test_grey_is_luminance_and_leaves_grey_images_as_they_are() -> None:
    graph = random_graph(planes=1)
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    assert (reference.planes(graph, np.repeat(values, 3, axis=3)) == values).all()


FOLD = {"conv0": StageFolding(taps=3, pe=2), "conv1": StageFolding(channels=2, pe=3), "head": StageFolding(channels=2)}


def test_folding_file_reads_back_as_it_was() -> None:
    folding = Folding(stages=FOLD)
    assert parse_folding(format_folding(folding), "here") == folding
    assert cycles_of(random_graph(), folding)["conv0"] == 8 * 8 * 3 * 2


@pytest.mark.parametrize(
    ("stage", "fold", "says"),
    [
        ("conv0", StageFolding(taps=2), "conv0: taps: expected 1, 3 or 9, got 2"),
        ("conv1", StageFolding(channels=3), "conv1: channels: expected a divisor of 4, got 3"),
        ("conv1", StageFolding(taps=9, channels=2), "conv1: channels: with all taps at once all 4 channels are"),
        ("conv1", StageFolding(pe=4), "conv1: pe: expected a divisor of 6, got 4"),
        ("conv1", StageFolding(pe=2, lanes=4), "conv1: lanes: expected a divisor of 2, got 4"),
        ("conv1", StageFolding(pe=2, lut_pe=3), "conv1: lut_pe: expected at most the 2"),
        ("conv1", StageFolding(taps=9, channels=4, pe=6), "conv1: lanes: 1 requantisers need 6 cycles"),
    ],
)
def test_foldings_that_cannot_be_built_are_refused(stage: str, fold: StageFolding, says: str) -> None:
    with pytest.raises(CompileError) as caught:
        check_folding(random_graph(), Folding(stages={**FOLD, stage: fold}))
    assert says in caught.value.message


@pytest.mark.parametrize("text", ["", "{", '{"format": 2, "stages": {}}', '{"stages": {"a": {"simd": 2}}}', "[]"])
def test_other_folding_files_are_refused(text: str) -> None:
    with pytest.raises(CompileError, match=r"^here"):
        parse_folding(text, "here")

"""Emission: the same bytes for the same graph, memories that say what the weights are, errors that name the place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fpga.compiler.emit import MODULES, emit, memory_names, sources, weight_memory
from fpga.compiler.folding import Folding, StageFolding, check_folding, dsp_blocks, packs
from hawkvision.core.errors import CompileError
from hawkvision.integer.ir import from_bytes, to_bytes
from tests.fpga.designs import CASES, FASHION, Case
from tests.hawkvision.integer.graphs import random_graph

FIRST = next(iter(CASES.values()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_same_graph_and_folding_give_the_same_bytes(case: Case) -> None:
    again = from_bytes(to_bytes(case.graph), "again")
    assert sources(again, case.folding) == sources(case.graph, case.folding)


def test_another_weight_changes_only_a_memory_and_the_name_of_the_graph() -> None:
    graph = random_graph(7)
    conv = graph.stages[0].conv
    weights = conv.weights.copy()
    weights[0, 0, 0, 0] ^= 1
    other = dataclasses.replace(graph, nodes=(dataclasses.replace(conv, weights=weights), *graph.nodes[1:]))
    before, after = (sources(g, FIRST.folding) for g in (graph, other))
    assert [name for name in before if before[name] != after[name]] == ["stage0_weights.mem", "hv_top.sv"]
    assert graph.sha256 in before["hv_top.sv"].decode()


def test_files_lie_in_reading_order_with_their_memories(tmp_path: Path) -> None:
    files = emit(FIRST.graph, FIRST.folding, tmp_path / "design")
    assert [path.name for path in files] == [*MODULES, "hv_top.sv"]
    memories = dict(memory_names(FIRST.graph))
    assert memories["STAGE1_BIAS"] == "stage1_bias.mem"
    assert all(path.is_file() for path in (*files, *(tmp_path / "design" / name for name in memories.values())))


def test_memory_has_a_word_for_each_beat_with_the_first_weight_lowest() -> None:
    stage = random_graph(weight_bits=8).stages[1]
    fold = StageFolding(taps=3, channels=2, pe=3)
    words = [int(line, 16) for line in weight_memory(stage, fold).split()]
    assert len(words) == 2 * 3 * 2
    # The second group's beat for kernel column 1 and the upper two input channels.
    word = words[6 + 1 * 2 + 1]
    found = [np.int8((word >> 8 * i & 255) - (word >> 8 * i & 128) * 2) for i in range(18)]
    expected = stage.conv.weights[3:6, :, 1, 2:4]
    assert found == expected.reshape(-1).tolist()


def test_weights_that_share_a_multiplier_carry_each_others_borrow() -> None:
    stage = random_graph(weight_bits=4).stages[1]
    words = [int(line, 16) for line in weight_memory(stage, StageFolding(channels=1, pe=2)).split()]
    low, high = words[0] & 15, words[0] >> 4
    first, second = (int(weight) for weight in stage.conv.weights[:2, 0, 0, 0])
    assert low == first & 15
    assert high == (second - (first < 0)) & 15


def test_multipliers_are_counted() -> None:
    stages = FASHION.graph.stages
    assert [dsp_blocks(stage, FASHION.folding.stages[stage.name]) for stage in stages] == [12, 96, 48, 0]
    assert packs(stages[0])
    wide = random_graph(weight_bits=8).stages[0]
    assert not packs(wide)
    assert dsp_blocks(wide, StageFolding(taps=3, pe=4, lanes=2)) == 14


def test_what_comes_and_what_is_read_at_once_must_divide_one_another() -> None:
    folding = Folding(stages={**FIRST.folding.stages, "conv1": StageFolding(channels=1, pe=2, lanes=2)})
    with pytest.raises(CompileError, match="head: channels: 2 come at once, 3 are read at once"):
        emit(FIRST.graph, Folding(stages={**folding.stages, "head": StageFolding(channels=3)}), Path("unused"))


@pytest.mark.parametrize(("taps", "rows", "says"), [(1, 3, "of its kernel, got 3"), (3, 4, "multiples of 3, got")])
def test_rows_that_a_stage_cannot_work_with_are_refused(taps: int, rows: int, says: str) -> None:
    folding = Folding(stages={**FIRST.folding.stages, "conv1": StageFolding(taps=taps, rows=rows)})
    with pytest.raises(CompileError, match=f"conv1: rows: expected more than .*{says}"):
        check_folding(FIRST.graph, folding)

"""Estimates what a folded graph takes of a device, before synthesis.

Multipliers and block RAMs follow rules of `fpga/rtl` and yosys and are counted. Look-up tables and flip-flops are sums
over what the modules hold (bits of adder trees, accumulators, windows and so on), with weights fitted to synthesised
designs. `python -m tests.bench.fpga.resources` fits the weights (`resources.toml`) and measures the error on other
foldings.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fpga.compiler.devices import Resources
from fpga.compiler.folding import OUTPUT_ROOM, Folding, StageFolding, beats, dsp_blocks, row_slots
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import KEPT_BITS, MULTIPLIER_BITS, ConvStage

TABLE: Final = Path(__file__).with_name("resources.toml")
BLOCK_SHAPES: Final = ((512, 36), (1024, 18), (2048, 9), (4096, 4), (8192, 2), (16384, 1))
"""Words of one block RAM, and bits per word."""
MAX_DISTRIBUTED: Final = 20
"""Blocks of 16 x 4 bits up to which yosys builds a memory of look-up tables."""
LOGIC_WORDS: Final = 16
"""Read-only memories of at most this many words are made of look-up tables (`hv_rom`)."""

Weight = Annotated[float, Meta(ge=0)]


LogicKind = Literal[
    "stage",  # stages: their counters and control
    "products",  # bits behind DSP blocks
    "table_products",  # bits of partial products made in look-up tables
    "tree",  # bits of the adder trees
    "sums",  # bits of accumulators
    "lanes",  # bits of requantisers, side by side
    "table_lanes",  # requantisers whose multiplier is made of look-up tables
    "rows",  # bits that the line memory gives to the multipliers in one cycle
    "window",  # bits of a whole window kept in registers
    "weights",  # bits of weights that are read in one cycle
    "table_words",  # bits of weights that are read in one cycle from look-up tables
    "distributed",  # blocks of 16 x 4 bits of distributed memory
]
Logic: TypeAlias = dict[LogicKind, Weight]
"""The amount of each kind of logic; or, fitted, what one unit of each takes."""


class ResourceWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fitted weights."""

    made_by: str
    luts: Logic
    ffs: Logic
    frame_luts: Weight
    """The input and output streams."""
    frame_ffs: Weight


@functools.cache
def model() -> ResourceWeights:
    """The weights, from their table."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=ResourceWeights)


def of_graph(graph: IntegerGraph, folding: Folding) -> Resources:
    """Estimated resources of a folded graph."""
    total, lanes = of_frame(graph), graph.input.channels
    for stage in graph.stages:
        fold = folding.stages[stage.name]
        total += of_stage(stage, fold, lanes)
        lanes = fold.lanes
    return total


def of_frame(graph: IntegerGraph) -> Resources:
    """Resources around the stages."""
    fitted = model()
    memories = [memory("row", graph.input.width, 8 * graph.input.channels), memory("queue", *_queue(graph))]
    return Resources(
        luts=round(fitted.frame_luts),
        ffs=round(fitted.frame_ffs),
        multipliers=0,
        block_rams=sum(part.block_rams for part in memories),
    )


def of_stage(stage: ConvStage, fold: StageFolding, lanes_in: int) -> Resources:
    """Resources of one stage that receives `lanes_in` channels per beat."""
    memories = _memories(stage, fold, lanes_in)
    found, fitted = _bits(stage, fold, lanes_in, memories), model()
    return Resources(
        luts=round(weigh(found, fitted.luts)),
        ffs=round(weigh(found, fitted.ffs)) - sum(part.registers for part in memories),
        multipliers=dsp_blocks(stage, fold),
        block_rams=sum(part.block_rams for part in memories),
    )


def weigh(found: Logic, weights: Logic) -> float:
    """The sum of all kinds, each times its weight."""
    return float(sum(count * weights[kind] for kind, count in found.items()))


class MemoryUse(msgspec.Struct, frozen=True):
    """The resources that one memory takes."""

    block_rams: int = 0
    distributed: int = 0
    """Blocks of 16 x 4 bits, as distributed memory or flip-flops."""
    logic: int = 0
    """Look-up tables, each of 16 words of one read-only bit."""
    registers: int = 0
    """Flip-flops behind it that move into it (`fpga.compiler.bram_output_registers`)."""


MemoryRole = Literal["line", "rom", "pixel", "half row", "row", "queue"]
"""The content of a memory: input rows of a stage; weights or biases; in `hv_pool` a pixel and half a row; the row
above; waiting logits."""


def memory(role: MemoryRole, words: int, width: int) -> MemoryUse:
    """The resources of a memory of `words` words of `width` bits."""
    small = -(-words // 16) * -(-width // 4)
    if role == "rom":
        if words <= LOGIC_WORDS:
            return MemoryUse(logic=width)
    elif role in ("pixel", "queue") or small <= MAX_DISTRIBUTED:
        return MemoryUse(distributed=small)
    blocks = min(-(-words // deep) * -(-width // wide) for deep, wide in BLOCK_SHAPES)
    return MemoryUse(block_rams=blocks, registers=width)


def _queue(graph: IntegerGraph) -> tuple[int, int]:
    """Words and width of the queue of logits, one per word, because the last stage has one lane."""
    stage = graph.stages[-1]
    words = 1 << (OUTPUT_ROOM * graph.classes - 1).bit_length()
    return words, stage.conv.accumulator_bits(stage.taken.bits)


def _memories(stage: ConvStage, fold: StageFolding, lanes_in: int) -> list[MemoryUse]:
    """Line memory, weights, biases and, with pooling, a pixel and half a row, as `fpga/rtl` has them."""
    conv, taken = stage.conv, stage.taken
    banks = 1 if fold.taps == 1 else conv.kernel
    word = max(fold.channels, lanes_in)
    row_words = 1 << (max(taken.width * taken.channels // word, 2) - 1).bit_length()
    line = memory("line", row_slots(stage, fold) // banks * row_words, word * taken.bits)
    groups = conv.channels // fold.lanes
    accumulator = conv.accumulator_bits(taken.bits)
    found = [
        *[line] * banks,
        memory("rom", beats(stage, fold) * (conv.channels // fold.pe), fold.multipliers * conv.weight_bits),
        memory("rom", groups, fold.lanes * (accumulator + MULTIPLIER_BITS)),
    ]
    if stage.pool is not None:
        width = fold.lanes * stage.given.bits
        found += [memory("pixel", groups, width), memory("half row", stage.convolved.width // 2 * groups, width)]
    return found


def bits(stage: ConvStage, fold: StageFolding, lanes_in: int) -> Logic:
    """The amount of each kind of logic in one stage."""
    return _bits(stage, fold, lanes_in, _memories(stage, fold, lanes_in))


def _bits(stage: ConvStage, fold: StageFolding, lanes_in: int, memories: list[MemoryUse]) -> Logic:
    conv, taken = stage.conv, stage.taken
    together, accumulator = fold.taps * fold.channels, conv.accumulator_bits(taken.bits)
    product, levels = conv.weight_bits + taken.bits, (together - 1).bit_length()
    nodes = [(-(-together // 2**level), product + level) for level in range(1, levels + 1)]
    lane = 3 * accumulator + 2 * KEPT_BITS + 2 * MULTIPLIER_BITS if stage.requantise is not None else accumulator
    return {
        "stage": 1,
        "products": together * (fold.pe - fold.lut_pe) * product,
        "table_products": together * fold.lut_pe * conv.weight_bits * taken.bits,
        "tree": fold.pe * sum(count * width for count, width in nodes),
        "sums": fold.pe * accumulator,
        "lanes": fold.lanes * lane,
        "table_lanes": fold.lanes if fold.lut_requantise else 0,
        "rows": (1 if fold.taps == 1 else conv.kernel) * max(fold.channels, lanes_in) * taken.bits,
        "window": together * taken.bits if fold.taps > conv.kernel else 0,
        "weights": fold.multipliers * conv.weight_bits,
        "table_words": sum(part.logic for part in memories),
        "distributed": sum(part.distributed for part in memories),
    }

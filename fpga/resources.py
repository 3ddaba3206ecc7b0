"""What a folded graph will take of a device, before anything is synthesised.

Multipliers and block RAMs follow rules that `fpga/rtl` and yosys fix, and are counted. Look-up tables and flip-flops
are sums over what the modules hold (bits of adder trees, accumulators, windows and so on), each kind with a weight
fitted to synthesised designs: `resources.toml`, written by `python -m tests.bench.fpga_resources`, which also measures
the error on foldings that took no part in the fit.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fpga.devices import Resources
from fpga.folding import Folding, StageFolding, beats, dsp_blocks, row_slots
from fpga.ir import KEPT_BITS, MULTIPLIER_BITS, Graph, Stage

TABLE: Final = Path(__file__).with_name("resources.toml")
BLOCK_SHAPES: Final = ((512, 36), (1024, 18), (2048, 9), (4096, 4), (8192, 2), (16384, 1))
"""Words and bits that one block RAM can be."""
MAX_DISTRIBUTED: Final = 20
"""Blocks of 16 x 4 bits up to which yosys makes a memory of look-up tables: found between 16 and 26."""
LOGIC_WORDS: Final = 16
"""A read-only memory of no more words is made of look-up tables (`hv_rom`)."""

Weight = Annotated[float, Meta(ge=0)]


class Bits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of each kind of logic there is; or, fitted, what a unit of it takes."""

    stage: Weight
    """Stages: their counters and control."""
    products: Weight
    """Bits behind DSP blocks."""
    table_products: Weight
    """Bits of partial products made in look-up tables."""
    tree: Weight
    """Bits of the adder trees."""
    sums: Weight
    """Bits of accumulators."""
    lanes: Weight
    """Bits of requantisers, side by side."""
    table_lanes: Weight
    """Requantisers whose multiplier is made of look-up tables."""
    rows: Weight
    """Bits that leave the line memory at once, and go on to the multipliers."""
    window: Weight
    """Bits of a whole window kept in registers."""
    weights: Weight
    """Bits of weights at once."""
    table_words: Weight
    """Bits of weights at once that lie in look-up tables."""
    distributed: Weight
    """Blocks of 16 x 4 bits of distributed memory."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fitted weights."""

    made_by: str
    luts: Bits
    ffs: Bits
    frame_luts: Weight
    """The streams in and out."""
    frame_ffs: Weight


@functools.cache
def model() -> Model:
    """From `resources.toml`."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=Model)


def of_graph(graph: Graph, folding: Folding) -> Resources:
    """All that a folded graph is estimated to take."""
    total, lanes = of_frame(graph), graph.input.channels
    for stage in graph.stages:
        fold = folding.stages[stage.name]
        total += of_stage(stage, fold, lanes)
        lanes = fold.lanes
    return total


def of_frame(graph: Graph) -> Resources:
    """What lies around the stages."""
    rows = memory(graph.input.width, 8 * graph.input.channels)
    return Resources(
        luts=round(model().frame_luts), ffs=round(model().frame_ffs), multipliers=0, block_rams=rows.block_rams
    )


def of_stage(stage: Stage, fold: StageFolding, lanes_in: int) -> Resources:
    """One stage, which is given `lanes_in` channels a beat."""
    memories = _memories(stage, fold, lanes_in)
    found, fitted = _bits(stage, fold, lanes_in, memories), model()
    return Resources(
        luts=round(weigh(found, fitted.luts)),
        ffs=round(weigh(found, fitted.ffs)) - sum(part.registers for part in memories),
        multipliers=dsp_blocks(stage, fold),
        block_rams=sum(part.block_rams for part in memories),
    )


def absorbed(graph: Graph, folding: Folding) -> int:
    """Flip-flops that go into block RAMs: counted, not fitted."""
    total, lanes = 0, graph.input.channels
    for stage in graph.stages:
        total += sum(part.registers for part in _memories(stage, folding.stages[stage.name], lanes))
        lanes = folding.stages[stage.name].lanes
    return total


def weigh(found: Bits, weights: Bits) -> float:
    """Every kind times its weight."""
    pairs = zip(msgspec.structs.astuple(found), msgspec.structs.astuple(weights), strict=True)
    return float(sum(count * weight for count, weight in pairs))


class Memory(msgspec.Struct, frozen=True):
    """What a memory becomes."""

    block_rams: int
    distributed: int
    """Blocks of 16 x 4 bits."""
    logic: int
    """Bits of look-up tables, each one a whole read-only memory."""
    registers: int = 0
    """Flip-flops behind it that become its own (`fpga.output_registers`)."""


def memory(words: int, width: int, *, distributed: bool | None = None) -> Memory:
    """A memory that is written and read; None leaves it to yosys, which takes block RAM for all but the smallest."""
    small = -(-words // 16) * -(-width // 4)
    if distributed or (distributed is None and small <= MAX_DISTRIBUTED):
        return Memory(0, small, 0)
    return Memory(_blocks(words, width), 0, 0, width)


def _blocks(words: int, width: int) -> int:
    return min(-(-words // deep) * -(-width // wide) for deep, wide in BLOCK_SHAPES)


def _rom(words: int, width: int) -> Memory:
    return Memory(0, 0, width) if words <= LOGIC_WORDS else Memory(_blocks(words, width), 0, 0, width)


def _memories(stage: Stage, fold: StageFolding, lanes_in: int) -> list[Memory]:
    """Line memory, weights, biases and, where it pools, half a row; as `fpga/rtl` lays them out."""
    conv, taken = stage.conv, stage.taken
    banks = 1 if fold.taps == 1 else conv.kernel
    word = max(fold.channels, lanes_in)
    row_words = 1 << (max(taken.width * taken.channels // word, 2) - 1).bit_length()
    line = memory(row_slots(stage) // banks * row_words, word * taken.bits)
    groups = conv.channels // fold.lanes
    accumulator = conv.accumulator_bits(taken.bits)
    found = [
        *[line] * banks,
        _rom(beats(stage, fold) * (conv.channels // fold.pe), fold.multipliers * conv.weight_bits),
        _rom(groups, fold.lanes * (accumulator + MULTIPLIER_BITS)),
    ]
    if stage.pool is not None:
        width = fold.lanes * stage.given.bits
        found += [
            memory(groups, width, distributed=True),
            memory(stage.convolved.width // 2 * groups, width),
        ]
    return found


def bits(stage: Stage, fold: StageFolding, lanes_in: int) -> Bits:
    """The kinds of logic of one stage."""
    return _bits(stage, fold, lanes_in, _memories(stage, fold, lanes_in))


def _bits(stage: Stage, fold: StageFolding, lanes_in: int, memories: list[Memory]) -> Bits:
    conv, taken = stage.conv, stage.taken
    together, accumulator = fold.taps * fold.channels, conv.accumulator_bits(taken.bits)
    product, levels = conv.weight_bits + taken.bits, (together - 1).bit_length()
    nodes = [(-(-together // 2**level), product + level) for level in range(1, levels + 1)]
    rows = (1 if fold.taps == 1 else conv.kernel) * max(fold.channels, lanes_in) * taken.bits
    lane = 3 * accumulator + 2 * KEPT_BITS + 2 * MULTIPLIER_BITS if stage.requantise is not None else accumulator
    return Bits(
        stage=1,
        products=together * (fold.pe - fold.lut_pe) * product,
        table_products=together * fold.lut_pe * conv.weight_bits * taken.bits,
        tree=fold.pe * sum(count * width for count, width in nodes),
        sums=fold.pe * accumulator,
        lanes=fold.lanes * lane,
        table_lanes=fold.lanes if fold.lut_requantise else 0,
        rows=rows,
        window=together * taken.bits if fold.taps > conv.kernel else 0,
        weights=fold.multipliers * conv.weight_bits,
        table_words=sum(part.logic for part in memories),
        distributed=sum(part.distributed for part in memories),
    )

"""Folding: how much of each stage exists in hardware at once, kept in a JSON file that people can edit.

A stage multiplies `taps × channels × pe` pairs per clock cycle: `taps` positions of the kernel (1, one column, or all),
`channels` input channels and `pe` output channels. The rest is a loop over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from hawkvision.core.errors import CompileError
from hawkvision.core.text_files import decode_text
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import ConvStage

Count = Annotated[int, Meta(ge=1, le=4096)]
MIN_ROW: Final = 3
"""Minimum cycles per row: the decision to begin the next row takes this long (`fpga/rtl/hv_window.sv`)."""
INPUT_GAP: Final = 4
"""Cycles between two rows of pixels (`fpga/rtl/hv_stream_in.sv`)."""
OUTPUT_ROOM: Final = 2
"""Images whose logits wait behind the last stage: one being read, one being produced."""
DSP_OPERAND_BITS: Final = 18


class StageFolding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage's parallelism."""

    taps: Count = 1
    """1, the kernel's side (one column at once), or all positions of the kernel."""
    channels: Count = 1
    """Input channels at once: a divisor of all; all of them if `taps` is more than a column."""
    pe: Count = 1
    """Output channels at once: a divisor of all."""
    lanes: Count = 1
    """Requantisers side by side: a divisor of `pe`."""
    lut_pe: Annotated[int, Meta(ge=0)] = 0
    """How many of `pe` use multipliers made of look-up tables instead of DSP blocks."""
    lut_requantise: bool = False
    """Whether the requantisers' multipliers, one per lane, are made of look-up tables."""
    rows: Annotated[int, Meta(ge=0, le=64)] = 0
    """Input rows that it keeps, more than the kernel's; 0: enough to never wait (`row_slots`)."""

    @property
    def multipliers(self) -> int:
        """Multiply-accumulates per cycle."""
        return self.taps * self.channels * self.pe


class Folding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The folding of a graph, by stage."""

    format: Literal[1] = 1
    stages: dict[str, StageFolding]


def parse_folding(text: bytes | str, where: str) -> Folding:
    """Read a folding file; `where` names it in errors.

    Raises:
        CompileError: if it is no JSON, or has another shape.
    """
    try:
        return msgspec.json.decode(text if isinstance(text, str) else decode_text(text), type=Folding)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CompileError(f"{where}: {error}") from None


def read_folding(path: Path) -> Folding:
    """Read a folding file.

    Raises:
        CompileError: if it cannot be read, is no JSON, or has another shape.
    """
    try:
        return parse_folding(path.read_bytes(), str(path))
    except OSError as error:
        raise CompileError(f"{path}: cannot be read: {error.strerror}") from None


def format_folding(folding: Folding) -> bytes:
    """A folding as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(folding), indent=2) + b"\n"


def check_folding(graph: IntegerGraph, folding: Folding) -> None:
    """Refuse a folding that cannot be built.

    Raises:
        CompileError: naming the stage and the field.
    """
    names = [stage.name for stage in graph.stages]
    if sorted(folding.stages) != sorted(names):
        raise CompileError(f"folding: expected the stages {names}, got {list(folding.stages)}")
    lanes = graph.input.channels
    for stage in graph.stages:
        fold = folding.stages[stage.name]
        _check_stage(stage, fold)
        if lanes % fold.channels and fold.channels % lanes:
            raise CompileError(
                f"folding: {stage.name}: channels: {lanes} come at once, {fold.channels} are read at once: "
                "one must divide the other"
            )
        lanes = fold.lanes


def _check_stage(stage: ConvStage, fold: StageFolding) -> None:
    at, kernel = f"folding: {stage.name}", stage.conv.kernel
    if fold.taps not in (1, kernel, kernel * kernel):
        raise CompileError(f"{at}: taps: expected 1, {kernel} or {kernel * kernel}, got {fold.taps}")
    _check_divides(f"{at}: channels", fold.channels, stage.taken.channels)
    if fold.taps > kernel and fold.channels != stage.taken.channels:
        raise CompileError(
            f"{at}: channels: with all taps at once all {stage.taken.channels} channels are, got {fold.channels}"
        )
    _check_divides(f"{at}: pe", fold.pe, stage.conv.channels)
    _check_divides(f"{at}: lanes", fold.lanes, fold.pe)
    if fold.lut_pe > fold.pe:
        raise CompileError(f"{at}: lut_pe: expected at most the {fold.pe} of pe, got {fold.lut_pe}")
    if fold.rows and (fold.rows <= kernel or (fold.taps > 1 and fold.rows % kernel)):
        several = "" if fold.taps == 1 else f", in multiples of {kernel}"
        raise CompileError(f"{at}: rows: expected more than the {kernel} of its kernel{several}, got {fold.rows}")
    if fold.pe // fold.lanes > beats(stage, fold):
        raise CompileError(
            f"{at}: lanes: {fold.lanes} requantisers need {fold.pe // fold.lanes} cycles for what comes every "
            f"{beats(stage, fold)}"
        )


def _check_divides(at: str, part: int, whole: int) -> None:
    if whole % part:
        raise CompileError(f"{at}: expected a divisor of {whole}, got {part}")


def beats(stage: ConvStage, fold: StageFolding) -> int:
    """Cycles for one group of `pe` outputs at one position."""
    return stage.conv.kernel**2 * stage.taken.channels // (fold.taps * fold.channels)


def packs(stage: ConvStage) -> bool:
    """Whether two weights share a DSP block's multiplier (`fpga/rtl/hv_mac.sv`)."""
    return 2 * stage.conv.weight_bits + stage.taken.bits <= DSP_OPERAND_BITS


def dsp_blocks(stage: ConvStage, fold: StageFolding) -> int:
    """Multipliers of 18×18 bits that a stage takes."""
    channels = fold.pe - fold.lut_pe
    multipliers = (-(-channels // 2) if packs(stage) else channels) * fold.taps * fold.channels
    return multipliers + (0 if stage.requantise is None or fold.lut_requantise else fold.lanes)


def row_slots(stage: ConvStage, fold: StageFolding) -> int:
    """Input rows that a stage keeps: `rows` of its folding, or enough that neither side waits for the other's pipeline.

    Enough are the rows under the kernel, one being written and usually two more; twice the kernel's rows where the
    kernel covers the whole input, so that one image arrives while another is processed.
    """
    kernel = stage.conv.kernel
    return fold.rows or (2 * kernel if kernel > 2 else 4)


def row_cycles(stage: ConvStage, fold: StageFolding) -> int:
    """Cycles from one output row of a stage to the next, without waiting."""
    kernel = stage.conv.kernel
    positions = stage.convolved.width * beats(stage, fold) * (stage.conv.channels // fold.pe)
    window = kernel - 1 if fold.taps > kernel else 0  # to fill the window before the row's first position
    return max(MIN_ROW, positions + window)


def cycles(stage: ConvStage, fold: StageFolding) -> int:
    """Cycles that a stage needs for one image."""
    return stage.convolved.height * row_cycles(stage, fold)


def cycles_of(graph: IntegerGraph, folding: Folding) -> Mapping[str, int]:
    """Cycles by stage; the greatest is the cycles from one image to the next."""
    return {stage.name: cycles(stage, folding.stages[stage.name]) for stage in graph.stages}


def input_cycles(graph: IntegerGraph) -> int:
    """Cycles in which an image's pixels arrive, one per cycle."""
    return graph.input.height * (graph.input.width + INPUT_GAP)


def interval(graph: IntegerGraph, folding: Folding) -> int:
    """Cycles from one image to the next (the initiation interval), if pixels are always there and logits taken."""
    return max(*cycles_of(graph, folding).values(), input_cycles(graph), graph.classes)


# Cycles of the modules in fpga/rtl, as stated at the top of each file and measured by
# tests/fpga/simulation/test_rtl_simulation.py.
_INPUT = 4
_DECISION = 4
"""Cycles from a row's last activation to the start of the row that needs it."""
_SUMS = 12
"""Window, multiplier, accumulator, without the adder tree."""
_LOGITS, _REQUANTISED = 3, 11
_POOLED = 6
_OUTPUT = 3


def latency(graph: IntegerGraph, folding: Folding) -> int:
    """Estimated cycles from an image's first pixel to its last logit on an idle device.

    A row begins when the rows that it needs are there and the row before has ended. Waits for free row slots are left
    out; they slow down only stages that wait for a slower one anyway.
    """
    at = graph.input
    rows = [_INPUT + row * (at.width + INPUT_GAP) + at.width - 1 for row in range(at.height)]
    for stage in graph.stages:
        rows = _rows_out(stage, folding.stages[stage.name], rows)
    return rows[-1] + _OUTPUT + folding.stages[graph.stages[-1].name].lanes - 1


def _rows_out(stage: ConvStage, fold: StageFolding, arrived: list[int]) -> list[int]:
    """When a stage's output rows are complete, from when its input rows are."""
    conv, height = stage.conv, stage.taken.height
    took = row_cycles(stage, fold)
    tree = (fold.taps * fold.channels - 1).bit_length()
    window = 1 if fold.taps > conv.kernel else 0
    after = _SUMS + tree + window + fold.pe // fold.lanes + (_LOGITS if stage.requantise is None else _REQUANTISED)
    if stage.pool is not None:
        after += _POOLED
        if stage.convolved.width % 2:
            after -= took // stage.convolved.width  # the last column is left out
    done, begun = [], -took
    for row in range(stage.convolved.height):
        needed = min(row - conv.pad + conv.kernel, height) - 1
        begun = max(begun + took, arrived[needed] + _DECISION)
        done.append(begun + took + after)
    return done if stage.pool is None else done[1::2]

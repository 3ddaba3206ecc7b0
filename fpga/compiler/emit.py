"""Writes a graph and its folding as SystemVerilog: the modules of `fpga/rtl`, a generated top, and memory contents.

The same graph and folding give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fpga.compiler.folding import OUTPUT_ROOM, Folding, StageFolding, check_folding, packs, row_slots
from hawkvision.core.errors import CompileError
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import MULTIPLIER_BITS, ConvStage

TOP: Final = "hv_top"
RTL: Final = Path(__file__).parents[1] / "rtl"
MODULES: Final = (
    "hv_mul.sv",
    "hv_sum.sv",
    "hv_mac.sv",
    "hv_rom.sv",
    "hv_requantise.sv",
    "hv_pool.sv",
    "hv_fifo.sv",
    "hv_window.sv",
    "hv_stage.sv",
    "hv_stream_in.sv",
    "hv_stream_out.sv",
)
"""In reading order, before the top."""


def emit(graph: IntegerGraph, folding: Folding, folder: Path) -> list[Path]:
    """Write a design's files into a folder, which is created if missing.

    Returns its SystemVerilog files in reading order, the top (`TOP`) last. Tools that use the top's defaults look for
    the contents of memories in their working folder.

    Raises:
        CompileError: if the folding does not fit the graph, or the folder cannot be written to.
    """
    files = sources(graph, folding)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise CompileError(f"{folder}: cannot write the design: {error.strerror}") from None
    return [folder / name for name in files if name.endswith(".sv")]


def sources(graph: IntegerGraph, folding: Folding) -> dict[str, bytes]:
    """A design's files by name: the modules, memory contents, and the top last.

    Raises:
        CompileError: if the folding does not fit the graph.
    """
    check_folding(graph, folding)
    files = {name: (RTL / name).read_bytes() for name in MODULES}
    for number, stage in enumerate(graph.stages):
        fold = folding.stages[stage.name]
        files[f"stage{number}_weights.mem"] = weight_memory(stage, fold)
        files[f"stage{number}_bias.mem"] = bias_memory(stage, fold)
    files[f"{TOP}.sv"] = _top(graph, folding).encode()
    return files


def memory_names(graph: IntegerGraph) -> Iterator[tuple[str, str]]:
    """(parameter of the top, file name) of each read-only memory."""
    for number in range(len(graph.stages)):
        for kind in ("weights", "bias"):
            yield f"STAGE{number}_{kind.upper()}", f"stage{number}_{kind}.mem"


def accumulator_bits(stage: ConvStage) -> int:
    """Width of a stage's sums in hardware."""
    return stage.conv.accumulator_bits(stage.taken.bits)


def weight_memory(stage: ConvStage, fold: StageFolding) -> bytes:
    """One word per beat of a position, in the order in which hv_window reads them."""
    conv, kernel = stage.conv, stage.conv.kernel
    groups, blocks = conv.channels // fold.pe, stage.taken.channels // fold.channels
    weights = conv.weights.astype(np.int64).reshape(groups, fold.pe, kernel, kernel, blocks, fold.channels)
    if packs(stage):
        upper, lower = _pairs(fold)
        weights[:, upper] -= weights[:, lower] < 0
    if fold.taps == 1:
        # group, row, column, block | pe, channel
        beats = weights.transpose(0, 2, 3, 4, 1, 5)
    elif fold.taps == kernel:
        # group, column, block | pe, row, channel
        beats = weights.transpose(0, 3, 4, 1, 2, 5)
    else:
        # group | pe, row, column, channel
        beats = weights.transpose(0, 1, 2, 3, 4, 5)
    return _memory(beats.reshape(-1, fold.multipliers), conv.weight_bits)


def _pairs(fold: StageFolding) -> tuple[list[int], list[int]]:
    """The upper and lower channels of each pair that shares a multiplier."""
    lower = list(range(fold.lut_pe, fold.pe - 1, 2))
    return [channel + 1 for channel in lower], lower


def bias_memory(stage: ConvStage, fold: StageFolding) -> bytes:
    """One word per group of `lanes` channels: bias and multiplier of each channel."""
    bias = stage.conv.bias.astype(np.int64)
    multiplier = np.zeros_like(bias) if stage.requantise is None else stage.requantise.multiplier.astype(np.int64)
    mask = (1 << accumulator_bits(stage)) - 1
    words = ((bias & mask) << MULTIPLIER_BITS) | multiplier
    return _memory(words.reshape(-1, fold.lanes), accumulator_bits(stage) + MULTIPLIER_BITS)


def _memory(words: NDArray[np.int64], bits: int) -> bytes:
    """Rows of numbers as lines of a hexadecimal memory file, the first number in the low bits."""
    digits = -(-words.shape[1] * bits // 4)
    mask = (1 << bits) - 1
    lines = []
    for row in words.tolist():
        value = 0
        for number in reversed(row):
            value = value << bits | number & mask
        lines.append(f"{value:0{digits}x}\n")
    return "".join(lines).encode()


def _top(graph: IntegerGraph, folding: Folding) -> str:
    stages, at = graph.stages, graph.input
    folds = [folding.stages[stage.name] for stage in stages]
    slots = [row_slots(stage, fold) for stage, fold in zip(stages, folds, strict=True)]
    lines = [*_header(graph), *_wires(graph, folds), *_input_instance(graph, slots[0])]
    for number, (stage, fold) in enumerate(zip(stages, folds, strict=True)):
        lanes = at.channels if number == 0 else folds[number - 1].lanes
        room = slots[number + 1] if number + 1 < len(stages) else OUTPUT_ROOM
        lines += _stage_instance(number, stage, fold, lanes, slots[number], room)
    lines += _output_instance(graph, folds[-1])
    return "\n".join([*lines, "endmodule", ""])


def _header(graph: IntegerGraph) -> list[str]:
    at = graph.input
    return [
        "// hv_top: generated by fpga/compiler/emit.py from a graph and its folding; do not edit.",
        f"// graph {graph.sha256}",
        f"// {at} in, {graph.classes} logits out; the streams are described in hv_stream_in.sv and hv_stream_out.sv",
        f"module {TOP} #(",
        ",\n".join(f'  parameter {parameter} = "{name}"' for parameter, name in memory_names(graph)),
        ")(",
        "  input  wire clk,",
        "  input  wire rst,",
        "  input  wire s_valid,",
        "  output wire s_ready,",
        f"  input  wire [{8 * at.channels - 1}:0] s_data,",
        "  input  wire s_mask,",
        "  output wire m_valid,",
        "  input  wire m_ready,",
        "  output wire signed [31:0] m_data,",
        "  output wire m_last",
        ");",
    ]


def _wires(graph: IntegerGraph, folds: Sequence[StageFolding]) -> Iterator[str]:
    """The streams between the instances."""
    widths = [8 * graph.input.channels] + [
        fold.lanes * (accumulator_bits(stage) if stage.requantise is None else stage.given.bits)
        for stage, fold in zip(graph.stages, folds, strict=True)
    ]
    for number, width in enumerate(widths):
        yield f"  wire valid_{number}, freed_{number};"
        yield f"  wire [{width - 1}:0] data_{number};"


def _input_instance(graph: IntegerGraph, room: int) -> list[str]:
    at = graph.input
    fill = "_".join(f"{value:02x}" for value in reversed(graph.fill))
    parameters: dict[str, int | str] = {
        "H": at.height,
        "W": at.width,
        "C": at.channels,
        "ROOM": room,
        "FILL": f"{8 * at.channels}'h{fill}",
    }
    ports = {name: name for name in ("s_valid", "s_ready", "s_data", "s_mask")}
    ports |= {"freed": "freed_0", "out_valid": "valid_0", "out_data": "data_0"}
    return _instance("hv_stream_in", "stream_in", parameters, ports)


def _output_instance(graph: IntegerGraph, fold: StageFolding) -> list[str]:
    last = len(graph.stages)
    accumulator = accumulator_bits(graph.stages[-1])
    parameters = {"CLASSES": graph.classes, "LANES": fold.lanes, "ACCW": accumulator, "ROOM": OUTPUT_ROOM}
    ports = {"in_valid": f"valid_{last}", "in_data": f"data_{last}", "freed": f"freed_{last}"}
    ports |= {"m_valid": "m_valid", "m_ready": "m_ready", "m_data": "m_data", "m_last": "m_last"}
    return _instance("hv_stream_out", "stream_out", parameters, ports)


def _stage_instance(
    number: int, stage: ConvStage, fold: StageFolding, lanes_in: int, slots: int, room: int
) -> list[str]:
    parameters: dict[str, int | str] = {
        **_shape_parameters(stage),
        "IN_LANES": lanes_in,
        "TAPS": fold.taps,
        "CH": fold.channels,
        "PE": fold.pe,
        "LANES": fold.lanes,
        "LUT_PE": fold.lut_pe,
        "LUT_REQUANTISE": int(fold.lut_requantise),
        "PACK": int(packs(stage)),
        "RING": slots,
        "ROOM": room,
        "WEIGHT_FILE": f"STAGE{number}_WEIGHTS",
        "BIAS_FILE": f"STAGE{number}_BIAS",
    }
    ports = {
        "in_valid": f"valid_{number}",
        "in_data": f"data_{number}",
        "freed": f"freed_{number}",
        "room_freed": f"freed_{number + 1}",
        "out_valid": f"valid_{number + 1}",
        "out_data": f"data_{number + 1}",
    }
    # Node names are free text; Verilog comments get only letters, digits and underscores.
    named = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in stage.name)
    return [f"  // {named}", *_instance("hv_stage", f"stage{number}", parameters, ports)]


def _shape_parameters(stage: ConvStage) -> dict[str, int]:
    node = stage.requantise
    return {
        "H": stage.taken.height,
        "W": stage.taken.width,
        "CIN": stage.taken.channels,
        "COUT": stage.conv.channels,
        "K": stage.conv.kernel,
        "PAD": stage.conv.pad,
        "AB": stage.taken.bits,
        "WB": stage.conv.weight_bits,
        "ACCW": accumulator_bits(stage),
        "OB": stage.given.bits if node is not None else 8,
        "PRE_SHIFT": node.pre_shift if node is not None else 0,
        "SHIFT": node.shift if node is not None else 1,
        "RAW": int(node is None),
        "POOL": int(stage.pool is not None),
    }


def _instance(module: str, name: str, parameters: Mapping[str, int | str], ports: Mapping[str, str]) -> list[str]:
    given = ", ".join(f".{key}({value})" for key, value in parameters.items())
    joined = ", ".join(f".{key}({value})" for key, value in {"clk": "clk", "rst": "rst", **ports}.items())
    return [f"  {module} #({given})", f"  {name} ({joined});"]

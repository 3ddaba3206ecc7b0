"""Checks the power model against published measurements.

    python -m tests.bench.fpga.power_calibration [--out FOLDER]

Two publications give currents of the core of an iCE40UP5K, a 40 nm FPGA with open tools. The first (counters and one
multiplication, github.com/tinyvision-ai-inc/ice40_power) fixes the constants; the second (MARLANN,
github.com/SymbioticEDA/MARLANN) is then predicted. Circuits are written from the descriptions, synthesised for iCE40,
and their switching is counted as for our own designs. Exit status 1 if a prediction is off by more than 30 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy.optimize import nnls

from fpga.compiler.toolchain import find
from fpga.reports.energy import constants
from fpga.reports.pages import table as markdown_table
from fpga.simulation.cell_layout import LANES
from fpga.simulation.netlist_simulation import NetlistSimulation, SwitchingActivity, Words
from hawkvision.system.subprocess_runner import run

CIRCUITS: Final = Path(__file__).with_name("power")
GOAL: Final = 0.30
CYCLES: Final = 4096
VOLTS: Final = 1.219
HALTED_UA: Final = 92.1
"""Configured, the clock halted: what flows without any cycle."""
BRANCH: Final = 1 / 3
"""What a further input costs of the first: neither set of measurements can tell them apart."""
STORE_PJ: Final = (6.0, 12.0, 24.0)
"""For a cycle of a 256 kbit single-port memory: an assumption, twice a block RAM's."""

# Bits of the counter and microamperes of the core at 12 MHz from outside; the circuit and the table agree that the
# four are one counter of so many bits, whose upper bits hardly ever change: what grows is the clock's load.
COUNTERS: Final = {28: 613.5, 56: 616.65, 112: 624.2, 224: 641.3}
OSCILLATOR_24_UA: Final = 645.0
TABLES_UA: Final = 996.0
BLOCK_UA: Final = 882.0
MHZ: Final = 12.0

# MARLANN's: megahertz, milliamperes, volts.
IDLE: Final = (12.0, 2.9, 1.218)
RUNNING: Final = ((12.0, 8.7, 1.216), (20.0, 14.0, 1.214))
STORES: Final = 4
"""Its 16-bit memories of 256 kbit, which are selected in every cycle."""
BLOCKS: Final = 16 + 4
"""Its 4 kbit block RAMs: 512 coefficients of 128 bits, 512 instructions of 32; read in every cycle."""


@dataclass(frozen=True, slots=True)
class FittedModel:
    """Picojoules: a cycle of the clock network, a flip-flop's clock pin, a transition, an 8x8 product."""

    clock: float
    flip_flop: float
    toggle: float
    multiply: float


def pj_per_cycle(microamperes: float, mhz: float, volts: float = VOLTS, without_ua: float = HALTED_UA) -> float:
    """Energy of a cycle from a current."""
    return (microamperes - without_ua) * volts / mhz


def activity(name: str, stimulus: Mapping[str, Words], cycles: int, **parameters: int) -> SwitchingActivity:
    """Switching of one of our circuits, mapped to iCE40 cells."""
    sets = "".join(f" -set {key} {value}" for key, value in parameters.items())
    chparam = f"chparam{sets} {name}; " if sets else ""
    script = f"read_verilog -sv {name}.v; {chparam}synth_ice40 -top {name} -json {name}.json"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / f"{name}.v").write_bytes((CIRCUITS / f"{name}.v").read_bytes())
        run(find("yosys"), ["-q", "-p", script], cpu_limit_s=120, folder=folder, title="yosys").check()
        return NetlistSimulation(folder / f"{name}.json", name).cycles(stimulus, cycles, skip=cycles // 8)


def net_units(found: SwitchingActivity) -> float:
    """Transitions a cycle, further inputs counted with their share."""
    return (found.net_toggles + BRANCH * found.branch_toggles) / found.cycles


def planes(values: NDArray[np.uint64], bits: int) -> Words:
    """Numbers (cycles, lanes) as one word a bit (cycles, bits), lane l in bit l."""
    places = np.arange(bits, dtype=np.uint64)
    lanes = np.uint64(1) << np.arange(LANES, dtype=np.uint64)
    out = np.empty((len(values), bits), np.uint64)
    for bit, place in enumerate(places):
        out[:, bit] = ((values >> place & np.uint64(1)) * lanes).sum(axis=1)
    return out


def fit() -> tuple[FittedModel, list[list[str]]]:
    """Constants from the first set, from differences between designs, for these share their board and their day."""
    counters = {bits: activity("counter", {}, CYCLES, BITS=bits) for bits in COUNTERS}
    plain = activity("counter", {}, CYCLES, BITS=24)
    tables = activity("product", {"from_block": np.zeros((CYCLES, 16), np.uint64)}, CYCLES, TABLES=1)
    steps = np.arange(CYCLES, dtype=np.uint64)[:, None] * np.ones(LANES, np.uint64)
    found = (steps * np.uint64(3) % np.uint64(256)) * (steps * np.uint64(5) % np.uint64(256))
    block = activity("product", {"from_block": planes(found, 16)}, CYCLES, TABLES=0)
    pairs = [
        *((f"counter of {b} bits", counters[b], counters[28], COUNTERS[b] - COUNTERS[28], 0.0) for b in (56, 112, 224)),
        ("product in look-up tables", tables, plain, TABLES_UA - OSCILLATOR_24_UA, 0.0),
        ("product in a block", block, plain, BLOCK_UA - OSCILLATOR_24_UA, 1.0),
    ]
    rows = np.array([[a.flip_flops - b.flip_flops, net_units(a) - net_units(b), m] for _, a, b, _, m in pairs])
    energies = np.array([pj_per_cycle(ua, MHZ, without_ua=0) for *_, ua, _ in pairs])
    weights, _ = nnls(rows / energies[:, None], np.ones(len(rows)))
    smallest = counters[28]
    clock = pj_per_cycle(COUNTERS[28], MHZ) - smallest.flip_flops * weights[0] - net_units(smallest) * weights[1]
    shown = [
        [name, f"{energy:.2f}", f"{row @ weights:.2f}", f"{row[0]:.0f}", f"{row[1]:.1f}", f"{row[2]:.0f}"]
        for (name, *_), energy, row in zip(pairs, energies, rows, strict=True)
    ]
    return FittedModel(float(clock), *map(float, weights)), shown


def kernel(repeats: int) -> Mapping[str, Words]:
    """The published workload: a 5x5x8 convolution, 29 instructions a pair of outputs, on uniform random pixels.

    Its coefficients are the published ones: per position one that counts and seven that are always the same.
    """
    draw = np.random.default_rng(0)
    places = [row * 256 + 8 * column for row in range(5) for column in range(5)]
    words = [28, *(place << 15 | index << 6 | 40 for index, place in enumerate(places))]
    words += [10 << 6 | 20, 8 << 15 | 9, 8 << 15 | 13]
    cycles = repeats * len(words)
    instruction = np.tile(np.array(words, np.uint64), repeats)[:, None] * np.ones(LANES, np.uint64)
    pixels = draw.integers(-128, 128, (cycles, LANES, 8))
    summing = np.tile(np.array([word & 63 == 40 for word in words]), repeats)
    for cycle in np.flatnonzero(~summing[1:]) + 1:  # nothing new is read
        pixels[cycle] = pixels[cycle - 1]
    position = np.tile(np.array([0, *range(25), 24, 24, 24]), repeats)
    counting = np.array([16 * (n // 10) + n % 10 for n in range(1, 26)])  # 0x01 … 0x09, 0x10 … 0x25, as published
    weights = np.broadcast_to(np.arange(1, 9), (cycles, 8)).copy()
    weights[:, 0] = counting[position]
    products = (pixels * weights[:, None, :]).astype(np.int64)
    bits = np.concatenate([planes((products[:, :, n % 8] & 0xFFFF).astype(np.uint64), 16) for n in range(16)], axis=1)
    read = np.concatenate([planes((pixels[:, :, n] & 0xFF).astype(np.uint64), 8) for n in range(8)], axis=1)
    return {
        "issue": np.full((cycles, 1), 0xFFFF_FFFF_FFFF_FFFF, np.uint64),
        "instruction": planes(instruction, 32),
        "words": read,
        "products": bits,
    }


@dataclass(frozen=True, slots=True)
class Prediction:
    """Picojoules a cycle."""

    title: str
    measured: float
    predicted: float
    parts: str

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def predict(fitted: FittedModel) -> list[Prediction]:
    """MARLANN idle and at work, from constants that know nothing of it; then with its idle current known."""
    repeats = CYCLES // 29
    stimulus = kernel(repeats)
    found = activity("accelerator", stimulus, repeats * 29)
    clock = fitted.clock + found.flip_flops * fitted.flip_flop
    memories = BLOCKS * constants().memory.values[1] + STORES * STORE_PJ[1]
    nets, products = net_units(found) * fitted.toggle, 16 * 26 / 29 * fitted.multiply
    idle_measured = pj_per_cycle(IDLE[1] * 1000, IDLE[0], IDLE[2])
    out = [Prediction("idle, 12 MHz", idle_measured, clock + memories, f"clock {clock:.0f}, memories {memories:.0f}")]
    parts = f"clock {clock:.0f}, memories {memories:.0f}, nets {nets:.0f}, products {products:.0f}"
    for mhz, milliamperes, volts in RUNNING:
        measured = pj_per_cycle(milliamperes * 1000, mhz, volts)
        out.append(Prediction(f"convolving, {mhz:g} MHz", measured, clock + memories + nets + products, parts))
    for mhz, milliamperes, volts in RUNNING:
        measured = pj_per_cycle(milliamperes * 1000, mhz, volts) - idle_measured
        parts = f"nets {nets:.0f}, products {products:.0f}"
        out.append(Prediction(f"convolving, {mhz:g} MHz, above idle", measured, nets + products, parts))
    return out


def page(fitted: FittedModel, differences: list[list[str]], predictions: Sequence[Prediction]) -> str:
    """The results, without what they mean."""
    constants_of = [
        ["clock network, a cycle", f"{fitted.clock:.1f}"],
        ["flip-flop, a cycle", f"{fitted.flip_flop:.4f}"],
        ["transition of a net", f"{fitted.toggle:.3f}"],
        ["8x8 product", f"{fitted.multiply:.1f}"],
    ]
    rows = [[p.title, f"{p.measured:.0f}", f"{p.predicted:.0f}", f"{p.error:+.0%}", p.parts] for p in predictions]
    heads = ("against the smallest of its kind", "measured pJ/cycle", "fitted", "flip-flops", "net units", "products")
    return "\n\n".join(
        [
            markdown_table(heads, differences),
            markdown_table(("constant", "pJ at 1.219 V"), constants_of),
            markdown_table(("MARLANN", "measured pJ/cycle", "predicted", "error", "made of"), rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, predict, compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fpga.power_calibration", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the tables there, as Markdown")
    options = parser.parse_args(arguments)
    fitted, differences = fit()
    predictions = predict(fitted)
    written = page(fitted, differences, predictions)
    Console().print(written, markup=False)
    if options.out is not None:
        options.out.write_text(written + "\n", encoding="utf-8")
    return int(any(abs(p.error) > GOAL for p in predictions))


if __name__ == "__main__":
    sys.exit(main())

"""From Verilog to a bitstream for Lattice ECP5: the tools' arguments and the cells of their netlists.

`fpga.compiler.synthesis` runs the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from fpga.compiler.devices import FpgaDevice, Resources
from fpga.compiler.yosys_netlist import NetlistModule

NETLIST: Final = "netlist.json"
BITSTREAM: Final = "design.bit"
PLACER: Final = "nextpnr-ecp5"
PACKER: Final = "ecppack"
"""Tools by their names in `fpga.compiler.toolchain`; yosys runs before them."""
PINS: Final = "pins.lpf"
"""The pin file in a design's folder."""
PLACED: Final[Mapping[str, str]] = {
    "luts": "TRELLIS_COMB",
    "ffs": "TRELLIS_FF",
    "multipliers": "MULT18X18D",
    "block_rams": "DP16KD",
}
"""nextpnr's names of placed cells, by field of `Resources`."""
TIMING_WEIGHT: Final = 30
"""The placer's weight of timing against wire length; nextpnr's default is 10."""
COMB_OF: Final = {"LUT4": 1, "CCU2C": 2, "TRELLIS_DPR16X4": 6}
"""TRELLIS_COMB per cell: two for a carry cell; four and two for writing for 16x4 bits of memory."""


def script(sources: Sequence[str], top: str) -> str:
    """The yosys script (`synth_ecp5`), run in the sources' folder; it writes `NETLIST`."""
    # Without -defer, yosys opens the memory files named by parameters' default values.
    read = f"read_verilog -defer -sv -D ECP5_DSP {' '.join(sources)}"
    return f"{read}; synth_ecp5 -top {top} -json {NETLIST}"


def used_resources(module: NetlistModule) -> Resources:
    """The resources of a netlist; placement adds a few LUTs that pass signals on."""
    cells = Counter(cell.type for cell in module.cells.values())
    return Resources(
        luts=sum(cells[cell] * comb for cell, comb in COMB_OF.items()),
        ffs=cells["TRELLIS_FF"],
        multipliers=cells["MULT18X18D"],
        block_rams=cells["DP16KD"],
    )


def clock_pin(device: FpgaDevice) -> str:
    """A pin file (LPF) with only the clock."""
    return f'LOCATE COMP "clk" SITE "{device.clock_pin}";\n'


def routed(seed: int) -> str:
    """The file that routing a seed writes: nextpnr's textual configuration."""
    return f"seed{seed}.config"


def route(device: FpgaDevice, seed: int, target_mhz: float) -> list[str]:
    """Arguments of the placer, run in the netlist's folder."""
    return [
        *(device.option, "--package", device.package, "--speed", str(device.speed)),
        *("--json", NETLIST, "--textcfg", routed(seed), "--report", f"seed{seed}.json"),
        *("--freq", f"{target_mhz:g}", "--seed", str(seed), "--router", "router2"),
        *("--placer-heap-timingweight", str(TIMING_WEIGHT), "--tmg-ripup", "--timing-allow-fail"),
        *("--lpf", PINS, "--lpf-allow-unconstrained"),
        *("--quiet", "--log", f"seed{seed}.log"),
    ]


def pack(seed: int) -> list[str]:
    """Arguments of the packer, which turns the routed file into `BITSTREAM`."""
    return ["--compress", routed(seed), BITSTREAM]

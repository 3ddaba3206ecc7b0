"""The differences between device families from Verilog to bitstream: tools, their arguments and their cells.

`fpga.compiler.synthesis` runs the steps, which are the same for all families; `fpga.compiler.resource_model` has the
rules for planning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from fpga.compiler.bram_output_registers import absorb
from fpga.compiler.devices import FamilyName, FpgaDevice, Resources
from fpga.compiler.yosys_netlist import NetlistModule

NETLIST: Final = "netlist.json"
BITSTREAM: Final = "design.bit"


class DeviceFamily(ABC):
    """A device family."""

    placer: ClassVar[str]
    packer: ClassVar[str]
    """Tools by their names in `fpga.compiler.toolchain`; yosys runs before them."""
    pins: ClassVar[str]
    """The pin file in a design's folder."""
    few_pins: ClassVar[bool]
    """Whether the package has few pins, so that logits leave the chip in only as many bits as they need."""
    placed: ClassVar[Mapping[str, str]]
    """nextpnr's names of placed cells, by field of `Resources`; other fields are as in the netlist."""

    @abstractmethod
    def script(self, sources: Sequence[str], top: str, parameters: Mapping[str, int]) -> str:
        """The yosys script, run in the sources' folder; it writes `NETLIST`."""

    @abstractmethod
    def refine(self, netlist: Path, top: str) -> None:
        """Improve the netlist that yosys wrote, where possible."""

    @abstractmethod
    def used_resources(self, module: NetlistModule) -> Resources:
        """The resources of a netlist."""

    @abstractmethod
    def clock_pin(self, device: FpgaDevice) -> str:
        """A pin file with only the clock."""

    @abstractmethod
    def routed(self, seed: int) -> str:
        """The file that routing a seed writes."""

    @abstractmethod
    def route(self, device: FpgaDevice, seed: int, target_mhz: float) -> list[str]:
        """Arguments of the placer, run in the netlist's folder."""

    @abstractmethod
    def pack(self, seed: int) -> list[str]:
        """Arguments of the packer, which turns the routed file into `BITSTREAM`."""


class Ecp5Family(DeviceFamily):
    """Lattice ECP5."""

    placer = "nextpnr-ecp5"
    packer = "ecppack"
    pins = "pins.lpf"
    few_pins = False
    placed: ClassVar[Mapping[str, str]] = {
        "luts": "TRELLIS_COMB",
        "ffs": "TRELLIS_FF",
        "multipliers": "MULT18X18D",
        "block_rams": "DP16KD",
    }
    timing_weight: Final = 30
    """The placer's weight of timing against wire length; nextpnr's default is 10."""
    comb_of: Final = {"LUT4": 1, "CCU2C": 2, "TRELLIS_DPR16X4": 6}
    """TRELLIS_COMB per cell: two for a carry cell; four and two for writing for 16x4 bits of memory."""

    def script(self, sources: Sequence[str], top: str, parameters: Mapping[str, int]) -> str:
        """`synth_ecp5`."""
        # Without -defer, yosys opens the memory files named by parameters' default values.
        read = f"read_verilog -defer -sv -D ECP5_DSP {' '.join(sources)}"
        return f"{read}; {_elaborate(top, parameters)}synth_ecp5 -top {top} -json {NETLIST}"

    def refine(self, netlist: Path, top: str) -> None:
        """Move registers behind block RAMs into them."""
        absorb(netlist, top)

    def used_resources(self, module: NetlistModule) -> Resources:
        """See `DeviceFamily.used_resources`; placement adds a few LUTs that pass signals on."""
        cells = Counter(cell.type for cell in module.cells.values())
        return Resources(
            luts=sum(cells[cell] * comb for cell, comb in self.comb_of.items()),
            ffs=cells["TRELLIS_FF"],
            multipliers=cells["MULT18X18D"],
            block_rams=cells["DP16KD"],
        )

    def clock_pin(self, device: FpgaDevice) -> str:
        """LPF."""
        return f'LOCATE COMP "clk" SITE "{device.clock_pin}";\n'

    def routed(self, seed: int) -> str:
        """nextpnr's textual configuration."""
        return f"seed{seed}.config"

    def route(self, device: FpgaDevice, seed: int, target_mhz: float) -> list[str]:
        """For nextpnr-ecp5."""
        return [
            *(device.option, "--package", device.package, "--speed", str(device.speed)),
            *("--json", NETLIST, "--textcfg", self.routed(seed), "--report", f"seed{seed}.json"),
            *("--freq", f"{target_mhz:g}", "--seed", str(seed), "--router", "router2"),
            *("--placer-heap-timingweight", str(self.timing_weight), "--tmg-ripup", "--timing-allow-fail"),
            *("--lpf", self.pins, "--lpf-allow-unconstrained"),
            *("--quiet", "--log", f"seed{seed}.log"),
        ]

    def pack(self, seed: int) -> list[str]:
        """For ecppack."""
        return ["--compress", self.routed(seed), BITSTREAM]


class Ice40Family(DeviceFamily):
    """Lattice iCE40 UltraPlus.

    The family has no memory of look-up tables and few block RAMs. Yosys chooses where memories go and makes small
    read-only ones of look-up tables. The memories of half a row (`hv_pool`) are never read and written at once, so they
    go into the large single-port RAMs, which cannot be initialised and would otherwise be unused.
    """

    placer = "nextpnr-ice40"
    packer = "icepack"
    pins = "pins.pcf"
    few_pins = True
    placed: ClassVar[Mapping[str, str]] = {
        "luts": "ICESTORM_LC",
        "multipliers": "ICESTORM_DSP",
        "block_rams": "ICESTORM_RAM",
        "large_rams": "ICESTORM_SPRAM",
    }
    """nextpnr does not report flip-flops; placing adds none."""
    half_rows: Final = "c:*.upper"
    enabled_together: Final = 24
    """A group of fewer flip-flops gets a look-up table instead of a clock enable. Eight logic cells share one enable,
    so many small groups would make placement fail."""

    def script(self, sources: Sequence[str], top: str, parameters: Mapping[str, int]) -> str:
        """`synth_ice40` in two parts; memory attributes are set between them."""
        mapped = f"synth_ice40 -dsp -device u -dffe_min_ce_use {self.enabled_together} -top {top}"
        return "; ".join(
            [
                f"read_verilog -defer -sv {' '.join(sources)}",
                f"{_elaborate(top, parameters)}{mapped} -run begin:map_ram",
                "setattr -unset ram_style -unset rom_style c:*",
                f'setattr -set ram_style "huge" -set no_rw_check 1 {self.half_rows}',
                f"{mapped} -run map_ram: -json {NETLIST}",
            ]
        )

    def refine(self, netlist: Path, top: str) -> None:
        """Do nothing: iCE40 block RAMs have no output registers."""

    def used_resources(self, module: NetlistModule) -> Resources:
        """Logic cells by nextpnr's rules; placement adds about 2 % for carry chains."""
        cells = Counter(cell.type for cell in module.cells.values())
        flip_flops = [cell for cell in module.cells.values() if cell.type.startswith("SB_DFF")]
        tables = [cell.connections for cell in module.cells.values() if cell.type == "SB_LUT4"]
        readers = Counter(bit for port in module.ports.values() if port.direction == "output" for bit in port.bits)
        for cell in module.cells.values():
            for port, bits in cell.connections.items():
                if cell.port_directions.get(port) == "input":
                    readers.update(bits)
        alone = {table["O"][0] for table in tables if readers[table["O"][0]] == 1}
        joined = sum(cell.connections["D"][0] in alone for cell in flip_flops)
        sums = {(table["I1"][0], table["I2"][0], table["I3"][0]) for table in tables}
        carries = [cell.connections for cell in module.cells.values() if cell.type == "SB_CARRY"]
        bare = sum((carry["I0"][0], carry["I1"][0], carry["CI"][0]) not in sums for carry in carries)
        return Resources(
            luts=len(tables) + len(flip_flops) - joined + bare,
            ffs=len(flip_flops),
            multipliers=cells["SB_MAC16"],
            block_rams=cells["SB_RAM40_4K"],
            large_rams=cells["SB_SPRAM256KA"],
        )

    def clock_pin(self, device: FpgaDevice) -> str:
        """PCF."""
        return f"set_io clk {device.clock_pin}\n"

    def routed(self, seed: int) -> str:
        """IceStorm's textual bitstream."""
        return f"seed{seed}.asc"

    def route(self, device: FpgaDevice, seed: int, target_mhz: float) -> list[str]:
        """For nextpnr-ice40."""
        return [
            *(device.option, "--package", device.package),
            *("--json", NETLIST, "--asc", self.routed(seed), "--report", f"seed{seed}.json"),
            *("--freq", f"{target_mhz:g}", "--seed", str(seed), "--timing-allow-fail"),
            *("--pcf", self.pins, "--pcf-allow-unconstrained"),
            *("--quiet", "--log", f"seed{seed}.log"),
        ]

    def pack(self, seed: int) -> list[str]:
        """For icepack."""
        return [self.routed(seed), BITSTREAM]


def _elaborate(top: str, parameters: Mapping[str, int]) -> str:
    if not parameters:
        return ""
    return f"hierarchy -top {top} " + " ".join(f"-chparam {key} {value}" for key, value in parameters.items()) + "; "


FAMILIES: Final[Mapping[FamilyName, DeviceFamily]] = {"ecp5": Ecp5Family(), "ice40": Ice40Family()}

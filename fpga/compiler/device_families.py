"""What differs between families of devices on the way from Verilog to a bitstream: tools, their words, their cells.

`fpga.compiler.synthesis` has the way itself and is the same for all. A family's rules for planning lie in
`fpga.compiler.resource_model`.
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
    """One of them."""

    placer: ClassVar[str]
    packer: ClassVar[str]
    """Tools by their names in `fpga.compiler.toolchain`; yosys comes before them."""
    pins: ClassVar[str]
    """The pin file in a design's folder."""
    few_pins: ClassVar[bool]
    """Whether logits leave the chip in no more bits than they have."""
    placed: ClassVar[Mapping[str, str]]
    """By field of `Resources`, nextpnr's name of what it placed; a field that is not here is as in the netlist."""

    @abstractmethod
    def script(self, sources: Sequence[str], top: str, parameters: Mapping[str, int]) -> str:
        """For yosys, in the sources' folder: to `NETLIST`."""

    @abstractmethod
    def refine(self, netlist: Path, top: str) -> None:
        """Rewrite what yosys has written, if anything is to be gained by it."""

    @abstractmethod
    def made(self, module: NetlistModule) -> Resources:
        """What a netlist amounts to."""

    @abstractmethod
    def clock_pin(self, device: FpgaDevice) -> str:
        """A pin file that has the clock only."""

    @abstractmethod
    def routed(self, seed: int) -> str:
        """The file that a seed leads to."""

    @abstractmethod
    def route(self, device: FpgaDevice, seed: int, target_mhz: float) -> list[str]:
        """What the placer is called with, in the netlist's folder."""

    @abstractmethod
    def pack(self, seed: int) -> list[str]:
        """What the packer is called with: from the routed file to `BITSTREAM`."""


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
    """How much the placer minds timing rather than wire length (default 10); measured to give the best clock."""
    comb_of: Final = {"LUT4": 1, "CCU2C": 2, "TRELLIS_DPR16X4": 6}
    """TRELLIS_COMB that nextpnr makes of a cell: a carry cell is two, 16x4 bits of memory four and two for writing."""

    def script(self, sources: Sequence[str], top: str, parameters: Mapping[str, int]) -> str:
        """`synth_ecp5`."""
        # `-defer`, for without it yosys opens the memory files of parameters' default values.
        read = f"read_verilog -defer -sv -D ECP5_DSP {' '.join(sources)}"
        return f"{read}; {_elaborate(top, parameters)}synth_ecp5 -top {top} -json {NETLIST}"

    def refine(self, netlist: Path, top: str) -> None:
        """Registers behind block RAMs go into them."""
        absorb(netlist, top)

    def made(self, module: NetlistModule) -> Resources:
        """Placement adds a few LUTs that only pass a signal on."""
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

    There is no memory of look-up tables, and few block RAMs. So yosys is not told where memories shall lie, and makes
    small read-only ones of look-up tables; but those of half a row (`hv_pool`) are written or read, never both at once,
    so they may lie in the large RAMs of one port, which nothing else could use: these cannot be initialised. What they
    give while they are written is not looked at.
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
    """nextpnr does not say how many of the logic cells' flip-flops are in use; placing adds none."""
    half_rows: Final = "c:*.upper"
    enabled_together: Final = 24
    """Fewer flip-flops get no enable of their own but a look-up table before them, mostly in the same logic cell. Eight
    cells share one enable: with all of them, a design of 4,834 logic cells was not placed in 300 CPU seconds; with
    these, it was in less than one minute, with 52 MHz."""

    def script(self, sources: Sequence[str], top: str, parameters: Mapping[str, int]) -> str:
        """`synth_ice40`, in two parts: what memories shall become is said when it has gathered them."""
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
        """Nothing: block RAMs have no output registers here."""

    def made(self, module: NetlistModule) -> Resources:
        """Logic cells by nextpnr's rules; it adds about 2 % more, which break carry chains and feed them."""
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

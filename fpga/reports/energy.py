"""What an inference costs in energy: an estimate with a low, a mid and a high value, never a measurement.

    E = toggles·e_toggle + branches·e_branch + multiplications·e_multiply + accesses·e_memory
        + cycles·(flip_flops·e_flip_flop + e_clock) + P_static · cycles / f

Activity is counted in the netlist on real images (`fpga.simulation.netlist_simulation`); the constants, with ranges
and sources, lie in `power.toml`; static power is the device's typical standby current. Low, mid and high take all low,
all mid and all high constants together, so the range is wider than independent errors would make it. Glitches are
missed, and the pins' power depends on the board: what is estimated is the chip's core.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fpga.compiler.devices import FamilyName, FpgaDevice
from fpga.simulation.netlist_simulation import SwitchingActivity

TABLE: Final = Path(__file__).with_name("power.toml")
OWN: Final[Mapping[FamilyName, Path]] = {"ice40": Path(__file__).with_name("power_ice40.toml")}
"""Constants that are another family's own, in place of those of the same name."""
BOARD_W: Final = (0.5, 1.5, 2.5)
"""What a small board draws beside the chip's core (regulators, oscillator, Ethernet PHY): an assumption."""

Positive = Annotated[float, Meta(gt=0)]
Range = tuple[Positive, Positive, Positive]
"""Low, mid, high."""


class EnergyConstant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One constant and why it has its value."""

    unit: str
    values: Range
    basis: Literal["measured", "assumed"]
    source: str


class EnergyConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of `power.toml`."""

    reference_v: Positive
    toggle: EnergyConstant
    branch: EnergyConstant
    multiply: EnergyConstant
    memory: EnergyConstant
    flip_flop: EnergyConstant
    clock: EnergyConstant


class ImageEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """One corner of the estimate, per inference."""

    nets_uj: float
    """Toggles and branches."""
    multipliers_uj: float
    memories_uj: float
    clock_uj: float
    static_uj: float
    chip_uj: float
    """All of the above."""
    chip_w: float
    with_board_uj: float


class EnergyEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Energy per inference at a clock and full load."""

    low: ImageEnergy
    mid: ImageEnergy
    high: ImageEnergy


@functools.cache
def constants(family: FamilyName = "ecp5") -> EnergyConstants:
    """A family's."""
    table = msgspec.toml.decode(TABLE.read_bytes(), type=EnergyConstants)
    if family not in OWN:
        return table
    own = msgspec.toml.decode(OWN[family].read_bytes(), type=dict[str, EnergyConstant])
    return msgspec.structs.replace(table, **own)


def estimate(activity: SwitchingActivity, inferences: float, device: FpgaDevice, mhz: float) -> EnergyEstimate:
    """The energy of one inference, if `activity` is that of `inferences` of them, one after the other at `mhz`."""
    return EnergyEstimate(
        **{name: _energy(activity, inferences, device, mhz, at) for at, name in enumerate(("low", "mid", "high"))}
    )


def dynamic_pj(activity: SwitchingActivity, at: int, table: EnergyConstants) -> dict[str, float]:
    """The activity's energy at the constants' own voltage, by part; `at` chooses low, mid or high (0, 1, 2)."""
    each_cycle = activity.flip_flops * table.flip_flop.values[at] + table.clock.values[at]
    return {
        "nets": activity.net_toggles * table.toggle.values[at] + activity.branch_toggles * table.branch.values[at],
        "multipliers": activity.multiplications * table.multiply.values[at],
        "memories": activity.memory_accesses * table.memory.values[at],
        "clock": activity.cycles * each_cycle,
    }


def _energy(activity: SwitchingActivity, inferences: float, device: FpgaDevice, mhz: float, at: int) -> ImageEnergy:
    table = constants(device.family)
    scale = (device.core_v / table.reference_v) ** 2 * 1e-6 / inferences
    parts = {name: pj * scale for name, pj in dynamic_pj(activity, at, table).items()}
    seconds = activity.cycles / inferences / (mhz * 1e6)
    static_uj = device.static_w[at] * seconds * 1e6
    chip_uj = sum(parts.values()) + static_uj
    return ImageEnergy(
        nets_uj=parts["nets"],
        multipliers_uj=parts["multipliers"],
        memories_uj=parts["memories"],
        clock_uj=parts["clock"],
        static_uj=static_uj,
        chip_uj=chip_uj,
        chip_w=chip_uj * 1e-6 / seconds,
        with_board_uj=chip_uj + BOARD_W[at] * seconds * 1e6,
    )

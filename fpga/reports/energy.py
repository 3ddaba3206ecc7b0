"""Estimates the energy of an inference: a low, a mid and a high value, never a measurement.

    E = toggles·e_toggle + branches·e_branch + multiplications·e_multiply + accesses·e_memory
        + cycles·(flip_flops·e_flip_flop + e_clock) + P_static · cycles / f

Activity is counted in the netlist on real images; constants, with ranges and sources, lie in `power.toml`; static power
is the device's typical standby current. The low value takes all low constants together, and so on, so the range is
wider than independent errors would make it. Glitches and the power of the pins are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fpga.compiler.devices import FpgaDevice
from fpga.simulation.netlist_simulation import SwitchingActivity

TABLE: Final = Path(__file__).with_name("power.toml")
REFERENCE_V: Final = 1.219
"""Core voltage of the constants."""
BOARD_W: Final = (0.5, 1.5, 2.5)
"""Power of a small board beside the chip's core (regulators, oscillator, Ethernet PHY); assumed."""

Positive = Annotated[float, Meta(gt=0)]
Range = tuple[Positive, Positive, Positive]
"""Low, mid, high."""


class EnergyConstant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A constant and the reason for its value."""

    unit: str
    values: Range
    basis: Literal["measured", "assumed"]
    source: str


EnergyPart = Literal["toggle", "branch", "multiply", "memory", "flip_flop", "clock"]
Constants: TypeAlias = Mapping[EnergyPart, EnergyConstant]


class ImageEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy per inference at one corner of the estimate."""

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
def constants() -> Constants:
    """The constants, from their table."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=dict[EnergyPart, EnergyConstant])


def estimate(activity: SwitchingActivity, inferences: float, device: FpgaDevice, mhz: float) -> EnergyEstimate:
    """Energy per inference, if `activity` is that of `inferences` of them back to back at `mhz`."""
    return EnergyEstimate(
        **{name: _energy(activity, inferences, device, mhz, at) for at, name in enumerate(("low", "mid", "high"))}
    )


def dynamic_pj(activity: SwitchingActivity, at: int, table: Constants) -> dict[str, float]:
    """Energy of an activity at the constants' voltage, by part; `at` selects low, mid or high (0, 1, 2)."""
    pj = {part: constant.values[at] for part, constant in table.items()}
    return {
        "nets": activity.net_toggles * pj["toggle"] + activity.branch_toggles * pj["branch"],
        "multipliers": activity.multiplications * pj["multiply"],
        "memories": activity.memory_accesses * pj["memory"],
        "clock": activity.cycles * (activity.flip_flops * pj["flip_flop"] + pj["clock"]),
    }


def _energy(activity: SwitchingActivity, inferences: float, device: FpgaDevice, mhz: float, at: int) -> ImageEnergy:
    scale = (device.core_v / REFERENCE_V) ** 2 * 1e-6 / inferences
    parts = {name: pj * scale for name, pj in dynamic_pj(activity, at, constants()).items()}
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

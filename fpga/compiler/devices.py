"""Which devices a network can be built for, and what a design takes of one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from hawkvision.errors import CompileError

TABLE: Final = Path(__file__).with_name("devices.toml")

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
FamilyName = Literal["ecp5", "ice40"]


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What a design uses, or a device has."""

    luts: Count
    """What nextpnr runs out of. ECP5: four-input look-up tables (TRELLIS_COMB) of logic, carry chains and distributed
    memory. iCE40: logic cells, each of which is a look-up table, a flip-flop, or one behind the other."""
    ffs: Count
    multipliers: Count
    """ECP5: of 18x18 bits, iCE40: of 16x16."""
    block_rams: Count
    """ECP5: of 18 kbit, iCE40: of 4 kbit."""
    large_rams: Count = 0
    """iCE40 UltraPlus: of 256 kbit and one port, empty when the device starts."""

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            luts=self.luts + other.luts,
            ffs=self.ffs + other.ffs,
            multipliers=self.multipliers + other.multipliers,
            block_rams=self.block_rams + other.block_rams,
            large_rams=self.large_rams + other.large_rams,
        )

    def fits(self, whole: Resources) -> bool:
        """Whether there is enough of everything."""
        return (
            self.luts <= whole.luts
            and self.ffs <= whole.ffs
            and self.multipliers <= whole.multipliers
            and self.block_rams <= whole.block_rams
            and self.large_rams <= whole.large_rams
        )


class FpgaDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One part in one package."""

    name: str = ""
    family: FamilyName
    option: str
    """What nextpnr is told."""
    package: str
    clock_pin: str
    """Where the clock enters if nobody says otherwise."""
    speed: int | None = None
    """The speed grade, where nextpnr knows several."""
    planned_mhz: Positive
    """The clock that planning counts on."""
    target_mhz: Positive
    """What placer and router strive for: a little more than what designs reach."""
    luts: Count
    ffs: Count
    multipliers: Count
    block_rams: Count
    large_rams: Count = 0
    core_v: Positive
    core_static_ma: Positive
    auxiliary_v: Positive
    auxiliary_static_ma: Positive
    static_range: tuple[Positive, Positive, Positive]
    """Low, mid, high, as factors of the typical currents."""

    @property
    def resources(self) -> Resources:
        """All that it has."""
        return Resources(**{field: getattr(self, field) for field in Resources.__struct_fields__})

    @property
    def static_w(self) -> tuple[float, float, float]:
        """What it draws with its clock stopped: low, mid, high."""
        typical = (self.core_v * self.core_static_ma + self.auxiliary_v * self.auxiliary_static_ma) / 1000
        low, mid, high = (typical * factor for factor in self.static_range)
        return low, mid, high


@functools.cache
def devices() -> dict[str, FpgaDevice]:
    """All of them, by name, from `devices.toml`."""
    read = msgspec.toml.decode(TABLE.read_bytes(), type=dict[str, FpgaDevice])
    return {name: msgspec.structs.replace(device, name=name) for name, device in read.items()}


def device(name: str) -> FpgaDevice:
    """One of them.

    Raises:
        CompileError: if there is none of that name; the message lists those there are.
    """
    found = devices().get(name)
    if found is None:
        raise CompileError(f"unknown device {name!r}: expected one of {', '.join(devices())}")
    return found

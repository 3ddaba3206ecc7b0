"""The devices that networks can be built for, and amounts of their resources."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from hawkvision.core.errors import CompileError

TABLE: Final = Path(__file__).with_name("devices.toml")

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that a design uses, or that a device has."""

    luts: Count
    """Four-input look-up tables (TRELLIS_COMB) of logic, carry chains and distributed memory."""
    ffs: Count
    multipliers: Count
    """Of 18x18 bits."""
    block_rams: Count
    """Of 18 kbit."""

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            luts=self.luts + other.luts,
            ffs=self.ffs + other.ffs,
            multipliers=self.multipliers + other.multipliers,
            block_rams=self.block_rams + other.block_rams,
        )

    def fits(self, whole: Resources) -> bool:
        """Whether `whole` has enough of everything."""
        return (
            self.luts <= whole.luts
            and self.ffs <= whole.ffs
            and self.multipliers <= whole.multipliers
            and self.block_rams <= whole.block_rams
        )


class FpgaDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One part in one package."""

    name: str = ""
    option: str
    """The option that selects the device in nextpnr."""
    package: str
    clock_pin: str
    """The clock's default pin."""
    speed: int
    """The speed grade."""
    planned_mhz: Positive
    """Clock assumed for planning."""
    target_mhz: Positive
    """Clock that placer and router aim at, slightly above what designs reach."""
    resources: Resources
    """Everything the device has."""
    core_v: Positive
    core_static_ma: Positive
    auxiliary_v: Positive
    auxiliary_static_ma: Positive
    static_range: tuple[Positive, Positive, Positive]
    """Low, mid, high, as factors of the typical currents."""

    @property
    def static_w(self) -> tuple[float, float, float]:
        """Power with the clock stopped: low, mid, high."""
        typical = (self.core_v * self.core_static_ma + self.auxiliary_v * self.auxiliary_static_ma) / 1000
        low, mid, high = (typical * factor for factor in self.static_range)
        return low, mid, high


@functools.cache
def devices() -> dict[str, FpgaDevice]:
    """All devices by name, from `devices.toml`."""
    read = msgspec.toml.decode(TABLE.read_bytes(), type=dict[str, FpgaDevice])
    return {name: msgspec.structs.replace(device, name=name) for name, device in read.items()}


def device(name: str) -> FpgaDevice:
    """A device by its name.

    Raises:
        CompileError: for an unknown name; the message lists the known ones.
    """
    found = devices().get(name)
    if found is None:
        raise CompileError(f"unknown device {name!r}: expected one of {', '.join(devices())}")
    return found

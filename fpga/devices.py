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


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What a design uses, or a device has."""

    luts: Count
    """Four-input look-up tables as nextpnr counts them (TRELLIS_COMB): logic, carry chains and distributed memory."""
    ffs: Count
    multipliers: Count
    """18x18."""
    block_rams: Count
    """Of 18 kbit."""

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            luts=self.luts + other.luts,
            ffs=self.ffs + other.ffs,
            multipliers=self.multipliers + other.multipliers,
            block_rams=self.block_rams + other.block_rams,
        )


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One part in one package."""

    name: str = ""
    family: Literal["ecp5"]
    option: str
    """What nextpnr is told."""
    package: str
    clock_pin: str
    """Where the clock enters if nobody says otherwise."""
    speed: int
    luts: Count
    ffs: Count
    multipliers: Count
    block_rams: Count
    core_v: Positive
    core_static_ma: Positive
    auxiliary_v: Positive
    auxiliary_static_ma: Positive
    static_range: tuple[Positive, Positive, Positive]
    """Low, mid, high, as factors of the typical currents."""

    @property
    def resources(self) -> Resources:
        """All that it has."""
        return Resources(luts=self.luts, ffs=self.ffs, multipliers=self.multipliers, block_rams=self.block_rams)

    @property
    def static_w(self) -> tuple[float, float, float]:
        """What it draws with its clock stopped: low, mid, high."""
        typical = (self.core_v * self.core_static_ma + self.auxiliary_v * self.auxiliary_static_ma) / 1000
        low, mid, high = (typical * factor for factor in self.static_range)
        return low, mid, high


@functools.cache
def devices() -> dict[str, Device]:
    """All of them, by name, from `devices.toml`."""
    read = msgspec.toml.decode(TABLE.read_bytes(), type=dict[str, Device])
    return {name: msgspec.structs.replace(device, name=name) for name, device in read.items()}


def device(name: str) -> Device:
    """One of them.

    Raises:
        CompileError: if there is none of that name; the message lists those there are.
    """
    found = devices().get(name)
    if found is None:
        raise CompileError(f"unknown device {name!r}: expected one of {', '.join(devices())}")
    return found

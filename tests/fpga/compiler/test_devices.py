"""Devices: what the table says of them."""

from __future__ import annotations

import msgspec
import pytest

from fpga.compiler.devices import Resources, device, devices
from hawkvision.core.errors import CompileError


def test_larger_devices_have_more_of_everything() -> None:
    small, intermediate, large = (device(f"lfe5u-{size}f") for size in (25, 45, 85))
    for field in set(Resources.__struct_fields__) - {"large_rams"}:
        assert getattr(small, field) < getattr(intermediate, field) < getattr(large, field)
    assert small.static_w[1] < intermediate.static_w[1] < large.static_w[1]


@pytest.mark.parametrize("name", devices())
def test_static_power_is_a_range(name: str) -> None:
    low, mid, high = device(name).static_w
    assert 0 < low < mid < high < 1


def test_design_fits_that_is_larger_in_nothing() -> None:
    whole = device("ice40up5k").resources
    assert whole.fits(whole)
    for field in Resources.__struct_fields__:
        one_more = msgspec.structs.replace(whole, **{field: getattr(whole, field) + 1})
        assert not one_more.fits(whole)


def test_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(CompileError, match="unknown device 'lfe5u-12f': expected one of lfe5u-25f, lfe5u-45f"):
        device("lfe5u-12f")

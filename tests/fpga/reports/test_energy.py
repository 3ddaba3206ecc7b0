"""The energy estimate: what it is made of, and how it scales."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fpga.compiler.devices import device
from fpga.reports.energy import BOARD_W, REFERENCE_V, constants, estimate
from fpga.simulation.netlist_simulation import SwitchingActivity

ACTIVITY = SwitchingActivity(
    cycles=10_000,
    net_toggles=1e6,
    branch_toggles=3e5,
    multiplications=5e4,
    memory_accesses=2e4,
    flip_flops=4_000,
)


def test_parts_add_up_and_the_range_is_ordered() -> None:
    found = estimate(ACTIVITY, 1, device("lfe5u-45f"), 120.0)
    for energy in (found.low, found.mid, found.high):
        parts = energy.nets_uj + energy.multipliers_uj + energy.memories_uj + energy.clock_uj + energy.static_uj
        assert energy.chip_uj == pytest.approx(parts)
        assert energy.chip_w == pytest.approx(energy.chip_uj * 1e-6 / (10_000 / 120e6))
    assert found.low.chip_uj < found.mid.chip_uj < found.high.chip_uj


def test_toggle_costs_its_constant_at_the_devices_voltage() -> None:
    chip = device("lfe5u-45f")
    more = replace(ACTIVITY, net_toggles=ACTIVITY.net_toggles + 1e6)
    added = estimate(more, 1, chip, 120.0).mid.nets_uj - estimate(ACTIVITY, 1, chip, 120.0).mid.nets_uj
    assert added == pytest.approx(constants()["toggle"].values[1] * (chip.core_v / REFERENCE_V) ** 2)


def test_slower_clock_costs_static_energy_only() -> None:
    fast, slow = (estimate(ACTIVITY, 1, device("lfe5u-25f"), mhz).mid for mhz in (120.0, 60.0))
    assert slow.static_uj == pytest.approx(2 * fast.static_uj)
    assert slow.nets_uj == fast.nets_uj
    assert slow.with_board_uj - slow.chip_uj == pytest.approx(BOARD_W[1] * 10_000 / 60)


def test_energy_is_of_one_inference() -> None:
    one, two = (estimate(ACTIVITY, n, device("lfe5u-85f"), 100.0).high for n in (1, 2))
    assert one.chip_uj == pytest.approx(2 * two.chip_uj)
    assert one.chip_w == pytest.approx(two.chip_w)


def test_every_constant_is_a_range_with_a_source() -> None:
    for constant in constants().values():
        assert list(constant.values) == sorted(constant.values)
        assert len(constant.source) > 20

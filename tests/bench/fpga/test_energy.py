"""The comparison of energies: what waits, and what draws power meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from fpga.compiler.devices import device
from fpga.reports.build_report import read
from fpga.reports.energy import BOARD_W
from tests.bench.fpga.energy import WATTS_A_CORE, Cpu, ratios

REPORT = read(Path(__file__).parents[3] / "fpga" / "reports" / "fashion_mnist-tiny_w4-lfe5u-45f.json")
PERIOD_US = 1e6 / REPORT.rate


def test_at_full_rate_the_energy_is_that_of_chip_and_board() -> None:
    found = ratios(Cpu("quick", PERIOD_US / 2), REPORT)
    assert found["equal rate, chip and board"] == pytest.approx(found["chip and board"], rel=1e-3)


def test_fpga_that_waits_for_a_slower_cpu_draws_power_and_is_clocked_all_the_while() -> None:
    slow = Cpu("slow", 3 * PERIOD_US)
    mid, chip = REPORT.energy.mid, device(REPORT.device)
    fpga_uj = mid.nets_uj + mid.multipliers_uj + mid.memories_uj + 3 * mid.clock_uj
    fpga_uj += (chip.static_w[1] + BOARD_W[1]) * slow.us
    expected = slow.us * WATTS_A_CORE[1] / fpga_uj
    assert ratios(slow, REPORT)["equal rate, chip and board"][1] == pytest.approx(expected, rel=1e-3)

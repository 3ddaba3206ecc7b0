"""Plans: the cheapest placement that keeps the bounds, and the reasons given."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fpga.compiler.devices import Resources, device
from fpga.offload import plan_search
from fpga.offload.cost_model import (
    CpuWork,
    EstimateRange,
    FpgaProfile,
    LinkModel,
    Machine,
    PlacementChoice,
    Workload,
    cost,
    forecast,
    service_s,
    watts,
)
from fpga.offload.plan_search import SHARES, Objective, schedule, search
from fpga.offload.queueing import ServiceTime
from hawkvision.core.errors import ConfigError

MS = 1e-3
SMALL = Resources(luts=5_000, ffs=5_000, multipliers=30, block_rams=20)
LARGE = Resources(luts=9_000, ffs=9_000, multipliers=50, block_rams=40)


def profile(name: str = "w4", interval_ms: float = 2.0, **changes: object) -> FpgaProfile:
    """An image of 100 MHz that takes so long for an image."""
    cycles = round(interval_ms * MS * 100e6)
    made = FpgaProfile(name, cycles, round(1.3 * cycles), 100e6, 784, 40, SMALL, EstimateRange(20e-6, 40e-6, 80e-6))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def workload(
    rate_hz: float = 300.0, deadline_ms: float = 20.0, cpu_ms: float = 3.0, *profiles: FpgaProfile
) -> Workload:
    return Workload("task", rate_hz, deadline_ms * MS, ServiceTime.spread(cpu_ms * MS, 0.2), profiles or (profile(),))


def machine(**changes: object) -> Machine:
    made = Machine(
        2, EstimateRange(4.0, 6.0, 8.0), LinkModel(10e6, 0.1 * MS, CpuWork.always(0.2 * MS)), device("lfe5u-45f")
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_idle_fpga_takes_all_that_costs_the_cpu_more() -> None:
    plan = search([workload()], machine())
    assert plan.feasible
    assert plan.exhaustive
    assert plan.choices == (PlacementChoice(profile(), 1.0),)
    assert plan.forecast.cpu_load == pytest.approx(300 * 0.2 * MS, rel=1e-3)


def test_cpu_seconds_are_those_of_the_rate_at_which_images_come() -> None:
    host = LinkModel(10e6, 0.1 * MS, CpuWork((10.0, 50.0), (1.0 * MS, 0.5 * MS)))
    task = dataclasses.replace(workload(30.0), work=CpuWork((10.0, 50.0), (4.0 * MS, 3.0 * MS)))
    half = PlacementChoice(profile(), 0.5)
    assert cost(task, half, machine(link=host)).cpu_load == pytest.approx(30 * (0.75 + 3.5) / 2 * MS, rel=1e-3)
    rare, many = (dataclasses.replace(task, rate_hz=rate) for rate in (1.0, 100.0))
    assert cost(rare, half, machine(link=host)).cpu_load == pytest.approx(1 * (1.0 + 4.0) / 2 * MS, rel=1e-3)
    assert cost(many, half, machine(link=host)).cpu_load == pytest.approx(100 * (0.5 + 3.0) / 2 * MS, rel=1e-3)


def test_cheap_cpu_keeps_what_would_cost_more_to_send() -> None:
    plan = search([workload(300, 20, 0.05)], machine())
    assert plan.choices == (PlacementChoice(None, 0.0),)
    assert any(r.choice.startswith("100.0%") and "costs" in r.reason for r in plan.rejected)


def test_rate_above_the_fpga_is_shared() -> None:
    task = workload(700, 20, 2)
    plan = search([task], machine(places=64))
    (prediction,) = plan.forecast.workloads
    assert plan.feasible
    assert 0.4 < plan.choices[0].share < 500 / 700
    assert prediction.p99_s <= task.deadline_s
    assert any("P99" in r.reason for r in plan.rejected)


@pytest.mark.parametrize(("objective", "rate_hz"), [("cpu", 450.0), ("energy", 800.0)])
def test_plan_is_the_cheapest_of_all_that_keep_the_deadline(objective: Objective, rate_hz: float) -> None:
    task, host = workload(rate_hz, 15, 2, profile(), profile("slow", 6)), machine()
    prices = []
    for choice in [
        PlacementChoice(None, 0.0),
        *(PlacementChoice(each, share) for each in task.profiles for share in SHARES),
    ]:
        found, own = forecast([task], [choice], host), cost(task, choice, host)
        if own.cpu_load < host.cores and found.workloads[0].p99_s <= task.deadline_s:
            prices.append(own.cpu_load if objective == "cpu" else watts(own, host).mid)
    assert search([task], host, objective).cost == min(prices)


def test_power_budget_excludes_and_says_so() -> None:
    host = machine()
    dear = search([workload(300, 20, 3)], host, power_w=0.5)
    assert not dear.feasible
    assert any("the budget is 0.5 W" in r.reason for r in dear.rejected)
    assert search([workload(300, 20, 3)], host, power_w=1.0).forecast.watts.mid <= 1.0


def test_two_images_share_one_device_or_one_stays_on_the_cpu() -> None:
    tasks = [
        Workload("a", 200, 20 * MS, ServiceTime.constant(3 * MS), (profile("a", resources=LARGE),)),
        Workload("b", 100, 20 * MS, ServiceTime.constant(3 * MS), (profile("b", resources=LARGE),)),
    ]
    together = search(tasks, machine(device=device("lfe5u-85f")))
    assert [choice.share for choice in together.choices] == [1.0, 1.0]
    alone = search(tasks, machine())
    assert [choice.share for choice in alone.choices] == [1.0, 0.0]


def test_image_too_large_for_the_device_is_refused_by_number() -> None:
    plan = search(
        [workload(300, 20, 3, profile(resources=Resources(luts=1, ffs=1, multipliers=73, block_rams=0)))], machine()
    )
    assert plan.choices[0].profile is None
    assert any("73 multipliers of 72" in r.reason for r in plan.rejected)


def test_cuts_are_told_of_but_never_chosen() -> None:
    cut = profile("w4", 0.5, cut="conv1", rest=ServiceTime.constant(0.01 * MS))
    plan = search([workload(300, 20, 3, profile(), cut)], machine())
    assert plan.choices[0].profile == profile()
    assert any("up to conv1" in r.choice and "cost model only" in r.reason for r in plan.rejected)


def test_unreachable_deadline_gives_the_nearest_and_says_it_is_not_kept() -> None:
    plan = search([workload(300, 1.0, 3)], machine())
    assert not plan.feasible
    assert plan.forecast.workloads[0].p99_s > 1 * MS
    assert math.isfinite(plan.forecast.workloads[0].p99_s)


def test_many_workloads_are_planned_within_the_bounds_of_the_search() -> None:
    tasks = [
        Workload(
            f"t{i}", 20.0 + i, 30 * MS, ServiceTime.constant(2 * MS), (profile(f"t{i}", 2 + i % 3, resources=SMALL),)
        )
        for i in range(4)
    ]
    plan = search(tasks, machine())
    assert plan.feasible
    assert sum(choice.profile is not None for choice in plan.choices) == 2  # 72 multipliers hold two of 30
    assert plan.bound <= plan.cost
    assert plan.compared <= plan_search.WIDTH


def test_schedule_gives_less_to_the_fpga_as_the_rate_grows_beyond_it() -> None:
    made = schedule(workload(1, 20, 2), machine(places=64), "cpu", [100, 300, 600, 900])
    shares = [point.share for point in made.points]
    assert shares[0] == shares[1] == 1.0
    assert shares[1] > shares[2] > shares[3] > 0
    assert made.share(450) == pytest.approx((shares[1] + shares[2]) / 2)
    assert (made.share(1), made.share(1e6)) == (shares[0], shares[3])


def test_slow_link_is_what_images_wait_for() -> None:
    slow = LinkModel(300_000, 0.0, CpuWork.always(0.0))
    assert service_s(profile(), slow) == pytest.approx(784 / 300_000)


@pytest.mark.parametrize("n", [0, plan_search.MAX_WORKLOADS + 1])
def test_number_of_workloads_is_bounded(n: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to"):
        search([workload()] * n, machine())

"""Shows a plan, as JSON for programs and as tables for people."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from fpga.offload.cost_model import EstimateRange, Machine, PlacementChoice, Workload, WorkloadForecast
from fpga.offload.plan_search import OffloadPlan
from fpga.offload.queueing import ServiceTime


def to_json(plan: OffloadPlan, machine: Machine) -> dict[str, Any]:
    """A plan for programs; infinite values are null."""
    each = zip(plan.workloads, plan.choices, plan.forecast.workloads, strict=True)
    return {
        "feasible": plan.feasible,
        "objective": plan.objective,
        "cost": _finite(plan.cost),
        "cost_bound": _finite(plan.bound),
        "exhaustive": plan.exhaustive,
        "placements_compared": plan.compared,
        "cpu_seconds_per_second": plan.forecast.cpu_load,
        "cores": machine.cores,
        "estimated_watts": _range(plan.forecast.watts),
        "workloads": [_workload(workload, choice, found) for workload, choice, found in each],
        "rejected": [{"workload": r.workload, "choice": r.choice, "reason": r.reason} for r in plan.rejected],
    }


def _workload(workload: Workload, choice: PlacementChoice, found: WorkloadForecast) -> dict[str, Any]:
    return {
        "name": workload.name,
        "rate_hz": workload.rate_hz,
        "deadline_ms": workload.deadline_s * 1e3,
        "cpu_ms": workload.cpu.mean_s * 1e3,
        "design": None if choice.profile is None else choice.profile.name,
        "share": choice.share,
        "fpga_share": found.fpga_share,
        "fpga_utilisation": found.fpga_load,
        "p50_ms": _finite(found.p50_s * 1e3),
        "p99_ms": _finite(found.p99_s * 1e3),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _range(of: EstimateRange) -> dict[str, float]:
    return {"low": of.low, "mid": of.mid, "high": of.high}


def show(plan: OffloadPlan, machine: Machine, console: Console) -> None:
    """A plan for people."""
    console.print(_placements(plan))
    power, load = plan.forecast.watts, plan.forecast.cpu_load
    console.print(
        f"CPU: {load:.3f} of {machine.cores} cores busy ({load / machine.cores:.1%}). "
        f"Power: {power.mid:.2f} W, from {power.low:.2f} to {power.high:.2f}: an estimate."
    )
    known = {f"{each.name}: {each.source}" for w in plan.workloads for each in w.profiles if each.runnable}
    console.print("; ".join(sorted({*known, *(f"{w.name} on a core: {_times(w.cpu)}" for w in plan.workloads)})))
    unit = "CPU seconds per second" if plan.objective == "cpu" else "W (estimate)"
    if plan.feasible:
        exact = "none is better" if plan.exhaustive else f"none can go below {plan.bound:.4g}"
        console.print(f"Cheapest of {plan.compared} placements within the bounds: {plan.cost:.4g} {unit}; {exact}.")
    else:
        console.print("[bold]No placement keeps all bounds[/bold]; this one comes nearest to the deadlines.")
    if plan.rejected:
        console.print(_rejections(plan))


def _placements(plan: OffloadPlan) -> Table:
    table = _table("workload", "goes to", "on FPGA", "FPGA busy", "P50 ms", "P99 ms", "deadline ms")
    for workload, choice, found in zip(plan.workloads, plan.choices, plan.forecast.workloads, strict=True):
        table.add_row(
            f"{workload.name} {workload.rate_hz:g}/s",
            str(choice),
            f"{found.fpga_share:.1%}",
            f"{found.fpga_load:.1%}",
            f"{found.p50_s * 1e3:.2f}",
            f"{found.p99_s * 1e3:.2f}",
            f"{workload.deadline_s * 1e3:g}",
        )
    return table


def _rejections(plan: OffloadPlan) -> Table:
    table = _table("not chosen", "", "why")
    for each in plan.rejected:
        table.add_row(each.workload, each.choice, each.reason)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title)
    return table


def _times(service: ServiceTime) -> str:
    return f"{service.mean_s * 1e3:.3g} ms ± {service.variation:.0%}"

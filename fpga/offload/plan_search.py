"""Searches for a plan: the cheapest placement that keeps every deadline, the power budget and the device's bounds.

Each workload has a list of choices: the CPU alone, or an FPGA design with a share of 1/40 to 40/40. Choices that break
a bound on their own are removed. Costs add up, so placements are sorted by cost first; the first that keeps the
deadlines is the best. With many workloads, only `WIDTH` partial placements are kept (the cheapest, and a quarter by
their use of the device); the plan then says that it may not be the best, and gives a lower bound of the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from fpga.offload.cost_model import (
    FREE,
    Machine,
    PlacementChoice,
    PlacementCost,
    PlacementForecast,
    Workload,
    cost,
    fits,
    forecast,
    shortage,
    watts,
)
from hawkvision.core.errors import ConfigError

Objective: TypeAlias = Literal["cpu", "energy"]
"""What to minimise: CPU seconds per second, or watts (mid estimate) of cores and FPGA together."""

SHARES: Final = tuple(i / 40 for i in range(1, 41))
WIDTH: Final = 7_000
"""Partial placements kept; enough for two workloads of two designs each."""
MAX_FORECASTS: Final = 2_000
"""Placements whose latencies are computed, at most."""
MAX_WORKLOADS: Final = 16


@dataclass(frozen=True)
class RejectedChoice:
    """A choice that was not taken, and why."""

    workload: str
    choice: str
    reason: str


@dataclass(frozen=True)
class OffloadPlan:
    """A placement, its prediction, and the reasons for it."""

    objective: Objective
    workloads: tuple[Workload, ...]
    choices: tuple[PlacementChoice, ...]
    forecast: PlacementForecast
    cost: float
    """CPU seconds per second, or watts."""
    bound: float
    """Lower bound of the cost of all placements within the bounds."""
    feasible: bool
    """False if no placement keeps all bounds; this one's slowest workload then comes nearest its deadline."""
    exhaustive: bool
    compared: int
    """Number of whole placements compared."""
    rejected: tuple[RejectedChoice, ...]


@dataclass(frozen=True)
class _PartialPlan:
    choices: tuple[PlacementChoice, ...]
    cost: PlacementCost


def search(
    workloads: Sequence[Workload], machine: Machine, objective: Objective = "cpu", power_w: float = math.inf
) -> OffloadPlan:
    """The cheapest placement. If none keeps all bounds, the returned one says so.

    Raises:
        ConfigError: if there is no workload, or more than `MAX_WORKLOADS`.
    """
    if not 1 <= len(workloads) <= MAX_WORKLOADS:
        raise ConfigError(f"plan: expected 1 to {MAX_WORKLOADS} workloads, got {len(workloads)}")
    rejected: list[RejectedChoice] = []
    lists = [_possible(workload, machine, power_w, rejected) for workload in workloads]
    partials, exhaustive = _combined(workloads, lists, machine, objective, power_w, rejected)
    bound, compared = _bound(lists, machine, objective), len(partials)
    for tried, partial in enumerate(partials[:MAX_FORECASTS]):
        found = forecast(workloads, partial.choices, machine)
        if all(p.p99_s <= w.deadline_s for p, w in zip(found.workloads, workloads, strict=True)):
            price = _price(partial.cost, machine, objective)
            exhaustive = exhaustive or (tried == 0 and price <= bound)
            kept = _explained(rejected, workloads, partial.choices, machine, objective)
            return OffloadPlan(
                objective, tuple(workloads), partial.choices, found, price, bound, True, exhaustive, compared, kept
            )
    exhaustive = exhaustive and compared <= MAX_FORECASTS
    return _nearest(workloads, machine, objective, bound, exhaustive, compared, tuple(rejected))


def _combined(
    workloads: Sequence[Workload],
    lists: Sequence[Sequence[tuple[PlacementChoice, PlacementCost]]],
    machine: Machine,
    objective: Objective,
    power_w: float,
    rejected: list[RejectedChoice],
) -> tuple[list[_PartialPlan], bool]:
    """Placements of all workloads within the bounds, cheapest first, and whether these are all of them."""
    exhaustive, partials = True, [_PartialPlan((), FREE)]
    for workload, choices in zip(workloads, lists, strict=True):
        grown = [
            _PartialPlan((*p.choices, choice), total)
            for p in partials
            for choice, own in choices
            if _keeps(total := p.cost + own, machine, power_w)
        ]
        grown.sort(key=lambda p: _price(p.cost, machine, objective))
        exhaustive = exhaustive and len(grown) <= WIDTH
        partials = _narrowed(grown)
        if not partials:
            together = "with what the others need, none of its choices fits within the bounds"
            rejected.append(RejectedChoice(workload.name, "any", together))
            break
    return partials, exhaustive


def schedule(workload: Workload, machine: Machine, objective: Objective, rates: Sequence[float]) -> ShareSchedule:
    """The best share at each of several ascending arrival rates."""
    points = []
    for rate in rates:
        at_rate = replace(workload, rate_hz=rate)
        choice = _cheapest(at_rate, machine, objective)
        (prediction,) = forecast([at_rate], [choice], machine).workloads
        points.append(SchedulePoint(rate, choice.share, prediction.fpga_mean_s, prediction.p99_s))
    return ShareSchedule(tuple(points))


def _cheapest(workload: Workload, machine: Machine, objective: Objective) -> PlacementChoice:
    """The choice of `search` for one workload, without the reasons."""
    priced = [(cost(workload, choice, machine), choice) for choice in _choices(workload)]
    kept = [
        (own, c) for own, c in priced if (c.profile is None or c.profile.runnable) and _keeps(own, machine, math.inf)
    ]
    kept.sort(key=lambda pair: _price(pair[0], machine, objective))
    for _, choice in kept:
        if forecast([workload], [choice], machine).workloads[0].p99_s <= workload.deadline_s:
            return choice
    return _nearest_choices([workload], machine)[0]


@dataclass(frozen=True, slots=True)
class SchedulePoint:
    """The plan for one arrival rate."""

    rate_hz: float
    share: float
    fpga_mean_s: float
    p99_s: float


@dataclass(frozen=True)
class ShareSchedule:
    """Shares by arrival rate: linear between points, constant beyond them."""

    points: tuple[SchedulePoint, ...]

    def share(self, rate_hz: float) -> float:
        """Share of images for the FPGA at a rate."""
        return self._between(rate_hz, [point.share for point in self.points])

    def fpga_mean_s(self, rate_hz: float) -> float:
        """Predicted mean latency on the FPGA at a rate."""
        return self._between(rate_hz, [point.fpga_mean_s for point in self.points])

    def _between(self, rate_hz: float, values: Sequence[float]) -> float:
        points = self.points
        if rate_hz <= points[0].rate_hz:
            return values[0]
        for i in range(1, len(points)):
            if rate_hz <= points[i].rate_hz:
                part = (rate_hz - points[i - 1].rate_hz) / (points[i].rate_hz - points[i - 1].rate_hz)
                return values[i - 1] + part * (values[i] - values[i - 1])
        return values[-1]


def _choices(workload: Workload) -> list[PlacementChoice]:
    shares = ((profile, SHARES if profile.runnable else SHARES[-1:]) for profile in workload.profiles)
    return [
        PlacementChoice(None, 0.0),
        *(PlacementChoice(profile, share) for profile, each in shares for share in each),
    ]


def _possible(
    workload: Workload, machine: Machine, power_w: float, rejected: list[RejectedChoice]
) -> list[tuple[PlacementChoice, PlacementCost]]:
    """The choices that keep all bounds if nothing else runs."""
    kept = []
    for choice in _choices(workload):
        own = cost(workload, choice, machine)
        reason = _broken(own, machine, power_w)
        if choice.profile is not None and not choice.profile.runnable:
            (alone,) = forecast([workload], [choice], machine).workloads
            reason = (
                f"cost model only, for the runtime gives whole images to either side: {own.cpu_load:.3g} CPU seconds "
                f"per second, P99 {alone.p99_s * 1e3:.2f} ms"
            )
        if reason is None:
            (alone,) = forecast([workload], [choice], machine).workloads
            if alone.p99_s > workload.deadline_s:
                took = "grows without bound" if math.isinf(alone.p99_s) else f"is {alone.p99_s * 1e3:.2f} ms"
                reason = f"P99 {took}, the deadline {workload.deadline_s * 1e3:g} ms"
        if reason is None:
            kept.append((choice, own))
        else:
            rejected.append(RejectedChoice(workload.name, str(choice), reason))
    return kept


def _keeps(total: PlacementCost, machine: Machine, power_w: float) -> bool:
    """Whether a placement keeps all bounds but the deadlines; `_broken` without the reason."""
    return (
        (machine.device is None or fits(total.resources, machine.device))
        and total.cpu_load < machine.cores
        and total.link_load < 1
        and (power_w == math.inf or watts(total, machine).mid <= power_w)
    )


def _broken(total: PlacementCost, machine: Machine, power_w: float) -> str | None:
    """The bound that a placement breaks, or None; deadlines are not checked here."""
    if _keeps(total, machine, power_w):
        return None
    if machine.device is not None and (short := shortage(total.resources, machine.device)):
        return short
    if total.cpu_load >= machine.cores:
        return f"the CPU would need {total.cpu_load:.2f} cores and has {machine.cores}"
    if total.link_load >= 1:
        return f"the link would be busy {total.link_load:.0%} of the time"
    return f"it draws {watts(total, machine).mid:.2f} W (estimate), the budget is {power_w:g} W"


def _price(total: PlacementCost, machine: Machine, objective: Objective) -> float:
    return total.cpu_load if objective == "cpu" else watts(total, machine).mid


def _narrowed(ordered: list[_PartialPlan]) -> list[_PartialPlan]:
    if len(ordered) <= WIDTH:
        return ordered
    cheap, rest = ordered[: WIDTH * 3 // 4], ordered[WIDTH * 3 // 4 :]
    rest.sort(key=lambda p: (p.cost.resources.multipliers, p.cost.resources.luts))
    return cheap + rest[: WIDTH // 4]


def _bound(
    lists: Sequence[Sequence[tuple[PlacementChoice, PlacementCost]]], machine: Machine, objective: Objective
) -> float:
    """Sum of each workload's cheapest choice, without the FPGA's idle power."""
    if not all(lists):
        return math.inf
    if objective == "cpu":
        return math.fsum(min(own.cpu_load for _, own in choices) for choices in lists)
    return math.fsum(min((own.fpga_w + machine.core_w * own.cpu_load).mid for _, own in choices) for choices in lists)


def _nearest(
    workloads: Sequence[Workload],
    machine: Machine,
    objective: Objective,
    bound: float,
    exhaustive: bool,
    compared: int,
    rejected: tuple[RejectedChoice, ...],
) -> OffloadPlan:
    chosen = _nearest_choices(workloads, machine)
    found = forecast(workloads, chosen, machine)
    price = found.cpu_load if objective == "cpu" else found.watts.mid
    kept = _summary(rejected)
    return OffloadPlan(
        objective, tuple(workloads), tuple(chosen), found, price, bound, False, exhaustive, compared, kept
    )


def _nearest_choices(workloads: Sequence[Workload], machine: Machine) -> list[PlacementChoice]:
    """If nothing keeps all bounds: workload by workload, the choice nearest its deadline that the device holds."""
    chosen: list[PlacementChoice] = []
    for number, workload in enumerate(workloads):
        best: tuple[float, float, PlacementChoice] | None = None
        for choice in _choices(workload):
            if choice.profile is not None and not choice.profile.runnable:
                continue
            upto, tried = workloads[: number + 1], [*chosen, choice]
            total = FREE
            for each, its in zip(upto, tried, strict=True):
                total = total + cost(each, its, machine)
            if machine.device is not None and not fits(total.resources, machine.device):
                continue
            found = forecast(upto, tried, machine).workloads
            late = max(p.p99_s / w.deadline_s for p, w in zip(found, upto, strict=True))
            if best is None or (late, total.cpu_load) < best[:2]:
                best = (late, total.cpu_load, choice)
        assert best is not None, "the CPU alone always fits the device"
        chosen.append(best[2])
    return chosen


def _explained(
    rejected: Sequence[RejectedChoice],
    workloads: Sequence[Workload],
    choices: Sequence[PlacementChoice],
    machine: Machine,
    objective: Objective,
) -> tuple[RejectedChoice, ...]:
    """Reasons against the extremes: the CPU alone, and each design with all images."""
    noted = list(rejected)
    for workload, chosen in zip(workloads, choices, strict=True):
        own = _price(cost(workload, chosen, machine), machine, objective)
        known = {r.choice for r in rejected if r.workload == workload.name}
        for choice in _choices(workload):
            price = _price(cost(workload, choice, machine), machine, objective)
            if choice != chosen and str(choice) not in known and choice.share in (0.0, 1.0):
                unit = "CPU seconds per second" if objective == "cpu" else "W"
                reason = f"it costs {price:.4g} {unit}, the chosen {own:.4g}"
                if price <= own:
                    reason = f"it costs {price:.4g} {unit}, but not all workloads keep their deadlines then"
                noted.append(RejectedChoice(workload.name, str(choice), reason))
    return _summary(noted)


def _summary(rejected: Sequence[RejectedChoice]) -> tuple[RejectedChoice, ...]:
    """The first and last of each group of similar rejections."""
    kept: list[RejectedChoice] = []
    groups: dict[tuple[str, str, str], list[RejectedChoice]] = {}
    for each in rejected:
        kind = each.reason.split(" ")[0]
        groups.setdefault((each.workload, each.choice.partition("% ")[2], kind), []).append(each)
    for group in groups.values():
        kept += group if len(group) < 3 else [group[0], group[-1]]
    return tuple(kept)

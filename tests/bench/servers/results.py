"""What a comparison found, as tables: each server's rates and waiting times, and HawkVision's over them.

Ratios are formed within a round, so that a machine that is slower in one round is so for both; the median over rounds
is given with its range. Percentiles are of all rounds' requests together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from rich.table import Table

from tests.bench.servers.catalogue import DOCUMENTED, ReferenceServer
from tests.bench.servers.measurement import Visit

OURS: Final = "hawkvision"
WITHOUT_KERNELS: Final = "hawkvision-onnxruntime"
Visits = Mapping[str, Sequence[Visit]]
Figure = Callable[[Visit], float]


def capacity(visit: Visit) -> float:
    """Right answers per second."""
    return visit.per_s


def ratio(visits: Visits, one: str, other: str, figure: Figure) -> tuple[float, float, float] | None:
    """(median, least, most) over rounds of one's figure over the other's; None if one of them is missing."""
    if one not in visits or other not in visits:
        return None
    found = [figure(mine) / figure(theirs) for mine, theirs in zip(visits[one], visits[other], strict=True)]
    return float(np.median(found)), min(found), max(found)


def percentiles(ms: Sequence[float]) -> tuple[float, float]:
    """P50 and P99: waits that were seen, or infinite where requests without answers reach so far. NaN of nothing."""
    if not ms:
        return float("nan"), float("nan")
    p50, p99 = np.percentile(ms, (50, 99), method="higher")
    return float(p50), float(p99)


def best_python(visits: Visits, servers: Mapping[str, ReferenceServer], *, documented: bool) -> str | None:
    """The Python server with most answers per second, of those with this handler; None if none took part."""
    kind = "documented" if documented else "same"
    rates = {
        name: float(np.median([visit.per_s for visit in found]))
        for name, found in visits.items()
        if name in servers and servers[name].distribution and servers[name].python and servers[name].handler == kind
    }
    return max(rates, key=rates.__getitem__, default=None)


def attribution(visits: Visits, servers: Mapping[str, ReferenceServer]) -> list[tuple[str, tuple[float, float, float]]]:
    """Our lead over the best Python server in factors that multiply within a round: kernels, serving, decoder, all."""
    last = best_python(visits, servers, documented=True) or best_python(visits, servers, documented=False)
    if last is None or last.removesuffix(DOCUMENTED) not in visits:
        return []
    given = last.removesuffix(DOCUMENTED)
    chain = {
        "kernels: ours over ours with ONNX Runtime": (OURS, WITHOUT_KERNELS),
        f"serving: that over {given} with our decoder": (WITHOUT_KERNELS, given),
        f"decoder: that over {last}": (given, last),
        f"all: ours over {last}": (OURS, last),
    }
    factors = [(part, ratio(visits, *pair, capacity)) for part, pair in chain.items() if pair[0] != pair[1]]
    known = [(part, found) for part, found in factors if found is not None]
    return known if len(known) == len(factors) else []


def tables(visits: Visits, servers: Mapping[str, ReferenceServer]) -> list[Table]:
    """Capacities, latencies and factors of those that went all rounds."""
    first = _table("closed loop", "answers/s (range)", "HawkVision / it", "per CPU second", "failed")
    for name, found in visits.items():
        rates = [visit.per_s for visit in found]
        first.add_row(
            name,
            f"{np.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})",
            _written(ratio(visits, OURS, name, capacity)),
            f"{np.median([visit.per_cpu_s for visit in found]):.1f}",
            str(sum(visit.failed for visit in found)),
        )
    second = _table(
        "Poisson arrivals at a share of each one's capacity, from when a request was due",
        *("share", "n", "P50 ms", "P99 ms", "HawkVision's P99 / it", "failed"),
    )
    for name, found in visits.items():
        for share in found[0].waits_ms:
            pooled = [ms for visit in found for ms in visit.waits_ms[share]]
            p50, p99 = percentiles(pooled)
            p99_ratio = ratio(visits, OURS, name, lambda visit, at=share: percentiles(visit.waits_ms[at])[1])  # type: ignore[misc]
            failed = sum(map(math.isinf, pooled))
            second.add_row(name, share, str(len(pooled)), f"{p50:.2f}", f"{p99:.2f}", _written(p99_ratio), str(failed))
    third = _table("HawkVision over the best Python server, answers/s", "times (range)")
    for part, factor in attribution(visits, servers):
        third.add_row(part, _written(factor))
    return [first, second, third] if third.rows else [first, second]


def _table(title: str, *columns: str) -> Table:
    table = Table("server", box=None, header_style="bold", title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _written(found: tuple[float, float, float] | None) -> str:
    if found is None or not math.isfinite(found[0]):
        return ""
    return f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"

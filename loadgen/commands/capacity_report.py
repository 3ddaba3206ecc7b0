"""What a search for the capacity found, as `--json` writes it and in words."""

from __future__ import annotations

from typing import Final

import msgspec

from loadgen.analysis.capacity import Confirmation, Probe, Standing
from loadgen.workload.record import Origin, TargetClass

LATE_MS: Final = 1.0
"""Of the generator, which is worth saying."""


class Capacity(msgspec.Struct, frozen=True):
    """What was found, as `--json` writes it."""

    url: str
    p99_ms: float
    min_accuracy: float | None
    targets: list[TargetClass]
    data: str
    low: float
    """The rate that was confirmed; 0 if none was."""
    high: float | None
    """The lowest rate that failed, twice in probes or in a confirming run; None if none did."""
    bracketed: float
    """The highest rate that held in a probe; 0 if none did."""
    refuted: list[float]
    """Rates whose confirming runs failed."""
    confirmation: Confirmation | None
    """The last confirming run: of `low`, or failed, or interrupted; None if there was none."""
    generator_limit: float | None
    """The highest rate that this generator was allowed to offer."""
    probes: list[Probe]
    """All runs in their order, confirming ones included."""
    interrupted: bool
    origin: Origin


def conclusion(found: Capacity) -> str:
    """The answer, with its bracket and how sure it is."""
    wanted = f"P99 ≤ {found.p99_ms:g} ms"
    if found.min_accuracy is not None:
        wanted += f" and accuracy ≥ {found.min_accuracy:g}"
    shown = "" if found.confirmation is None else f"\n{confirmed_by(found.confirmation, found.min_accuracy)}"
    if found.low > 0.0:
        return f"capacity: {found.low:.4g} requests/s at {wanted}, confirmed{_bracket(found)}{shown}"
    probed = f"{found.bracketed:.4g} requests/s held in a probe and are not confirmed" if found.bracketed > 0.0 else ""
    if found.interrupted:
        return f"interrupted, looking for {wanted}: {probed or 'no rate held so far'}{shown}"
    if found.refuted:
        tried = ", ".join(f"{rate:.4g}" for rate in found.refuted)
        return (
            f"no rate kept {wanted} for long: probes found {found.bracketed:.4g} requests/s, but {tried} failed" + shown
        )
    if probed:
        return f"no rate was confirmed to keep {wanted}: {probed}"
    lowest = min(found.probes, key=lambda each: each.rate, default=None)
    return f"no rate kept {wanted}" + ("" if lowest is None else f"; the lowest tried was {lowest.rate:.3g} requests/s")


def confirmed_by(run: Confirmation, min_accuracy: float | None) -> str:
    """What a confirming run rests on."""
    cut = f" (cut from {run.wanted}: --confirm-s)" if run.n < run.wanted else ""
    high = "no end" if run.p99_high is None else f"{run.p99_high:.1f}"
    low = "none" if run.p99_low is None else f"{run.p99_low:.1f}"
    p99 = "P99 none" if run.p99_ms is None else f"P99 {run.p99_ms:.1f} ms"
    few = f", on {run.occasions} occasions only: --confirm-requests" if run.few else ""
    text = (
        f"{run.rate:.4g} requests/s, {run.n} requests{cut} in {run.seconds:.0f} s: {p99} (95 %: {low} to {high}{few})"
    )
    if run.accuracy is not None:
        found = run.accuracy
        text += f", accuracy {found.value:.1%} (95 %: {found.low:.1%} to {found.high:.1%})"
    if run.standing is not None and min_accuracy is not None:
        text += f": {min_accuracy:.1%} is {run.standing}"
        if run.standing in (Standing.KEPT, Standing.CHANCE):
            text += "; more images and --confirm-requests would tell"
    return text


def probe_line(probe: Probe) -> str:
    """One run in a line."""
    p99 = "P99 none" if probe.p99_ms is None else f"P99 {probe.p99_ms:.1f} ms"
    accuracy = "" if probe.accuracy is None else f", right {probe.accuracy:.1%}"
    late = f", generator late {probe.late_ms:.1f} ms" if probe.late_ms > LATE_MS else ""
    came = "held" if probe.held else "interrupted" if probe.interrupted else f"failed: {', '.join(probe.failing)}"
    kind = "confirming: " if probe.confirming else ""
    errors = f", not answered: {error_codes(probe)}" if probe.errors else ""
    return f"{probe.rate:8.4g} requests/s: {kind}{p99}{accuracy}, n={probe.n}{errors}{late}: {came}"


def error_codes(probe: Probe) -> str:
    """How many requests got no answer, by code."""
    return ", ".join(f"{code} {count}" for code, count in probe.errors.items())


def _bracket(found: Capacity) -> str:
    if found.high is not None:
        return f" ({found.high:.4g} failed; {len(found.probes)} runs)"
    if found.generator_limit is not None and found.low >= found.generator_limit:
        return ", and perhaps more: this generator offers no higher rate; try --processes"
    return f", and perhaps more: the search ended after {len(found.probes)} runs"

"""`python -m loadgen find-capacity`: the highest rate at which a server keeps its P99 and its accuracy, confirmed.

Short probes find a bracket, and a long run confirms the rate (`analysis.rate_search`); `analysis.capacity` decides what
holds. Every run is an open loop of Poisson arrivals. All runs send the same images for the same targets in the same
order. First probes of equally many requests have the same pattern of arrivals, stretched to their rate; repeats and
confirming runs have others.

It takes at most `--max-probes` probes, each as long as `--probe-requests` take (at most `MOST_PROBE_S`) or `--probe-s`
if that is longer, and `1 + STEPS_DOWN` confirming runs of `--confirm-s`, each with `WARM_UP_S` before and `--timeout-s`
after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady
from hawkvision.system.files import write_atomic
from loadgen.analysis.capacity import (
    LEAST_RATE,
    STEPS_DOWN,
    CapacityGoal,
    Confirmation,
    CountedAnswers,
    Probe,
    RateSearch,
    RateTrial,
    Standing,
    confirmation,
    counted,
    is_lightly_loaded,
    judge,
)
from loadgen.clients import noise_floor
from loadgen.clients.engine import LoadJob
from loadgen.clients.processes import WorkerProcesses
from loadgen.commands import options
from loadgen.commands.command_line import option
from loadgen.commands.interrupt import INTERRUPTED_STATUS, first_interrupt, run_unless
from loadgen.commands.options import Setup
from loadgen.commands.terminal import progress_bar, terminal
from loadgen.workload import target_mix
from loadgen.workload.arrivals import MAX_RATE, MAX_REQUESTS, ConstantArrivals
from loadgen.workload.record import Origin, RequestOutcome, TargetClass, check_files

WARM_UP_S: Final = 1.0
"""Of every run; not counted."""
PRECISION: Final = 0.05
"""Width of the bracket to end with, relative to the rate."""
MOST_PROBE_S: Final = 60.0
"""Counted, of a probe: below five requests per second it has fewer than 300. The confirming run has more."""
CONFIRM_PROBES: Final = 4.0
"""A confirming run is as long as so many of `--probe-s` at least: a backlog that grows slowly takes time to be seen."""
LEAST_CONFIRMING: Final = 1000
"""Requests: ten lie beyond the P99 then (`counted.FEWEST_BEYOND`)."""
GENERATOR_SHARE: Final = 0.7
"""Of the generator's own highest rate, beyond which it would measure itself."""

LATE_MS: Final = 1.0
"""Of the generator, which is worth saying."""

Ask: TypeAlias = Callable[[LoadJob], Awaitable[tuple[list[RequestOutcome], bool]]]
"""What comes of a job, and whether it was interrupted."""


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


class CapacityOptions(options.LoadOptions, frozen=True, kw_only=True):
    """The options of `python -m loadgen find-capacity`."""

    p99_ms: Annotated[
        float,
        option("Verdict", "P99 latency to keep, in milliseconds, counted from when requests are due."),
    ]
    min_accuracy: Annotated[float | None, option("Verdict", "Share of all requests that must be answered right.")] = (
        None
    )
    from_rate: Annotated[float, option("Load", "First rate to try, in requests per second.")] = 8.0
    probe_requests: Annotated[
        int,
        option(
            "Measurement",
            f"Fewest requests to count in a probe, which takes {MOST_PROBE_S:g} s at most.",
        ),
    ] = 300
    probe_s: Annotated[
        float, option("Measurement", "Fewest seconds to count in a probe; queues take time to grow.")
    ] = 5.0
    max_probes: Annotated[int, option("Measurement", "Most probes, repeated ones included.")] = 24
    confirm_requests: Annotated[int, option("Measurement", "Fewest requests of the run that confirms the rate.")] = (
        LEAST_CONFIRMING
    )
    confirm_s: Annotated[
        float,
        option("Measurement", f"Most seconds of a confirming run; there are up to {1 + STEPS_DOWN}."),
    ] = 180.0
    no_noise: Annotated[bool, option("Measurement", "Do not measure the load generator first.")] = False
    json: Annotated[Path | None, option("Output", "Write what was found to this file.")] = None
    html: Annotated[
        Path | None,
        option("Output", "Write a page with the curves of latency and goodput against the rate to this file."),
    ] = None

    def counted_s(self, tried: RateTrial) -> float:
        """How long a run is, without its warm-up."""
        if tried.confirming:
            return min(self.confirm_s, max(self.confirm_requests / tried.rate, CONFIRM_PROBES * self.probe_s))
        return max(self.probe_s, min(self.probe_requests / tried.rate, MOST_PROBE_S))


async def run(given: CapacityOptions) -> int:
    """Search and print, also what an interrupt leaves; 0 if a rate was confirmed, 1 if none was, 130 if interrupted.

    Raises:
        HawkVisionError: for options that do not fit, or a server that cannot be connected to.
    """
    _check(given)
    check_files(given.json, given.html)
    setup_ = options.read_setup(given)
    if given.min_accuracy is not None and setup_.dataset.labels is None:
        raise ConfigError("--min-accuracy: expected labelled images; --data has none")
    started = options.origin(setup_.seed)
    console = terminal(120, highlight=False)
    probes: list[Probe] = []
    latest: Confirmation | None = None
    # At a higher rate the longest run would have more requests than a run may have.
    most = min(MAX_RATE, MAX_REQUESTS / (WARM_UP_S + max(given.confirm_s, given.probe_s)))
    search = RateSearch(given.from_rate, PRECISION, most, given.max_probes)
    limit: float | None = None

    def conclude(*, interrupted: bool = False) -> None:
        found = Capacity(
            url=given.url,
            p99_ms=given.p99_ms,
            min_accuracy=given.min_accuracy,
            targets=setup_.classes,
            data=setup_.dataset.name,
            low=search.confirmed or 0.0,
            high=search.high if search.high < math.inf else None,
            bracketed=search.low,
            refuted=search.refuted,
            confirmation=latest,
            generator_limit=limit,
            probes=probes,
            interrupted=interrupted,
            origin=started,
        )
        console.print(conclusion(found))
        _write(given, found, labelled=setup_.dataset.labels is not None)

    with first_interrupt() as stop:
        async with WorkerProcesses(setup_.processes) as workers:

            async def ask(job: LoadJob) -> tuple[list[RequestOutcome], bool]:
                with progress_bar("requests", len(job.due), job.duration_s) as show:
                    return await workers.run(job, stop=stop, show=show), stop.is_set()

            await workers.load(setup_.dataset)
            if not given.no_noise:
                job = setup_.job(ConstantArrivals(noise_floor.LEAST_RATE), given.probe_s)
                floor = await run_unless(stop, noise_floor.measure(workers, job, given.from_rate))
                if floor is not None:
                    limit = GENERATOR_SHARE * floor.max_rate
                    search.most = min(search.most, limit)
                    console.print(f"the generator alone: {floor}")
            try:
                if not stop.is_set():
                    async for probe, confirmed in find(search, setup_, given, ask):
                        probes.append(probe)
                        latest = confirmed or latest
                        console.print(probe_line(probe))
            except HawkVisionError:
                if probes:
                    conclude()
                raise
        interrupted = stop.is_set() and search.next() is not None
    conclude(interrupted=interrupted)
    if interrupted:
        return INTERRUPTED_STATUS
    return 0 if search.confirmed is not None else 1


def _write(given: CapacityOptions, found: Capacity, *, labelled: bool) -> None:
    """Write the files that were asked for."""
    if given.json is not None:
        write_atomic(given.json, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if given.html is not None:
        from loadgen.analysis.capacity_page import capacity_page

        page = capacity_page(found.url, conclusion(found), found.probes, found.p99_ms, found.origin, labelled=labelled)
        write_atomic(given.html, page.encode())


async def find(
    search: RateSearch, setup_: Setup, given: CapacityOptions, ask: Ask
) -> AsyncIterator[tuple[Probe, Confirmation | None]]:
    """Try rates until the search is over or interrupted; give each run, with its figures if it was to confirm a rate.

    Raises:
        NotReady: if the first run has no answer at all, which no lower rate would mend.
    """
    goal, labelled = CapacityGoal(given.p99_ms, given.min_accuracy), setup_.dataset.labels is not None
    least: CountedAnswers | None = None
    least_rate = math.inf
    first = True
    while (tried := search.next()) is not None:
        job = job_of(tried, given.counted_s(tried), setup_)
        outcomes, interrupted = await ask(job)
        end_s = job.duration_s
        if interrupted:
            end_s = min(end_s, max((each.due_s for each in outcomes), default=0.0))
        answers = counted(outcomes, WARM_UP_S, end_s, labelled=labelled)
        probe = judge(tried, answers, goal, None if interrupted else least, interrupted=interrupted)
        counts = tried.confirming and len(answers) > 0
        yield probe, confirmation(tried.rate, answers, goal, given.confirm_requests, setup_.seed) if counts else None
        if interrupted:
            return
        if first and not any(each.answered for each in outcomes):
            raise NotReady(f"none of {probe.n} requests was answered: {error_codes(probe)}")
        first = False
        if tried.rate < least_rate and is_lightly_loaded(probe):
            least, least_rate = answers, tried.rate
        search.record(tried, probe.held)


def job_of(tried: RateTrial, seconds: float, setup_: Setup) -> LoadJob:
    """Every request of a run: so many at uniform moments, which is what Poisson arrivals are once it is known how many
    there are. So the rate is what it says, without its own chance.
    """
    n, warming = max(1, round(tried.rate * seconds)), round(tried.rate * WARM_UP_S)
    rng = np.random.default_rng([setup_.seed, tried.confirming, tried.again])
    due = WARM_UP_S + np.sort(rng.random(n)) * seconds
    before = np.sort(rng.random(warming)) * WARM_UP_S
    # The counted ones first, so that the length of the warm-up does not decide which images count.
    image = setup_.dataset.order(n, setup_.seed + 2), setup_.dataset.order(warming, setup_.seed + 3)
    target = [
        list(itertools.islice(target_mix.draws(setup_.classes, setup_.seed + 1), count)) for count in (n, warming)
    ]
    return LoadJob(
        server=setup_.server,
        fields=[each.fields for each in setup_.classes],
        target=[*target[1], *target[0]],
        image=[*image[1].tolist(), *image[0].tolist()],
        duration_s=WARM_UP_S + seconds,
        max_in_flight=setup_.max_in_flight,
        due=[*before.tolist(), *due.tolist()],
    )


def _check(given: CapacityOptions) -> None:
    options.positive("--p99-ms", given.p99_ms)
    options.positive("--probe-s", given.probe_s)
    options.positive("--confirm-s", given.confirm_s)
    if not LEAST_RATE <= given.from_rate <= MAX_RATE:
        raise ConfigError(f"--from-rate: expected {LEAST_RATE:g} to {MAX_RATE:g}, got {given.from_rate!r}")
    if given.min_accuracy is not None and not 0.0 < given.min_accuracy <= 1.0:
        raise ConfigError(f"--min-accuracy: expected a fraction above 0, at most 1, got {given.min_accuracy!r}")
    if given.probe_requests < 100:
        raise ConfigError(f"--probe-requests: expected at least 100, for a P99; got {given.probe_requests}")
    if given.confirm_requests < LEAST_CONFIRMING:
        raise ConfigError(
            f"--confirm-requests: expected at least {LEAST_CONFIRMING}, so that ten lie beyond the P99; got "
            f"{given.confirm_requests}"
        )
    if given.max_probes < 1:
        raise ConfigError(f"--max-probes: expected at least 1, got {given.max_probes}")


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

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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
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
    confirmation,
    counted,
    is_lightly_loaded,
    judge,
)
from loadgen.clients import noise_floor
from loadgen.clients.engine import LoadJob
from loadgen.clients.processes import WorkerProcesses
from loadgen.commands import options
from loadgen.commands.capacity_report import Capacity, conclusion, error_codes, probe_line
from loadgen.commands.command_line import option
from loadgen.commands.interrupt import INTERRUPTED_STATUS, first_interrupt, run_unless
from loadgen.commands.options import Setup
from loadgen.commands.terminal import terminal
from loadgen.workload import target_mix
from loadgen.workload.arrivals import MAX_RATE, MAX_REQUESTS, ConstantArrivals
from loadgen.workload.record import Origin, RequestOutcome, check_files

WARM_UP_S: Final = 1.0
"""Of every run; not counted."""
MOST_PROBE_S: Final = 60.0
"""Counted, of a probe: below five requests per second it has fewer than 300. The confirming run has more."""
CONFIRM_PROBES: Final = 4.0
"""A confirming run is as long as so many of `--probe-s` at least: a backlog that grows slowly takes time to be seen."""
LEAST_CONFIRMING: Final = 1000
"""Requests: ten lie beyond the P99 then (`counted.FEWEST_BEYOND`)."""
GENERATOR_SHARE: Final = 0.7
"""Of the generator's own highest rate, beyond which it would measure itself."""

Ask: TypeAlias = Callable[[LoadJob], Awaitable[tuple[list[RequestOutcome], bool]]]
"""What comes of a job, and whether it was interrupted."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """How long runs are, and what they send."""

    setup: Setup
    probe_requests: int = 300
    probe_s: float = 5.0
    confirm_requests: int = LEAST_CONFIRMING
    confirm_s: float = 180.0

    def seconds(self, tried: RateTrial) -> float:
        """Counted."""
        if tried.confirming:
            return min(self.confirm_s, max(self.confirm_requests / tried.rate, CONFIRM_PROBES * self.probe_s))
        return max(self.probe_s, min(self.probe_requests / tried.rate, MOST_PROBE_S))

    def job(self, tried: RateTrial) -> LoadJob:
        """Every request of a run: so many at uniform moments, which is what Poisson arrivals are once it is known how
        many there are. So the rate is what it says, without its own chance.
        """
        seconds, of = self.seconds(tried), self.setup
        n, warming = max(1, round(tried.rate * seconds)), round(tried.rate * WARM_UP_S)
        rng = np.random.default_rng([of.seed, tried.confirming, tried.again])
        due = WARM_UP_S + np.sort(rng.random(n)) * seconds
        before = np.sort(rng.random(warming)) * WARM_UP_S
        # The counted ones first, so that the length of the warm-up does not decide which images count.
        image = of.dataset.order(n, of.seed + 2), of.dataset.order(warming, of.seed + 3)
        target = [list(itertools.islice(target_mix.draws(of.classes, of.seed + 1), count)) for count in (n, warming)]
        return LoadJob(
            server=of.server,
            fields=[each.fields for each in of.classes],
            target=[*target[1], *target[0]],
            image=[*image[1].tolist(), *image[0].tolist()],
            duration_s=WARM_UP_S + seconds,
            max_in_flight=of.max_in_flight,
            due=[*before.tolist(), *due.tolist()],
        )

    def most_rate(self) -> float:
        """At which a run has no more requests than a run may have."""
        return min(MAX_RATE, MAX_REQUESTS / (WARM_UP_S + max(self.confirm_s, self.probe_s)))


@dataclass(slots=True)
class CapacityFindings:
    """What is known so far."""

    probes: list[Probe] = field(default_factory=list)
    confirmation: Confirmation | None = None
    """Of the last confirming run, whatever came of it."""
    interrupted: bool = False


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
    precision: Annotated[float, option("Measurement", "Width of the bracket to end with, relative to the rate.")] = 0.05
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


async def run(given: CapacityOptions) -> int:
    """Search and print; 0 if a rate was confirmed, 1 if none was, 130 after an interrupt. Partial findings are
    printed and written, too.

    Raises:
        HawkVisionError: for options that do not fit, or a server that cannot be connected to.
    """
    _check(given)
    check_files(given.json)
    setup_ = options.read_setup(given)
    goal = CapacityGoal(given.p99_ms, given.min_accuracy)
    if goal.min_accuracy is not None and setup_.dataset.labels is None:
        raise ConfigError("--min-accuracy: expected labelled images; --data has none")
    plan = ProbePlan(setup_, given.probe_requests, given.probe_s, given.confirm_requests, given.confirm_s)
    started = options.origin(setup_.seed)
    console = terminal(160, highlight=False)
    findings = CapacityFindings()
    search = RateSearch(given.from_rate, given.precision, plan.most_rate(), given.max_probes)
    limit: float | None = None

    def conclude() -> None:
        found = _capacity(given, setup_, search, findings, limit, started)
        console.print(conclusion(found))
        if given.json is not None:
            write_atomic(given.json, msgspec.json.format(msgspec.json.encode(found)) + b"\n")

    with first_interrupt() as stop:
        async with WorkerProcesses(setup_.processes) as workers:

            async def ask(job: LoadJob) -> tuple[list[RequestOutcome], bool]:
                return await workers.run(job, stop=stop), stop.is_set()

            await workers.load(setup_.dataset)
            if not given.no_noise:
                job = setup_.job(ConstantArrivals(noise_floor.LEAST_RATE), given.probe_s)
                floor = await run_unless(stop, noise_floor.measure(workers, job, given.from_rate))
                if floor is not None:
                    limit = GENERATOR_SHARE * floor.max_rate
                    search.most = min(search.most, limit)
                    console.print(
                        f"the generator alone: P99 {floor.p99_ms:.2f} ms, at most {floor.max_rate:.0f} requests/s"
                    )
            try:
                if not stop.is_set():
                    await find(search, plan, goal, ask, findings, lambda probe: console.print(probe_line(probe)))
            except HawkVisionError:
                if findings.probes:
                    conclude()
                raise
        findings.interrupted = stop.is_set() and search.next() is not None
    conclude()
    if findings.interrupted:
        return INTERRUPTED_STATUS
    return 0 if search.confirmed is not None else 1


async def find(
    search: RateSearch,
    plan: ProbePlan,
    goal: CapacityGoal,
    ask: Ask,
    findings: CapacityFindings,
    report: Callable[[Probe], None],
) -> None:
    """Try rates until the search is over or interrupted; each probe is added to the findings and reported.

    Raises:
        NotReady: if the first run has no answer at all, which no lower rate would mend.
    """
    labelled = plan.setup.dataset.labels is not None
    least: CountedAnswers | None = None
    least_rate = math.inf
    while (tried := search.next()) is not None:
        job = plan.job(tried)
        outcomes, interrupted = await ask(job)
        end_s = job.duration_s
        if interrupted:
            end_s = min(end_s, max((each.due_s for each in outcomes), default=0.0))
        answers = counted(outcomes, WARM_UP_S, end_s, labelled=labelled)
        probe = judge(tried, answers, goal, None if interrupted else least, interrupted=interrupted)
        findings.probes.append(probe)
        report(probe)
        if tried.confirming and len(answers):
            seed = plan.setup.seed
            findings.confirmation = confirmation(tried.rate, answers, goal, plan.confirm_requests, seed)
        if interrupted:
            return
        if len(findings.probes) == 1 and not any(each.answered for each in outcomes):
            raise NotReady(f"none of {probe.n} requests was answered: {error_codes(probe)}")
        if tried.rate < least_rate and is_lightly_loaded(probe):
            least, least_rate = answers, tried.rate
        search.record(tried, probe.held)


def _capacity(
    given: CapacityOptions,
    setup_: Setup,
    search: RateSearch,
    findings: CapacityFindings,
    limit: float | None,
    started: Origin,
) -> Capacity:
    return Capacity(
        url=given.url,
        p99_ms=given.p99_ms,
        min_accuracy=given.min_accuracy,
        targets=setup_.classes,
        data=setup_.dataset.name,
        low=search.confirmed or 0.0,
        high=search.high if search.high < math.inf else None,
        bracketed=search.low,
        refuted=search.refuted,
        confirmation=findings.confirmation,
        generator_limit=limit,
        probes=findings.probes,
        interrupted=findings.interrupted,
        origin=started,
    )


def _check(given: CapacityOptions) -> None:
    options.positive("--p99-ms", given.p99_ms)
    options.positive("--precision", given.precision)
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

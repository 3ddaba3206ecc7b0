"""`python -m tests.bench.policies`: policies compared over bad links, through the same servers, models and schedule.

Every policy gets an edge node of its own, one after another, in front of one datacenter tier (`deployment`). Within a
round all are sent the same images with the same targets at the same moments, over the same link traces; the next round
has other ones, and begins with another policy. HawkVision is tested as it is meant to be used over such links, with
its datagram transport, and once more over TCP alone like all others (`hawkvision-tcp`).

Callers and links run at a higher priority than ordinary processes, where that is allowed: they stand for other
machines, and must not add their own waits for a processor to latencies.

Before each round, all models of the policy are loaded and both tiers are connected, over links of the usual rate and
delay without loss. The link traces begin with the schedule. The answers of the reference stage to all images, which
pair the accuracy drops, are collected once beforehand.

`static@0.55` among the policies is `static` with that threshold, and `static+fallback` is `static` whose edge answers
just before a deadline that the datacenter misses. `all-edge` is our own edge stage alone. The first comparison is the
share of requests that are answered right within the deadline (`goal_checks`). No round is repeated or left out because
it was disturbed: CPU steal is reported beside the figures.

Writes, into a folder: a record per link, rate and policy, all rounds together, with its figures; the single rounds; a
page per link and rate; what servers said; and `summary.json` with all figures and the claims they bear out.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady
from hawkvision.models.manifest import models_dir
from hawkvision.system.files import write_atomic
from loadgen.analysis.steady_state import is_steady
from loadgen.analysis.summary import summarise
from loadgen.clients import noise_floor
from loadgen.clients.engine import LoadJob, Protocol, ServerAddress
from loadgen.clients.processes import WorkerProcesses
from loadgen.commands import command_line, options
from loadgen.commands.link_proxy import link_samples
from loadgen.commands.options import MAX_IN_FLIGHT, Setup
from loadgen.commands.terminal import terminal
from loadgen.host import cpu_slowdown, cpu_steal, idle_prevention
from loadgen.host.cpu_slowdown import SpinnerProgress
from loadgen.host.cpu_steal import ProcessorTime
from loadgen.network.profiles import LinkProfile, trace_number
from loadgen.workload.arrivals import parse as parse_arrivals
from loadgen.workload.dataset import Dataset, read_dataset
from loadgen.workload.record import CLIENT_EDGE, EDGE_DC, LinkSample, NoiseFloor, RequestOutcome, Run, TargetClass, save
from tests.bench.policies.deployment import CarriedBytes, Deployment
from tests.bench.policies.goal_checks import (
    GoalCheck,
    LinkBytes,
    PolicyCell,
    PolicyReport,
    PolicyResult,
    PolicyRow,
    judge,
    show_claims,
    show_rows,
    together,
)
from tests.bench.policies.plan import PLACES, PolicyContender, PolicyPlan, add_arguments, read_plan
from tests.bench.policies.report_goals import goals_page

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "Compare policies over bad links: same servers, models, images, moments and link traces."
REFERENCE_RATE: Final = 10.0
"""Images per second that the reference stage is asked about: few, so that none waits for another and times out."""
REFERENCE_TRIES: Final = 5
SETTLE_TRIES: Final = 20
"""Of less than a second each, until both tiers answer as they do when they are idle."""
SETTLE_RATE: Final = 20.0
TERMINATED_STATUS: Final = 128 + signal.SIGTERM
WARM_ANSWER_S: Final = 1.0
"""The slowest answer of a try that counts: nothing is left to do for requests of those tested before."""


async def run(given: argparse.Namespace) -> int:
    """Compare as the options say; print, and write into the folder. SIGINT and SIGTERM end it; what is done is written.

    A contender that fails in one round is left out there and said so; then the status is 1. It is 143 after SIGTERM,
    else 0.

    Raises:
        HawkVisionError: for options that do not fit, links that cannot be had here, or servers that do not start.
    """
    plan = read_plan(given)
    dataset = read_dataset(
        given.data, given.task, models_dir(given.models_dir), split=given.split, indices=None, limit=given.limit
    )
    if dataset.labels is None:
        raise ConfigError(f"--data {given.data}: expected labelled images; accuracy is half of what is compared")
    (plan.out / "rounds").mkdir(parents=True, exist_ok=True)
    console = terminal(180)
    backend = ("--backend", given.backend)
    dc_arguments = ("--tasks", given.task, "--datagram-port", "0", *backend)
    found = _PartialResults({}, [])
    floors = {} if given.no_noise else await _floors(plan, dataset)
    for protocol, floor in floors.items():
        console.print(
            f"the generator alone, by {protocol}: P50 {floor.p50_ms:.2f} ms, P99 {floor.p99_ms:.2f} ms, "
            f"at most {floor.max_rate:.0f} requests/s",
            highlight=False,
        )
    testing = asyncio.current_task()
    assert testing is not None
    terminated: list[bool] = []

    def terminate() -> None:
        if not terminated:  # timeout(1) sends it twice
            terminated.append(testing.cancel())

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        with Deployment(plan.out / "logs", dc_arguments, given.congestion) as deployment:
            async with WorkerProcesses(1, deployment.client_prefix, realtime=True) as workers:
                await workers.load(dataset)
                bench = _Bench(plan, dataset, deployment, workers, ("--task", given.task, *backend), floors)
                try:
                    await bench.ask_reference()
                    await _test_all(plan, bench, found, console)
                finally:
                    _conclude(plan, found, given.congestion or _kernels_congestion(), console)
    except asyncio.CancelledError:
        if not terminated:
            raise
        return TERMINATED_STATUS
    return 1 if found.failures else 0


async def _floors(plan: PolicyPlan, dataset: Dataset) -> dict[Protocol, NoiseFloor]:
    """What the generator itself adds, by protocol, before anything else is there: no links; at the highest rate."""
    rate = max(plan.rates)
    floors: dict[Protocol, NoiseFloor] = {}
    # Not before all ordinary processes: asking for as much as it can, it would leave nothing to the null server.
    async with WorkerProcesses(1) as workers:
        await workers.load(dataset)
        for protocol in dict.fromkeys(contender.protocol for contender in plan.contenders):
            server = ServerAddress("http://127.0.0.1", protocol, timeout_s=plan.timeout_s)
            setup_ = Setup(server, dataset, plan.classes, 1, MAX_IN_FLIGHT, plan.seed)
            job = setup_.job(parse_arrivals(plan.schedule(rate)), plan.duration_s)
            floors[protocol] = await noise_floor.measure(workers, job, rate)
    return floors


@dataclass(frozen=True, slots=True)
class _PartialResults:
    """The results and failures so far."""

    cells: dict[tuple[str, float], dict[str, list[PolicyResult]]]
    """By link and rate, then contender: a result per round."""
    failures: list[str]


async def _test_all(plan: PolicyPlan, bench: _Bench, found: _PartialResults, console: Console) -> None:
    for link in plan.links:
        if unseen := plan.unseen(link):
            never = f"{link.name}: never {', '.join(unseen)} while requests count"
            console.print(f"{never}; more --rounds or a longer --duration-s see more", highlight=False, markup=False)
        for rate in plan.rates:
            results = found.cells.setdefault((link.name, rate), {})
            for number in range(plan.rounds):
                for contender in rotated(plan.contenders, number):
                    title = f"{link.name}, {rate:g}/s, round {number + 1}: {contender.name}"
                    console.print(f"{title} …", highlight=False)
                    try:
                        result = await bench.test(contender, link, rate, number)
                    except HawkVisionError as error:
                        found.failures.append(f"{title}: {error}")
                        console.print(f"error: {error}", highlight=False, markup=False)
                    else:
                        results.setdefault(contender.name, []).append(result)


def title_of(contender: PolicyContender, link: LinkProfile, rate: float, number: int) -> str:
    """What the files of one test are called."""
    return f"{link.name}-{rate:g}-{contender.name}-round{number + 1}"


def rotated(found: Sequence[PolicyContender], number: int) -> tuple[PolicyContender, ...]:
    """The order of a round: each begins one further."""
    first = number % len(found)
    return (*found[first:], *found[:first])


class _Bench:
    """Tests one contender after another."""

    def __init__(
        self,
        plan: PolicyPlan,
        dataset: Dataset,
        deployment: Deployment,
        workers: WorkerProcesses,
        edge_arguments: tuple[str, ...],
        floors: Mapping[Protocol, NoiseFloor],
    ) -> None:
        self._plan = plan
        self._floors = floors
        self._dataset = dataset
        self._deployment = deployment
        self._workers = workers
        self._edge_arguments = edge_arguments
        self._reference: dict[int, bool] = {}

    async def ask_reference(self) -> None:
        """Whether the reference stage is right about each image, over perfect links and TCP.

        Raises:
            NotReady: if some images are never answered by the datacenter.
        """
        contender = PolicyContender("reference", "hawkvision", "tcp")
        arguments = (*self._edge_arguments, *contender.arguments)
        with self._deployment.edge(*arguments, log=contender.name) as node:
            setup_ = self._setup(contender, node.url, [TargetClass({"quality": "best"}, 1.0)], 0)
            await self._settle(setup_, contender)
            missing = list(range(len(self._dataset)))
            for _ in range(REFERENCE_TRIES):
                due = [n / REFERENCE_RATE for n in range(len(missing))]
                outcomes = await self._workers.run(
                    LoadJob(setup_.server, [{"quality": "best"}], [0] * len(due), missing, len(due), MAX_IN_FLIGHT, due)
                )
                best = [each for each in outcomes if each.tier == "datacenter" and not each.degraded]
                self._reference |= {each.image: bool(each.right) for each in best}
                numbers = self._dataset.numbers
                missing = [place for place in missing if numbers[place] not in self._reference]
                if not missing:
                    return
        raise NotReady(f"the reference stage did not answer {len(missing)} of {len(self._dataset)} images")

    async def test(self, contender: PolicyContender, link: LinkProfile, rate: float, number: int) -> PolicyResult:
        """One contender, one round; its record is written.

        Raises:
            HawkVisionError: if its edge node does not start, or cannot be asked.
        """
        plan, deployment = self._plan, self._deployment
        name = title_of(contender, link, rate, number)
        profiles = plan.profiles(link)
        deployment.settle(profiles[CLIENT_EDGE], profiles[EDGE_DC])
        with deployment.edge(*self._edge_arguments, *contender.arguments, log=name) as node:
            setup_ = self._setup(contender, node.url, plan.classes, number)
            await self._settle(setup_, contender)
            started = options.origin(setup_.seed)
            before: list[tuple[CarriedBytes, CarriedBytes]] = []
            had: list[tuple[ProcessorTime | None, SpinnerProgress | None]] = []

            def begun() -> None:
                deployment.begin(profiles[CLIENT_EDGE], profiles[EDGE_DC], number)
                before.append(self._carried())
                had.append((cpu_steal.read(), idle_prevention.pace()))

            schedule = plan.schedule(rate)
            try:
                outcomes = await self._workers.run(setup_.job(parse_arrivals(schedule), plan.duration_s), begun=begun)
                near, far = (after.since(then) for after, then in zip(self._carried(), before[0], strict=True))
                lost, slowed = cpu_steal.since(had[0][0]), cpu_slowdown.since(had[0][1], idle_prevention.pace())
            finally:
                deployment.settle(None, None)  # what is still on its way is not waited for
        tested = Run(
            name=contender.name,
            url=node.url,
            protocol=setup_.server.protocol,
            schedule=schedule,
            duration_s=plan.duration_s,
            warm_up_s=plan.warm_up_s,
            deadline_ms=plan.deadline_ms,
            data=self._dataset.name,
            labelled=True,
            targets=plan.classes,
            outcomes=outcomes,
            origin=started,
            noise=self._floors.get(contender.protocol),
            links=samples(profiles, plan.duration_s, number),
            steady=is_steady(outcomes, plan.warm_up_s, plan.duration_s),
            reference=self._reference,
            stolen=lost,
            slowed=slowed,
            server=f"hawkvision {started.hawkvision}, policy {contender.policy}, started for this test",
        )
        save(tested, plan.out / "rounds" / f"{name}.json.gz")
        return PolicyResult(tested, LinkBytes(near.up, near.down, far.up, far.down))

    async def _settle(self, setup_: Setup, contender: PolicyContender) -> None:
        """Load what is loaded on demand, and wait until the datacenter answers where it is to answer at all.

        Raises:
            NotReady: if it does not.
        """
        fields = [*(each.fields for each in setup_.classes), {"quality": "best"}]
        n = 2 * len(fields)
        due = [number / SETTLE_RATE for number in range(n)]
        targets = [number % len(fields) for number in range(n)]
        outcomes: list[RequestOutcome] = []
        for attempt in range(SETTLE_TRIES):
            # Other images each time: with a low threshold few are uncertain enough for the datacenter.
            images = [(attempt * n + number) % len(self._dataset) for number in range(n)]
            job = LoadJob(setup_.server, fields, targets, images, n / SETTLE_RATE, MAX_IN_FLIGHT, due)
            outcomes = await self._workers.run(job)
            reached = any(each.tier == "datacenter" for each in outcomes) or contender.policy == "all-edge"
            if reached and all(each.answered and each.latency_s < WARM_ANSWER_S for each in outcomes):
                return
        said = sorted({f"{each.status} {each.error} {each.tier}".strip() for each in outcomes})
        slowest_ms = max(each.latency_s for each in outcomes) * 1e3
        raise NotReady(
            f"{contender.name} does not answer well before the test: {'; '.join(said)}; at most {slowest_ms:.0f} ms"
        )

    def _setup(self, contender: PolicyContender, url: str, classes: list[TargetClass], number: int) -> Setup:
        server = ServerAddress(
            url,
            contender.protocol,
            api_key=self._deployment.key,
            timeout_s=self._plan.timeout_s,
        )
        return Setup(server, self._dataset, classes, 1, MAX_IN_FLIGHT, self._plan.seed + 10 * number)

    def _carried(self) -> tuple[CarriedBytes, CarriedBytes]:
        return self._deployment.carried(CLIENT_EDGE), self._deployment.carried(EDGE_DC)


def samples(profiles: Mapping[str, LinkProfile | None], duration_s: float, number: int) -> list[LinkSample]:
    """What the links of a round are like, for its record; as `Deployment.begin` makes them `LEAD_S` before."""
    found = [
        sample
        for place, profile in enumerate(profiles.values())
        if profile is not None
        for sample in link_samples(profile, duration_s, PLACES[place], trace_number(number, place))
    ]
    return sorted(found, key=lambda sample: sample.at_s)


def _conclude(plan: PolicyPlan, found: _PartialResults, congestion: str, console: Console) -> None:
    """Put rounds together, print, and write. Unfinished cells are left out."""
    report = PolicyReport(
        command=command_line.stated(),
        where=list(plan.where),
        client_link=None if plan.client_link is None else plan.client_link.name,
        congestion=congestion,
        rounds=plan.rounds,
        duration_s=plan.duration_s,
        warm_up_s=plan.warm_up_s,
        deadline_ms=plan.deadline_ms,
        rows=[],
        claims=[],
        files=[],
        failures=found.failures,
    )
    pages: dict[str, tuple[list[Run], list[PolicyRow], list[GoalCheck]]] = {}
    for (link, rate), results in found.cells.items():
        if not results:
            continue
        tested = {name: together(results[name]) for name in (c.name for c in plan.contenders) if name in results}
        cell = PolicyCell(link, rate, tested)
        for name, result in tested.items():
            report.files.append(f"{link}-{rate:g}-{name}.json.gz")
            save(result.run, plan.out / report.files[-1], summarise(result.run))
        rows, claims = judge(cell)
        report.rows.extend(rows)
        report.claims.extend(claims)
        show_rows(rows, f"\n{link}, {rate:g} requests/s, deadline {plan.deadline_ms:g} ms", console)
        report.files.append(f"{link}-{rate:g}.html")
        pages[report.files[-1]] = ([result.run for result in tested.values()], rows, claims)
    if report.claims:
        show_claims(report.claims, console)
    write_atomic(plan.out / "summary.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    for page, (runs, rows, claims) in pages.items():
        write_atomic(plan.out / page, goals_page(runs, rows, claims).encode())
    console.print(f"written to {plan.out}", highlight=False)


def _kernels_congestion() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()

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
share of requests that are answered right within the deadline (`figures`). No round is repeated or left out because it
was disturbed.

Writes, into a folder: a record per link, policy and round; what servers said; and `summary.json` with all figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.console import Console

from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady
from hawkvision.models.manifest import models_dir
from hawkvision.system.files import write_atomic
from loadgen.analysis.steady_state import is_steady
from loadgen.clients.engine import LoadJob, ServerAddress
from loadgen.clients.processes import WorkerProcesses
from loadgen.commands import command_line, options
from loadgen.commands.options import MAX_IN_FLIGHT, Setup
from loadgen.commands.terminal import terminal
from loadgen.network.profiles import LinkProfile
from loadgen.workload.arrivals import parse as parse_arrivals
from loadgen.workload.dataset import Dataset, read_dataset
from loadgen.workload.record import RequestOutcome, Run, TargetClass, save
from tests.bench.policies.deployment import Deployment
from tests.bench.policies.figures import PolicyRow, RoundResult, rows_of, show_rows
from tests.bench.policies.plan import PolicyContender, PolicyPlan, add_arguments, read_plan

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "Compare policies over bad links: same servers, models, images, moments and link traces."
REFERENCE_RATE: Final = 10.0
"""Images per second that the reference stage is asked about: few, so that none waits for another and times out."""
REFERENCE_TRIES: Final = 5
SETTLE_TRIES: Final = 20
"""Of less than a second each, until both tiers answer as they do when they are idle."""
SETTLE_RATE: Final = 20.0
WARM_ANSWER_S: Final = 1.0
"""The slowest answer of a try that counts: nothing is left to do for requests of those tested before."""
TIMEOUT_S: Final = 10.0


async def run(given: argparse.Namespace) -> int:
    """Compare as the options say; print, and write into the folder, on Ctrl-C what is done.

    A contender that fails in one round is left out there and said so; then the status is 1, else 0.

    Raises:
        HawkVisionError: for options that do not fit, links that cannot be had here, or servers that do not start.
    """
    plan = read_plan(given)
    dataset = read_dataset(given.data, given.task, models_dir(), split="auto", indices=None, limit=given.limit)
    if dataset.labels is None:
        raise ConfigError(f"--data {given.data}: expected labelled images; accuracy is half of what is compared")
    (plan.out / "rounds").mkdir(parents=True, exist_ok=True)
    console = terminal(180)
    backend = ("--backend", given.backend)
    failures: list[str] = []
    results: dict[str, dict[str, list[RoundResult]]] = {link.name: {} for link in plan.links}
    with Deployment(plan.out / "logs", ("--tasks", given.task, "--datagram-port", "0", *backend)) as deployment:
        async with WorkerProcesses(1, deployment.client_prefix) as workers:
            await workers.load(dataset)
            bench = _Bench(plan, dataset, deployment, workers, ("--task", given.task, *backend))
            try:
                await bench.ask_reference()
                for link in plan.links:
                    await _test(plan, bench, link, results[link.name], failures, console)
            finally:
                _conclude(plan, results, failures, console)
    return 1 if failures else 0


async def _test(
    plan: PolicyPlan,
    bench: _Bench,
    link: LinkProfile,
    results: dict[str, list[RoundResult]],
    failures: list[str],
    console: Console,
) -> None:
    """All rounds of a link, into `results` by contender."""
    for number in range(plan.rounds):
        for contender in rotated(plan.contenders, number):
            title = f"{link.name}, round {number + 1}: {contender.name}"
            console.print(f"{title} …", highlight=False)
            try:
                result = await bench.test(contender, link, number)
            except HawkVisionError as error:
                failures.append(f"{title}: {error}")
                console.print(f"error: {error}", highlight=False, markup=False)
            else:
                results.setdefault(contender.name, []).append(result)


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
    ) -> None:
        self._plan = plan
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
        with self._deployment.edge(*self._edge_arguments, *contender.arguments, log=contender.name) as node:
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

    async def test(self, contender: PolicyContender, link: LinkProfile, number: int) -> RoundResult:
        """One contender, one round; its record is written.

        Raises:
            HawkVisionError: if its edge node does not start, or cannot be asked.
        """
        plan, deployment = self._plan, self._deployment
        name = f"{link.name}-{contender.name}-round{number + 1}"
        near, far = plan.profiles(link)
        deployment.settle(near, far)
        with deployment.edge(*self._edge_arguments, *contender.arguments, log=name) as node:
            setup_ = self._setup(contender, node.url, plan.classes, number)
            await self._settle(setup_, contender)
            started = options.origin(setup_.seed)
            before: list[tuple[int, tuple[int, int] | None]] = []

            def begun() -> None:
                deployment.begin(near, far, number)
                before.append((deployment.uplink_bytes(), options.processor_time()))

            schedule = f"poisson:{plan.rate:g}"
            try:
                outcomes = await self._workers.run(setup_.job(parse_arrivals(schedule), plan.duration_s), begun=begun)
                uplink_bytes = deployment.uplink_bytes() - before[0][0]
                stolen = options.stolen_share(before[0][1], options.processor_time())
            finally:
                deployment.be_perfect()  # what is still on its way is not waited for
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
            steady=is_steady(outcomes, plan.warm_up_s, plan.duration_s),
            reference=self._reference,
            stolen=stolen,
            server=f"hawkvision {started.hawkvision}, policy {contender.policy}, started for this test",
        )
        save(tested, plan.out / "rounds" / f"{name}.json.gz")
        return RoundResult(tested, uplink_bytes)

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
        server = ServerAddress(url, contender.protocol, api_key=self._deployment.key, timeout_s=TIMEOUT_S)
        return Setup(server, self._dataset, classes, 1, MAX_IN_FLIGHT, self._plan.seed + 10 * number)


def _conclude(
    plan: PolicyPlan, results: dict[str, dict[str, list[RoundResult]]], failures: list[str], console: Console
) -> None:
    """Print and write the figures of what is done."""
    rows: list[PolicyRow] = []
    for link, found in results.items():
        if found:
            rows += (figures := rows_of(link, plan.rate, found))
            show_rows(figures, f"\n{link}, {plan.rate:g} requests/s, deadline {plan.deadline_ms:g} ms", console)
    said = {name: getattr(plan, name) for name in ("rounds", "duration_s", "warm_up_s", "deadline_ms", "rate", "seed")}
    report = {"command": command_line.stated(), "plan": said, "rows": rows, "failures": failures}
    write_atomic(plan.out / "summary.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    console.print(f"written to {plan.out}", highlight=False)

"""`python -m tests.bench.policies`: policies compared at the same targets, over links.

Every policy gets an edge node of its own, one after another, in front of one datacenter tier (`deployment`), and the
same stages. Within a round all are sent the same images with the same targets at the same moments, over the same link
traces; the next round has other ones, and begins with another policy. The baselines' thresholds are tuned per target on
the images that our certificates rest on (`thresholds`); their edge answers just before a deadline that the datacenter
misses. HawkVision sends datagrams from the edge on where it finds them better, and comes once more over TCP alone like
all others (`hawkvision-tcp`).

Callers and links run at a higher priority than ordinary processes, where that is allowed: they stand for other
machines, and must not add their own waits for a processor to latencies. Each tier has half of the cores, because they
stand for different machines, too (`--shared-cores` ends that).

Before each round, all models of the policy are loaded and both tiers are connected, over links of the usual rate and
delay without loss. The link traces begin with the schedule. No round is repeated or left out because it was disturbed:
one that is in the folder is read from there, so that a long comparison may be made in parts (`--minutes`).

Writes, into a folder: a record per link, policy and round; what servers said; and `summary.json` with all figures.
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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
from loadgen.workload.record import RequestOutcome, save
from tests.bench.cascade import FILES, Cascade
from tests.bench.policies.deployment import Deployment
from tests.bench.policies.figures import PolicyRow, Round, rows_of, show_rows
from tests.bench.policies.plan import PolicyPlan, add_arguments, read_plan
from tests.bench.policies.thresholds import lowest_threshold

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "Compare policies at the same targets: same servers, models, images, moments and link traces."
SETTLE_TRIES: Final = 20
"""Of less than a second each, until both tiers answer as they do when they are idle."""
SETTLE_RATE: Final = 20.0
SETTLE_S: Final = 8.0
"""What a round takes besides its schedule, to tell whether another one can end in time."""
WARM_ANSWER_S: Final = 1.0
"""The slowest answer of a try that counts: nothing is left to do for requests of those tested before."""
TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Images:
    """What is sent, and what is known of it."""

    dataset: Dataset
    reference: dict[int, bool] | None
    """Whether the reference stage is right about each image, by its number."""
    thresholds: dict[float, float]
    """That a baseline would tune, by the accuracy drop that they allow."""


def read_images(plan: PolicyPlan) -> Images:
    """The images, none of which certified anything, with labels.

    Raises:
        HawkVisionError: if images or models are missing, or there are no labels.
    """
    task, file = plan.conditions.task, plan.data / FILES.get(plan.conditions.task, "")
    if plan.conditions.backend == "noop":
        return Images(read_dataset(str(plan.data), task, models_dir(), split="all", limit=None), None, {0.0: 0.5})
    cascade = Cascade(task, plan.conditions.edge, plan.data)
    certifying, test = cascade.certifying().evidence, cascade.test()
    split = "held_out" if cascade.manifest.training is not None else "all"
    dataset = read_dataset(str(file), task, models_dir(), split=split, limit=None)
    return Images(dataset, test.reference, {drop: lowest_threshold(certifying, drop) for drop in plan.drops})


async def run(given: argparse.Namespace) -> int:
    """Compare as the options say; print, and write into the folder, on Ctrl-C what is done.

    A contender that fails in one round is said so; then the status is 1, else 0.

    Raises:
        HawkVisionError: for options that do not fit, links that cannot be had here, or servers that do not start.
    """
    plan = read_plan(given)
    ends = time.monotonic() + 60.0 * plan.minutes
    console, failures = terminal(180), list[str]()
    todo = [place for place in places(plan) if not place.path.exists()]
    try:
        if todo:
            await _test(plan, todo, ends, failures, console)
    finally:
        _conclude(plan, failures, console)
    return 1 if failures else 0


@dataclass(frozen=True, slots=True)
class Place:
    """One contender in one round over one link, and the file of its record."""

    link: LinkProfile
    number: int
    contender: str
    path: Path


def places(plan: PolicyPlan) -> Iterator[Place]:
    """All, a round over all links before the next; in each round another contender begins."""
    for number in range(plan.rounds):
        first = number % len(plan.contenders)
        for link in plan.links:
            for contender in (*plan.contenders[first:], *plan.contenders[:first]):
                path = plan.out / "rounds" / f"{link.name}-{contender}-round{number + 1}.json.gz"
                yield Place(link, number, contender, path)


async def _test(plan: PolicyPlan, todo: list[Place], ends: float, failures: list[str], console: Console) -> None:
    """What is still to do, as far as the time allows."""
    images, backend = read_images(plan), ("--backend", plan.conditions.backend)
    if images.dataset.labels is None:
        raise ConfigError(f"--data {plan.data}: expected labelled images; accuracy is half of what is compared")
    tier = ("--tasks", plan.conditions.task, "--datagram-port", "0", *backend)
    with Deployment(plan.out / "logs", tier, shared_cores=plan.conditions.shared_cores) as deployment:
        async with WorkerProcesses(1, deployment.client_prefix) as workers:
            await workers.load(images.dataset)
            bench = _Bench(plan, images, deployment, workers)
            for place in todo:
                if time.monotonic() + plan.conditions.duration_s + SETTLE_S > ends:
                    return
                title = f"{place.link.name}, round {place.number + 1}: {place.contender}"
                console.print(f"{title} …", highlight=False)
                try:
                    await bench.test(place)
                except HawkVisionError as error:
                    failures.append(f"{title}: {error}")
                    console.print(f"error: {error}", highlight=False, markup=False)


class _Bench:
    """Tests one contender after another."""

    def __init__(self, plan: PolicyPlan, images: Images, deployment: Deployment, workers: WorkerProcesses) -> None:
        self._plan = plan
        self._images = images
        self._deployment = deployment
        self._workers = workers

    async def test(self, place: Place) -> None:
        """One contender, one round; its record is written.

        Raises:
            HawkVisionError: if its edge node does not start, or cannot be asked.
        """
        plan, given, deployment = self._plan, self._plan.conditions, self._deployment
        near, far, number = plan.client_link, place.link, place.number
        arguments = plan.arguments(place.contender, self._images.thresholds)
        deployment.settle(near, far)
        with deployment.edge(*arguments, log=place.path.name.partition(".")[0]) as node:
            server = ServerAddress(node.url, "http", api_key=deployment.key, timeout_s=TIMEOUT_S)
            setup_ = Setup(server, self._images.dataset, given.targets, 1, MAX_IN_FLIGHT, given.seed + 10 * number)
            await self._settle(setup_, place.contender)
            started = options.origin(setup_.seed)
            before: list[tuple[int, tuple[int, int] | None]] = []

            def begun() -> None:
                deployment.begin(near, far, number)
                before.append((deployment.uplink_bytes(), options.processor_time()))

            schedule = f"poisson:{given.rate:g}"
            try:
                outcomes = await self._workers.run(setup_.job(parse_arrivals(schedule), given.duration_s), begun=begun)
                uplink_bytes = deployment.uplink_bytes() - before[0][0]
                stolen = options.stolen_share(before[0][1], options.processor_time())
            finally:
                deployment.be_perfect()  # what is still on its way is not waited for
        tested = Round(
            name=place.contender,
            url=node.url,
            protocol=server.protocol,
            schedule=schedule,
            duration_s=given.duration_s,
            warm_up_s=given.warm_up_s,
            deadline_ms=given.deadline_ms,
            data=self._images.dataset.name,
            labelled=True,
            targets=given.targets,
            outcomes=outcomes,
            origin=started,
            steady=is_steady(outcomes, given.warm_up_s, given.duration_s),
            reference=self._images.reference,
            stolen=stolen,
            server=f"hawkvision {started.hawkvision}, {' '.join(arguments)}, started for this test",
            link=place.link.name,
            uplink_bytes=uplink_bytes,
        )
        save(tested, place.path)

    async def _settle(self, setup_: Setup, contender: str) -> None:
        """Load what is loaded on demand, and wait until the datacenter answers where it is to answer at all.

        First by `best` alone: a target that is answered before the datacenter is there would not be certified for a
        hundred requests. Without deadlines, for the same reason.

        Raises:
            NotReady: if it does not.
        """
        targets = [{k: v for k, v in each.fields.items() if k != "deadline_ms"} for each in setup_.classes]
        await self._settle_with(setup_, contender, [{"quality": "best"}])
        await self._settle_with(setup_, contender, [*targets, {"quality": "best"}])

    async def _settle_with(self, setup_: Setup, contender: str, fields: list[dict[str, str]]) -> None:
        n = 2 * len(fields)
        due = [number / SETTLE_RATE for number in range(n)]
        targets = [number % len(fields) for number in range(n)]
        outcomes: list[RequestOutcome] = []
        for attempt in range(SETTLE_TRIES):
            # Other images each time: with a low threshold few are uncertain enough for the datacenter.
            images = [(attempt * n + number) % len(setup_.dataset) for number in range(n)]
            job = LoadJob(setup_.server, fields, targets, images, n / SETTLE_RATE, MAX_IN_FLIGHT, due)
            outcomes = await self._workers.run(job)
            reached = any(each.tier == "datacenter" for each in outcomes) or contender == "all-edge"
            if reached and all(each.answered and each.latency_s < WARM_ANSWER_S for each in outcomes):
                return
        said = sorted({f"{each.status} {each.error} {each.tier}".strip() for each in outcomes})
        slowest_ms = max(each.latency_s for each in outcomes) * 1e3
        raise NotReady(f"{contender} does not answer well before the test: {'; '.join(said)}; {slowest_ms:.0f} ms")


def read_rounds(plan: PolicyPlan) -> dict[str, dict[str, list[Round]]]:
    """The rounds in the folder that all contenders have, by link; those of all links together under an empty name."""
    found: dict[str, dict[str, list[Round]]] = {}
    for link in plan.links:
        mine = [place for place in places(plan) if place.link is link and place.path.exists()]
        whole = [n for n in range(plan.rounds) if sum(each.number == n for each in mine) == len(plan.contenders)]
        for place in mine:
            if place.number in whole:
                body = gzip.decompress(place.path.read_bytes())
                made = found.setdefault(link.name, {name: [] for name in plan.contenders})
                made[place.contender].append(msgspec.json.decode(body, type=Round))
    if len(found) > 1:
        found[""] = {name: [each for link in found.values() for each in link[name]] for name in plan.contenders}
    return found


def _conclude(plan: PolicyPlan, failures: list[str], console: Console) -> None:
    """Print and write the figures of what is done."""
    rows: list[PolicyRow] = []
    for link, rounds in read_rounds(plan).items():
        rows += (figures := rows_of(link or "all links", rounds))
        show_rows(figures, console)
    report = {"command": command_line.stated(), "conditions": plan.conditions, "rows": rows, "failures": failures}
    write_atomic(plan.out / "summary.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    console.print(f"written to {plan.out}", highlight=False)

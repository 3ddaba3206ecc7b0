"""`python -m loadgen run`: one load test, from the schedule to the report.

The command measures the generator against a null server (`noise_floor`), asks the reference stage for every image
(`--reference`), and runs the schedule, or sends every image once per target (`--evaluate`). Ctrl-C stops sending, waits
a few seconds for answers and writes everything; a second Ctrl-C ends at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from hawkvision.core.errors import ArtifactError, ConfigError
from hawkvision.system.files import write_atomic
from loadgen.analysis.steady_state import is_steady
from loadgen.clients import noise_floor
from loadgen.clients.engine import LoadJob, client_for
from loadgen.clients.processes import WorkerProcesses
from loadgen.clients.server_info import ask_reference, check_task, identify
from loadgen.commands import options
from loadgen.commands.interrupt import INTERRUPTED_STATUS, first_interrupt
from loadgen.commands.link_proxy import LinkProxy, link_samples, udp_port_of
from loadgen.commands.options import Setup
from loadgen.commands.run_options import WARM_UP_S, RunOptions, check_goals, completed, missed_goals
from loadgen.commands.terminal import progress_bar, terminal
from loadgen.network.profiles import LinkProfile, load_profile
from loadgen.workload.arrivals import ClosedLoop, ReplayedArrivals, SteppedArrivals, parse
from loadgen.workload.record import NoiseFloor, RequestOutcome, Run, check_files, save

DURATION_S: Final = 60.0
REPLAY_TAIL_S: Final = 0.001
"""After the last timestamp, so that its request still belongs to the run."""

if TYPE_CHECKING:
    from loadgen.analysis.summary import RunSummary


async def run(given: RunOptions) -> int:
    """Test as the options say; print, and write what is asked for.

    The status is 130 after an interrupt, 1 if nothing was answered or a goal was missed, or if an evaluation lacks
    answers, else 0.

    Raises:
        HawkVisionError: for options that do not fit, or a server that cannot be connected to.
    """
    given = completed(given)
    console = terminal(120)
    tested = await _measure(given, *read_test(given), console)
    summary = _write(tested, given.json, given.html, console)
    missed = missed_goals(summary, given.p99_ms, given.min_effective, evaluate=given.evaluate)
    for said in missed:
        print(f"missed: {said}", file=sys.stderr)  # noqa: T201
    return INTERRUPTED_STATUS if tested.interrupted else int(bool(missed))


def read_test(given: RunOptions) -> tuple[Setup, LoadJob, float | None, LinkProfile | None]:
    """(setup, job, rate of the schedule, link) that the options ask for, which are `completed`.

    A closed loop has no rate.

    Raises:
        ConfigError: naming the option that does not fit.
    """
    assert given.arrivals is not None
    assert given.warm_up_s is not None
    arrivals = parse(given.arrivals)
    duration_s = given.duration_s
    if duration_s is None:
        duration_s = DURATION_S
        if isinstance(arrivals, ReplayedArrivals | SteppedArrivals):
            duration_s = arrivals.span_s + REPLAY_TAIL_S
    options.positive("--duration-s", duration_s)
    if not 0.0 <= given.warm_up_s < duration_s:
        raise ConfigError(
            f"--warm-up-s (default {WARM_UP_S:g}): expected 0 or more and less than the run, which lasts "
            f"{duration_s:g} s; got {given.warm_up_s!r}"
        )
    check_files(given.json, given.html)
    check_goals(given)
    profile = None if given.link is None else load_profile(given.link)
    setup_ = options.read_setup(given)
    options.check_callers(arrivals, setup_.processes)
    for named, asked in (
        ("--evaluate", given.evaluate),
        ("--reference", given.reference),
        ("--min-effective", given.min_effective is not None),
    ):
        if asked and setup_.dataset.labels is None:
            raise ConfigError(f"{named}: expected labelled images; --data has none")
    if given.evaluate:
        assert isinstance(arrivals, ClosedLoop)
        job = setup_.each_image_once(arrivals.callers, given.duration_s)
        return setup_, job, None, profile
    job = setup_.job(arrivals, duration_s)
    if not job.target:
        raise ConfigError(f"--arrivals {given.arrivals}: no request falls into {duration_s:g} s")
    if job.due and job.due[-1] < given.warm_up_s:
        raise ConfigError(
            f"--warm-up-s {given.warm_up_s:g}: none of {len(job.due)} requests is due after it; expected a shorter "
            "warm-up, or more requests (--arrivals, --duration-s)"
        )
    return setup_, job, None if isinstance(arrivals, ClosedLoop) else arrivals.rate, profile


async def _measure(
    given: RunOptions, setup_: Setup, job: LoadJob, rate: float | None, profile: LinkProfile | None, console: Console
) -> Run:
    """The record of the noise floor, the reference and the schedule.

    If it was interrupted before the warm-up was over, all requests count.
    """
    assert given.arrivals is not None
    assert given.warm_up_s is not None
    started = options.origin(setup_.seed)
    spec = setup_.dataset.kind
    await check_task(setup_.server, None if spec is None else spec.name)
    async with WorkerProcesses(setup_.processes) as workers:
        await workers.load(setup_.dataset)
        floor = (
            None
            if given.no_noise
            else await noise_floor.measure(workers, msgspec.structs.replace(job, once=False), rate)
        )
        if floor is not None:
            _show_floor(floor, rate, console)
        server = await identify(setup_.server)
        reference = await _reference(setup_, job) if given.reference else None
        async with _link_proxy(setup_, profile) as proxy:
            if proxy is not None:
                job = msgspec.structs.replace(job, server=msgspec.structs.replace(job.server, url=proxy.url))
            before = options.processor_time()
            outcomes, stopped_s = await _interruptible(workers, job, begun=None if proxy is None else proxy.begin)
            stolen = options.stolen_share(before, options.processor_time())
    duration_s = job.duration_s if stopped_s is None else min(stopped_s, job.duration_s)
    if job.once and outcomes:
        duration_s = min(duration_s, max(each.done_s for each in outcomes))
    warm_up_s = given.warm_up_s if given.warm_up_s < duration_s else 0.0
    dataset = setup_.dataset
    return Run(
        name=given.name or ("run" if given.json is None else given.json.name.partition(".")[0]),
        url=given.url,
        protocol=given.protocol,
        schedule=given.arrivals,
        duration_s=duration_s,
        warm_up_s=warm_up_s,
        deadline_ms=given.deadline_ms,
        data=dataset.name,
        labelled=dataset.labels is not None,
        kind="" if spec is None else spec.name,
        targets=setup_.classes,
        outcomes=outcomes,
        origin=started,
        links=[] if profile is None else link_samples(profile, job.duration_s),
        link="" if profile is None else profile.name,
        noise=floor,
        # Each target of an evaluation has its own time, and may take another; steps are not meant to be steady.
        steady=None if job.once or given.arrivals.startswith("steps:") else is_steady(outcomes, warm_up_s, duration_s),
        interrupted=stopped_s is not None,
        reference=reference,
        stolen=stolen,
        server=server,
    )


def _show_floor(floor: NoiseFloor, rate: float | None, console: Console) -> None:
    console.print(
        f"the generator alone: P50 {floor.p50_ms:.2f} ms, P99 {floor.p99_ms:.2f} ms, "
        f"at most {floor.max_rate:.0f} requests/s",
        highlight=False,
    )
    if rate is not None and rate > noise_floor.MOST_SHARE * floor.max_rate:
        console.print(f"{rate:g} requests/s is near what this generator can send; use more --processes")


async def _reference(setup_: Setup, job: LoadJob) -> dict[int, float | bool]:
    positions = sorted(set(job.image))
    with progress_bar("reference", len(positions)) as show:
        return await ask_reference(setup_.dataset, setup_.server, positions, show)


@asynccontextmanager
async def _link_proxy(setup_: Setup, profile: LinkProfile | None) -> AsyncIterator[LinkProxy | None]:
    """Put the server behind the given link, after a first connection: a link accepts connections for a dead server."""
    if profile is None:
        yield None
        return
    server = setup_.server
    asker = client_for(server, 1)
    try:
        await asker.open()
    finally:
        await asker.close()
    datagrams = [await udp_port_of(server.url, server.api_key)] if server.protocol == "datagram" else []
    async with LinkProxy(server.url, profile, udp_ports=datagrams) as behind:
        yield behind


async def _interruptible(
    workers: WorkerProcesses, job: LoadJob, begun: Callable[[], None] | None
) -> tuple[list[RequestOutcome], float | None]:
    """The outcomes, and the seconds after which an interrupt stopped the sending, or None."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def noted() -> float:
        await stop.wait()
        return loop.time() - began

    with (
        first_interrupt() as stop,
        progress_bar(
            "requests",
            len(job.due) or (len(job.target) if job.once else None),
            None if job.once else job.duration_s,
        ) as show,
    ):
        noting = asyncio.create_task(noted())
        try:
            outcomes = await workers.run(job, stop=stop, show=show, begun=begun)
            return outcomes, await noting if stop.is_set() else None
        finally:
            noting.cancel()


def _write(tested: Run, record: Path | None, page: Path | None, console: Console) -> RunSummary:
    """Save the record first, and again with the figures, so that it is there whatever fails later.

    Raises:
        ArtifactError: if something could not be written, once all else is written and printed.
    """
    from loadgen.analysis.summary import show, summarise

    failed: dict[Path, ArtifactError] = {}

    def attempt(path: Path | None, write: Callable[[Path], None]) -> None:
        if path is not None:
            try:
                write(path)
            except ArtifactError as error:
                failed[path] = error

    def write_page(path: Path) -> None:
        from loadgen.analysis.page import page as page_of

        write_atomic(path, page_of([tested]).encode())

    attempt(record, lambda path: save(tested, path))
    summary = summarise(tested)
    attempt(record, lambda path: save(tested, path, summary))
    show(summary, console)
    attempt(page, write_page)
    for path in (record, page):
        if path is not None and path not in failed:
            console.print(f"written to {path}", highlight=False)
    if failed:
        raise ArtifactError("; ".join(map(str, failed.values())))
    return summary

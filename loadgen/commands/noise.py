"""`python -m loadgen noise`: what the load generator itself adds and can send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.models.manifest import models_dir
from hawkvision.system.files import write_atomic
from loadgen.clients import noise_floor
from loadgen.clients.engine import ServerAddress
from loadgen.clients.processes import WorkerProcesses
from loadgen.commands import options
from loadgen.commands.command_line import option
from loadgen.commands.options import Setup
from loadgen.commands.terminal import terminal
from loadgen.workload import target_mix
from loadgen.workload.arrivals import MAX_RATE, ConstantArrivals
from loadgen.workload.dataset import read_dataset
from loadgen.workload.record import check_files


class NoiseOptions(options.SenderOptions, frozen=True, kw_only=True):
    """The options of `python -m loadgen noise`."""

    rate: Annotated[float, option("Load", "Requests per second at which the noise floor is measured.")] = 100.0
    seconds: Annotated[
        float, option("Load", "Seconds to measure the noise floor, and as many for the highest rate.")
    ] = 10.0
    json: Annotated[Path | None, option("Output", "Write what was measured to this file.")] = None


async def run(given: NoiseOptions) -> None:
    """Measure and print.

    Raises:
        HawkVisionError: for options that do not fit.
    """
    options.positive("--seconds", given.seconds)
    if not 0.0 < given.rate <= MAX_RATE:
        raise ConfigError(f"--rate: expected a number above 0, at most {MAX_RATE:g}, got {given.rate!r}")
    check_files(given.json)
    dataset = read_dataset(given.data, "imagenet", models_dir(None), split="all", limit=given.limit)
    classes = target_mix.parse(target_mix.DEFAULT)
    server = ServerAddress("http://127.0.0.1", given.protocol)
    planned = Setup(server, dataset, classes, given.processes, options.MAX_IN_FLIGHT, seed=0)
    started = options.origin(planned.seed)
    async with WorkerProcesses(given.processes) as workers:
        await workers.load(dataset)
        job = planned.job(ConstantArrivals(noise_floor.LEAST_RATE), given.seconds)
        floor = await noise_floor.measure(workers, job, given.rate, floor_s=given.seconds, ceiling_s=given.seconds)
    rate = noise_floor.floor_rate(given.rate, floor.max_rate)
    console = terminal(160, highlight=False)
    console.print(
        f"{given.protocol}, {given.processes} processes, {dataset.name}\n"
        f"floor at {rate:.4g} requests/s: P50 {floor.p50_ms:.2f} ms, P99 {floor.p99_ms:.2f} ms\n"
        f"ceiling: {floor.max_rate:.0f} requests/s\n"
        f"{started.cpu}, {started.cores} cores shared with the null server, load before {started.load_before:.1f}",
        markup=False,
    )
    if given.json is not None:
        report = {
            "protocol": given.protocol, "processes": given.processes, "data": dataset.name, "rate": rate,
            "floor": floor, "origin": started,
        }  # fmt: skip
        write_atomic(given.json, msgspec.json.format(msgspec.json.encode(report)) + b"\n")

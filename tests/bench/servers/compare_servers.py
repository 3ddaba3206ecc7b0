"""The options of `python -m tests.bench.servers`, what must be there first, and the report.

The report is written after every round, because rounds take minutes and servers of others fail in ways of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console

from hawkvision.core import __version__
from hawkvision.core.errors import ConfigError
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import artifact_path, cache_dir, load_manifest, models_dir
from hawkvision.system.files import write_atomic
from loadgen.commands.options import origin
from loadgen.commands.terminal import terminal
from loadgen.workload.dataset import read_dataset
from tests.bench.servers import results
from tests.bench.servers.catalogue import REFERENCE_SERVERS, Handler, ReferenceServer, contenders, find
from tests.bench.servers.environments import install, shared_pins
from tests.bench.servers.handlers import work
from tests.bench.servers.images import CAMERA_QUALITY, SIDES, as_jpeg, enlarged
from tests.bench.servers.measurement import MeasurementPlan, ServerMeasurement, choose_cores
from tests.bench.servers.overhead.node import pinned
from tests.bench.servers.serving import ServedTask

SUMMARY: Final = "Compare a HawkVision node with other model servers: same model, same images, same core."
TASK: Final = "imagenet"
VARIANT: Final = "efficientnet_lite0_int8"
CONNECTIONS: Final = 64
"""At most, in the open loop; a request that finds 64 others unanswered counts as failed."""
SHARES: Final = "0.3,0.6,0.9"
MAX_ROUNDS: Final = 100
MAX_SECONDS: Final = 600.0
VERSION_S: Final = 60.0
"""For an interpreter to start and look up a package, on a busy machine."""
HANDLERS: Final[Mapping[str, tuple[Handler, ...]]] = {
    "same": ("same",),
    "documented": ("documented",),
    "both": ("same", "documented"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tests.bench.servers`."""
    names = ",".join(peer.name for peer in REFERENCE_SERVERS)
    parser.add_argument("--names", default=names, help="which, comma-separated; default: %(default)s")
    parser.add_argument("--data", metavar="PATH", help="npz file or folder; default: the built-in photographs")
    parser.add_argument("--images", type=int, default=64, help="at most, evenly spread; default: %(default)s")
    parser.add_argument(
        "--image-side", type=int, metavar="N", help="enlarge the images to N x 3/4 N, as a camera sends them"
    )
    parser.add_argument(
        "--handler",
        choices=tuple(HANDLERS),
        default="both",
        help="how the others prepare images: HawkVision's way, their documentation's; default: %(default)s",
    )
    parser.add_argument("--variant", default=VARIANT, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each loop in each round; default: %(default)s")
    parser.add_argument("--loads", default=SHARES, help="shares of each one's capacity; default: %(default)s")
    parser.add_argument("--callers", type=int, default=8, help="of the closed loop; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's raw figures here")
    parser.add_argument("--install-only", action="store_true", help="make the servers' environments, measure nothing")


async def run(given: argparse.Namespace) -> int:
    """Compare as the options say, and print the tables; 1 if a server had to be left out, 130 after Ctrl-C, else 0.

    Raises:
        HawkVisionError: if a server cannot be installed, or the options make no comparison.
    """
    console = terminal(160)
    servers = {peer.name: peer for peer in contenders(find(given.names), HANDLERS[given.handler])}
    plan, cores = _plan(given), choose_cores()
    task, data, bodies = _subject(given, cores[0])

    def report(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False)

    report("environments of the peers; packages are fetched once")
    pythons = {name: await asyncio.to_thread(python_of, peer, report) for name, peer in servers.items()}
    if given.install_only:
        return 0
    versions = {name: version_of(peer, pythons[name]) for name, peer in servers.items()}
    began = origin(given.seed)
    with pinned(cores[1]):
        model = str(task.model)
        bare = {handler: work.load(model, work.HANDLERS[handler](task.spec())) for handler in HANDLERS[given.handler]}
        measurement = ServerMeasurement(plan, task, bodies, bare, report)

        def keep() -> None:
            if given.json is not None:
                load = os.getloadavg()[0]
                written = {
                    "origin": began, "load_after": load, "cores": cores, "model": given.variant, "data": data,
                    "plan": plan, "versions": versions, "visits": measurement.visits,
                    "failures": measurement.failures,
                }  # fmt: skip
                write_atomic(given.json, msgspec.json.format(msgspec.json.encode(written)) + b"\n")

        status = 0
        try:
            await measurement.run({name: (peer, pythons[name]) for name, peer in servers.items()}, _folder(), keep)
        except asyncio.CancelledError:  # Ctrl-C: what was finished before it counts
            status = 130
    console.print(
        f"{began.cpu}; servers on core {cores[0]}, one at a time, the generator on core {cores[1]}; load average "
        f"before {began.load_before:.2f}, after {os.getloadavg()[0]:.2f}\n{given.variant} on {data}; "
        f"{measurement.rounds} of {plan.rounds} rounds of {plan.window_s:g} s in rotated order; "
        "every answer is that of the bare loop",
        markup=False,
    )
    show(measurement, servers, versions, console)
    return status or int(bool(measurement.failures))


def show(
    measurement: ServerMeasurement,
    servers: Mapping[str, ReferenceServer],
    versions: Mapping[str, str],
    console: Console,
) -> None:
    """Print what the finished rounds found; who missed one is left out, for ratios are formed within rounds."""
    rounds = measurement.rounds
    whole = {name: found[:rounds] for name, found in measurement.visits.items() if 0 < rounds <= len(found)}
    for table in results.tables(whole, servers) if whole else []:
        console.print(table)
    for name in whole.keys() & servers.keys():
        console.print(f"{name} {versions[name]}: {servers[name].how}", markup=False, highlight=False)
    for name, reason in measurement.failures.items():
        console.print(f"{name} is missing: {reason}", markup=False, highlight=False)


def _plan(given: argparse.Namespace) -> MeasurementPlan:
    """The options, within their bounds.

    Raises:
        ConfigError: naming the one that is not.
    """
    for name, most in {"rounds": MAX_ROUNDS, "seconds": MAX_SECONDS, "callers": CONNECTIONS}.items():
        if not 0 < getattr(given, name) <= most:
            raise ConfigError(f"--{name}: expected more than 0 and at most {most:g}, got {getattr(given, name):g}")
    return MeasurementPlan(given.rounds, given.seconds, given.callers, read_shares(given.loads), given.seed)


def read_shares(written: str) -> tuple[float, ...]:
    """Shares of a capacity, comma-separated.

    Raises:
        ConfigError: unless they are some numbers above 0 and at most 1.
    """
    try:
        shares = dict.fromkeys(float(each) for each in written.split(","))
    except ValueError:
        shares = {}
    if not shares or not all(0.0 < each <= 1.0 for each in shares):
        raise ConfigError(f"--loads: expected shares above 0 and at most 1, as 0.3,0.6; got {written!r}")
    return tuple(shares)


def _subject(given: argparse.Namespace, core: int) -> tuple[ServedTask, str, list[bytes]]:
    """(what all serve, what the images are, the images); the model is verified.

    Raises:
        ConfigError: if there are no images, or one cannot be read, or none of that size can be made.
        ArtifactError: if the model is not built.
    """
    side = given.image_side
    if side is not None and side not in SIDES:
        raise ConfigError(f"--image-side: expected {SIDES.start} to {SIDES.stop - 1} pixels, got {side}")
    models = models_dir()
    variant = load_manifest(TASK, models).variant(given.variant)
    load_variant(cache_dir(), TASK, variant)
    data = read_dataset(given.data, TASK, models, split="all", limit=given.images)
    if len(data) == 0:
        raise ConfigError(f"--data: {data.name} has no images; expected some")
    name, make = data.name, as_jpeg
    if side is not None:
        name += f", enlarged to {side}x{round(side * 3 / 4)}, mirrored at the sides, JPEG quality {CAMERA_QUALITY}"
        make = functools.partial(enlarged, side=side)
    bodies = [make(body, number) for number, body in enumerate(data.bodies)]
    name += f"; JPEGs of {np.median([len(body) for body in bodies]) / 1e3:.0f} kB (median)"
    task = ServedTask(artifact_path(cache_dir(), TASK, variant.name), variant.name, variant.input, core, CONNECTIONS)
    return task, name, bodies


def python_of(peer: ReferenceServer, say: Callable[[str], None]) -> Path:
    """The interpreter that runs a peer: ours, or its own environment's, which is made if need be.

    Raises:
        ConfigError: if that cannot be, or ours lacks Ray.
    """
    if peer.pins is not None:
        return install(_folder() / (peer.shares or peer.name), (*shared_pins(), *peer.pins), peer.alone, say)
    if peer.distribution is None:
        return Path(sys.executable)
    try:
        importlib.metadata.version(peer.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{peer.title} runs in HawkVision's own environment, which has no {peer.distribution}; "
            "install the extra: pip install '.[datacenter]'"
        ) from None
    return Path(sys.executable)


def version_of(peer: ReferenceServer, python: Path) -> str:
    """The version of the package that is compared, as its environment has it; it may not be known."""
    if peer.distribution is None:
        return __version__
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    try:
        command = [str(python), "-c", ask, peer.distribution]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=VERSION_S)
    except (subprocess.SubprocessError, OSError):
        return f"{peer.distribution}, version not known"
    return f"{peer.distribution} {ran.stdout.strip()}"


def _folder() -> Path:
    return cache_dir() / "peers"

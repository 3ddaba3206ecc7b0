"""The options of `python -m tests.bench.servers`, and what must be there first: environments, the model, the
images."""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.core.errors import ConfigError
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import artifact_path, cache_dir, load_manifest, models_dir
from loadgen.commands.options import origin
from loadgen.commands.terminal import terminal
from loadgen.workload.dataset import read_dataset
from tests.bench.servers.catalogue import REFERENCE_SERVERS, Handler, ReferenceServer, contenders, find
from tests.bench.servers.comparison import Part, ServerComparison, conduct, handlers_of, telling, version_of
from tests.bench.servers.environments import install, shared_pins
from tests.bench.servers.handlers import work
from tests.bench.servers.images import CAMERA_QUALITY, SIDES, as_jpeg, enlarged
from tests.bench.servers.measurement import SHARES, ComparedServers, MeasurementPlan, choose_cores
from tests.bench.servers.overhead.node import pinned
from tests.bench.servers.serving import ServedTask

SUMMARY: Final = "Compare a HawkVision node with other model servers: same model, same images, same core."
TASK: Final = "imagenet"
VARIANT: Final = "efficientnet_lite0_int8"
CONNECTIONS: Final = 64
"""At most, in the open loop; a request that finds 64 others unanswered counts as failed."""
MAX_ROUNDS: Final = 100
MAX_CALLERS: Final = CONNECTIONS
MAX_SECONDS: Final = 600.0
MAX_LOADS: Final = 9
HANDLERS: Final[Mapping[str, tuple[Handler, ...]]] = {
    "same": ("same",),
    "documented": ("documented",),
    "both": ("same", "documented"),
}
PARTS: Final[Mapping[str, tuple[Part, ...]]] = {
    "model": ("model",),
    "overhead": ("overhead",),
    "both": ("model", "overhead"),
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
    shares = ",".join(map(str, SHARES))
    parser.add_argument("--loads", default=shares, help="shares of each one's capacity; default: %(default)s")
    parser.add_argument(
        "--same-rate",
        type=int,
        default=1,
        metavar="ROUNDS",
        help="rounds in which all servers get one rate; 0 leaves them out; default: %(default)s",
    )
    parser.add_argument("--same-rate-seconds", type=float, metavar="S", help="of each in those; default: --seconds")
    parser.add_argument("--callers", type=int, default=8, help="of the closed loop; default: %(default)s")
    parser.add_argument("--requests", type=int, default=300, help="per round without a model; default: %(default)s")
    parser.add_argument("--measure", choices=tuple(PARTS), default="both", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here as well")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables here as well, as one page")
    parser.add_argument("--install-only", action="store_true", help="make the servers' environments, measure nothing")


@dataclass(frozen=True, slots=True)
class Subject:
    """What all are asked."""

    task: ServedTask
    data: str
    """For the report."""
    bodies: Sequence[bytes]
    labels: Sequence[int] | None


async def run(given: argparse.Namespace) -> int:
    """Compare as the options say, and print the tables; 1 if a server had to be left out, else 0.

    Raises:
        HawkVisionError: if a server cannot be installed, or the options make no comparison.
    """
    console = terminal(160)
    handlers = HANDLERS[given.handler]
    peers, plan = contenders(find(given.names), handlers), _plan(given)
    cores = choose_cores()
    subject = _subject(given, cores[0])
    console.print("environments of the peers; packages are fetched once")
    pythons = {peer.name: await asyncio.to_thread(python_of, peer, telling(console)) for peer in peers}
    if given.install_only:
        return 0
    began = origin(given.seed)
    field = ComparedServers(peers, pythons, subject.task, subject.bodies, {}, _folder())
    comparison = ServerComparison(
        origin=began,
        cores=cores,
        model=given.variant,
        data=subject.data,
        labels=subject.labels,
        field=field,
        plan=plan,
        versions={peer.name: version_of(peer, pythons[peer.name]) for peer in peers},
        parts=PARTS[given.measure],
        json=given.json,
        html=given.html,
    )
    task = subject.task
    with pinned(cores[1]):
        bare = {each: work.load(str(task.model), work.HANDLERS[each](task.spec())) for each in handlers_of(peers)}
        return await conduct(comparison, bare, console)


def _plan(given: argparse.Namespace) -> MeasurementPlan:
    """The options, within their bounds.

    Raises:
        ConfigError: naming the one that is not.
    """
    bounds = {"rounds": MAX_ROUNDS, "seconds": MAX_SECONDS, "callers": MAX_CALLERS, "requests": 100_000}
    for name, most in bounds.items():
        if not 0 < getattr(given, name) <= most:
            raise ConfigError(f"--{name}: expected more than 0 and at most {most:g}, got {getattr(given, name):g}")
    if not 0 <= given.same_rate <= MAX_ROUNDS:
        raise ConfigError(f"--same-rate: expected 0 to {MAX_ROUNDS} rounds, got {given.same_rate}")
    same_rate_s = given.seconds if given.same_rate_seconds is None else given.same_rate_seconds
    if not 0 < same_rate_s <= MAX_SECONDS:
        raise ConfigError(f"--same-rate-seconds: expected more than 0 and at most {MAX_SECONDS:g}, got {same_rate_s:g}")
    return MeasurementPlan(
        rounds=given.rounds,
        window_s=given.seconds,
        warm_up_s=min(2.0, given.seconds / 4),
        callers=given.callers,
        requests=given.requests,
        seed=given.seed,
        shares=read_shares(given.loads),
        same_rate_rounds=given.same_rate,
        same_rate_window_s=same_rate_s,
    )


def read_shares(written: str) -> tuple[float, ...]:
    """Shares of a capacity, comma-separated.

    Raises:
        ConfigError: unless they are some numbers above 0 and at most 1, each once.
    """
    try:
        shares = tuple(float(each) for each in written.split(","))
    except ValueError:
        shares = ()
    if (
        not 0 < len(shares) <= MAX_LOADS
        or len(set(shares)) < len(shares)
        or not all(0.0 < each <= 1.0 for each in shares)
    ):
        raise ConfigError(
            f"--loads: expected 1 to {MAX_LOADS} shares above 0 and at most 1, as 0.3,0.6; got {written!r}"
        )
    return shares


def _subject(given: argparse.Namespace, core: int) -> Subject:
    """The model, which is verified, and the images.

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
    return Subject(task, name, bodies, data.labels)


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
            "install the extra: pip install 'hawkvision[datacenter]'"
        ) from None
    return Path(sys.executable)


def _folder() -> Path:
    return cache_dir() / "peers"

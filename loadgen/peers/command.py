"""The options of `python -m loadgen peers`, and its course: install, find out the right answers, measure, report."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import cv2
import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from hawkvision import __version__
from hawkvision.artifacts import load_variant, write_atomic
from hawkvision.errors import ConfigError
from hawkvision.manifest import artifact_path, cache_dir, load_manifest, models_dir
from loadgen.bench.edge import pinned
from loadgen.dataset import read_dataset
from loadgen.peers import results, work
from loadgen.peers.catalogue import PEERS, Peer, find
from loadgen.peers.contest import KINDS, Contest, Field, Plan, choose_cores
from loadgen.peers.environments import install, shared_pins
from loadgen.peers.results import BARE, OURS, Overhead, Report, Row
from loadgen.peers.serving import Task
from loadgen.setup import origin

TASK: Final = "imagenet"
VARIANT: Final = "efficientnet_lite0_int8"
CONNECTIONS: Final = 64
"""At most, in the open loop; a request that finds 64 others unanswered counts as failed."""
MAX_ROUNDS: Final = 100
MAX_CALLERS: Final = CONNECTIONS
MAX_SECONDS: Final = 600.0
JPEG: Final = b"\xff\xd8\xff"
QUALITY: Final = 90
ONLY: Final = ("model", "overhead", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `loadgen.peers.add_arguments`."""
    names = ",".join(peer.name for peer in PEERS)
    parser.add_argument("--names", default=names, help="which, comma-separated; default: %(default)s")
    parser.add_argument("--data", metavar="PATH", help="npz file or folder; default: the built-in photographs")
    parser.add_argument("--pictures", type=int, default=64, help="at most, evenly spread; default: %(default)s")
    parser.add_argument("--variant", default=VARIANT, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each loop in each round; default: %(default)s")
    parser.add_argument("--callers", type=int, default=8, help="of the closed loop; default: %(default)s")
    parser.add_argument("--requests", type=int, default=300, help="per round without a model; default: %(default)s")
    parser.add_argument("--measure", choices=ONLY, default="both", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here as well")
    parser.add_argument("--install-only", action="store_true", help="make the servers' environments, measure nothing")


async def run(given: argparse.Namespace) -> int:
    """See `loadgen.peers.run`."""
    console = Console() if sys.stdout.isatty() else Console(width=160)
    peers, plan = find(given.names), _plan(given)
    cores = choose_cores()
    task, pictures, bodies = _subject(given, cores[0])
    console.print("environments of the peers; packages are fetched once")
    pythons = {peer.name: await asyncio.to_thread(python_of, peer, _say(console)) for peer in peers}
    if given.install_only:
        return 0
    began = origin(given.seed)
    with pinned(cores[1]):
        bare = work.load(str(task.model), task.spec())
        expected = [bare(body) for body in bodies]
        contest = Contest(Field(peers, pythons, task, bodies, expected, _folder()), plan, _say(console))
        if given.measure in ("model", "both"):
            await contest.run_model(bare)
        if given.measure in ("overhead", "both"):
            await contest.run_overhead()
    report = Report(
        origin=began,
        cores=cores,
        load_after=os.getloadavg()[0],
        model=given.variant,
        data=pictures,
        checked=len(bodies) if given.measure != "overhead" else 0,
        rounds=plan.rounds,
        window_s=plan.window_s,
        callers=plan.callers,
        rows=_rows(contest, peers, pythons, plan.rounds),
        overhead=_overhead(contest, peers, plan.rounds),
        failures=contest.failures,
    )
    results.show(report, console)
    if given.json is not None:
        write_atomic(given.json, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 1 if contest.failures else 0


def _plan(given: argparse.Namespace) -> Plan:
    """The options, within their bounds.

    Raises:
        ConfigError: naming the one that is not.
    """
    bounds = {"rounds": MAX_ROUNDS, "seconds": MAX_SECONDS, "callers": MAX_CALLERS, "requests": 100_000}
    for name, most in bounds.items():
        if not 0 < getattr(given, name) <= most:
            raise ConfigError(f"--{name}: expected more than 0 and at most {most:g}, got {getattr(given, name):g}")
    return Plan(
        rounds=given.rounds,
        window_s=given.seconds,
        warm_up_s=min(2.0, given.seconds / 4),
        callers=given.callers,
        requests=given.requests,
        seed=given.seed,
    )


def _subject(given: argparse.Namespace, core: int) -> tuple[Task, str, list[bytes]]:
    """The model, which is verified, and the pictures: the data's name, and their bodies.

    Raises:
        ConfigError: if there are no pictures, or one cannot be read.
        ArtifactError: if the model is not built.
    """
    models = models_dir()
    variant = load_manifest(TASK, models).variant(given.variant)
    load_variant(cache_dir(), TASK, variant)
    data = read_dataset(given.data, TASK, models, split="all", limit=given.pictures)
    if len(data) == 0:
        raise ConfigError(f"--data: {data.name} has no pictures; expected some")
    task = Task(artifact_path(cache_dir(), TASK, variant.name), variant.name, variant.input, core, CONNECTIONS)
    return task, data.name, [as_jpeg(body, number) for number, body in enumerate(data.bodies)]


def as_jpeg(body: bytes, number: int) -> bytes:
    """The picture itself if it is a JPEG, else made one: all servers are sent what all of them decode alike.

    Raises:
        ConfigError: naming the picture that is none.
    """
    if body.startswith(JPEG):
        return body
    pixels = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ConfigError(f"--data: picture {number} is neither JPEG, PNG nor WebP")
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes())


def python_of(peer: Peer, say: Callable[[str], None]) -> Path:
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


def version_of(peer: Peer, python: Path) -> str:
    """Of the package that is compared, as its environment has it."""
    if peer.distribution is None:
        return f"({__version__})"
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    told = subprocess.run(  # noqa: S603 - our own interpreters
        [str(python), "-c", ask, peer.distribution], capture_output=True, text=True, check=True, timeout=60.0
    )
    return f"({peer.distribution} {told.stdout.strip()})"


def _rows(contest: Contest, peers: Sequence[Peer], pythons: dict[str, Path], rounds: int) -> tuple[Row, ...]:
    """Of those that went all rounds, for ratios are formed within rounds."""
    if not contest.visits:
        return ()
    whole = {name: visits for name, visits in contest.visits.items() if len(visits) == rounds}
    ours = whole.get(OURS)
    bare = results.row(
        BARE,
        BARE,
        "",
        "decode, scale and ONNX Runtime in a loop; latencies computed: its turns, first come first served",
        contest.visits[BARE],
        ours,
    )
    return (
        bare,
        *(
            results.row(
                peer.name, peer.title, version_of(peer, pythons[peer.name]), peer.how, contest.visits[peer.name], ours
            )
            for peer in peers
            if peer.name in whole
        ),
    )


def _overhead(contest: Contest, peers: Sequence[Peer], rounds: int) -> tuple[Overhead, ...]:
    """Likewise."""
    if not contest.waits:
        return ()
    whole = {key: waits for key, waits in contest.waits.items() if len(waits) == rounds}
    ours = whole.get((OURS, "decode"))
    floor = results.overhead("", "client alone", None, whole["", None], ours)
    found = [
        results.overhead(peer.name, peer.title, kind, whole[peer.name, kind], ours)
        for kind in KINDS
        for peer in peers
        if (peer.name, kind) in whole
    ]
    return (floor, *found)


def _folder() -> Path:
    return cache_dir() / "peers"


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(escape(text), style="dim", highlight=False)

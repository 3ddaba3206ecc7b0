"""A node with damaged files, full or read-only disks, and wrong clocks.

    python -m tests.bench.robustness.damage [--only kernel,clock]
    (root)

Each case starts a node (or a tier) with the damage in place. The columns: when it was ready, or its exit status; its
message about the damage; whether its first answer was right; whether it logged a traceback. A traceback, or a wrong
answer that is not `degraded`, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import Answer
from hawkvision.models.manifest import cache_dir, models_dir
from tests.bench.robustness.fault_world import Server, photographs

OFFSETS: Final = ("-1d", "+1d", "-3d", "+800d")


@dataclass(frozen=True)
class Start:
    """How a server is started."""

    words: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    client_env: dict[str, str] = field(default_factory=dict)
    module: str = "edge"


Prepared = AbstractContextManager[Start]


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, unmounted afterwards."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["/usr/bin/mount", "-t", "tmpfs", "-o", options, "hv-damage", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["/usr/bin/umount", "-l", str(folder)], check=True)


def copied_cache(scratch: Path) -> Path:
    """A cache folder of our own: models and kernels as they are."""
    home = scratch / "cache"
    home.mkdir()
    shutil.copytree(cache_dir(), home / "hawkvision", symlinks=True)
    return home


def kernels(home: Path) -> list[Path]:
    """The compiled kernels below a cache folder."""
    found = sorted(home.rglob("*.so"))
    assert found, f"no compiled kernel below {home}"
    return found


@contextlib.contextmanager
def state_file(scratch: Path, kind: str) -> Iterator[Start]:
    """A state file that cannot be used."""
    with mounted(scratch / "disk", "size=64k") as disk:
        state = disk / "state.sqlite"
        if kind == "garbage":
            state.write_bytes(b"not a database" * 1000)
        elif kind == "full disk":
            with contextlib.suppress(OSError):
                (disk / "ballast").write_bytes(bytes(1 << 20))
        elif kind == "read-only":
            subprocess.run(["/usr/bin/mount", "-o", "remount,ro", str(disk)], check=True)
        yield Start(words=("--state-file", str(state)))


@contextlib.contextmanager
def cache_on(scratch: Path, options: str) -> Iterator[Start]:
    """The cache on a file system with the given options; models are elsewhere."""
    with mounted(scratch / "disk", options) as disk:
        yield Start(words=("--cache-dir", str(cache_dir())), env={"XDG_CACHE_HOME": str(disk)})


@contextlib.contextmanager
def kernel(scratch: Path, damage: Callable[[bytes], bytes]) -> Iterator[Start]:
    """Damaged compiled kernels."""
    home = copied_cache(scratch)
    for path in kernels(home):
        path.write_bytes(damage(path.read_bytes()))
    yield Start(env={"XDG_CACHE_HOME": str(home)})


@contextlib.contextmanager
def model(scratch: Path, damage: Callable[[bytes], bytes]) -> Iterator[Start]:
    """Damaged model files."""
    home = copied_cache(scratch)
    for path in sorted(home.rglob("efficientnet_lite*.onnx")):
        path.write_bytes(damage(path.read_bytes()))
    yield Start(env={"XDG_CACHE_HOME": str(home)})


@contextlib.contextmanager
def profile(scratch: Path, damage: Callable[[str], str]) -> Iterator[Start]:
    """An altered profile of the shipped models."""
    models = scratch / "models"
    shutil.copytree(models_dir(), models)
    path = models / "imagenet" / "profile.json"
    path.write_text(damage(path.read_text()))
    yield Start(words=("--models-dir", str(models)))


def trusting(text: str) -> str:
    """The profile with every threshold 0, which accepts everything."""

    def zeroed(value: object) -> object:
        if isinstance(value, dict):
            return {k: 0.0 if k == "threshold" else zeroed(v) for k, v in value.items()}
        return [zeroed(each) for each in value] if isinstance(value, list) else value

    return json.dumps(zeroed(json.loads(text)))


@contextlib.contextmanager
def text_file(scratch: Path, option: str, text: bytes) -> Iterator[Start]:
    """A file given on the command line that is not what it should be."""
    path = scratch / "given"
    path.write_bytes(text)
    yield Start(words=(option, str(path)))


@contextlib.contextmanager
def clock(whose: str, offset: str) -> Iterator[Start]:
    """A clock that is wrong, by libfaketime."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    assert library is not None, "libfaketime is missing; on Debian: apt-get install faketime"
    env = {"LD_PRELOAD": str(library), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    if whose == "server":
        yield Start(words=("--datagram-port", "0"), env=env)
    else:
        yield Start(words=("--datagram-port", "0"), client_env=env)


def half(data: bytes) -> bytes:
    """Cut off, as after a power cut."""
    return data[: len(data) // 2]


def zeroed(data: bytes) -> bytes:
    """The right length, and nothing in it."""
    return bytes(len(data))


def one_bit(data: bytes) -> bytes:
    """One bit is another one, in the middle."""
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


CASES: Final[dict[str, Callable[[Path], Prepared]]] = {
    "nothing": lambda _: contextlib.nullcontext(Start()),
    "state file: garbage": lambda scratch: state_file(scratch, "garbage"),
    "state file: full disk": lambda scratch: state_file(scratch, "full disk"),
    "state file: read-only": lambda scratch: state_file(scratch, "read-only"),
    "cache: noexec": lambda scratch: cache_on(scratch, "noexec"),
    "cache: read-only": lambda scratch: cache_on(scratch, "ro"),
    "cache: full": lambda scratch: cache_on(scratch, "size=4k"),
    "kernel: cut off": lambda scratch: kernel(scratch, half),
    "kernel: zeroed": lambda scratch: kernel(scratch, zeroed),
    "kernel: one bit": lambda scratch: kernel(scratch, one_bit),
    "model: cut off": lambda scratch: model(scratch, half),
    "model: one bit": lambda scratch: model(scratch, one_bit),
    "profile: thresholds 0": lambda scratch: profile(scratch, trusting),
    "profile: cut off": lambda scratch: profile(scratch, lambda text: text[: len(text) // 2]),
    "certificates: garbage": lambda scratch: text_file(scratch, "--certificates", b"\xff\xfe{"),
    "settings: garbage": lambda scratch: text_file(scratch, "--config", b"[edge\nport = x"),
    **{f"clock: node {day}": lambda _, day=day: clock("server", day) for day in OFFSETS},  # type: ignore[misc]
    **{f"clock: caller {day}": lambda _, day=day: clock("caller", day) for day in OFFSETS},  # type: ignore[misc]
}


@dataclass(frozen=True, slots=True)
class DamageOutcome:
    """One row."""

    case: str
    came_to: str
    said: str
    answers: str
    traceback: bool
    wrong: bool


async def seen(case: str, image: bytes, expected: str) -> DamageOutcome:
    """Start a node with a damage and look what comes of it."""
    with tempfile.TemporaryDirectory(prefix="hv-damage-") as folder, CASES[case](Path(folder)) as start:
        server = Server(case, (start.module, *start.words), start.env)
        began = time.monotonic()
        await server.start(wait=False)
        assert server.process is not None
        ready = asyncio.create_task(server.ready())
        ended = asyncio.create_task(server.process.wait())
        done, _ = await asyncio.wait({ready, ended}, timeout=180.0, return_when=asyncio.FIRST_COMPLETED)
        came_to, answers, wrong = "neither ready nor ended", "-", False
        if ready in done:
            came_to = f"ready after {time.monotonic() - began:.1f} s"
            answers, wrong = await _answers(server.url, image, expected, start)
        elif ended in done:
            came_to = f"ended with {server.process.returncode} after {time.monotonic() - began:.1f} s"
        ready.cancel()
        await server.stop()
        await asyncio.gather(ready, ended, return_exceptions=True)
        lines = [line for _, line in server.said]
        worth = [line for line in lines if "WARNING" in line or line.startswith("error:")]
        return DamageOutcome(
            case, came_to, worth[0] if worth else "", answers, any("Traceback" in line for line in lines), wrong
        )


async def _answers(url: str, image: bytes, expected: str, start: Start) -> tuple[str, bool]:
    if "--datagram-port" in start.words:
        return await _answer_by_datagrams(url, image, expected, start)
    async with AsyncClient(url) as client:
        outcome: Answer | HawkVisionError
        try:
            outcome = await client.classify(image, quality="fast")
        except HawkVisionError as error:
            return f"{type(error).__name__}: {error}", False
    right = outcome.label == expected
    return f"{'right' if right else 'other'}, {outcome.accuracy.status.value}", not right and not outcome.degraded


async def _answer_by_datagrams(url: str, image: bytes, expected: str, start: Start) -> tuple[str, bool]:
    script = (
        "import sys; from hawkvision import Client\n"
        f"with Client({url!r}, transport='datagram', timeout_s=20) as client:\n"
        "    print(client.classify(sys.stdin.buffer.read(), quality='fast').label)"
    )
    asking = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        env={**os.environ, **start.client_env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asking.communicate(image)
    if asking.returncode:
        return err.decode(errors="replace").strip().splitlines()[-1], False
    right = out.decode().strip() == expected
    return f"{'right' if right else 'other'}, by datagrams", not right


async def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.robustness.damage")
    parser.add_argument("--only", default="", help="parts of the names of cases to run, separated by commas")
    words = [word for word in parser.parse_args().only.split(",") if word]
    image = photographs(1)[0]
    healthy = Server("healthy", ("edge",))
    await healthy.start()
    async with AsyncClient(healthy.url) as client:
        expected = (await client.classify(image, quality="fast")).label
    await healthy.stop()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("case", "came to", "first answer", "traceback", "said"):
        table.add_column(title)
    bad = False
    for case in CASES:
        if not words or any(word in case for word in words):
            row = await seen(case, image, expected)
            bad = bad or row.wrong or row.traceback
            traceback = "yes" if row.traceback else "no"
            table.add_row(case, row.came_to, row.answers + (" WRONG" if row.wrong else ""), traceback, row.said)
    Console(width=220).print(table)
    return int(bad)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

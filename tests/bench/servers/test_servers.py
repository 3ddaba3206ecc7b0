"""The comparison's own parts, against a tiny server that is really started."""

import asyncio
import io
import json
import os
import select
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.models.manifest import InputSpec
from tests.bench.servers import results
from tests.bench.servers.catalogue import (
    REFERENCE_SERVERS,
    ReferenceServer,
    ServerSite,
    StartCommand,
    contenders,
)
from tests.bench.servers.compare_servers import show
from tests.bench.servers.handlers import work
from tests.bench.servers.measurement import (
    MeasurementPlan,
    ServerMeasurement,
    Visit,
    check_answers,
)
from tests.bench.servers.serving import ServedTask, serving
from tests.bench.servers.supervisor import descendants

TINY = """
import http.server, os, subprocess, zlib
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_POST(self):
        jpeg = self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"index": %d}' % (zlib.crc32(jpeg) % 1000)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
subprocess.Popen(["sleep", "600"], start_new_session=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["HAWKVISION_PEER_PORT"])), Handler).serve_forever()
"""
SPEC = InputSpec(height=224, width=224, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bicubic")
BODIES = [bytes([number]) * 100 for number in range(8)]
WINDOW_S = 1.0
"""Longer than this machine stands still: a server without an answer in it counts as failed."""


def tiny_class(body: bytes) -> int:
    return zlib.crc32(body) % 1000


def peer(script: str = TINY, name: str = "tiny") -> ReferenceServer:
    def start(site: ServerSite) -> StartCommand:
        return StartCommand((str(site.python), "-c", script))

    return ReferenceServer(name=name, title=name, distribution=None, how="", start=start, path="/")


def task() -> ServedTask:
    return ServedTask(Path("none.onnx"), "none", SPEC, min(os.sched_getaffinity(0)), 4)


async def served_once(tiny: ReferenceServer, log: Path, expected: Iterable[int]) -> tuple[set[int], float]:
    """(process ids, CPU seconds) of a server whose answers were checked."""
    async with serving(tiny, Path(sys.executable), task(), BODIES[0], log) as served:
        await check_answers(served, BODIES, list(expected))
        return set(descendants(served.supervisor_pid)), served.cpu_seconds()


def test_a_server_is_started_checked_and_ended_with_all_its_processes(tmp_path: Path) -> None:
    log = tmp_path / "tiny.log"
    processes, cpu_s = asyncio.run(served_once(peer(), log, map(tiny_class, BODIES)))
    assert cpu_s > 0.0
    assert len(processes) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert not log.exists()


def test_a_server_that_answers_otherwise_than_the_bare_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="image 0: expected class 1000 as of the bare loop"):
        asyncio.run(served_once(peer(), tmp_path / "tiny.log", [1000] * len(BODIES)))


def test_a_server_that_ends_says_why_and_its_log_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "dead.log"
    with pytest.raises(NotReady, match="no model today"):
        asyncio.run(served_once(peer("raise SystemExit('no model today')", "dead"), log, []))
    assert "no model today" in log.read_text()


def test_keeper_ends_everything_when_its_parent_dies(tmp_path: Path) -> None:
    core, folder = str(min(os.sched_getaffinity(0))), tmp_path / "folder"
    folder.mkdir()
    child = (
        "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        "print(p.pid, flush=True); p.wait()"
    )
    command = [sys.executable, "-m", "tests.bench.servers.supervisor", core, str(folder), sys.executable, "-c", child]
    parent = (
        "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent, *command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        grandchild = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        assert select.select([grandchild], [], [], 20)[0], "a server's process outlived the one that wanted it"
        os.close(grandchild)


def test_a_server_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    plan = MeasurementPlan(rounds=2, window_s=WINDOW_S, callers=2, shares=(0.5,), seed=1)
    servers = {"dead": peer("raise SystemExit('no model today')", "dead"), "hawkvision": peer(name="hawkvision")}
    said: list[str] = []
    rounds: list[int] = []
    measurement = ServerMeasurement(plan, task(), BODIES, {"same": tiny_class}, said.append)
    python = Path(sys.executable)
    running = measurement.run(
        {name: (each, python) for name, each in servers.items()}, tmp_path, lambda: rounds.append(measurement.rounds)
    )
    asyncio.run(running)
    assert rounds == [1, 2]
    assert "no model today" in measurement.failures["dead"]
    assert {name: len(found) for name, found in measurement.visits.items()} == {"hawkvision": 2, "bare loop": 2}
    assert all(visit.per_s > 0 and visit.failed == 0 for found in measurement.visits.values() for visit in found)
    # On a busy machine some may find all connections taken; never all.
    assert all(0.0 < min(visit.waits_ms["0.5"]) < np.inf for visit in measurement.visits["hawkvision"])
    assert sum("round" in line and "dead" in line for line in said) == 1
    console = Console(record=True, file=io.StringIO(), width=200)
    show(measurement, servers, dict.fromkeys(servers, "1"), console)
    assert "dead is missing" in console.export_text()


def attributed(rates: Mapping[str, tuple[int, int]]) -> list[float]:
    """The factors of contenders with so many answers per second in two rounds."""
    servers = {each.name: each for each in contenders(REFERENCE_SERVERS, ("same", "documented"))}
    return [factor for _, (factor, _, _) in results.attribution(
        {name: [Visit(done, done, 0, {}) for done in both] for name, both in rates.items()}, servers
    )]  # fmt: skip


def test_the_lead_is_divided_into_factors() -> None:
    rates = {
        "hawkvision": (240, 480), "hawkvision-onnxruntime": (120, 240), "kserve": (100, 200), "ray": (60, 120),
        "kserve-documented": (40, 80), "ray-documented": (20, 40), "triton": (500, 900),
    }  # fmt: skip
    assert attributed(rates) == pytest.approx([2.0, 1.2, 2.5, 6.0])
    undocumented = {name: each for name, each in rates.items() if "documented" not in name}
    assert attributed(undocumented) == pytest.approx([2.0, 1.2, 2.4])
    for missing in ("hawkvision", "hawkvision-onnxruntime"):
        assert attributed({name: each for name, each in rates.items() if name != missing}) == []


@pytest.mark.parametrize("shape", [(300, 500), (500, 300), (224, 224), (227, 256), (1000, 1400)])
@pytest.mark.parametrize("spec", [(224, 224, 1.0), (224, 224, 0.875), (120, 160, 0.9)])
def test_both_handlers_see_the_same_part_of_an_image(shape: tuple[int, int], spec: tuple[int, int, float]) -> None:
    down, across = np.mgrid[: shape[0], : shape[1]]
    ramps = np.dstack((255 * down / shape[0], 255 * across / shape[1], np.full(shape, 128))).astype(np.uint8)
    jpeg = cv2.imencode(".jpg", ramps, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    asked = json.dumps(
        dict(zip(("height", "width", "crop_fraction"), spec, strict=True)) | {"interpolation": "bicubic"}
    )
    ours, theirs = (prepare(asked)(jpeg) for prepare in (work.same, work.documented))
    assert ours.shape == theirs.shape == (*spec[:2], 3)
    assert ours.dtype == theirs.dtype == np.uint8
    assert np.abs(ours.astype(int) - theirs).max() <= 6  # of 255: one part in forty of the image's side

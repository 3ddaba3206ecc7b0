"""The comparison's own parts, against a tiny server that is really started."""

import asyncio
import io
import json
import math
import os
import select
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.models.manifest import InputSpec
from tests.bench.servers import environments, results
from tests.bench.servers.catalogue import (
    REFERENCE_SERVERS,
    TRITON_HEAD_BYTES,
    ReferenceServer,
    ServerSite,
    StartCommand,
    contenders,
    find,
    read_index,
    read_inferred,
)
from tests.bench.servers.compare_servers import read_shares, show
from tests.bench.servers.handlers import work
from tests.bench.servers.images import as_jpeg, enlarged
from tests.bench.servers.measurement import (
    MeasurementPlan,
    ServerMeasurement,
    Visit,
    check_answers,
    rotations,
    sojourns_s,
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
        assert await check_answers(served, BODIES, given := list(expected)) == given
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


def test_latencies_of_the_bare_loop_are_those_of_one_queue() -> None:
    waits = sojourns_s(np.array([0.0, 1.0, 1.5, 9.0]), np.array([2.0, 1.0, 3.0]))
    assert waits.tolist() == [2.0, 2.0, 4.5, 2.0]


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
    for found in measurement.visits.values():
        assert all(visit.per_s > 0 and visit.failed == 0 for visit in found)
        # On a busy machine some may find all connections taken; never all.
        assert all(0.0 < min(visit.waits_ms["0.5"]) < np.inf for visit in found)
    assert sum("round" in line and "dead" in line for line in said) == 1
    console = Console(record=True, file=io.StringIO(), width=200)
    show(measurement, servers, dict.fromkeys(servers, "1"), None, console)
    assert "dead is missing" in console.export_text()


def visit(per_s: float, ms: float = 1.0, answers: Sequence[int] = ()) -> Visit:
    return Visit(per_s, per_s, 0, {"0.6": [ms] * 100}, list(answers))


def test_ratios_are_formed_within_rounds() -> None:
    visits = {"hawkvision": [visit(200), visit(100)], "x": [visit(100), visit(50)]}
    assert results.ratio(visits, "hawkvision", "x", results.capacity) == (2.0, 2.0, 2.0)
    assert results.ratio(visits, "hawkvision", "y", results.capacity) is None


def test_classes_are_counted_where_there_is_something_to_compare_with() -> None:
    assert results.share_alike([1, 2, 3, 4], [1, 7, 3, 4]) == 0.75
    assert math.isnan(results.share_alike([1], None))


def attributed(rates: Mapping[str, tuple[int, int]]) -> list[float]:
    """The factors of contenders with so many answers per second in two rounds."""
    servers = {each.name: each for each in contenders(REFERENCE_SERVERS, ("same", "documented"))}
    return [factor for _, (factor, _, _) in results.attribution(
        {name: [visit(done) for done in both] for name, both in rates.items()}, servers
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


def test_requests_without_answers_make_percentiles_worse_and_never_better() -> None:
    waits = list(np.arange(1.0, 201.0))
    assert results.percentiles(waits) == (101.0, 199.0)
    waits[:3] = [np.inf] * 3  # the fastest ones are lost
    assert results.percentiles(waits) == (104.0, np.inf)


@given(st.lists(st.integers(), min_size=1, max_size=9, unique=True), st.integers(1, 20))
def test_orders_hold_everyone_and_everyone_begins_once_in_as_many_rounds(names: list[int], rounds: int) -> None:
    orders = list(rotations(names, rounds))
    assert all(sorted(order) == sorted(names) for order in orders)
    assert len({order[0] for order in orders}) == min(rounds, len(names))


@given(st.binary(max_size=300))
def test_triton_frames_have_one_length_of_json_before_any_image(jpeg: bytes) -> None:
    (triton,) = find("triton")
    frame = triton.frame(jpeg)
    assert len(frame) == TRITON_HEAD_BYTES + len(jpeg)
    assert frame.endswith(jpeg)
    assert f"Inference-Header-Content-Length: {TRITON_HEAD_BYTES}\r\n" == triton.headers


def test_images_of_other_formats_are_sent_as_jpeg_and_jpegs_as_they_are() -> None:
    pixels = np.full((40, 30, 3), 200, np.uint8)
    png, jpeg = (cv2.imencode(suffix, pixels)[1].tobytes() for suffix in (".png", ".jpg"))
    assert simplejpeg.decode_jpeg(as_jpeg(png, 0)).tobytes() == pixels.tobytes()
    assert as_jpeg(jpeg, 1) == jpeg
    with pytest.raises(ConfigError, match="image 2 is neither"):
        as_jpeg(b"no image", 2)


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


def test_hawkvision_takes_part_once_and_the_others_with_each_handler() -> None:
    both = contenders(find("hawkvision,litserve,ray"), ("same", "documented"))
    assert [each.name for each in both] == [
        "hawkvision",
        "litserve",
        "litserve-documented",
        "ray",
        "ray-documented",
    ]
    assert [each.name for each in contenders(find("triton,hawkvision"), ("documented",))] == [
        "triton-documented",
        "hawkvision",
    ]


def test_enlarged_images_keep_the_centred_square_and_are_mirrored_beside_it() -> None:
    square = cv2.GaussianBlur(np.random.default_rng(3).integers(0, 256, (90, 90, 3), np.uint8), (15, 15), 5)
    wide = simplejpeg.decode_jpeg(enlarged(cv2.imencode(".png", square)[1].tobytes(), 0, 480), "BGR")
    assert wide.shape == (360, 480, 3)
    back = cv2.resize(wide[:, 60:420], (90, 90), interpolation=cv2.INTER_AREA).astype(int)
    assert np.abs(back - square).mean() < 3
    assert np.abs(wide[:, 420:].astype(int) - wide[:, 359:419][:, ::-1]).mean() < 3
    with pytest.raises(ConfigError, match="image 5 is neither"):
        enlarged(b"no image", 5, 480)


@pytest.mark.parametrize("written", ["", "0", "1.5", "0.3,0.3", "half", "nan", ",".join(map(str, range(1, 20)))])
def test_loads_that_are_no_shares_are_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="--loads: expected 1 to 9 shares"):
        read_shares(written)


@given(st.integers(0, 999))
def test_answers_are_read_as_each_protocol_writes_them(index: int) -> None:
    assert read_index(b'{"label":"x","index":%d}' % index) == index
    assert read_inferred(b'{"model_name":"m","outputs":[{"name":"index","shape":[1],"data":[%d]}]}' % index) == index


@pytest.mark.parametrize("names", ["", "litserve,litserve", "hawkvision,torchserve"])
def test_unknown_peers_are_refused_with_those_there_are(names: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"hawkvision, hawkvision-onnxruntime, litserve, mlserver, .*, ray, triton",
    ):
        find(names)


def test_an_environment_that_cannot_be_made_says_what_was_to_be_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    with pytest.raises(ConfigError, match="file/peer: cannot make"):
        environments.install(tmp_path / "file" / "peer", ["some==1"], ["other==2"], said.append)
    assert "some==1, other==2" in said[0]
    assert not environments.is_installed(tmp_path / "file" / "peer", ["some==1"], ["other==2"])


def test_pip_carries_its_last_words() -> None:
    with pytest.raises(ConfigError, match=r"(?s)pip.*failed.*with a network:.*not a requirement") as raised:
        environments.pip(Path(sys.executable), ["not a requirement"])
    assert len(str(raised.value)) < 4000

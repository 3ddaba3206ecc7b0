"""The comparison's own parts, against a tiny server that is really started; the peers themselves where installed."""

import asyncio
import io
import json
import os
import select
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.models.manifest import InputSpec, cache_dir
from loadgen.clients.base import RequestTimes
from loadgen.commands.options import origin
from tests.bench.servers import environments, results, tables
from tests.bench.servers.catalogue import (
    TRITON_HEAD_BYTES,
    ReferenceServer,
    ServerSite,
    StartCommand,
    contenders,
    find,
    read_index,
    read_inferred,
)
from tests.bench.servers.compare_servers import read_shares
from tests.bench.servers.comparison import ServerComparison, conduct, version_of
from tests.bench.servers.handlers import work
from tests.bench.servers.images import as_jpeg, enlarged
from tests.bench.servers.measurement import (
    ComparedServers,
    MeasurementPlan,
    ServerMeasurement,
    check_answers,
    rotations,
    sojourns_s,
)
from tests.bench.servers.overhead.node import make_image
from tests.bench.servers.results import (
    AttributionFinding,
    ComparedLoop,
    Kind,
    LoadWindow,
    ServerRatio,
    ServersReport,
    ServerVisit,
    Waits,
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
    async with serving(tiny, Path(sys.executable), task(), "model", BODIES[0], log) as served:
        assert await check_answers(served, BODIES, given := list(expected)) == given
        return set(descendants(served.keeper)), served.cpu_seconds()


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


def test_contest_measures_every_contender_in_every_round(tmp_path: Path) -> None:
    plan = MeasurementPlan(rounds=2, window_s=WINDOW_S, warm_up_s=0.05, callers=2, requests=20, seed=1)
    tiny = peer(name="hawkvision")
    field = ComparedServers(
        [tiny], {"hawkvision": Path(sys.executable)}, task(), BODIES, {"same": list(map(tiny_class, BODIES))}, tmp_path
    )
    contest = ServerMeasurement(field, plan, lambda _: None)
    asyncio.run(contest.run_model({"same": tiny_class}))
    visits = contest.visits["hawkvision"]
    assert len(visits) == len(contest.visits["bare loop"]) == 2
    assert all(visit.window.done > 0 and visit.window.failed == 0 for visit in visits)
    assert [sorted(visit.at) for visit in visits] == [[0.3, 0.6, 0.9]] * 2
    # On a busy machine some may find all connections taken; never all.
    assert all(0.0 < waits.ms.min() < np.inf for visit in visits for waits in visit.at.values())
    assert [sorted(visit.at) for visit in contest.visits["bare loop"]] == [[0.3, 0.6, 0.9]] * 2


def tiny_comparison(folder: Path, rounds: int) -> ServerComparison:
    ours = peer(name="hawkvision")
    plan = MeasurementPlan(rounds, WINDOW_S, 0.05, callers=2, requests=20, seed=1, shares=(0.5,))
    return ServerComparison(
        origin=origin(0),
        cores=(0, 1),
        model="none",
        data="bytes",
        labels=None,
        field=ComparedServers([ours], {"hawkvision": Path(sys.executable)}, task(), BODIES, {}, folder),
        plan=plan,
        versions={"hawkvision": "(1)"},
        parts=("model",),
        json=folder / "peers.json",
        html=None,
    )


def conduct_tiny(folder: str) -> None:
    """What the next test runs as a process."""
    comparison = tiny_comparison(Path(folder), rounds=50)
    sys.exit(asyncio.run(conduct(comparison, {"same": tiny_class}, Console(width=160))))


def test_every_finished_round_is_written_and_an_interrupt_concludes_from_these(tmp_path: Path) -> None:
    written = tmp_path / "peers.json"
    script = f"from tests.bench.servers.test_servers import conduct_tiny; conduct_tiny({str(tmp_path)!r})"

    async def scenario() -> tuple[int | None, str, dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        while b"round 2 of 50" not in (line := await process.stdout.readline()):
            assert line, "it ended by itself"
        first = json.loads(written.read_text())
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        return process.returncode, out.decode(), first

    status, out, first = asyncio.run(scenario())
    last = json.loads(written.read_text())
    assert (status, first["rounds"], first["complete"], last["complete"]) == (130, 1, False, False)
    assert [row["name"] for row in first["rows"]] == ["bare loop", "hawkvision"]
    assert 1 <= last["rounds"] < 50
    assert "finished so far" in out
    assert "answers/s" in out


def test_interrupt_in_the_first_round_leaves_nothing_to_conclude_from(tmp_path: Path) -> None:
    comparison = tiny_comparison(tmp_path, rounds=1)
    contest = ServerMeasurement(comparison.field, comparison.plan, lambda _: None)
    contest.visits["bare loop"] = [visit(100, 2.0)]
    report = comparison.report(contest, complete=False)
    assert (report.rounds, report.rows, report.against, report.checked) == (0, (), (), 0)
    tables.show(report, Console(file=io.StringIO()))


def test_version_that_nobody_knows_loses_no_results() -> None:
    unknown = replace(peer(), distribution="no-such-distribution")
    assert version_of(unknown, Path(sys.executable)) == "(no-such-distribution, version not known)"
    assert version_of(unknown, Path("/no/python")) == "(no-such-distribution, version not known)"
    assert (
        version_of(replace(peer(), distribution="msgspec"), Path(sys.executable)) == f"(msgspec {msgspec.__version__})"
    )


def test_all_servers_get_one_rate_that_the_slowest_can_bear(tmp_path: Path) -> None:
    plan = MeasurementPlan(
        1, WINDOW_S, 0.05, callers=2, requests=20, seed=1, shares=(), same_rate_rounds=1, same_rate_window_s=WINDOW_S
    )
    peers = [peer(name="one"), peer(name="other")]
    pythons = dict.fromkeys(("one", "other"), Path(sys.executable))
    field = ComparedServers(peers, pythons, task(), BODIES, {"same": list(map(tiny_class, BODIES))}, tmp_path)
    contest = ServerMeasurement(field, plan, lambda _: None)
    asyncio.run(contest.run_model({"same": tiny_class}))
    asyncio.run(contest.run_same_rate({"same": tiny_class}))
    assert not contest.failures
    slowest = min(contest.visits[name][0].window.per_s for name in ("one", "other"))
    assert contest.rate == pytest.approx(0.6 * slowest)
    assert {name: [waits.rate for waits in found] for name, found in contest.at_rate.items()} == {
        name: [contest.rate] for name in ("one", "other", "bare loop")
    }


def test_latencies_of_the_bare_loop_are_those_of_one_queue() -> None:
    waits = sojourns_s(np.array([0.0, 1.0, 1.5, 9.0]), np.array([2.0, 1.0, 3.0]))
    assert waits.tolist() == [2.0, 2.0, 4.5, 2.0]


def test_contest_goes_on_without_a_server_that_fails(tmp_path: Path) -> None:
    plan = MeasurementPlan(rounds=2, window_s=WINDOW_S, warm_up_s=0.02, callers=2, requests=20, seed=1)
    peers = [peer("raise SystemExit('no model today')", "dead"), peer(name="tiny")]
    pythons = dict.fromkeys(("dead", "tiny"), Path(sys.executable))
    field = ComparedServers(peers, pythons, task(), BODIES, {"same": list(map(tiny_class, BODIES))}, tmp_path)
    said: list[str] = []
    contest = ServerMeasurement(field, plan, said.append)
    asyncio.run(contest.run_model({"same": tiny_class}))
    assert "no model today" in contest.failures["dead"]
    visits = {name: len(found) for name, found in contest.visits.items()}
    assert visits == {"tiny": 2, "bare loop": 2, "dead": 0}, contest.failures
    assert sum("round" in line and "dead" in line for line in said) == 1


def visit(done: int, ms: float) -> ServerVisit:
    return ServerVisit(LoadWindow(done, 0, 1.0, 0.5), {0.6: Waits(10.0, np.full(100, ms))})


def contender(name: str, kind: Kind = "python") -> ComparedLoop:
    return ComparedLoop(name, name.upper(), "1", "", kind, "same")


def test_ratios_are_formed_within_rounds() -> None:
    ours, theirs = [visit(200, 3.0), visit(100, 6.0)], [visit(100, 6.0), visit(50, 12.0)]
    row = results.row(contender("x"), AttributionFinding(theirs), AttributionFinding(ours), None)
    assert row.capacity == 75.0
    assert row.capacity_ratio == ServerRatio(2.0, 2.0, 2.0)
    assert row.loads[0].p99_ratio == ServerRatio(0.5, 0.5, 0.5)
    assert (row.per_cpu_s, row.core_share) == (150.0, 0.5)


def test_answers_are_counted_against_the_labels_and_against_ours() -> None:
    theirs, ours = (
        ServerVisit(LoadWindow(1, 0, 1.0, 0.5), {}, [1, 2, 3, 4]),
        ServerVisit(LoadWindow(1, 0, 1.0, 0.5), {}, [1, 2, 9, 9]),
    )
    row = results.row(contender("x"), AttributionFinding([theirs]), AttributionFinding([ours]), [1, 7, 3, 4])
    assert (row.top1, row.agreement) == (0.75, 0.5)
    alone = results.row(contender("x"), AttributionFinding([theirs]), None, None)
    assert (alone.top1, alone.agreement) == (None, None)


def test_ours_is_compared_with_the_python_peer_that_is_best_in_each_figure() -> None:
    ours = AttributionFinding([visit(200, 3.0)], [Waits(5.0, np.full(100, 2.0))])
    seen = {"busy": (100, 6.0, 8.0), "quick": (50, 4.0, 9.0), "native": (400, 1.0, 1.0)}
    rows = [
        results.row(
            contender(name, "native" if name == "native" else "python"),
            AttributionFinding([visit(done, ms)], [Waits(5.0, np.full(100, same_ms))]),
            ours,
            None,
        )
        for name, (done, ms, same_ms) in seen.items()
    ]
    found = [(each.peer, each.ratio.median) for each in results.against_best(rows)]
    assert found == [("BUSY", 2.0), ("QUICK", 0.75), ("BUSY", 0.25)]


def attributed(rates: dict[str, tuple[int, int]]) -> list[tuple[str, float]]:
    """Parts and their factors, of contenders with so many answers per second in two rounds."""
    found = {name: AttributionFinding([visit(done, 1.0) for done in both]) for name, both in rates.items()}
    kinds: dict[str, Kind] = {"hawkvision": "ours", "hawkvision-onnxruntime": "ours", "triton": "native"}
    rows = [
        results.row(
            ComparedLoop(
                name, name, "1", "", kinds.get(name, "python"),
                "documented" if name.endswith("-documented") else "same",
            ),
            each, None, None,
        )
        for name, each in found.items()
    ]  # fmt: skip
    return [(each.part, each.ratio.median) for each in results.attribution(rows, found)]


def test_what_ours_is_ahead_by_is_divided_into_factors() -> None:
    rates = {
        "hawkvision": (240, 480), "hawkvision-onnxruntime": (120, 240), "quick": (100, 200), "slow": (60, 120),
        "quick-documented": (40, 80), "slow-documented": (20, 40), "triton": (500, 900),
    }  # fmt: skip
    parts = attributed(rates)
    assert [part for part, _ in parts] == ["kernels", "serving", "decoder", "all"]
    assert [factor for _, factor in parts] == pytest.approx([2.0, 1.2, 2.5, 6.0])


def test_nothing_is_attributed_where_somebody_is_missing_and_a_decoder_only_where_it_was_asked_for() -> None:
    rates = {"hawkvision": (240, 480), "hawkvision-onnxruntime": (120, 240), "quick": (100, 200)}
    assert [part for part, _ in attributed(rates)] == ["kernels", "serving", "all"]
    for missing in rates:
        assert attributed({name: each for name, each in rates.items() if name != missing}) == []


def test_requests_without_answers_make_percentiles_worse_and_never_better() -> None:
    waits = np.arange(1.0, 201.0)
    assert results.percentiles(waits) == (101.0, 199.0)
    waits[:3] = np.inf  # the fastest ones are lost
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


def test_the_documented_handler_takes_no_memory_anew_for_every_image() -> None:
    script = (
        "import resource, sys; from tests.bench.servers.handlers import work; prepare = work.documented(sys.argv[1]);"
        "jpeg = sys.stdin.buffer.read(); [prepare(jpeg) for _ in range(5)];"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt;"
        "before = faults(); [prepare(jpeg) for _ in range(10)]; print(faults() - before)"
    )
    large = enlarged(make_image(), 0, 1280)
    told = subprocess.run(
        [sys.executable, "-c", script, task().spec()], input=large, capture_output=True, check=True, timeout=60
    )
    assert int(told.stdout) < 1000  # else several hundred for each of the ten


def test_enlarged_images_keep_the_centred_square_and_are_mirrored_beside_it() -> None:
    square = cv2.GaussianBlur(np.random.default_rng(3).integers(0, 256, (90, 90, 3), np.uint8), (15, 15), 5)
    wide = simplejpeg.decode_jpeg(enlarged(cv2.imencode(".png", square)[1].tobytes(), 0, 480), "BGR")
    assert wide.shape == (360, 480, 3)
    back = cv2.resize(wide[:, 60:420], (90, 90), interpolation=cv2.INTER_AREA).astype(int)
    assert np.abs(back - square).mean() < 3
    assert np.abs(wide[:, 420:].astype(int) - wide[:, 359:419][:, ::-1]).mean() < 3
    with pytest.raises(ConfigError, match="image 5 is neither"):
        enlarged(b"no image", 5, 480)


def test_a_page_holds_every_server_and_refers_to_nothing_outside() -> None:
    row = results.row(
        contender("litserve"), AttributionFinding([visit(100, 2.0)]), AttributionFinding([visit(200, 1.0)]), None
    )
    seen = ServersReport(
        origin=origin(0),
        cores=(0, 1),
        load_after=0.0,
        model="m",
        data="<script>",
        checked=1,
        rounds=1,
        window_s=1.0,
        callers=1,
        rows=(row,),
        against=results.against_best([row]),
        attribution=(results.Attribution("kernels", "one over the other", results.ServerRatio(1.375, 1.25, 1.5)),),
        overhead=(),
        failures={},
    )
    page = tables.page(seen)
    assert "LITSERVE" in page
    assert "best Python peer" in page
    assert "1.38 (1.25–1.50)" in page
    assert "<script" not in page
    assert "http" not in page


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


@pytest.mark.parametrize("handler", ["same", "documented"])
def test_work_without_a_model_still_reads_the_image(handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAWKVISION_PEER_WORK", "decode")
    monkeypatch.setenv("HAWKVISION_PEER_HANDLER", handler)
    monkeypatch.setenv("HAWKVISION_PEER_INPUT", task().spec())
    classify = work.classifier()
    assert classify(make_image()) == 0
    with pytest.raises((ValueError, OSError), match=r"JPEG|cannot identify"):
        classify(b"no image")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["litserve", "mlserver", "triton"])
def test_installed_peers_start_and_answer(name: str, tmp_path: Path) -> None:
    (found,) = contenders(find(name), ("documented",))
    folder = cache_dir() / "peers" / (found.shares or name)
    assert found.pins is not None
    if not environments.is_installed(folder, (*environments.shared_pins(), *found.pins), found.alone):
        pytest.skip(f"{found.title} is not installed; `python -m tests.bench.servers --install-only` does")

    async def ask() -> int | None:
        python = folder / "bin" / "python"
        async with serving(found, python, task(), "decode", make_image(), tmp_path / "log") as served:
            return (await served.asker.ask(make_image(), {}, RequestTimes())).index

    assert asyncio.run(ask()) == 0

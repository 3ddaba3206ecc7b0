"""The three FPGA backends keep the contract, give the same integers, and tell cycles, times and joules apart."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import termios
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fpga import reference
from fpga.backends import Options, build_of, open_fpga
from fpga.backends.base import Build, FpgaBackend
from fpga.backends.board import BoardBackend
from fpga.backends.ref import ReferenceBackend
from fpga.backends.simulated import SimulatedBackend
from fpga.devices import Resources
from fpga.folding import Folding, StageFolding, format_folding, interval
from fpga.framing import Frame, Hello, Reason, Run, Trouble, Welcome, encode
from fpga.integer_onnx import write
from fpga.links import UdpLink, open_link
from fpga.offload.door import open_offload
from fpga.offload.runtime import Offload, OffloadBackend
from fpga.offload.search import Point, Schedule
from fpga.power import Energy, Estimate
from fpga.report import Proof, Report, Switching
from fpga.sessions import MAX_ATTEMPTS, MAX_PAUSE_S, DeviceSession
from hawkvision.clock import ManualClock, MonotonicClock
from hawkvision.errors import BackendError, BackendUnavailable, CompileError, ConfigError
from hawkvision.metrics import EdgeMetrics, FpgaCounts
from hawkvision.process import ServerProcess, running
from hawkvision.testing import BackendConformance
from hawkvision.vision.backend import Backend
from tests.fpga.designs import CASES
from tests.fpga.graphs import random_graph

FIRST = next(iter(CASES.values()))
"""A design that is built for the simulation's own tests as well."""
GRAPH, FOLDING = FIRST.graph, FIRST.folding
COLOUR = random_graph(side=24, planes=3)
BUILD = Build(FOLDING, 100e6, 2e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    path.write_bytes(write(GRAPH))
    return path


@contextlib.contextmanager
def emulated(model: Path, *line: str) -> Iterator[ServerProcess]:
    with running("fpga.emulator", "--model", str(model), *line) as process:
        yield process


@contextlib.contextmanager
def not_emulated(window: int = 2, begun: threading.Event | None = None) -> Iterator[int]:
    """The port of a device that does not say that it is a program; its logits are all 0. `begun`: it has pixels."""
    at, link, stop = GRAPH.input, UdpLink.at("127.0.0.1", 0), threading.Event()
    session = DeviceSession(GRAPH, Welcome(at.height, at.width, at.channels, GRAPH.classes, window, False, 0, 7))

    def answer() -> None:
        while not stop.is_set():
            select.select((link,), (), (), 0.05)
            for frame in link.receive():
                replies, work = session.receive(frame)
                if begun is not None and isinstance(frame.message, Run):
                    begun.set()
                done = None if work is None else session.finish(work, 7, np.zeros(GRAPH.classes, np.int32))
                for reply in [*replies, *([] if done is None else [done])]:
                    link.send(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield link.port
    finally:
        stop.set()
        thread.join()
        link.close()


@pytest.fixture(scope="module")
def udp(model: Path) -> Iterator[str]:
    with emulated(model, "--window", "3") as process:
        yield process.url


@pytest.fixture(scope="module")
def serial(model: Path) -> Iterator[tuple[str, str]]:
    """Two lines, for a line has one host."""
    with emulated(model, "--pty") as one, emulated(model, "--pty") as other:
        yield one.url, other.url


class TestReferenceBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: ReferenceBackend(GRAPH)


class TestReferenceBackendWithoutCompiler(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: ReferenceBackend(COLOUR, how="numpy")


class TestSimulatedBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: SimulatedBackend(GRAPH, BUILD)


class TestBoardBackendOverUdp(BackendConformance):
    # A device has one session: the newer host takes it from the older, which greets it again for its next picture.
    @pytest.fixture
    def make_backend(self, udp: str) -> Callable[[], Backend]:
        return lambda: BoardBackend(GRAPH, udp)


class TestBoardBackendOverSerial(BackendConformance):
    @pytest.fixture
    def make_backend(self, serial: tuple[str, str]) -> Callable[[], Backend]:
        lines = itertools.cycle(serial)
        return lambda: BoardBackend(GRAPH, next(lines))


def pictures(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)


def expected(planes: np.ndarray) -> np.ndarray:
    return reference.logits(GRAPH, planes).astype(np.float32) * np.float32(GRAPH.logit_scale)


@pytest.mark.parametrize("kind", ["fpga-ref", "fpga-sim", "fpga-device"])
def test_all_give_the_reference_logits_whole_or_in_part(kind: str, model: Path, udp: str, tmp_path: Path) -> None:
    folding = tmp_path / "folding.json"
    folding.write_bytes(format_folding(FOLDING))
    options = Options(udp if kind == "fpga-device" else None, folding=folding, clock_mhz=50.0)
    batch, mask = pictures(4), np.random.default_rng(1).random((4, 8, 8)) < 0.8
    backend: FpgaBackend = open_fpga(kind, model, options)  # type: ignore[arg-type]
    with contextlib.closing(backend):
        grey = reference.planes(GRAPH, batch)
        np.testing.assert_array_equal(backend.infer(batch), expected(grey))
        np.testing.assert_array_equal(backend.infer_masked(batch, mask), expected(reference.filled(GRAPH, grey, mask)))
        assert backend.counts().pictures == 8
        with pytest.raises(BackendError, match="the mask is"):
            backend.infer_masked(batch, mask[:, 1:])


def test_the_reference_counts_what_the_model_says() -> None:
    backend = ReferenceBackend(GRAPH, BUILD)
    backend.infer(pictures(3))
    cycles, counts = 3 * interval(GRAPH, FOLDING), backend.counts()
    assert counts.cycles == {"modelled": cycles}
    assert counts.seconds == {"modelled": pytest.approx(cycles / 100e6)}
    assert counts.joules == pytest.approx(6e-6)
    assert counts.emulated is None


def built(chip_uj: float) -> Report:
    """A report of which only folding, clock and energy mean something."""
    none = Resources(luts=0, ffs=0, multipliers=0, block_rams=0)
    parts = dict.fromkeys(("nets_uj", "multipliers_uj", "memories_uj", "clock_uj", "static_uj", "chip_w"), 0.0)
    energy = Energy(**parts, chip_uj=chip_uj, with_board_uj=0.0)
    return Report(
        task="", variant="", graph_sha256=GRAPH.sha256, device="", command="", tools={}, folding=FOLDING,
        multipliers_in_use=1, multiplications=1, available=none, estimated=none, synthesised=none, placed=none,
        target_mhz=80.0, seeds=(), median_mhz=80.0, best_mhz=80.0, critical_path=(), pins="",
        stage_cycles=dict.fromkeys(FOLDING.stages, 1),
        estimated_cycles=1, simulated_cycles=1, latency_cycles=1,
        proof=Proof(pictures=1, pictures_from="", logits=1, differing=0, cycles_per_picture=1.0, cells={}),
        switching=Switching(
            inferences=1, net_toggles=0.0, branch_toggles=0.0, multiplications=0.0, memory_accesses=0.0
        ),
        energy=Estimate(low=energy, mid=energy, high=energy), synthesis_cpu_s=0.0,
    )  # fmt: skip


def test_a_report_says_folding_clock_and_energy_and_a_file_or_clock_overrides_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(built(chip_uj=1.0)))
    assert build_of(GRAPH, Options(report=path)) == Build(FOLDING, 80e6, 1e-6)
    assert build_of(GRAPH, Options(report=path, clock_mhz=60.0)) == Build(FOLDING, 60e6, 1e-6)
    folding = tmp_path / "folding.json"
    folding.write_bytes(format_folding(FOLDING))
    assert build_of(GRAPH, Options(report=path, folding=folding)) == Build(FOLDING, 80e6, None)
    with pytest.raises(CompileError, match=r"it is about the graph"):
        build_of(COLOUR, Options(report=path))


def test_metrics_tell_estimates_from_counts() -> None:
    metrics = EdgeMetrics()
    metrics.watch_fpga(lambda: FpgaCounts(2, {"reported": 7}, {"round_trip": 0.5}, 1e-5, False))
    page = metrics.exposition().decode()
    assert 'hawkvision_fpga_cycles_total{basis="reported"} 7.0' in page
    assert "hawkvision_fpga_round_trip_seconds_total 0.5" in page
    assert "hawkvision_fpga_estimated_joules_total An ESTIMATE" in page
    assert "hawkvision_fpga_estimated_joules_total 1e-05" in page
    assert "hawkvision_fpga_emulated 0.0" in page


def test_compiled_code_lies_in_the_given_cache(model: Path, tmp_path: Path) -> None:
    open_fpga("fpga-ref", model, Options(cache=tmp_path)).close()
    assert [path.suffix for path in (tmp_path / "fpga").iterdir()] == [".so"]


def test_offload_compiles_into_the_given_cache_too(model: Path, udp: str, tmp_path: Path) -> None:
    open_offload(model, Options(udp, cache=tmp_path), 0.05, 1, MonotonicClock()).close()
    assert [path.suffix for path in (tmp_path / "fpga").iterdir()] == [".so"]


def test_offload_computes_what_a_lost_device_does_not_answer(model: Path) -> None:
    everything = Offload(Schedule((Point(1.0, 1.0, 0.0, 0.0),)), 1e-3, 1e-4, 20e-3, 8, 2)
    clock, right = ManualClock(), ReferenceBackend(GRAPH).infer(pictures(3))
    with contextlib.ExitStack() as stack:
        with emulated(model) as process:
            sides = BoardBackend(GRAPH, process.url, attempts=1), ReferenceBackend(GRAPH)
            both = stack.enter_context(contextlib.closing(OffloadBackend(*sides, everything, clock)))
            while both.offloaded().share < 1.0:
                clock.advance(0.25)
                both.infer(pictures(1))
            np.testing.assert_array_equal(both.infer(pictures(3)), right)
            answered = both.offloaded().fpga
        np.testing.assert_array_equal(both.infer(pictures(3)), right)
        counts = both.offloaded()
    assert counts.fpga == answered >= 3
    assert (counts.failed, counts.fpga_up) == (3, False)


def test_what_is_not_known_is_not_counted() -> None:
    backend = ReferenceBackend(GRAPH)
    backend.infer(pictures(1))
    counts = backend.counts()
    assert (counts.pictures, dict(counts.cycles), dict(counts.seconds), counts.joules) == (1, {}, {}, None)


def test_the_simulation_counts_cycles_of_the_rtl() -> None:
    backend = SimulatedBackend(GRAPH, BUILD)
    backend.infer(pictures(4))
    counts = backend.counts()
    assert 4 * interval(GRAPH, FOLDING) <= counts.cycles["simulated"] < 6 * interval(GRAPH, FOLDING)
    assert counts.seconds == {"simulated": pytest.approx(counts.cycles["simulated"] / 100e6)}


def test_the_device_tells_what_it_models_from_what_was_measured(udp: str) -> None:
    with contextlib.closing(BoardBackend(GRAPH, udp)) as backend:
        backend.infer(pictures(2))
        counts = backend.counts()
    # The emulator was told of no folding: a multiplication a cycle.
    assert counts.cycles == {"modelled": 2 * GRAPH.multiplications}
    assert counts.seconds["modelled"] == pytest.approx(2 * GRAPH.multiplications / 100e6)
    assert counts.seconds["round_trip"] >= counts.seconds["modelled"]
    assert counts.emulated is True


def test_rows_go_to_the_device_as_they_come(udp: str) -> None:
    (picture,) = reference.planes(GRAPH, pictures(1))
    with contextlib.closing(BoardBackend(GRAPH, udp)) as backend:
        rows = ((picture[row], None) for row in range(8))
        np.testing.assert_array_equal(backend.infer_pieces(rows), expected(picture[None])[0])
        # The last three rows never come.
        mask = np.repeat(np.arange(8) < 5, 8).reshape(1, 8, 8)
        early = ((picture[row], None) for row in range(5))
        shown = reference.filled(GRAPH, picture[None], mask)
        np.testing.assert_array_equal(backend.infer_pieces(early), expected(shown)[0])


def test_rows_may_come_in_the_same_memory_while_the_device_is_busy(model: Path) -> None:
    (picture,) = reference.planes(GRAPH, pictures(1))
    row = np.empty_like(picture[0])

    def camera() -> Iterator[tuple[np.ndarray, None]]:
        for each in picture:
            row[:] = each
            yield row, None
        row[:] = 0

    in_line = threading.Event()
    with (
        emulated(model, "--window", "1", "--clock-mhz", "0.05") as process,
        ThreadPoolExecutor() as pool,
        contextlib.closing(BoardBackend(GRAPH, process.url)) as backend,
    ):
        before = pool.submit(backend.infer_pieces, whole(picture, in_line))
        assert in_line.wait(10)
        np.testing.assert_array_equal(backend.infer_pieces(camera()), expected(picture[None])[0])
        before.result()


def whole(picture: np.ndarray, in_line: threading.Event) -> Iterator[tuple[np.ndarray, None]]:
    """A picture in one piece; says when it has its place in the line."""
    yield picture.reshape(64, 1), None
    in_line.set()


def test_a_round_trip_begins_when_a_picture_is_sent_not_when_it_gets_in_line(model: Path) -> None:
    with emulated(model, "--window", "1", "--clock-mhz", "1") as process:
        backend = BoardBackend(GRAPH, process.url)
        with contextlib.closing(backend):
            backend.infer(pictures(1))
            one = backend.counts().seconds["round_trip"]
            backend.infer(pictures(8))
            nine = backend.counts().seconds["round_trip"]
    assert nine < 18 * one, "eight in line would make 1 + 2 + … + 8 of it"


def test_a_device_that_takes_anothers_place_is_called_what_it_is(model: Path) -> None:
    with contextlib.ExitStack() as stack:
        with not_emulated() as port:
            backend = stack.enter_context(contextlib.closing(BoardBackend(GRAPH, f"udp://127.0.0.1:{port}")))
            backend.infer(pictures(1))
        assert backend.counts().emulated is False
        assert set(backend.counts().cycles) == {"reported"}
        with emulated(model, "--port", str(port)):
            backend.infer(pictures(1))
            assert backend.counts().emulated is True
            assert set(backend.counts().cycles) == {"reported", "modelled"}


def test_a_caller_that_fails_halfway_leaves_the_device_to_others(udp: str) -> None:
    def broken() -> Iterator[tuple[np.ndarray, None]]:
        yield np.zeros((8, 1), np.uint8), None
        raise OSError("the camera is gone")

    with contextlib.closing(BoardBackend(GRAPH, udp)) as backend:
        for _ in range(5):  # more than the window of 3
            with pytest.raises(OSError, match="camera"):
                backend.infer_pieces(broken())
        with pytest.raises(BackendError, match="of 64 with 1 channels"):
            backend.infer_pieces([(np.zeros((8, 3), np.uint8), None)])
        with pytest.raises(BackendError, match="8 pixels more than a picture's 64"):
            backend.infer_pieces([(np.zeros((8, 1), np.uint8), None)] * 9)
        assert backend.infer(pictures(1)).shape == (1, 5)


def test_a_caller_turned_away_halfway_leaves_the_device_to_others() -> None:
    begun, in_line, (picture,) = threading.Event(), threading.Event(), reference.planes(GRAPH, pictures(1))

    def turned_away(backend: BoardBackend, pool: ThreadPoolExecutor) -> Iterator[tuple[np.ndarray, None]]:
        yield np.zeros((8, 1), np.uint8), None
        assert begun.wait(10), "the device has its first pixels, so it has the only place"
        others.append(pool.submit(backend.infer_pieces, whole(picture, in_line)))
        assert in_line.wait(10), "another picture waits, and no more than one may"
        yield np.zeros((8, 1), np.uint8), None

    others: list[Future[np.ndarray]] = []
    with (
        not_emulated(window=1, begun=begun) as port,
        ThreadPoolExecutor() as pool,
        contextlib.closing(BoardBackend(GRAPH, f"udp://127.0.0.1:{port}", most=1)) as backend,
    ):
        with pytest.raises(BackendUnavailable, match="1 pictures are waiting for the device"):
            backend.infer_pieces(turned_away(backend, pool))
        # Long before the first, if it were still in its place, would have to leave it.
        assert others[0].result(MAX_PAUSE_S / 2).shape == (5,)


def test_a_device_of_another_model_is_an_error_at_the_start(udp: str) -> None:
    with pytest.raises(BackendError, match=f"holds the model {GRAPH.sha256[:16]}"):
        BoardBackend(random_graph(9), udp)


def test_a_device_that_goes_away_fails_its_callers_and_a_new_one_is_found(model: Path) -> None:
    with emulated(model) as process:
        backend, port = BoardBackend(GRAPH, process.url), process.port
        backend.infer(pictures(1))
    with contextlib.closing(backend), emulated(model, "--port", str(port)):
        np.testing.assert_array_equal(backend.infer(pictures(1)), ReferenceBackend(GRAPH).infer(pictures(1)))


def test_a_line_is_opened_anew_however_many_connections_are_open(udp: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    with contextlib.ExitStack() as connections:
        connections.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (opened := os.dup(0)) < 1024:
            connections.callback(os.close, opened)
        connections.callback(os.close, opened)
        with contextlib.closing(BoardBackend(GRAPH, udp)) as backend:
            assert backend.infer(pictures(1)).shape == (1, 5)


def test_a_line_without_a_descriptor_left_is_an_error_of_the_backend(udp: str) -> None:
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 2, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        os.close(taken.pop())  # one is enough for the socket, not for what wakes its thread
        with pytest.raises(BackendError, match=f"{udp}: Too many open files"):
            BoardBackend(GRAPH, udp)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def test_a_line_that_is_hung_up_is_an_error_and_so_is_opening_it_again(model: Path) -> None:
    with emulated(model, "--pty") as process:
        backend = BoardBackend(GRAPH, process.url)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=r"fpga-device: the line broke|serial:"):
            backend.infer(pictures(1))
    backend.close()


def test_a_device_that_falls_silent_is_unavailable_not_a_defect(model: Path) -> None:
    with emulated(model) as process:
        backend = BoardBackend(GRAPH, process.url, attempts=1)
    with contextlib.closing(backend), pytest.raises(BackendUnavailable, match="no answer after 1 attempts"):
        backend.infer(pictures(1))


def test_a_backend_that_is_given_up_waits_for_no_device() -> None:
    given_up: Future[None] = Future()
    with contextlib.closing(UdpLink.at("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(BoardBackend, GRAPH, f"udp://127.0.0.1:{silent.port}", given_up=given_up)
        assert select.select((silent,), (), (), 10)[0]
        given_up.set_result(None)
        with pytest.raises(BackendUnavailable, match="the backend is closed"):
            opening.result()
        assert len(silent.receive()) < MAX_ATTEMPTS


def test_a_serial_line_has_one_host(serial: tuple[str, str]) -> None:
    with contextlib.closing(BoardBackend(GRAPH, serial[0])), pytest.raises(BackendError, match="another has it"):
        BoardBackend(GRAPH, serial[0])


def test_closing_ends_the_thread(udp: str) -> None:
    BoardBackend(GRAPH, udp).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hawkvision-fpga-device"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "udp://host",
        "udp://h:99999",
        "udp://h:1/x",
        "serial:tty",
        "serial:/dev/x?baud=fast",
        "serial:/d?x=1",
        "serial:/\0",
    ],
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected udp://HOST:PORT or serial:/dev/NAME"):
        open_link(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("serial:/nowhere/tty", "No such file"),
        ("serial:/dev/null", "Inappropriate ioctl"),
        ("serial:/dev/null?baud=12345", "12345 baud is no speed"),
        ("serial:/dev/null?baud=0", "0 baud is no speed"),
        ("udp://no-such-host.invalid:1", "udp://no-such-host.invalid:1"),
        (f"udp://{'a' * 64}.net:1", "udp://a+.net:1: .*label"),
    ],
)
def test_lines_that_cannot_be_opened_are_errors(url: str, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        open_link(url)


def test_a_device_answers_the_host_whose_session_it_is_not_the_last_to_speak() -> None:
    device = UdpLink.at("127.0.0.1", 0)
    hosts = [UdpLink.to("127.0.0.1", device.port) for _ in range(2)]
    for session, host in enumerate(hosts):
        host.send(encode(Frame(session, 0, Hello(bytes(32)))))
    found: list[Frame] = []
    while len(found) < 2:
        found += device.receive()
    device.send(encode(Frame(0, 1, Trouble(Reason.FAILED, "for the first"))))
    device.send(encode(Frame(1, 1, Trouble(Reason.FAILED, "for the second"))))
    for session, host in enumerate(hosts):
        assert select.select((host,), (), (), 10)[0]
        assert [frame.session for frame in host.receive()] == [session]
    for link in (device, *hosts):
        link.close()


def test_a_serial_line_is_8n1_without_flow_control_whatever_it_was_before() -> None:
    ours, theirs = os.openpty()
    mode = termios.tcgetattr(theirs)
    mode[2] |= termios.CSTOPB | termios.CRTSCTS
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    with contextlib.closing(open_link(f"serial:{os.ttyname(theirs)}")):
        kept = termios.tcgetattr(theirs)[2]
    assert kept & termios.CSIZE == termios.CS8
    assert not kept & (termios.CSTOPB | termios.CRTSCTS | termios.PARENB)
    os.close(ours)
    os.close(theirs)


def test_links_receive_nothing_when_nothing_came() -> None:
    udp = UdpLink.at("127.0.0.1", 0)
    assert udp.receive() == []
    with pytest.raises(BackendError, match="in use"):
        UdpLink.at("127.0.0.1", udp.port)
    udp.send(b"nobody has asked yet")
    udp.close()


def test_backends_say_what_they_miss(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing its address"):
        open_fpga("fpga-device", model, Options())
    with pytest.raises(CompileError, match="needs a folding"):
        SimulatedBackend(GRAPH, Build())
    with pytest.raises(CompileError, match="cannot be read"):
        build_of(GRAPH, Options(report=tmp_path / "none.json"))
    with pytest.raises(CompileError, match="No such file"):
        build_of(GRAPH, Options(folding=tmp_path / "none.json"))
    other = tmp_path / "folding.json"
    other.write_bytes(format_folding(Folding(stages={"x": StageFolding()})))
    with pytest.raises(CompileError, match="expected the stages"):
        build_of(GRAPH, Options(folding=other))

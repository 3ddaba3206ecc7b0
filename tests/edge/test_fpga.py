"""A real node on FPGA backends: the answers of ONNX Runtime for the same integer stage, with cycles on `/metrics`."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.factory import load_components
from fpga.compiler.folding import Folding, StageFolding, format_folding, interval
from fpga.device.framing import MAX_FRAME
from fpga.device.host_session import MAX_ATTEMPTS
from hawkvision.core.errors import ConfigError, HawkVisionError, ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import read_command_line
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.onnx_writer import write
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.calibration.calibrate import calibrate
from hawkvision.models.image_sets.idx_reader import grey_png
from hawkvision.models.manifest import artifact_path, load_manifest
from hawkvision.system.child_server import running
from tests.edge.conftest import Caller
from tests.edge.peer import running_peer
from tests.hawkvision.integer.graphs import random_graph
from tests.hawkvision.model_zoo.answers import answers_of
from tests.hawkvision.model_zoo.synthetic_task import write_cascade


@dataclass(frozen=True)
class Cascade:
    """A task of random networks, built and profiled."""

    models: Path
    cache: Path
    folding: Path
    cycles: int

    @property
    def model(self) -> Path:
        return artifact_path(self.cache, "shapes", "tiny_w4")

    @property
    def emulator(self) -> tuple[str, ...]:
        """Of a device that takes a few milliseconds for an image."""
        return ("--model", str(self.model), "--clock-mhz", "4000")

    def arguments(self, *more: str) -> tuple[str, ...]:
        folders = ("--models-dir", str(self.models), "--cache-dir", str(self.cache))
        return ("--port", "0", "--task", "shapes", *folders, *more)


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Cascade:
    root = tmp_path_factory.mktemp("cascade")
    models, _ = write_cascade(root, channels=(96, 192, 192))
    cache = root / "cache"
    build("shapes", models=models, cache=cache, progress=lambda *_: None)
    bodies = images(120)
    labels = answers_of("shapes", load_manifest("shapes", models).best, bodies, cache, models)
    own = root / "own.npz"
    data = np.frombuffer(b"".join(bodies), np.uint8)
    np.savez(own, data=data, offsets=np.cumsum([0, *map(len, bodies)]), labels=labels)
    calibrate("shapes", own, models / "shapes" / "profile.json", seed=1, models=models, cache=cache)
    graph = graph_of(artifact_path(cache, "shapes", "tiny_w4"))
    folding = Folding(stages={stage.name: StageFolding() for stage in graph.stages})
    path = root / "folding.json"
    path.write_bytes(format_folding(folding))
    return Cascade(models, cache, path, interval(graph, folding))


def settings(*arguments: str) -> EdgeConfig:
    return read_command_line(EdgeConfig, arguments, "edge", "")


def images(n: int) -> list[bytes]:
    rng = np.random.default_rng(4)
    return [grey_png(rng.integers(0, 256, (12, 12), dtype=np.uint8)) for _ in range(n)]


@contextlib.contextmanager
def node(cascade: Cascade, *more: str, env: Mapping[str, str] | None = None) -> Iterator[Caller]:
    with running("edge", *cascade.arguments(*more), env=env) as server:
        caller = Caller(server)
        yield caller
        caller.close()


def answers(caller: Caller, n: int = 12) -> list[tuple[Any, ...]]:
    replies = [caller.classify(body, "quality=fast").json for body in images(n)]
    return [(each["model"], each["tier"], each["index"], each["confidence"]) for each in replies]


def metric(caller: Caller, name: str) -> float | None:
    for line in caller.get("/metrics").body.decode().splitlines():
        if line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    return None


@pytest.fixture(scope="module")
def by_onnxruntime(cascade: Cascade) -> list[tuple[Any, ...]]:
    with node(cascade, "--variant", "tiny_w4") as caller:
        return answers(caller)


def test_the_reference_serves_the_same_answers_as_onnxruntime(
    cascade: Cascade, by_onnxruntime: list[tuple[Any, ...]]
) -> None:
    build_of = ("--fpga-folding", str(cascade.folding), "--fpga-clock-mhz", "50")
    with (
        running_peer(model="both", top_k=[(1, 0.99), (0, 0.005)]) as peer,
        node(cascade, "--backend", "fpga-ref", "--datacenter-url", peer.url, "--audit-share", "0", *build_of) as caller,
    ):
        before = metric(caller, "hawkvision_fpga_images_total")
        assert answers(caller) == by_onnxruntime
        escalated = caller.classify(images(1)[0], "quality=best").json
        ran = metric(caller, "hawkvision_fpga_images_total")
        cycles = metric(caller, 'hawkvision_fpga_cycles_total{basis="modelled"}')
        seconds = metric(caller, "hawkvision_fpga_modelled_seconds_total")
        joules = metric(caller, "hawkvision_fpga_estimated_joules_total")
    assert by_onnxruntime[0][:2] == ("tiny_w4", "edge")
    assert before is not None
    assert ran == before + 12
    assert cycles == ran * cascade.cycles
    assert seconds == pytest.approx(ran * cascade.cycles / 50e6)
    assert joules is None, "no report, no joules"
    assert (escalated["tier"], escalated["model"]) == ("datacenter", "both")


def test_a_device_serves_the_same_answers_and_its_emulator_is_called_one(
    cascade: Cascade, by_onnxruntime: list[tuple[Any, ...]]
) -> None:
    with (
        running("fpga.device.emulator", *cascade.emulator, "--folding", str(cascade.folding)) as device,
        node(cascade, "--backend", "fpga-device", "--fpga-device", device.url) as caller,
    ):
        assert answers(caller) == by_onnxruntime
        assert metric(caller, "hawkvision_fpga_emulated") == 1
        modelled = metric(caller, "hawkvision_fpga_modelled_seconds_total")
        round_trip = metric(caller, "hawkvision_fpga_round_trip_seconds_total")
    assert modelled is not None
    assert round_trip is not None
    assert 0 < modelled < round_trip


def sides(caller: Caller) -> dict[str, float]:
    found = {side: metric(caller, f'hawkvision_offload_images_total{{side="{side}"}}') for side in ("fpga", "cpu")}
    return {side: images or 0.0 for side, images in found.items()}


def test_offload_serves_the_same_answers_with_its_device_and_after_losing_it(
    cascade: Cascade, by_onnxruntime: list[tuple[Any, ...]]
) -> None:
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(running("fpga.device.emulator", *cascade.emulator))
        shared = ("--backend", "fpga-offload", "--fpga-device", device.url)
        caller = stack.enter_context(node(cascade, *shared))
        before = sides(caller)
        assert answers(caller) == by_onnxruntime
        there = sides(caller)
        device.stop()
        assert answers(caller) == by_onnxruntime
        alone = sides(caller)
    assert there["fpga"] > before["fpga"]
    assert alone["cpu"] - there["cpu"] == 12


def test_a_device_whose_place_another_took_is_a_503_until_it_is_back(cascade: Cascade, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(write(random_graph()))
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(running("fpga.device.emulator", *cascade.emulator))
        caller = stack.enter_context(node(cascade, "--backend", "fpga-device", "--fpga-device", device.url))
        assert caller.classify(images(1)[0]).status == 200
        device.stop()
        same_port = ("--port", device.url.rpartition(":")[2])
        with running("fpga.device.emulator", "--model", str(other), *same_port):
            gone = caller.classify(images(1)[0])
        stack.enter_context(running("fpga.device.emulator", *cascade.emulator, *same_port))
        assert caller.classify(images(1)[0]).status == 200
    assert (gone.status, gone.json["code"], gone.headers["retry-after"]) == (503, "unavailable", "1")


def test_a_node_told_to_stop_greets_a_silent_device_no_more_and_ends_well(cascade: Cascade) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        device.bind(("127.0.0.1", 0))
        device.settimeout(60)
        where = f"udp://127.0.0.1:{device.getsockname()[1]}"
        words = cascade.arguments("--backend", "fpga-device", "--fpga-device", where)
        with subprocess.Popen([sys.executable, "-m", "edge", *words]) as process:
            device.recv(MAX_FRAME)
            process.terminate()
            assert process.wait(60) == 0
        device.setblocking(False)
        greetings = 1
        with contextlib.suppress(BlockingIOError):
            while device.recv(MAX_FRAME):
                greetings += 1
    assert greetings < MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--backend", "fpga-ref", "--variant", "tiny"), "carries no integer graph"),
        (("--backend", "fpga-ref", "--fpga-folding", "/nowhere.json"), "/nowhere.json: cannot be read: No such file"),
        (("--backend", "fpga-ref", "--fpga-report", "/nowhere.json"), "/nowhere.json: cannot be read: No such file"),
        (("--backend", "fpga-device", "--fpga-device", "udp://no-host.invalid:1"), "udp://no-host.invalid:1"),
        (("--backend", "fpga-device", "--fpga-device", "tcp://host:1"), "expected udp://HOST:PORT, got"),
    ],
)
def test_a_backend_that_cannot_run_is_an_error_at_the_start(cascade: Cascade, more: tuple[str, ...], says: str) -> None:
    with pytest.raises(HawkVisionError) as caught:
        load_components(settings(*cascade.arguments(*more)))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--backend", "fpga-device"), "missing edge.fpga_device"),
        (("--backend", "fpga-ref", "--fpga-device", "udp://h:1"), "edge.fpga_device belongs to"),
        (("--fpga-clock-mhz", "100"), "edge.fpga_clock_mhz belongs to an FPGA backend"),
        (("--backend", "fpga-ref", "--fpga-deadline-ms", "9"), "belongs to edge.backend = 'fpga-offload'"),
    ],
)
def test_settings_that_contradict_the_backend_are_refused(more: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*more)
    assert says in caught.value.message


def test_a_task_without_an_fpga_stage_is_an_error_at_the_start() -> None:
    with pytest.raises(ManifestError, match=r"task 'imagenet' has no stage for FPGAs: name one in edge\.variant"):
        load_components(settings("--backend", "fpga-ref"))

"""The FPGA backends keep the contract, give the same integers, and tell cycles, times and joules apart."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fpga.backends.base import FpgaCollector, FpgaCounts
from fpga.backends.device import DeviceBackend
from fpga.backends.local import ReferenceBackend, SimulatedBackend
from fpga.backends.offload import OffloadBackend
from fpga.compiler.folding import Folding, StageFolding, format_folding, interval
from fpga.node_backend import NodeBackendKind, open_node_backend
from fpga.reports.build_report import DesignInfo, read_design
from fpga.settings import FpgaSettings
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import CompileError, ConfigError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import LOGITS
from hawkvision.inference.backends.interface import Backend
from hawkvision.integer import reference
from tests.clocks import ManualClock
from tests.fpga.small_model import FOLDING, GRAPH, emulated, expected, images
from tests.hawkvision.inference.backend_conformance import BackendConformance
from tests.hawkvision.integer.graphs import random_graph

COLOUR = random_graph(side=24, planes=3)
COMMITTED = Path(__file__).parents[3] / "fpga" / "reports" / "fashion_mnist-tiny_w4-lfe5u-25f.json"
BUILD = DesignInfo(FOLDING, 100e6, 2e-6)


class TestReferenceBackend(BackendConformance):
    @pytest.fixture(params=[(GRAPH, None), (COLOUR, "numpy")], ids=["compiled", "numpy"])
    def make_backend(self, request: pytest.FixtureRequest) -> Callable[[], Backend]:
        graph, kernel = request.param
        return lambda: ReferenceBackend(graph, kernel=kernel)


class TestSimulatedBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: SimulatedBackend(GRAPH, BUILD)


@pytest.mark.parametrize("kind", ["fpga-ref", "fpga-sim", "fpga-device", "fpga-offload"])
def test_all_give_the_reference_logits(kind: NodeBackendKind, model: Path, udp: str, tmp_path: Path) -> None:
    folding = tmp_path / "folding.json"
    folding.write_bytes(format_folding(FOLDING))
    settings = FpgaSettings(device=udp, folding=folding, clock_mhz=50.0)
    with contextlib.closing(open_node_backend(kind, model, settings, 1, MonotonicClock())) as backend:
        batch = images(4)
        np.testing.assert_array_equal(backend.infer(batch)[LOGITS], expected(reference.planes(GRAPH, batch)))


def test_the_reference_counts_what_the_model_says_and_nothing_that_is_not_known() -> None:
    backend = ReferenceBackend(GRAPH, BUILD)
    backend.infer(images(3))
    cycles, counts = 3 * interval(GRAPH, FOLDING), backend.counts()
    assert counts.cycles == {"modelled": cycles}
    assert counts.seconds == {"modelled": pytest.approx(cycles / 100e6)}
    assert counts.joules == pytest.approx(6e-6)
    assert counts.emulated is None
    backend = ReferenceBackend(GRAPH)
    backend.infer(images(1))
    assert backend.counts() == FpgaCounts(1, {}, {}, None, None)


def test_a_report_says_folding_clock_and_energy_and_a_file_or_clock_overrides_it(tmp_path: Path) -> None:
    report, path = json.loads(COMMITTED.read_bytes()), tmp_path / "report.json"
    report |= {"graph_sha256": GRAPH.sha256, "median_mhz": 80.0, "folding": msgspec.to_builtins(FOLDING)}
    report["stage_cycles"] = dict.fromkeys(FOLDING.stages, 1)
    report["energy"]["mid"]["chip_uj"] = 1.0
    path.write_text(json.dumps(report))
    assert read_design(GRAPH, path) == DesignInfo(FOLDING, 80e6, 1e-6)
    assert read_design(GRAPH, path, clock_mhz=60.0) == DesignInfo(FOLDING, 60e6, 1e-6)
    folding = tmp_path / "folding.json"
    folding.write_bytes(format_folding(FOLDING))
    assert read_design(GRAPH, path, folding) == DesignInfo(FOLDING, 80e6, None)
    with pytest.raises(CompileError, match=r"it is about the graph"):
        read_design(COLOUR, path)


def test_metrics_tell_estimates_from_counts() -> None:
    metrics = EdgeMetrics()
    counts = FpgaCounts(2, {"reported": 7}, {"round_trip": 0.5}, 1e-5, False)
    metrics.registry.register(FpgaCollector(lambda: counts))
    page = metrics.exposition().decode()
    assert 'hawkvision_fpga_cycles_total{basis="reported"} 7.0' in page
    assert "hawkvision_fpga_round_trip_seconds_total 0.5" in page
    assert "hawkvision_fpga_estimated_joules_total Estimate:" in page
    assert "hawkvision_fpga_estimated_joules_total 1e-05" in page
    assert "hawkvision_fpga_emulated 0.0" in page


def test_offload_computes_what_a_lost_device_does_not_answer(model: Path) -> None:
    clock, right = ManualClock(), ReferenceBackend(GRAPH).infer(images(3))[LOGITS]
    with contextlib.ExitStack() as stack:
        with emulated(model) as process:
            sides = DeviceBackend(GRAPH, process.url, attempts=1), ReferenceBackend(GRAPH)
            both = stack.enter_context(contextlib.closing(OffloadBackend(*sides, 1, 60.0, clock)))
            np.testing.assert_array_equal(both.infer(images(3))[LOGITS], right)
            answered = both.offloaded().fpga
        np.testing.assert_array_equal(both.infer(images(3))[LOGITS], right)
        counts = both.offloaded()
    assert counts.fpga == answered >= 1
    assert (counts.failures, both.fpga_up) == (1, False)


def test_the_simulation_counts_cycles_of_the_rtl() -> None:
    backend = SimulatedBackend(GRAPH, BUILD)
    backend.infer(images(4))
    counts = backend.counts()
    assert 4 * interval(GRAPH, FOLDING) <= counts.cycles["simulated"] < 6 * interval(GRAPH, FOLDING)
    assert counts.seconds == {"simulated": pytest.approx(counts.cycles["simulated"] / 100e6)}


def test_backends_say_what_they_miss(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing the device's address"):
        open_node_backend("fpga-device", model, FpgaSettings(), 1, MonotonicClock())
    with pytest.raises(CompileError, match="needs a folding"):
        SimulatedBackend(GRAPH, DesignInfo())
    with pytest.raises(CompileError, match="cannot be read"):
        read_design(GRAPH, tmp_path / "none.json")
    with pytest.raises(CompileError, match="cannot be read: No such file"):
        read_design(GRAPH, folding=tmp_path / "none.json")
    other = tmp_path / "folding.json"
    other.write_bytes(format_folding(Folding(stages={"x": StageFolding()})))
    with pytest.raises(CompileError, match="expected the stages"):
        read_design(GRAPH, folding=other)

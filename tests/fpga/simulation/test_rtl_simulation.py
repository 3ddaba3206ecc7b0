"""The RTL, simulated cycle by cycle, against the reference: the same logits, in the cycles that the model says."""

from __future__ import annotations

import numpy as np
import pytest

from fpga.compiler.folding import interval, latency
from fpga.simulation.rtl_simulation import Simulation, Stalls
from fpga.simulation.verilator import VerilatorDesign, library
from hawkvision.core.errors import BackendError, CompileError
from hawkvision.integer import reference
from tests.fpga.designs import CASES, FASHION, Case
from tests.hawkvision.integer.graphs import random_images


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def device(case: Case) -> Simulation:
    return Simulation(case.graph, case.folding)


def test_logits_are_those_of_the_reference_at_the_estimated_rate(case: Case, device: Simulation) -> None:
    images = random_images(case.graph, 12, seed=1)
    run = device.run(images)
    assert (run.logits == reference.logits(case.graph, images)).all()
    expected = interval(case.graph, case.folding)
    measured = (run.last_out[-1] - run.last_out[3]) / (len(images) - 4)
    assert abs(measured - expected) <= 0.01 * expected


def test_latency_of_an_idle_device_is_as_estimated(case: Case, device: Simulation) -> None:
    device.reset()  # it may still be at a last row that pooling leaves out
    run = device.run(random_images(case.graph, 1))
    expected = latency(case.graph, case.folding)
    assert abs(run.last_out[0] - run.first_in[0] - expected) <= 0.01 * expected


@pytest.mark.parametrize("stalls", [Stalls(200, 0, 1), Stalls(0, 250, 2), Stalls(90, 120, 3)])
def test_random_pauses_change_no_logit(case: Case, device: Simulation, stalls: Stalls) -> None:
    images = random_images(case.graph, 8, seed=stalls.seed)
    assert (device.run(images, stalls=stalls).logits == reference.logits(case.graph, images)).all()


def test_missing_pixels_are_filled_as_in_the_reference(case: Case, device: Simulation) -> None:
    images = random_images(case.graph, 6, seed=4)
    mask = np.random.default_rng(4).random(images.shape[:3]) < np.linspace(0, 0.9, 6)[:, None, None]
    shown = reference.filled(case.graph, images, mask)
    run = device.run(images, mask, stalls=Stalls(50, 0, 4))
    assert (run.logits == reference.logits(case.graph, shown)).all()


@pytest.mark.parametrize("timeout_factor", [0.01, 0.05, 0.1])
def test_reset_in_the_midst_of_an_image_leaves_nothing_behind(
    case: Case, device: Simulation, timeout_factor: float
) -> None:
    images = random_images(case.graph, 4, seed=7)
    with pytest.raises(BackendError, match="the simulated device gave"):
        device.run(images[:1], timeout_factor=timeout_factor)
    run = device.run(images[1:])
    assert (run.logits == reference.logits(case.graph, images[1:])).all()


def test_rows_that_come_late_give_the_same_logits_sooner_than_the_whole_image_would(
    case: Case, device: Simulation
) -> None:
    graph = case.graph
    image, pace = random_images(graph, 1, seed=6), 4 * interval(graph, case.folding) // graph.input.height
    run = device.run(image, arrives=np.arange(graph.input.height)[None] * pace)
    assert (run.logits == reference.logits(graph, image)).all()
    assert run.last_out[0] - run.last_in[0] < latency(graph, case.folding)
    assert run.last_in[0] >= (graph.input.height - 1) * pace


@pytest.mark.slow
def test_fashion_network_keeps_its_rate_within_a_per_cent() -> None:
    images = random_images(FASHION.graph, 8)
    run = Simulation(FASHION.graph, FASHION.folding).run(images)
    assert (run.logits == reference.logits(FASHION.graph, images)).all()
    expected = interval(FASHION.graph, FASHION.folding)
    assert expected == 4704
    assert abs((run.last_out[-1] - run.last_out[3]) / 4 - expected) <= 0.01 * expected


FIRST = next(iter(CASES.values()))


def test_other_shapes_are_refused() -> None:
    device = Simulation(FIRST.graph, FIRST.folding)
    with pytest.raises(BackendError, match=r"expected uint8 images \(n, 8, 8, 1\), got \(2, 8, 9, 1\)"):
        device.run(np.zeros((2, 8, 9, 1), np.uint8))
    with pytest.raises(BackendError, match="mask: expected"):
        device.run(np.zeros((2, 8, 8, 1), np.uint8), np.ones((2, 8), np.bool_))
    with pytest.raises(BackendError, match="arrives: expected"):
        device.run(np.zeros((2, 8, 8, 1), np.uint8), arrives=np.zeros((2, 9), np.int64))


CONSTANT = b"""
module hv_constant #(parameter FILE = "") (input clk, output reg [7:0] word);
  reg [7:0] memory [0:0];
  initial $readmemh(FILE, memory);
  always @(posedge clk) word <= memory[0];
endmodule
"""
NO_DRIVER = b'#include "verilated.h"\nvoid vl_fatal(const char*, int, const char*, const char*) {}\n'


SMALL = VerilatorDesign("hv_constant", {"hv_constant.sv": CONSTANT}, NO_DRIVER, {"FILE": ("constant.mem", b"2a\n")})


def test_library_whose_memory_was_removed_is_built_anew() -> None:
    memory = library(SMALL).with_name("constant.mem")
    memory.unlink()
    assert library(SMALL).is_file()
    assert memory.read_bytes() == b"2a\n"


def test_sources_that_the_tool_refuses_are_quoted() -> None:
    broken = VerilatorDesign("broken", {"broken.sv": b"module broken(input wire clk);\n  nonsense\nendmodule\n"}, b"")
    with pytest.raises(CompileError, match=r"(?s)verilator on broken failed.*broken\.sv:3"):
        library(broken)

"""The benchmarks of the simulated RTL, on a network of a few weights."""

from __future__ import annotations

import dataclasses

import numpy as np

from fpga.compiler.folding import interval, latency
from tests.bench.fpga import exact, partial
from tests.fpga.designs import CASES

SMALL = next(iter(CASES.values()))


def test_every_way_of_streaming_is_counted_and_no_logit_differs() -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    parts = exact.measure(SMALL.graph, SMALL.folding, images)
    assert [part.images for part in parts] == [14, 13, 13]
    assert [part.differing for part in parts] == [0, 0, 0]
    estimate = interval(SMALL.graph, SMALL.folding)
    assert not exact.missed(parts, estimate)
    assert exact.missed([dataclasses.replace(parts[0], differing=2)], estimate) == ["without pauses: 2 logits differ"]
    assert len(exact.missed(parts, 2 * estimate)) == 1


def test_slow_link_hides_all_work_but_the_last_rows() -> None:
    slow, quick = partial.measure(SMALL.graph, SMALL.folding, mhz=100, lost=0.3, links=[0.1, 1e6])
    whole = latency(SMALL.graph, SMALL.folding)
    assert slow.differing == quick.differing == 0
    assert slow.early < 0.7 * slow.late
    assert abs(slow.late - whole) <= 0.05 * whole
    assert abs(quick.early - quick.late) <= 0.05 * whole

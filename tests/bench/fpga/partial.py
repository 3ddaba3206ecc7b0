"""Measures images that arrive in pieces: the time from the last piece to the answer, against waiting for the whole
image.

    python -m tests.bench.fpga.partial --task fashion_mnist

A link delivers an image row by row, at a rate in Mbit/s of raw pixels. The device takes each row as it comes, or all
rows at the pace of its input once the last has arrived. Cycles are counted in the cycle-accurate simulation of the RTL;
--mhz converts them to microseconds. The image is noise, because the schedule does not depend on pixels. Logits of both
ways are compared with the reference, also with rows missing (--lost).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from fpga.compiler.folding import Folding, latency
from fpga.simulation.rtl_simulation import Simulation
from hawkvision.core.errors import HawkVisionError
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph
from tests.bench.fpga.exact import chosen_folding, graph_of

LINKS_MBIT: Final = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The results for one link."""

    mbit: float
    arriving: int
    """Cycles from the first row's arrival to the last one's."""
    early: int
    """Cycles from the last row's arrival to the last logit, when rows are taken as they come."""
    late: int
    """The same when the device waits for the whole image."""
    differing: int
    """Logits of both ways that differ from the reference."""


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="fashion_mnist")
    parser.add_argument("--variant", default="tiny_w4")
    parser.add_argument("--device", default="lfe5u-45f", help="whose fastest folding is taken")
    parser.add_argument("--folding", type=Path, help="a folding file instead")
    parser.add_argument("--mhz", type=float, default=120.0, help="the clock assumed")
    parser.add_argument("--lost", type=float, default=0.0, help="share of the rows that never arrive")
    given = parser.parse_args()
    try:
        graph = graph_of(given.task, given.variant)
        folding = chosen_folding(graph, given.device, given.folding)
        timed = measure(graph, folding, given.mhz, given.lost)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.task} {given.variant}: latency of a whole image, estimated: {latency(graph, folding):,} cycles")
    show(timed, given.mhz)
    return 1 if any(link.differing or link.early > link.late for link in timed) else 0


def measure(
    graph: IntegerGraph, folding: Folding, mhz: float, lost: float, links: Sequence[float] = LINKS_MBIT
) -> list[TimedRun]:
    """One image over each link, both ways, on an idle device."""
    simulation = Simulation(graph, folding)
    at = graph.input
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (1, at.height, at.width, at.channels), dtype=np.uint8)
    mask = np.broadcast_to((rng.random((1, at.height)) >= lost)[:, :, None], image.shape[:3])
    expected = reference.logits(graph, reference.filled(graph, image, mask))
    found = []
    for mbit in links:
        row = 8 * at.width * at.channels / mbit * mhz  # cycles; bits over Mbit/s are microseconds
        arrives = np.round(np.arange(1, at.height + 1) * row).astype(np.int64)[None]
        last = int(arrives[0, -1])
        early = simulation.run(image, mask, arrives=arrives)
        late = simulation.run(image, mask, arrives=np.full_like(arrives, last))
        differing = sum(int((run.logits != expected).sum()) for run in (early, late))
        sooner, later = (int(run.last_out[0]) + 1 - last for run in (early, late))
        found.append(TimedRun(mbit, last - int(arrives[0, 0]), sooner, later, differing))
    return found


def show(timed: Sequence[TimedRun], mhz: float) -> None:
    """Print the results."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = (
        "link Mbit/s",
        "rows arrive in µs",
        "last row to answer µs",
        "waiting for all µs",
        "sooner",
        "logits differing",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for link in timed:
        table.add_row(
            f"{link.mbit:g}", f"{link.arriving / mhz:,.1f}", f"{link.early / mhz:,.1f}", f"{link.late / mhz:,.1f}",
            f"{link.late / link.early:.1f}x", str(link.differing),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"cycles simulated, at an assumed {mhz:g} MHz")


if __name__ == "__main__":
    sys.exit(main())

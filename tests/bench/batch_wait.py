"""Whether a model that is free should wait for more images before it starts a batch: a simulation of one device.

Images arrive at random (Poisson). A batch of b images takes t(b) = fixed + b * each. A free device starts when it has
waited or its batch is full. Each row is one t(b) and one load; each column is one wait, as mean / P99 latency in units
of t(1). `hawkvision.inference.batch_sizes` cites the result: not to wait is best in every row.

    python -m tests.bench.batch_wait
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

MOST = 64
WAITS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""In units of t(1)."""
LOADS = (0.05, 0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the throughput of full batches."""
COSTS = ((1.0, 0.0), (1.0, 0.02), (1.0, 0.1), (1.0, 1.0), (0.0, 1.0))
"""(fixed, each): from a device that a batch costs no more than one image, to a processor that works one by one."""


def latencies(
    arrivals: NDArray[np.float64], duration: Callable[[int], float], most: int, wait: float
) -> NDArray[np.float64]:
    """The latency of each image."""
    images, free, done = 0, 0.0, np.empty(len(arrivals))
    while images < len(arrivals):
        ready = max(free, arrivals[images])
        full = arrivals[images + most - 1] if images + most <= len(arrivals) else np.inf
        start = min(ready + wait, max(full, ready))
        batch = min(int(np.searchsorted(arrivals, start, "right")) - images, most)
        free = start + duration(batch)
        done[images : images + batch] = free
        images += batch
    return done - arrivals


def rows(images: int, seed: int) -> list[tuple[str, float, list[tuple[float, float]]]]:
    """For each cost and load, mean and P99 at each wait."""
    found = []
    for fixed, each in COSTS:

        def duration(batch: int, fixed: float = fixed, each: float = each) -> float:
            return fixed + batch * each

        for load in LOADS:
            rate = load * MOST / duration(MOST)
            arrivals = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, images))
            unit = duration(1)
            took = [latencies(arrivals, duration, MOST, wait * unit) / unit for wait in WAITS]
            cells = [(float(each.mean()), float(np.percentile(each, 99))) for each in took]
            found.append((f"{fixed:g} + {each:g} b", load, cells))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{'t(b)':<12}{'load':>6}" + "".join(f"{f'wait {wait:g} t(1)':>16}" for wait in WAITS))
    for cost, load, cells in rows(given.images, given.seed):
        print(f"{cost:<12}{load:>6}" + "".join(f"{f'{mean:.2f} / {tail:.2f}':>16}" for mean, tail in cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Links that trained the constants of the wait cutoff, with its worst cases. No benchmark reports on them.

python -m tests.sim.made_up_links [--seeds 2]
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from typing import Final

from tests.sim.response_time import RoundTrip, simulate

Link = Callable[[float], RoundTrip]
"""Of a deadline in ms."""
RATES_HZ: Final = (1.0, 10.0, 30.0)
DEADLINES_MS: Final = (60.0, 250.0)


def by_chance(on_time: float) -> Link:
    """Each reply is on time with that probability."""
    return lambda d: lambda _, rng: d * rng.uniform(0.3, 0.9) if rng.random() < on_time else math.inf


def log_normal(median: float, sigma: float) -> Link:
    """The median is a share of the deadline."""
    return lambda d: lambda _, rng: d * rng.lognormvariate(math.log(median), sigma)


def spells(good_s: float, bad_s: float, good: float, bad: float) -> Link:
    """Spells of exponential length in turns, on time with probability `good` or `bad`."""

    def of(deadline_ms: float) -> RoundTrip:
        lengths, ends, is_good, last = random.Random(5), 0.0, False, 0.0

        def round_trip(now: float, rng: random.Random) -> float:
            nonlocal ends, is_good, last
            if now < last - 1.0:  # another run
                ends, is_good = 0.0, False
            last = now
            while now >= ends:
                is_good = not is_good
                ends += lengths.expovariate(1.0 / (good_s if is_good else bad_s))
            on_time = rng.random() < (good if is_good else bad)
            return deadline_ms * rng.uniform(0.2, 0.7) if on_time else math.inf

        return round_trip

    return of


LINKS: Final[dict[str, Link]] = {
    **{f"by chance, {share:g}": by_chance(share) for share in (0.0, 0.02, 0.05, 0.12, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9)},
    "log-normal, three in ten on time": log_normal(1.3, 0.5),
    "up and out for 0.3 s each": spells(0.3, 0.3, 1.0, 0.0),
    "up and out for 2 s each": spells(2.0, 2.0, 1.0, 0.0),
    "up for 1 s, out for 3 s": spells(1.0, 3.0, 1.0, 0.0),
    "0.8 and 0.1 on time, for 5 s each": spells(5.0, 5.0, 0.8, 0.1),
}


def main() -> None:
    """Print what of always waiting is lost, in points of all callers, and the most misses in a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    seeds = range(parser.parse_args().seeds)
    for name, link in LINKS.items():
        runs = [
            simulate(link(deadline_ms), deadline_ms, rate_hz=rate_hz, seed=seed)
            for deadline_ms in DEADLINES_MS for rate_hz in RATES_HZ for seed in seeds
        ]  # fmt: skip
        lost = [100.0 * (each.possible - each.both) / each.callers for each in runs]
        missed = max(each.missed_in_a_row for each in runs)
        print(f"{name:36s} mean {sum(lost) / len(lost):4.1f}  worst {max(lost):4.1f}  missed {missed}", flush=True)


if __name__ == "__main__":
    main()

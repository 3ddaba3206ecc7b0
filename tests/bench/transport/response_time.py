"""The wait cutoff on links that tuned nothing: callers that could have both, that had both, and that missed.

    python -m tests.bench.transport.response_time [--seeds 10] [--callers 600] [--rate-hz 10] [--node 0]

Simulated time. The report also has the results of always and of never waiting. `lost` is the difference to always
waiting, in points of all callers; fewer right answers are lost if the edge's own answer is right for some of them. The
first link always answers in 84 or 88 of each caller's 92 ms. With `--node`, that many callers use a real node over it,
one after the other, with all times 25 times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Callable
from typing import Final

from hawkvision.core.types import Quality, Tier
from tests.edge.bench import UNSURE, bench, known
from tests.edge.peer import Peer, running_peer
from tests.hawkvision.cascade.synthetic import SHA
from tests.sim.response_time import Outcome, RoundTrip, simulate

DEADLINES_MS: Final = (60.0, 92.0, 250.0)
STEADY_MS: Final = (84.0, 88.0)
STEADY_DEADLINE_MS: Final = 92.0
SLOWER: Final = 25.0
"""So that what this machine takes is little beside the 4 ms that are left."""


def _of(draw: Callable[[random.Random], float]) -> RoundTrip:
    return lambda _, rng: draw(rng)


def _alternating(good_s: float, bad_s: float, good: Callable[[random.Random], float], bad_ms: float) -> RoundTrip:
    return lambda now, rng: good(rng) if now % (good_s + bad_s) < good_s else bad_ms


LINKS: Final[dict[str, RoundTrip]] = {
    "steady, 84 or 88 ms": _of(lambda rng: rng.choice(STEADY_MS)),
    "steady, 57 to 59 ms": _of(lambda rng: rng.uniform(57.0, 59.0)),
    "quick": _of(lambda rng: rng.gauss(30.0, 4.0)),
    "long tail": _of(lambda rng: 20.0 + rng.lognormvariate(math.log(35.0), 0.7)),
    "slow and long tail": _of(lambda rng: 50.0 + rng.lognormvariate(math.log(45.0), 0.5)),
    "one in five lost": _of(lambda rng: math.inf if rng.random() < 0.2 else rng.uniform(35.0, 55.0)),
    "outages of 8 s each 40 s": _alternating(32.0, 8.0, lambda rng: rng.uniform(30.0, 50.0), math.inf),
    "slow spells, 200 ms": _alternating(10.0, 10.0, lambda rng: rng.uniform(30.0, 50.0), 200.0),
}


def _row(name: str, deadline_ms: float, outcomes: list[Outcome]) -> str:
    callers = sum(each.callers for each in outcomes)
    possible, both, missed = (sum(getattr(each, what) for each in outcomes) for what in ("possible", "both", "missed"))
    shares = [each.both / each.possible for each in outcomes if each.possible]
    span = f"{min(shares):.3f} to {max(shares):.3f}" if shares else "-"
    return (
        f"| {name} | {deadline_ms:g} | {possible / callers:.1%} | {both / callers:.1%} | 0 | "
        f"{both / possible if possible else 1.0:.3f} | {span} | {100 * (possible - both) / callers:.1f} | "
        f"{missed / callers:.1%} | {1 - possible / callers:.1%} | {max(each.missed_in_a_row for each in outcomes)} |"
    )


def _at_node(callers: int) -> None:
    """Real sockets and time, the whole node."""
    peer: Peer

    async def ask_all() -> int:
        both = 0
        async with bench(peer, UNSURE) as it:
            await known(it.node)
            for _ in range(callers):
                peer.delay_s = SLOWER * 1e-3 * random.choice(STEADY_MS)
                answer = await it.ask(target=Quality.BEST, deadline_ms=SLOWER * STEADY_DEADLINE_MS)
                both += answer.tier is Tier.DATACENTER and answer.deadline_met is True and not answer.degraded
        return both

    with running_peer(model="large", fingerprint=SHA) as peer:
        print(f"A node, {SLOWER:g} times as slow: {asyncio.run(ask_all())} of {callers} callers got both")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--callers", type=int, default=600)
    parser.add_argument("--rate-hz", type=float, default=10.0)
    parser.add_argument("--node", type=int, default=0, help="callers of a real node")
    given = parser.parse_args()
    steady = [
        simulate(
            LINKS["steady, 84 or 88 ms"], STEADY_DEADLINE_MS, callers=given.callers, rate_hz=given.rate_hz, seed=seed,
            spent=0.0,
        )
        for seed in range(given.seeds)
    ]  # fmt: skip
    found = min(each.both for each in steady)
    print(f"84 or 88 of 92 ms: at least {found} of {given.callers} callers got both, in {given.seeds} runs")
    if given.node:
        _at_node(given.node)
    print(
        "| link | deadline, ms | always: both | ours: both | never: both | of those who could | worst to best seed | "
        "lost, points | ours: missed | always: missed | missed in a row, most |\n" + "|---" * 11 + "|"
    )
    for name, link in LINKS.items():
        for deadline_ms in DEADLINES_MS:
            outcomes = [
                simulate(link, deadline_ms, callers=given.callers, rate_hz=given.rate_hz, seed=seed)
                for seed in range(given.seeds)
            ]
            print(_row(name, deadline_ms, outcomes), flush=True)


if __name__ == "__main__":
    main()

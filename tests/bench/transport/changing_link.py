"""`python -m tests.bench.transport.changing_link`: images by datagrams over a profile's link traces, in simulated time.

Eight images of 25 KB a second at random, with a datacenter's part of the deadline. One row for each trace. *After* are
the images that leave within `AFTER_S` of a change to at least twice the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hawkvision.transport.client.datagram_client import DatagramLink
from hawkvision.transport.client.encoding_plan import ANSWER_S
from hawkvision.transport.coding.image_coding import Complete
from loadgen.network.profiles import LinkProfile, load_profile
from tests.sim.client_world import quantile
from tests.sim.test_datagram_client import IMAGE, RATE, Edge

AFTER_S: Final = 1.3
PROBE_S: Final = 0.1
"""Between an edge node's probes of its datacenter."""
LATE_S: Final = 0.1


@dataclass(frozen=True)
class Sent:
    """What became of one image."""

    at: float
    after_s: float
    whole: bool
    """Whether it was answered within the deadline, and had arrived as it was sent."""


def images(profile: LinkProfile, trace: int, seconds: float, deadline_s: float) -> list[Sent]:
    """All that were sent, at seconds from the start of the trace."""
    world = Edge(trace)
    world.over(profile, trace)
    rng, began = random.Random(trace), world.now

    async def send(link: DatagramLink, at: float) -> Sent:
        await asyncio.sleep(at)
        started, arrived = world.now, None
        lossless = link.fits_lossless(IMAGE, deadline_s)
        try:
            _, answer = await link.ask(
                b"", IMAGE, deadline_s=deadline_s, timeout_s=deadline_s + LATE_S, lossless=lossless
            )
            arrived = world.arrived.get(answer)
        except TimeoutError:
            pass
        after_s = world.now - started
        whole = isinstance(arrived, Complete) and arrived.body == IMAGE and after_s <= deadline_s
        return Sent(started - began, after_s, whole)

    async def main(link: DatagramLink) -> list[Sent]:
        sending, at = [], 0.3
        while at < seconds:
            sending.append(asyncio.ensure_future(send(link, at)))
            at += rng.expovariate(RATE)
        while not all(each.done() for each in sending):
            await link.probe(PROBE_S)
            await asyncio.sleep(PROBE_S)
        return [each.result() for each in sending]

    return world.play(main, ANSWER_S)


def eased_at(profile: LinkProfile, trace: int) -> list[float]:
    """When the way up became at least twice as quick, in seconds."""
    rates = [(each.at_s, each.phase.up.rate_bit_s or 0.0) for each in profile.schedule(trace)]
    return [at_s for (_, before), (at_s, rate) in pairwise(rates) if rate >= 2 * before]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.transport.changing_link", description=__doc__)
    parser.add_argument("--link", default="wifi-busy", help="a profile; default: %(default)s")
    parser.add_argument("--traces", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each trace; default: %(default)s")
    parser.add_argument("--deadline-ms", type=float, default=100.0)
    given = parser.parse_args()
    print("| trace | images | whole in time | P50, P90 ms | after: images | whole in time |\n|---|---|---|---|---|---|")
    for trace in range(given.traces):
        profile = load_profile(given.link)
        sent = images(profile, trace, given.seconds, given.deadline_ms * 1e-3)
        eased = eased_at(profile, trace)
        after = [each for each in sent if any(0.0 <= each.at - at < AFTER_S for at in eased)]
        times = [each.after_s * 1e3 for each in sent]
        print(
            f"| {trace} | {len(sent)} | {share(sent)} | {quantile(times, 0.5):.0f}, {quantile(times, 0.9):.0f} "
            f"| {len(after)} | {share(after)} |"
        )


def share(sent: list[Sent]) -> str:
    """The share of images that arrived whole in time."""
    return f"{100 * sum(each.whole for each in sent) / len(sent):.1f} %" if sent else "–"


if __name__ == "__main__":
    main()

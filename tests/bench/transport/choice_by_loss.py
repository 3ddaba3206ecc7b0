"""`python -m tests.bench.transport.choice_by_loss`: when a link's loss moves images to datagrams, in simulated time.

While TCP carries the images, only an edge node's probes tell of the loss; late replies are left out here. Each trace
of the profile is a fresh node.
"""

from __future__ import annotations

import argparse
from typing import Final

from hawkvision.network.transport_choice import LinkReading, Transport, TransportChoice
from loadgen.network.profiles import LinkProfile, load_profile
from tests.sim.client_world import LINK, LinkWorld

PROBE_S: Final = 0.1


def left_tcp_after_s(profile: LinkProfile, trace: int, seconds: float) -> float | None:
    """When images begin to travel as datagrams; None for not within `seconds`."""
    world = LinkWorld([(LINK, LINK)], trace)
    world.over(profile, trace)
    choice, began = TransportChoice(), world.now
    while world.now - began < seconds:
        world.ping()
        world.run(world.now + PROBE_S)
        loss = world.sender.loss(world.now)
        reading = LinkReading(available=True, loss=loss.ratio if loss.known else None, outcomes=loss.outcomes)
        choice = choice.next(reading, world.now)
        if choice.transport is Transport.DATAGRAM:
            return world.now - began
    return None


def main() -> None:
    """Print how many nodes left TCP, and when."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.transport.choice_by_loss", description=__doc__)
    parser.add_argument("--link", default="satellite", help="a profile; default: %(default)s")
    parser.add_argument("--traces", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each trace; default: %(default)s")
    given = parser.parse_args()
    profile = load_profile(given.link)
    found = [left_tcp_after_s(profile, trace, given.seconds) for trace in range(given.traces)]
    times = sorted(each for each in found if each is not None)
    on = sum(given.seconds - each for each in times) / (given.seconds * given.traces)
    print(f"{len(times)} of {given.traces} left TCP, after {', '.join(f'{each:.0f}' for each in times)} s")
    print(f"{100 * on:.0f} % of the time by datagrams")


if __name__ == "__main__":
    main()

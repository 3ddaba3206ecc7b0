"""What every congestion controller must keep, whatever its idea: add yours to `controllers.py` and run this."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.congestion.packet_trains import MAX_RATE, Arrival
from hawkvision.transport.congestion.path_measurement import DATAGRAM, INITIAL_WINDOW
from hawkvision.transport.congestion.rate_control import MOST_WINDOW, RateController
from tests.fuzz.examples import examples
from tests.hawkvision.transport.congestion.controllers import CONTROLLERS
from tests.sim.bottleneck import Camera, Independent, Link, Simulation

RATE = 500_000.0
"""Bytes per second of the link."""
IMAGE = 12_000

pytestmark = pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)
Controller = type[CongestionController]


def a_link(loss: float = 0.0, queue: int = 50_000) -> Link:
    """4 Mbit/s, a round trip of 40 ms and, unless said otherwise, a queue of 100 ms."""
    forth, back = (Independent(loss, random.Random(seed)) for seed in (1, 2))
    return Link(Simulation(), RATE, queue=queue, loss=forth, back_loss=back, rng=random.Random(3))


def a_camera(link: Link, controller: Controller, load: float = 2.0) -> Camera:
    """A camera whose images ask for this share of the link."""
    return Camera(link, IMAGE, IMAGE / (load * link.rate), congestion=controller)


def goodput(link: Link, camera: Camera, seconds: float) -> float:
    """The share of the link that a camera gets in the next seconds."""
    before = camera.delivered
    link.sim.run(link.sim.now + seconds)
    return (camera.delivered - before) / (seconds * link.rate)


def test_a_link_of_its_own_is_used_and_its_queue_is_bounded(controller: Controller) -> None:
    link = a_link(queue=500_000)
    camera = a_camera(link, controller)
    link.sim.run(3.0)
    queues = []
    before = camera.delivered
    for tick in range(80):
        link.sim.run(3.0 + 0.05 * (tick + 1))
        queues.append(link.queue_s)
    assert camera.delivered - before > 0.8 * 4.0 * RATE
    assert max(queues) < 0.12  # of a second that it could grow to


def test_a_link_that_halves_is_followed(controller: Controller) -> None:
    link = a_link(queue=500_000)
    camera = a_camera(link, controller)
    link.sim.run(4.0)
    link.rate /= 2
    link.sim.run(7.0)
    assert camera.rate.pacing_rate < 1.5 * link.rate
    link.sim.run(9.0)
    assert link.queue_s < 0.12


def test_a_link_that_doubles_is_followed(controller: Controller) -> None:
    link = a_link()
    camera = a_camera(link, controller, load=4.0)
    link.sim.run(4.0)
    link.rate *= 2
    link.sim.run(8.0)
    assert goodput(link, camera, 2.0) > 0.7


def test_a_queue_that_overflows_slows_the_sender(controller: Controller) -> None:
    link = a_link(queue=15_000)
    camera = a_camera(link, controller, load=4.0)
    link.sim.run(3.0)
    overflowed, sent = link.overflowed, camera.sent
    link.sim.run(8.0)
    assert (link.overflowed - overflowed) * DATAGRAM < 0.25 * (camera.sent - sent)  # three quarters, if it did not


@pytest.mark.parametrize("loss", [0.01, 0.1])
def test_random_loss_is_survived(controller: Controller, loss: float) -> None:
    link = a_link(loss)
    camera = a_camera(link, controller)
    link.sim.run(3.0)
    assert goodput(link, camera, 4.0) > 0.05


def test_an_outage_stops_the_sender_and_its_end_starts_it_again(controller: Controller) -> None:
    link = a_link()
    camera = a_camera(link, controller)
    link.sim.run(3.0)
    camera.reachable = False
    link.sim.run(9.0)
    before = camera.sent
    link.sim.run(12.0)
    assert camera.sent - before <= 5 * DATAGRAM
    assert camera.rate.congestion_window == DATAGRAM
    camera.reachable = True
    link.sim.run(15.0)
    assert goodput(link, camera, 3.0) > 0.6


def test_after_a_pause_no_more_leaves_at_once_than_before_and_the_link_is_used_again(controller: Controller) -> None:
    link = a_link()
    camera = a_camera(link, controller)
    link.sim.run(3.0)
    camera.every_s = 15.0
    link.sim.run(25.0)
    left, now = 0, link.sim.now
    rate = copy.deepcopy(camera.rate)
    while rate.release_at(DATAGRAM, now) <= now:
        rate.on_packet_sent(DATAGRAM, now)
        left += DATAGRAM
    assert left <= max(INITIAL_WINDOW, 0.05 * RATE)
    camera.every_s = IMAGE / (2.0 * RATE)
    link.sim.run(37.0)
    assert goodput(link, camera, 3.0) > 0.6


def test_two_of_a_kind_share_a_link(controller: Controller) -> None:
    link = a_link()
    cameras = [a_camera(link, controller)]
    link.sim.run(3.0)
    cameras.append(a_camera(link, controller))
    link.sim.run(25.0)
    before = [camera.delivered for camera in cameras]
    link.sim.run(37.0)
    shares = [(camera.delivered - was) / (12.0 * RATE) for camera, was in zip(cameras, before, strict=True)]
    assert min(shares) > 0.25
    assert sum(shares) > 0.8


def test_before_any_report_one_initial_window_leaves_and_then_little(controller: Controller) -> None:
    rate = RateController(0.0, controller)
    left = 0
    while rate.release_at(DATAGRAM, 0.0) <= 0.0:
        rate.on_packet_sent(DATAGRAM, 0.0)
        left += 1
    assert 10 <= left <= 16
    assert rate.release_at(DATAGRAM, 0.0) > 0.005


@dataclass(frozen=True)
class Step:
    """One call, with whatever a peer may say."""

    kind: str
    size: int
    after_s: float
    count: int
    reported: float
    rtt_s: float | None


STEPS = st.builds(
    Step,
    st.sampled_from(["send", "silence", "received", "lost", "mixed", "spurious"]),
    st.integers(1, DATAGRAM),
    st.sampled_from([0.0, 1e-9, 0.001, 0.04, 1.0, 30.0]) | st.floats(0.0, 1e6),
    st.integers(1, 40),
    st.floats(-1e9, 1e9),
    st.none() | st.sampled_from([0.0, 1e-9, 0.04]) | st.floats(-1e9, 1e9),
)


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=examples(300))
def test_no_history_breaks_the_bounds(controller: Controller, history: list[Step]) -> None:
    """Clocks that stand still or leap, reports of what was never sent, round trips that cannot be."""
    rate, now = RateController(0.0, controller), 0.0
    sent = deque[float]([0.0], maxlen=100)
    for step in history:
        now += step.after_s
        match step.kind:
            case "send":
                for _ in range(step.count):
                    if rate.release_at(step.size, now) <= now:
                        in_flight = rate.path.in_flight
                        open_breaker = rate.congestion_window == DATAGRAM
                        assert in_flight + step.size <= rate.congestion_window or in_flight <= 0.0 or open_breaker
                        rate.on_packet_sent(step.size, now)
                        sent.append(now)
            case "silence":
                rate.on_silence(now)
            case "spurious":
                rate.on_spurious_loss(step.count, 1)
            case kind:
                named = [sent[-1 - n % len(sent)] for n in range(step.count)]
                arrivals = [Arrival(step.size, at, step.reported + n * 1e-3) for n, at in enumerate(named)]
                lost = named if kind != "received" else []
                rate.on_report(arrivals if kind != "lost" else [], lost, step.rtt_s, now, int(kind != "received"))
        assert 0.0 < rate.pacing_rate <= MAX_RATE
        assert 0.0 < rate.congestion.pacing_rate <= MAX_RATE
        assert DATAGRAM <= rate.congestion_window <= MOST_WINDOW
        assert now <= rate.release_at(step.size, now) < math.inf
        assert 0.0 < rate.timeout_s() < math.inf


def held(value: Any, seen: set[int]) -> int:
    """Elements of all containers that an object holds."""
    if id(value) in seen or isinstance(value, (int, float, str, type)) or value is None:
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return len(value) + sum(held(each, seen) for each in value.values())
    if isinstance(value, (list, tuple, deque, set)):
        return len(value) + sum(held(each, seen) for each in value)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    parts = [getattr(value, name) for name in slots if hasattr(value, name)]
    return sum(held(part, seen) for part in [*parts, *getattr(value, "__dict__", {}).values()])


def test_state_stays_bounded_when_nothing_is_ever_reported(controller: Controller) -> None:
    rate = RateController(0.0, controller)
    for number in range(10_000):
        rate.on_packet_sent(DATAGRAM, number * 0.01)
    assert held(rate, set()) < 5_000


def test_state_stays_bounded_over_a_long_life(controller: Controller) -> None:
    rate = RateController(0.0, controller)
    for number in range(10_000):
        at = number * 0.02
        rate.on_packet_sent(DATAGRAM, at)
        lost = number % 7 == 0
        rate.on_report([] if lost else [Arrival(DATAGRAM, at, at + 0.02)], [at] if lost else [], 0.01, at + 0.01, lost)
    assert held(rate, set()) < 5_000

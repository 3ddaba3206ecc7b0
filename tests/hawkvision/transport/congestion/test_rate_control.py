"""Rate control: what a simulated bottleneck gets out of it, and what no history may do to it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.congestion.loss_meter import LossMeter
from hawkvision.transport.congestion.packet_trains import Arrival
from hawkvision.transport.congestion.path_measurement import PathMeasurement, WindowedMinimum
from hawkvision.transport.congestion.rate_control import RateController
from tests.sim.bottleneck import Bbr, Bulk, Camera, Cubic, Gilbert, Independent, Link, Simulation

RATE = 2_500_000.0  # 20 Mbit/s
IMAGE = 20_000


def a_link(
    loss: float = 0.0, *, rate: float = RATE, queue: int = 100_000, jitter_s: float = 0.0, before: bool = False
) -> Link:
    """RTT 40 ms; loss both ways, so reports are lost as well."""
    return Link(
        Simulation(),
        rate,
        queue=queue,
        loss=Independent(loss, random.Random(1)),
        back_loss=Independent(loss, random.Random(2)),
        lossy_before=before,
        jitter_s=jitter_s,
        rng=random.Random(3),
    )


def wanting(link: Link, load: float) -> Camera:
    """A camera whose images ask for this share of the link."""
    return Camera(link, IMAGE, IMAGE / (load * link.rate))


def shares(link: Link, camera: Camera, other: Bulk, seconds: int) -> list[tuple[float, float]]:
    """What each got of the link in each second."""
    took = []
    for _ in range(seconds):
        before = camera.delivered, other.delivered
        link.sim.run(link.sim.now + 1.0)
        took.append(((camera.delivered - before[0]) / link.rate, (other.delivered - before[1]) / link.rate))
    return took


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
def test_the_links_rate_is_found_in_two_seconds_whatever_is_lost(loss: float, before: bool) -> None:
    link = a_link(loss, before=before)
    camera = Camera(link, IMAGE, every_s=0.1)
    link.sim.run(2.0)
    assert 0.7 * RATE < camera.rate.pacing_rate < 1.3 * RATE


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_an_image_passes_at_the_links_speed(loss: float) -> None:
    link = a_link(loss)
    camera = Camera(link, IMAGE, every_s=0.1)
    link.sim.run(5.0)
    warm = sorted(taken for number, taken in camera.arrived.items() if camera.started[number] > 1.0)
    ideal_s = link.delay_s + IMAGE / RATE
    assert warm[int(0.99 * len(warm))] < 1.1 * ideal_s


def test_the_first_image_leaves_without_waiting_for_a_second_round_trip() -> None:
    link = a_link()
    camera = Camera(link, IMAGE, every_s=100.0)
    link.sim.run(1.0)
    assert camera.arrived[0] < 4.5 * link.delay_s + IMAGE / RATE


@pytest.mark.parametrize(
    ("loss", "jitter_s", "used"), [(0.0, 0.0, 0.9), (0.1, 0.0, 0.85), (0.3, 0.0, 0.85), (0.0, 0.01, 0.5)]
)
def test_a_sender_that_wants_too_much_uses_the_link_and_keeps_the_queue_short(
    loss: float, jitter_s: float, used: float
) -> None:
    link = a_link(loss, queue=400_000, jitter_s=jitter_s)
    camera = wanting(link, 2.0)
    link.sim.run(2.0)
    before, queues = camera.delivered, []
    for tick in range(80):
        link.sim.run(2.0 + 0.05 * (tick + 1))
        queues.append(link.queue_s)
    assert camera.delivered - before > used * (1.0 - loss) * 4.0 * RATE
    assert max(queues) < 0.05


@pytest.mark.parametrize("make", [Cubic, Bbr])
@pytest.mark.parametrize("first", ["camera", "other"])
def test_beside_a_tcp_flow_neither_starves(make: Callable[[Link], Bulk], first: str) -> None:
    link = a_link(rate=RATE / 2, queue=50_000)
    if first == "camera":
        camera = wanting(link, 2.0)
        link.sim.run(3.0)
        other = make(link)
    else:
        other = make(link)
        link.sim.run(3.0)
        camera = wanting(link, 2.0)
    took = shares(link, camera, other, 15)[3:]
    assert sum(share for _, share in took) / len(took) > 0.25
    assert sum(share for share, _ in took) / len(took) > 0.15
    assert min(share for share, _ in took) > 0.1


def test_a_small_sender_is_not_slowed_by_a_tcp_flow_that_fills_the_queue() -> None:
    link = a_link(rate=RATE / 2, queue=50_000)
    other = Cubic(link)
    link.sim.run(3.0)
    camera = Camera(link, IMAGE, every_s=0.2)
    link.sim.run(10.0)
    warm = [left for number, left in camera.left.items() if camera.started[number] > 5.0]
    assert max(warm) < IMAGE / link.rate
    assert other.delivered > 0.5 * 10.0 * link.rate


def test_when_the_other_flow_ends_the_link_is_taken_again() -> None:
    link = a_link(rate=RATE / 2, queue=50_000)
    camera = wanting(link, 2.0)
    other = Cubic(link)
    link.sim.run(8.0)
    other.stop()
    link.sim.run(13.0)
    before = camera.delivered
    link.sim.run(14.0)
    assert camera.delivered - before > 0.8 * link.rate


def test_when_a_crowd_has_gone_images_pass_at_the_links_speed_after_one_image() -> None:
    link = a_link(rate=2 * RATE)
    link.delay_s = 0.002
    camera = Camera(link, IMAGE, every_s=0.125)
    link.sim.run(3.0)
    link.rate, link.delay_s = 0.2 * RATE, 0.04
    link.sim.run(6.0)
    link.rate, link.delay_s = 2 * RATE, 0.002
    link.sim.run(7.0)
    since = [taken for number, taken in camera.arrived.items() if camera.started[number] > 6.2]
    assert max(since) < 1.5 * (link.delay_s + IMAGE / link.rate)


def test_jitter_alone_is_no_path_that_eases() -> None:
    path, rng = PathMeasurement(), random.Random(4)
    for tick in range(1_000):
        path.observe([], [], 0.02 + 0.02 * rng.random(), 0.01 * tick, 0)
        assert not path.eased


def test_heavy_loss_of_reports_does_not_open_the_circuit_breaker() -> None:
    link = a_link(0.5)
    camera = Camera(link, IMAGE, every_s=0.1)
    slowest = math.inf
    for tick in range(90):
        link.sim.run(1.0 + 0.1 * tick)
        slowest = min(slowest, camera.rate.pacing_rate)
    assert slowest > 10_000


def test_a_round_trip_that_outgrows_the_timeout_is_measured_all_the_same() -> None:
    """Else everything is given up before it is reported, and nothing is ever learned again."""
    link = a_link()
    camera = Camera(link, IMAGE, every_s=0.1)
    link.sim.run(2.0)
    link.delay_s = 0.2
    link.sim.run(6.0)
    assert camera.rate.rtt_s is not None
    assert camera.rate.rtt_s > 0.35


@pytest.mark.parametrize(("rtt_s", "rate"), [(0.005, 2_880_000.0), (0.05, 288_000.0), (2.0, 43_243.0)])
def test_the_first_round_trip_raises_the_rate_to_one_initial_window_in_that_time(rtt_s: float, rate: float) -> None:
    control = RateController(now=0.0)
    control.on_packet_sent(60, 0.0)
    control.on_report([Arrival(60, 0.0, rtt_s / 2)], [], rtt_s, rtt_s)
    assert control.pacing_rate == pytest.approx(rate, rel=0.01)


def test_what_may_leave_at_once_takes_the_links_time_and_more_takes_the_rates() -> None:
    link = a_link()
    camera = Camera(link, IMAGE, every_s=0.2)
    link.sim.run(2.15)
    control, now = camera.rate, link.sim.now
    assert control.path.trains.speed is not None
    assert control.transmission_s(IMAGE, now) == pytest.approx(IMAGE / control.path.trains.speed)
    while control.release_at(1_200, now) <= now:
        control.on_packet_sent(1_200, now)
    assert control.transmission_s(IMAGE, now) == pytest.approx(IMAGE / control.pacing_rate, rel=0.2)


def test_a_link_that_became_far_slower_is_seen_before_a_whole_image_is_through() -> None:
    link = a_link()
    camera = Camera(link, IMAGE, every_s=0.2)
    link.sim.run(2.15)
    before = camera.rate.transmission_s(IMAGE, link.sim.now)
    link.rate = RATE / 10
    link.sim.run(2.2 + link.delay_s * 2 + 0.3 * IMAGE / link.rate + 0.02)
    assert camera.rate.transmission_s(IMAGE, link.sim.now) > 5 * before


def test_a_round_trip_that_has_just_grown_counts_at_once() -> None:
    control = RateController(now=0.0)
    for step, rtt_s in enumerate((0.01, 0.01, 0.09)):
        control.on_packet_sent(60, step)
        control.on_report([Arrival(60, step, rtt_s / 2)], [], rtt_s, step + rtt_s)
    assert control.latest_rtt_s == pytest.approx(0.09)
    assert control.rtt_s is not None
    assert control.rtt_s < 0.03


@pytest.mark.parametrize(("ratio", "burst"), [(0.1, 1.0), (0.2, 2.0), (0.1, 4.0), (0.3, 4.0)])
def test_ratio_and_burst_of_losses_are_estimated(ratio: float, burst: float) -> None:
    link = a_link()
    link.loss = Gilbert(ratio, burst, random.Random(4)) if burst > 1.0 else Independent(ratio, random.Random(4))
    camera = Camera(link, IMAGE, every_s=0.05)
    ratios, bursts = [], []
    for second in range(2, 22):
        link.sim.run(float(second))
        assert camera.rate.loss.known
        ratios.append(camera.rate.loss.ratio)
        bursts.append(camera.rate.loss.burst)
    assert ratio / 1.5 < sum(ratios) / len(ratios) < 1.5 * ratio
    assert burst / 1.5 < sum(bursts) / len(bursts) < 1.5 * burst


def test_losses_are_unknown_before_fifty_outcomes() -> None:
    meter = LossMeter()
    meter.observe(received=20, lost=20, runs=1, now=0.0)
    few = meter.estimate
    meter.observe(received=10, lost=0, runs=0, now=0.1)
    assert (few.known, meter.estimate.known) == (False, True)
    assert meter.estimate.ratio == pytest.approx(0.4)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.integers(0, 90)), max_size=40))
def test_losses_that_were_none_become_arrivals(rounds: list[tuple[int, int, int]]) -> None:
    meter = LossMeter()
    for tick, (received, lost, late) in enumerate(rounds):
        meter.observe(received, lost, int(lost > 0), float(tick))
        before = meter.estimate
        meter.retract(late, int(late >= lost))
        after = meter.estimate
        assert after.outcomes == before.outcomes
        assert round(after.ratio * after.outcomes) == max(0, round(before.ratio * before.outcomes) - late)
        assert after.burst >= 1.0


def test_losses_are_forgotten_after_the_window() -> None:
    meter = LossMeter()
    meter.observe(received=0, lost=50, runs=1, now=0.0)
    for tick in range(60):
        meter.observe(received=10, lost=0, runs=0, now=1.0 + tick)
    assert meter.estimate.ratio == 0.0


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.0, 3.0)), min_size=1, max_size=60))
def test_the_windowed_minimum_is_that_of_recent_values(history: list[tuple[float, float]]) -> None:
    window, now, seen = WindowedMinimum(10.0), 0.0, []
    for value, step in history:
        now += step
        window.observe(value, now)
        seen.append((now, value))
    least = window.value
    assert least is not None
    assert least <= min(value for at, value in seen if at > now - 9.0)
    assert least >= min(value for at, value in seen if at >= now - 11.0)

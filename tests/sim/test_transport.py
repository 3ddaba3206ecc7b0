"""The datagram transport over bad links, by seed: each image gets one response, in time if possible."""

from __future__ import annotations

import statistics

import pytest

from hawkvision.transport.coding.image_coding import Complete, Partial, Plan, encode
from hawkvision.transport.protocol.wire import Status
from tests.hawkvision.transport.coding.test_image_coding import scene
from tests.sim.transport_world import World, small_image

LINK = "rate=20mbit,delay=20ms"
ROUND_TRIP_S = 0.040
IMAGE = small_image()
SEGMENTS = encode(scene(64, 128), Plan(50, 0.5), 300)


def run(world: World, images: int = 30, every_s: float = 0.05, timeout_s: float = 15.0) -> World:
    """Ask that often, and wait for the last answers. What was answered twice has failed in the world itself."""
    world.stream(IMAGE, images, every_s)
    world.run(world.now + images * every_s + timeout_s)
    assert len(world.asked) == images
    return world


FAULTS = {
    "independent": "",
    "bursts": ",burst=4",
    "outages": ",outage=50ms",
    "reordering": ",reorder=20%,reorder_delay=30ms",
    "duplicates": ",duplicate=30%",
    "jitter": ",jitter=30ms,jitter_reorders=yes",
}
OF_LOSS = ("bursts", "outages")
"""How losses come together: nothing where there are none."""


@pytest.mark.parametrize(
    ("loss", "fault"), [(loss, fault) for loss in (0, 5, 20, 50) for fault in FAULTS if loss or fault not in OF_LOSS]
)
def test_every_image_is_answered_once(loss: int, fault: str) -> None:
    spec = f"{LINK},loss={loss}%{FAULTS[fault]}"
    for seed in range(3):
        world = run(World([(spec, spec)], seed))
        assert not world.unanswered, f"seed {seed}"
        statuses = [asked.status for asked in world.asked.values()]
        assert statuses.count(Status.OK) >= (28 if loss == 50 else 30), f"seed {seed}"
        assert set(statuses) <= {Status.OK, Status.EXPIRED}, f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_images_asked_before_and_during_an_outage_are_answered_after_it(seed: int) -> None:
    world = World([(LINK, LINK)], seed)
    world.at(world.now + 0.42, lambda: world.routes[0].cut(True))
    world.at(world.now + 1.42, lambda: world.routes[0].cut(False))
    run(world, 40, 0.05)
    assert not world.unanswered
    late = [asked.answered_at - 101.42 for asked in world.asked.values() if asked.answered_at and asked.at < 101.42]
    assert max(late) < 3.0


def test_lost_answers_come_by_the_stream_when_no_datagram_gets_through() -> None:
    world = World([(LINK, LINK)], 1)
    world.run(world.now + 1.0)
    number = world.ask(IMAGE)
    world.at(world.now + 0.021, lambda: setattr(world.routes[0].down, "dead", True))
    world.run(world.now + 8.0)
    assert number is not None
    assert world.asked[number].status == Status.OK
    assert world.by_stream == 1


def test_an_answer_lost_in_all_its_copies_comes_again_within_two_round_trips_more() -> None:
    world = World([(LINK, LINK)], 1)
    run(world, 20, 0.05, 1.0)
    number = world.ask(IMAGE)
    world.at(world.now + 0.0215, lambda: setattr(world.routes[0].down, "dead", True))
    world.at(world.now + 0.040, lambda: setattr(world.routes[0].down, "dead", False))
    world.run(world.now + 0.0450 + 2 * ROUND_TRIP_S + 0.030)
    assert number is not None
    assert world.asked[number].status == Status.OK


def test_without_loss_an_image_takes_one_round_trip_and_nothing_is_sent_twice() -> None:
    world = World([(LINK, LINK)], 1)
    world.run(world.now + 1.0)
    before = world.sent["up"]
    run(world, 20, 0.2, 1.0)
    assert max(world.latencies) < ROUND_TRIP_S + world.service_s + 0.010
    fragments = 20 * IMAGE.format.n
    assert world.sent["up"] - before <= fragments + 3 * 20  # and reports


def test_one_round_of_asking_repairs_what_parity_did_not() -> None:
    """One in four images loses more at 30 % than its parity covers; one round trip more brings nearly all of them."""
    latencies = list[float]()
    for seed in range(10):
        world = run(World([(f"{LINK},loss=30%", LINK)], seed), 40, 0.1)
        latencies += world.latencies[10:]
    latencies.sort()
    assert latencies[len(latencies) * 2 // 3] < 1.5 * ROUND_TRIP_S
    assert latencies[len(latencies) * 8 // 10] < 3.5 * ROUND_TRIP_S


@pytest.mark.parametrize("loss", [10, 30, 50])
def test_incomplete_images_are_handed_over_before_their_deadline(loss: int) -> None:
    """All answers at their deadline or before it; the handler's time and half a round trip are in the reserve."""
    kinds = set[type]()
    for seed in range(10):
        world = World([(f"{LINK},loss={loss}%", LINK)], seed)
        world.run(world.now + 0.5)
        world.stream(SEGMENTS, 20, 0.05, deadline_s=0.080)
        world.run(world.now + 5.0)
        for number, asked in world.asked.items():
            where = f"seed {seed}, image {number}"
            assert asked.answered_at is not None, where
            assert asked.answered_at <= asked.at + 0.080 + 0.005, where
            kinds |= {type(event.arrived) for event in asked.final}
    assert Partial in kinds or loss < 30
    assert Complete in kinds


@pytest.mark.parametrize("deadline_s", [0.06, 0.08])
def test_missing_fragments_are_requested_if_they_can_arrive_before_the_deadline(deadline_s: float) -> None:
    """Over a round trip of 20 ms; nearly half of these images lose a fragment, and none has one to spare."""
    statuses = list[int | None]()
    for seed in range(5):
        world = World([("rate=20mbit,delay=10ms,loss=10%", "rate=20mbit,delay=10ms")], seed)
        world.stream(small_image(parity=0.0), 40, 0.1, deadline_s=deadline_s)
        world.run(world.now + 6.0)
        statuses += [asked.status for asked in world.asked.values()][10:]
    assert statuses.count(Status.OK) > 0.9 * len(statuses)


def test_with_a_loose_deadline_a_provisional_part_becomes_complete() -> None:
    repaired = 0
    for seed in range(10):
        world = World([(f"{LINK},loss=30%", LINK)], seed)
        world.run(world.now + 0.5)
        world.stream(SEGMENTS, 20, 0.1, deadline_s=0.5)
        world.run(world.now + 5.0)
        for asked in world.asked.values():
            assert len(asked.provisional) <= 1
            if asked.provisional and asked.final:
                assert isinstance(asked.provisional[0].arrived, Partial)
                repaired += isinstance(asked.final[0].arrived, Complete)
    assert repaired > 5


def test_an_answer_made_from_a_part_ends_the_image() -> None:
    for seed in range(5):
        world = World([(f"{LINK},loss=40%", LINK)], seed)
        world.answer_partial = True
        world.stream(SEGMENTS, 20, 0.1)
        world.run(world.now + 12.0)
        assert not world.unanswered, f"seed {seed}"


@pytest.mark.parametrize("way_back", [0, 20])
@pytest.mark.parametrize("loss", [5, 20, 50])
def test_the_loss_that_is_measured_is_near_the_true_one(loss: int, way_back: int) -> None:
    """Mean of ten seeds within 30 %, or 2.5 points where reports are lost, too, and all they tell seems lost."""
    measured, true = list[float](), list[float]()
    for seed in range(10):
        world = World([(f"{LINK},loss={loss}%", f"{LINK},loss={way_back}%")], seed)
        world.stream(IMAGE, 60, 0.1)
        world.run(world.now + 6.0)
        measured.append(world.sender.loss(world.now).ratio)
        true.append(world.air_loss())
    assert statistics.mean(measured) == pytest.approx(statistics.mean(true), rel=0.3, abs=0.025 if way_back else 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_path_that_dies_is_found_within_three_round_trips_and_used_again_when_it_returns(seed: int) -> None:
    world = World([(LINK, LINK), (LINK, LINK)], seed)
    world.stream(IMAGE, 200, 0.04)
    world.run(world.now + 2.0)
    world.routes[0].cut(True)
    cut_at, paths = world.now, world.sender.channel.paths
    before = paths[0].next_sequence
    while not paths[0].dead(world.now) and world.now < cut_at + 1.0:
        world.run(world.now + 0.005)
    # It asks for the first report with the next image, up to 40 ms later.
    assert world.now - cut_at <= 3 * ROUND_TRIP_S + 0.040 + 0.010
    at_detection = paths[0].next_sequence
    world.run(cut_at + 3.0)
    assert paths[0].next_sequence - at_detection <= 6  # probes
    world.routes[0].cut(False)
    back = paths[0].next_sequence
    world.run(world.now + 2.0)
    assert paths[0].next_sequence - back > 20
    world.run(world.now + 12.0)
    assert not world.unanswered
    assert before > 20
    during = [asked for asked in world.asked.values() if cut_at + 0.2 < asked.at < cut_at + 3.0]
    assert max(asked.answered_at - asked.at for asked in during if asked.answered_at) < 0.12


def test_a_path_that_was_never_heard_wakes_its_sender_rarely() -> None:
    world = World([(LINK, LINK)], 1)
    world.routes[0].cut(True)
    world.run(world.now + 2.0)
    assert world.flushes["client"] < 20


def test_an_idle_session_wakes_rarely() -> None:
    world = World([(LINK, LINK)], 1)
    run(world, 5, 0.1, 1.0)
    before = world.flushes.total()
    world.run(world.now + 60.0)
    assert world.flushes.total() - before < 10


def test_a_session_whose_peer_vanished_does_not_spin() -> None:
    world = World([(LINK, LINK)], 1)
    run(world, 5, 0.1, 1.0)
    world.routes[0].cut(True)
    world.ask(IMAGE)
    world.run(world.now + 30.0)
    before = world.flushes.total()
    world.run(world.now + 60.0)
    assert world.flushes.total() - before < 50 * 60

"""The transport changes with what the link loses, and does not flap."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.network.transport_choice import (
    LATE_TO_LEAVE,
    LEAVE_AFTER_S,
    LOSS_TO_LEAVE,
    RETURN_AFTER_S,
    SLOW_RETURN_AFTER_S,
    TCP_DWELL_S,
    LinkReading,
    Transport,
    TransportChoice,
)

TICK_S = 0.1
OUTCOMES = 100
SEED = 20261121
FRESH = TransportChoice()


def losing(ratio: float, late: int = 0) -> LinkReading:
    """A lossy peer that answers, over a link that loses so much."""
    return LinkReading(available=True, loss=ratio, outcomes=OUTCOMES, late=late)


def over(readings: Iterable[LinkReading], start: TransportChoice = FRESH) -> list[tuple[float, TransportChoice]]:
    """Time and choice after each of the readings, a tick apart."""
    choices, choice, now = [], start, 0.0
    for reading in readings:
        choice, now = choice.next(reading, now), now + TICK_S
        choices.append((now, choice))
    return choices


def changes(choices: list[tuple[float, TransportChoice]]) -> list[tuple[float, Transport]]:
    """When the transport changed, and to which."""
    pairs = zip([(0.0, FRESH), *choices], choices, strict=False)
    return [(now, after.transport) for (_, before), (now, after) in pairs if before.transport is not after.transport]


def measured(ratios: Iterable[float], seed: int, window: int = OUTCOMES) -> Iterator[LinkReading]:
    """What a meter of the last outcomes says, one probe a tick, where each is lost with the probability given."""
    source, last = random.Random(seed), deque[bool](maxlen=window)
    for ratio in ratios:
        last.append(source.random() < ratio)
        known = len(last) >= 50
        yield LinkReading(True, sum(last) / len(last) if known else None, len(last) if known else 0)


def test_datagrams_take_over_once_the_loss_has_lasted() -> None:
    ((at, to),) = changes(over([losing(0.05)] * 100))
    assert to is Transport.DATAGRAM
    assert LEAVE_AFTER_S <= at <= LEAVE_AFTER_S + 2 * TICK_S


def test_one_percent_is_enough_and_less_is_not() -> None:
    assert changes(over([LinkReading(True, LOSS_TO_LEAVE, 200)] * 100))
    assert not changes(over([LinkReading(True, LOSS_TO_LEAVE * 0.99, 10_000)] * 100))


def test_a_single_lost_datagram_is_no_loss_yet() -> None:
    assert not changes(over([LinkReading(True, 1 / 50, 50)] * 100))


def test_a_loss_that_passes_soon_changes_nothing() -> None:
    assert not changes(over(([losing(0.05)] * 25 + [losing(0.0)]) * 20))


def test_an_unknown_loss_changes_nothing() -> None:
    assert not changes(over([LinkReading(True, None, 0)] * 100))


def test_escalations_that_are_late_change_the_transport_without_any_loss() -> None:
    assert not changes(over([losing(0.0, late=LATE_TO_LEAVE - 1)] * 10))
    assert changes(over([losing(0.0, late=LATE_TO_LEAVE)] * 10)) == [(TICK_S, Transport.DATAGRAM)]


def test_a_slow_tcp_is_left_at_once_and_tried_again_only_after_minutes() -> None:
    slow = replace(losing(0.0), slow=True)
    (left, to), (back, again) = changes(over([slow, *[losing(0.0)] * 4_000]))
    assert (left, to, again) == (TICK_S, Transport.DATAGRAM, Transport.TCP)
    assert SLOW_RETURN_AFTER_S <= back - left <= SLOW_RETURN_AFTER_S + 2 * TICK_S


def test_nothing_goes_to_a_datagram_peer_that_is_not_there() -> None:
    assert not changes(over([replace(losing(0.3, late=9), available=False)] * 1_000))


def test_a_datagram_peer_that_is_gone_is_left_at_once() -> None:
    on = TransportChoice(Transport.DATAGRAM, 0.0)
    assert over([replace(losing(0.3), available=False)], on)[0][1].transport is Transport.TCP


def test_tcp_comes_back_after_thirty_seconds_without_loss() -> None:
    at, to = changes(over([losing(0.0)] * 400, TransportChoice(Transport.DATAGRAM, 0.0)))[-1]
    assert to is Transport.TCP
    assert RETURN_AFTER_S <= at <= RETURN_AFTER_S + 2 * TICK_S


def test_a_loss_between_the_thresholds_keeps_what_is() -> None:
    between = [losing(0.006)] * 1_000
    assert over(between, TransportChoice(Transport.DATAGRAM, 0.0))[-1][1].transport is Transport.DATAGRAM
    assert not changes(over(between))


def test_a_lost_datagram_begins_the_wait_for_tcp_anew() -> None:
    almost = [losing(0.0)] * 290
    choices = over([*almost, losing(0.01), *almost], TransportChoice(Transport.DATAGRAM, 0.0))
    assert choices[-1][1].transport is Transport.DATAGRAM


@given(st.lists(st.tuples(st.booleans(), st.none() | st.floats(0.0, 1.0), st.integers(0, 500), st.integers(0, 32))))
def test_tcp_is_never_left_sooner_than_its_dwell(readings: list[tuple[bool, float | None, int, int]]) -> None:
    found = changes(over([LinkReading(*reading) for reading in readings for _ in range(20)]))
    returns = [at for at, to in found if to is Transport.TCP]
    leaves = [at for at, to in found if to is Transport.DATAGRAM]
    assert all(leave - at >= TCP_DWELL_S - 1e-6 for at in returns for leave in leaves if leave > at)


@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_turns_bad_and_good_again_is_followed_once_each_way(seed: int) -> None:
    good, bad = [0.0] * 600, [0.05] * 1_200
    found = changes(over(measured([*good, *bad, *good], SEED + seed)))
    assert [to for _, to in found] == [Transport.DATAGRAM, Transport.TCP]
    assert 60.0 < found[0][0] < 80.0
    assert 175.0 + RETURN_AFTER_S < found[1][0] < 180.0 + RETURN_AFTER_S + 15.0


@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_loses_one_in_a_thousand_is_left_to_tcp_for_an_hour_but_for_chance(seed: int) -> None:
    found = changes(over(measured([0.001] * 36_000, SEED + seed)))
    away = sum(back - left for (left, _), (back, _) in zip(found[::2], found[1::2], strict=False))
    assert away < 0.1 * 3_600.0

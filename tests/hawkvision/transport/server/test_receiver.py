"""The receiving end: what it makes of fragments, what it asks for, that it answers once, and what a peer cannot do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.transport.coding.image_coding import Complete, Partial, Plan, encode
from hawkvision.transport.protocol.control import MAX_REGISTERED_BYTES
from hawkvision.transport.protocol.frames import (
    AnswerPart,
    Cancel,
    Fragment,
    Nack,
    Ping,
    Report,
    fragment_room,
)
from hawkvision.transport.protocol.image_format import Kind, WireImageFormat
from hawkvision.transport.protocol.wire import MAX_NACKS, Drop, Status, WireError
from hawkvision.transport.server.assembly import Budget, ReceivedImage, ReceiveTimeouts
from hawkvision.transport.server.receiver import (
    ABANDONED_S,
    EARLY_SHARE,
    MAX_ASSEMBLING,
    MAX_SESSION_BYTES,
    MIN_SHARE,
    TEMPLATE_WAIT_S,
    Receiver,
)
from hawkvision.transport.server.response_delivery import MAX_ANSWERS, REMEMBERED
from tests.fuzz.examples import examples
from tests.hawkvision.transport.coding.test_image_coding import scene
from tests.hawkvision.transport.protocol.test_frames import fragments as any_fragments
from tests.hawkvision.transport.session import BEGIN, PLENTY, Peer, coded, fragments, server

SCENE = encode(scene(64, 128), Plan(50, 0.5), 300)


def give(end: Receiver, peer: Peer, *frames: Fragment | Cancel | Ping, now: float = BEGIN) -> list[ReceivedImage]:
    """Let frames arrive, each in its datagram; what is handed over at once."""
    for frame in frames:
        end.receive(*peer.seal(frame), now)
    return handed(end, peer, now)


def handed(end: Receiver, peer: Peer, now: float) -> list[ReceivedImage]:
    peer.open(list(end.poll(now)))
    events = list(end.events)
    end.events.clear()
    return events


def answers(end: Receiver, peer: Peer, now: float) -> list[AnswerPart]:
    return [frame for frame in peer.open(list(end.poll(now))) if isinstance(frame, AnswerPart)]


def confirm(end: Receiver, peer: Peer, sent: int, now: float) -> None:
    """Report that everything so far has arrived."""
    end.receive(*peer.seal(Report(0, 0, 0, 0, (0.0,) * sent)), now)


def test_an_image_is_handed_over_once_when_k_fragments_came_in_any_order() -> None:
    end, peer, image = server(), Peer(), coded(k=4, n=6)
    some = fragments(image, meta=b"m")
    assert give(end, peer, *[some[n] for n in (5, 0, 3)]) == []
    (event,) = give(end, peer, some[1])
    assert event.final
    assert event.arrived == Complete(b"".join(image.symbols[:4]), None)
    assert (event.number, event.template, event.meta) == (0, b"quality=fast", b"m")
    assert give(end, peer, *some) == []


def test_the_first_of_two_conflicting_fragments_counts() -> None:
    end, peer, image = server(), Peer(), coded(k=2, n=3)
    good = fragments(image)
    other_bytes = Fragment(0, 0, image.format, 0, 0, 0, b"", b"\xff" * len(image.symbols[0]))
    other_format = fragments(coded(k=3, n=5))[1]
    other_template = fragments(image, template=1)[1]
    (event,) = give(end, peer, good[0], other_bytes, other_format, other_template, good[1])
    assert event.arrived == Complete(b"".join(image.symbols[:2]), None)
    assert end.channel.drops == {Drop.MALFORMED: 2}


def test_missing_fragments_are_requested_and_the_partial_image_is_handed_over_meanwhile() -> None:
    end, peer = server(), Peer()
    some = fragments(SCENE)
    give(end, peer, *some[: SCENE.format.k - 2])
    frames = peer.open(list(end.poll(BEGIN + 0.1)))
    assert Nack(0, (SCENE.format.k - 2, SCENE.format.k - 1)) in frames
    (event,) = end.events
    assert isinstance(event.arrived, Partial)
    assert not event.final
    end.events.clear()
    (event,) = give(end, peer, *some[-2:], now=BEGIN + 0.2)
    assert isinstance(event.arrived, Complete)
    assert event.final


def test_at_a_deadline_a_part_is_handed_over_for_good() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(SCENE, left_ms=20)[:2])
    assert end.next_timer(BEGIN) <= BEGIN + 0.010 + 1e-9
    (event,) = handed(end, peer, BEGIN + 0.010)
    assert event.final
    assert isinstance(event.arrived, Partial)
    assert 0 < event.arrived.received_fraction < 1
    assert give(end, peer, *fragments(SCENE, left_ms=5), now=BEGIN + 0.015) == []


def test_of_a_deadline_the_ways_of_the_image_and_of_the_answer_are_taken() -> None:
    end, peer, rtt_s = server(), Peer(), 0.06
    give(end, peer, *fragments(coded()))
    end.answer(0, Status.OK, b"an answer", BEGIN)
    assert answers(end, peer, BEGIN)
    confirm(end, peer, end.channel.paths[0].next_sequence, BEGIN + rtt_s)
    (event,) = give(end, peer, *fragments(coded(), number=1, left_ms=100), now=BEGIN + 1)
    assert event.deadline is not None
    assert event.deadline.at == pytest.approx(BEGIN + 1 + 0.1 - rtt_s, abs=0.005)


def test_deadlines_are_those_of_the_latest_round_trip_where_there_are_few() -> None:
    end, peer = server(), Peer()
    for number, rtt_s in enumerate((0.08, 0.08, 0.02)):
        give(end, peer, *fragments(coded(), number=number), now=BEGIN + number)
        end.answer(number, Status.OK, b"an answer", BEGIN + number)
        assert answers(end, peer, BEGIN + number)
        confirm(end, peer, end.channel.paths[0].next_sequence, BEGIN + number + rtt_s)
    (event,) = give(end, peer, *fragments(coded(), number=3, left_ms=100), now=BEGIN + 3)
    assert event.deadline is not None
    assert event.deadline.at == pytest.approx(BEGIN + 3 + 0.1 - 0.02, abs=0.005)


def test_an_image_whose_deadline_is_over_may_be_let_come_in_all_the_same() -> None:
    end, peer = server(), Peer()
    end.timeouts = ReceiveTimeouts(grace_s=0.015)
    first, *rest = fragments(SCENE, left_ms=1)
    assert give(end, peer, first) == []
    assert end.next_timer(BEGIN) <= BEGIN + 0.015 + 1e-9
    assert give(end, peer, rest[0], now=BEGIN + 0.014) == []
    (event,) = handed(end, peer, BEGIN + 0.0151)
    assert event.final
    assert isinstance(event.arrived, Partial)


def test_an_image_that_is_all_or_nothing_may_be_held_for_a_late_answer() -> None:
    end, peer = server(), Peer()
    end.timeouts = ReceiveTimeouts(hold_s=0.05)
    first, *rest = (replace(each, rest_ms=40) for each in fragments(coded(), left_ms=20))
    give(end, peer, first)
    assert not answers(end, peer, BEGIN + 0.030)
    (event,) = give(end, peer, *rest, now=BEGIN + 0.040)
    assert event.final
    assert isinstance(event.arrived, Complete)


def test_an_image_is_held_no_longer_than_that() -> None:
    end, peer = server(), Peer()
    end.timeouts = ReceiveTimeouts(hold_s=0.05)
    give(end, peer, replace(fragments(coded(), left_ms=20)[0], rest_ms=200))
    assert not answers(end, peer, BEGIN + 0.050)
    assert {part.status for part in answers(end, peer, BEGIN + 0.061)} == {Status.EXPIRED}


@pytest.mark.parametrize("parity", [0.0, 0.5])
def test_too_few_fragments_are_not_decoded(parity: float) -> None:
    end, peer, large = server(), Peer(), encode(scene(320, 320), Plan(80, parity), 300)
    least, early = (math.ceil(share * large.format.k) for share in (MIN_SHARE, EARLY_SHARE))
    assert 1 < least < early < large.format.k - 1
    for number, came, offered, status in [
        (1, least - 1, False, Status.EXPIRED),
        (2, least, False, None),
        (3, early - 1, False, None),
        (4, early, True, None),
    ]:
        end.timeouts = ReceiveTimeouts(grace_s=1.0)
        give(end, peer, *fragments(large, number, left_ms=1)[:came])
        assert bool(handed(end, peer, BEGIN + 0.2)) == offered, "while the rest is asked for"
        parts = answers(end, peer, BEGIN + 1.001)
        assert {part.status for part in parts if part.image == number} == ({status} if status else set())
        assert [event.final for event in end.events] == ([] if status else [True])
        end.events.clear()


def test_a_whole_coarse_image_is_decoded_however_few_fragments_hold_it() -> None:
    end, peer, large = server(), Peer(), encode(scene(320, 320), Plan(80, 0.5, base=True), 300)
    assert 0 < large.format.base_k < EARLY_SHARE * large.format.k - 1
    end.timeouts = ReceiveTimeouts(grace_s=1.0)
    give(end, peer, *fragments(large, left_ms=1)[: large.format.base_k])
    (event,) = handed(end, peer, BEGIN + 0.2)
    assert isinstance(event.arrived, Partial)
    assert not event.final


def test_without_a_deadline_it_is_asked_a_few_times_and_then_given_up() -> None:
    end, peer, now, nacks, parts = server(), Peer(), BEGIN, 0, set[int]()
    give(end, peer, fragments(coded())[0])
    while now < BEGIN + ABANDONED_S + 1:
        now = max(end.next_timer(now), now + 0.0005)
        frames = peer.open(list(end.poll(now)))
        nacks += sum(isinstance(frame, Nack) for frame in frames)
        parts |= {frame.status for frame in frames if isinstance(frame, AnswerPart)}
    assert 1 <= nacks <= 2 * MAX_NACKS  # two copies, as the loss is not known
    assert parts == {Status.EXPIRED}


def test_an_image_that_is_all_or_nothing_is_waited_for_when_asking_for_it_has_ended() -> None:
    """Its sender repairs it by itself, too, and there are seconds left."""
    end, peer, now, nacks = server(), Peer(), BEGIN, 0
    some = fragments(coded(), left_ms=5000)
    give(end, peer, some[0])
    while now < BEGIN + 4.0:
        now = max(end.next_timer(now), now + 0.0005)
        frames = peer.open(list(end.poll(now)))
        nacks += sum(isinstance(frame, Nack) for frame in frames)
        assert not any(isinstance(frame, AnswerPart) for frame in frames), f"after {now - BEGIN:.3f} s"
    assert nacks >= MAX_NACKS
    (event,) = give(end, peer, *some[1:], now=BEGIN + 4.5)
    assert isinstance(event.arrived, Complete)


def test_an_unknown_template_waits_for_the_control_stream_and_then_is_refused() -> None:
    end, peer, image = server(), Peer(), coded()
    assert give(end, peer, *fragments(image, 1, template=9), *fragments(image, 2, 50, template=8)) == []
    end.register_template(9, b"late")
    (event,) = handed(end, peer, BEGIN + 0.02)
    assert (event.number, event.template) == (1, b"late")
    assert answers(end, peer, BEGIN + 0.06) == [], "its deadline is over, but what it asks may be told any moment"
    expected = {(2, Status.NO_TEMPLATE)}
    assert {(part.image, part.status) for part in answers(end, peer, BEGIN + TEMPLATE_WAIT_S + 0.001)} == expected


def test_a_repeated_registration_is_an_error_and_hands_nothing_over_again() -> None:
    end, peer = server(), Peer()
    assert len(give(end, peer, *fragments(coded()))) == 1
    with pytest.raises(WireError, match="expected an unused one"):
        end.register_template(0, b"other")
    assert handed(end, peer, BEGIN + 1) == []
    assert not answers(end, peer, BEGIN + 1)


def test_templates_and_headers_are_bounded_and_given_back() -> None:
    budget = Budget(PLENTY)
    end = server(budget)
    most = MAX_REGISTERED_BYTES // 4096
    for number in range(1, most):
        end.register_tables(number, bytes(4096))
    with pytest.raises(WireError, match=str(MAX_REGISTERED_BYTES)):
        end.register_tables(most, bytes(4096))
    assert budget.used <= MAX_REGISTERED_BYTES
    end.close()
    assert budget.used == 0


def test_a_cancelled_image_is_over_whatever_still_arrives_of_it() -> None:
    end, peer = server(), Peer()
    some = fragments(coded())
    give(end, peer, some[0], Cancel(0))
    assert list(end.cancelled) == [0]
    assert give(end, peer, *some[1:]) == []
    assert not answers(end, peer, BEGIN + 20)


def test_an_image_cancelled_before_it_arrives_is_not_begun() -> None:
    end, peer = server(), Peer()
    assert give(end, peer, Cancel(0), *fragments(coded())) == []
    assert not end.cancelled


def test_a_fragment_after_the_answer_starts_nothing() -> None:
    end, peer = server(), Peer()
    some = fragments(coded())
    give(end, peer, *some[:5])
    end.answer(0, Status.OK, b"cat", BEGIN)
    assert give(end, peer, some[5]) == []
    end.answer(0, Status.OK, b"dog", BEGIN + 0.1)
    assert {part.body for part in answers(end, peer, BEGIN + 0.5)} == {b"cat"}


def test_a_response_that_is_too_long_is_refused() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(coded()))
    end.answer(0, Status.OK, bytes(100_000), BEGIN)
    (part,) = answers(end, peer, BEGIN)
    assert part.status == Status.BROKEN
    assert b"too long" in part.body


def test_ten_thousand_unfinished_images_hold_no_more_than_is_allowed() -> None:
    budget = Budget(PLENTY)
    end, peer = server(budget), Peer()
    refused = set[int]()
    for number in range(10_000):
        now = BEGIN + number * 1e-4
        end.receive(*peer.seal(fragments(coded(), number)[0]), now)
        if number % 50 == 0:
            refused |= {part.image for part in answers(end, peer, now)}
        assert len(end._assembling) <= MAX_ASSEMBLING
        assert len(end._responses._answers) <= MAX_ANSWERS
    assert budget.used <= MAX_SESSION_BYTES
    assert len(refused) > 1000
    assert len(end._responses._finished) <= REMEMBERED
    assert len(end.unconfirmed) <= MAX_ANSWERS
    end.close()
    assert budget.used == 0


def test_a_session_that_fills_the_common_budget_is_refused_and_the_other_goes_on_afterwards() -> None:
    budget = Budget(len(b"quality=fast") * 2 + 700)
    greedy, other, peer, another = server(budget), server(budget), Peer(), Peer()
    for number in range(3):
        greedy.receive(*peer.seal(fragments(coded(size=300), number)[0]), BEGIN)
    assert {(part.image, part.status) for part in answers(greedy, peer, BEGIN)} == {(2, Status.OVERLOADED)}
    greedy.close()
    assert len(give(other, another, *fragments(coded(size=100)))) == 1


def test_a_handler_that_waits_for_the_rest_of_an_image_is_cancelled_when_it_is_refused() -> None:
    some = fragments(SCENE)
    budget = Budget(10_000_000)
    end, peer = server(budget), Peer()
    give(end, peer, *some[: SCENE.format.k - 2])
    (event,) = handed(end, peer, BEGIN + 0.1)
    assert not event.final
    budget.limit = budget.used  # others took all there is
    assert give(end, peer, some[-1], now=BEGIN + 0.2) == []
    assert list(end.cancelled) == [event.number]


def test_one_symbol_that_holds_all_segments_is_handed_over_once() -> None:
    end, peer = server(), Peer()
    whole = encode(scene(32, 64), Plan(30, 0.0), 1100)
    assert whole.format.k == 1
    two = WireImageFormat(Kind.SEGMENTS, 64, 32, 30, whole.format.interval, k=2, n=2)
    frames = [Fragment(0, 0, two, index, 0, 0, b"", whole.symbols[0]) for index in (0, 1)]
    give(end, peer, frames[0])
    (event,) = handed(end, peer, BEGIN + 0.1)
    assert event.final
    assert give(end, peer, frames[1], now=BEGIN + 0.2) == []


def test_broken_symbols_are_answered_as_broken() -> None:
    end, peer = server(), Peer()
    image = coded(k=2, n=3)
    frames = [Fragment(0, 0, image.format, index, 0, 0, b"", bytes(7 + index)) for index in range(2)]
    assert give(end, peer, *frames) == []
    assert {part.status for part in answers(end, peer, BEGIN + 0.5)} == {Status.BROKEN}


hostile = st.one_of(
    any_fragments(),
    st.builds(
        Fragment, st.integers(0, 3), st.just(0),
        st.builds(
            WireImageFormat, st.just(Kind.SEGMENTS), st.just(64), st.just(48), st.just(50), st.just(4), st.just(3),
                  st.integers(3, 6), st.integers(0, 2)),
        st.integers(0, 2), st.integers(0, 99), st.just(0), st.just(b""),
        st.binary(min_size=1, max_size=fragment_room(b"")),
    ),
    st.builds(Cancel, st.integers(0, 3)),
    st.just(Ping()),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(hostile, st.integers(0, 3), st.integers(0, 60)), max_size=40))
def test_authentic_frames_of_any_content_hand_nothing_over_twice_and_leave_no_bytes(
    sent: list[tuple[Fragment | Cancel | Ping, int, int]],
) -> None:
    budget = Budget(PLENTY)
    end, peer, now, finals = server(budget), Peer(), BEGIN, list[int]()
    for frame, path, wait_ms in sent:
        now += wait_ms * 1e-3
        end.receive(*peer.seal(frame, path=path), now)
        peer.open(list(end.poll(now)))
        finals += [event.number for event in end.events if event.final]
        end.events.clear()
    assert len(finals) == len(set(finals))
    end.close()
    assert budget.used == 0

"""The sending end: fragments out, repairs, answers in; and what a hostile receiver cannot do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.clock import Deadline
from hawkvision.transport.client.sender import (
    MAX_IMAGES,
    MAX_RESENDS,
    MAX_ROUNDS,
    Sender,
)
from hawkvision.transport.coding.image_coding import Coded
from hawkvision.transport.protocol.frames import (
    MAX_ANSWER_PARTS,
    MAX_META,
    AnswerPart,
    Cancel,
    Fragment,
    Frame,
    Interim,
    Nack,
    Report,
    fragment_room,
)
from hawkvision.transport.protocol.image_format import WireImageFormat
from hawkvision.transport.protocol.wire import WireError
from tests.fuzz.examples import examples
from tests.hawkvision.transport.protocol.test_frames import answer_parts, reports
from tests.hawkvision.transport.session import BEGIN, CLIENT, SERVER, Peer, client, coded

IMAGE = coded(k=4, n=6)


def peer_of() -> Peer:
    return Peer(SERVER, CLIENT)


def out(end: Sender, peer: Peer, now: float) -> list[Frame]:
    return peer.open(list(end.poll(now)))


def sent(end: Sender, peer: Peer, now: float) -> list[int]:
    """Indices of the fragments that leave now."""
    return [frame.index for frame in out(end, peer, now) if isinstance(frame, Fragment)]


def until(end: Sender, peer: Peer, begin: float, end_at: float) -> list[int]:
    """Indices of the fragments that leave by then, by the sender's own timers."""
    now, indices = begin, list[int]()
    while (now := max(end.next_timer(now), now + 0.0005)) <= end_at:
        indices += sent(end, peer, now)
    return indices


def test_parts_of_an_answer_become_one_event_however_often_they_come() -> None:
    end, peer = client(), peer_of()
    end.submit(0, IMAGE, None, b"", BEGIN)
    parts = [AnswerPart(0, 1, 1, 2, b"at"), AnswerPart(0, 1, 0, 2, b"c")]
    for part in (*parts, *parts):
        end.receive(*peer.seal(part), BEGIN)
    assert list(end.answered) == [(0, 1, b"cat")]


def test_an_answer_by_the_stream_and_by_datagrams_counts_once() -> None:
    end, peer = client(), peer_of()
    end.submit(0, IMAGE, None, b"", BEGIN)
    end.answer(0, 0, b"cat")
    end.receive(*peer.seal(AnswerPart(0, 0, 0, 1, b"dog")), BEGIN)
    end.answer(0, 0, b"dog")
    assert [body for _, _, body in end.answered] == [b"cat"]


def test_parts_that_contradict_the_first_are_ignored() -> None:
    end, peer = client(), peer_of()
    end.submit(0, IMAGE, None, b"", BEGIN)
    for part in (AnswerPart(0, 0, 0, 2, b"c"), AnswerPart(0, 0, 1, 3, b"x"), AnswerPart(0, 1, 1, 2, b"x")):
        end.receive(*peer.seal(part), BEGIN)
    assert not end.answered
    end.receive(*peer.seal(AnswerPart(0, 0, 1, 2, b"at")), BEGIN)
    assert list(end.answered) == [(0, 0, b"cat")]


def test_interim_responses_arrive_once_and_in_order() -> None:
    end, peer = client(), peer_of()
    end.submit(0, IMAGE, None, b"", BEGIN)
    for interim in (Interim(0, 1, b"cat?"), Interim(0, 0, b"dog?"), Interim(0, 1, b"cat?"), Interim(9, 5, b"cow?")):
        end.receive(*peer.seal(interim), BEGIN)
    end.receive(*peer.seal(AnswerPart(0, 0, 0, 1, b"cat")), BEGIN)
    end.receive(*peer.seal(Interim(0, 2, b"dog?")), BEGIN)
    assert (list(end.interims), list(end.answered)) == ([(0, b"cat?")], [(0, 0, b"cat")])


def test_a_nack_brings_the_fragments_again_but_not_at_once_twice() -> None:
    end, peer = client(), peer_of()
    end.submit(0, IMAGE, None, b"", BEGIN)
    sent(end, peer, BEGIN)
    end.receive(*peer.seal(Report(0, 0, 0, 0, (0.0,) * 6)), BEGIN + 0.04)
    for _ in range(2):
        end.receive(*peer.seal(Nack(0, (1, 3, 200))), BEGIN + 0.05)
        end.receive(*peer.seal(Nack(77, (1,))), BEGIN + 0.05)
    assert sent(end, peer, BEGIN + 0.05) == [1, 3]


def test_resends_of_a_fragment_are_bounded() -> None:
    end, peer = client(), peer_of()
    end.submit(0, IMAGE, None, b"", BEGIN)
    count = sent(end, peer, BEGIN).count(0)
    for step in range(1, 400):
        end.receive(*peer.seal(Nack(0, (0,))), BEGIN + step)
        count += sent(end, peer, BEGIN + step + 0.01).count(0)
    assert count == 1 + MAX_RESENDS


def test_without_any_report_the_image_is_repaired_with_what_was_sent_least() -> None:
    end, peer = client(), peer_of()
    end.submit(0, IMAGE, None, b"", BEGIN)
    assert sent(end, peer, BEGIN) == [0, 1, 2, 3, 4, 5]
    again = until(end, peer, BEGIN, BEGIN + 600)
    counts = [again.count(index) for index in range(6)]
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= MAX_ROUNDS * 4 // 6 - 1, "a round may find some of the last one's still on their way"


def test_nothing_is_sent_after_its_deadline() -> None:
    end, peer = client(), peer_of()
    big = coded(k=30, n=60, size=1000)
    end.submit(0, big, Deadline(BEGIN + 0.01), b"", BEGIN)
    first = len(sent(end, peer, BEGIN))
    assert 0 < first < 60
    assert until(end, peer, BEGIN + 0.0101, BEGIN + 30) == []


def test_an_image_that_is_wanted_late_is_sent_after_its_deadline_and_not_for_ever() -> None:
    end, peer = client(), peer_of()
    end.submit(0, coded(k=30, n=60, size=1000), Deadline(BEGIN), b"", BEGIN, late_s=0.5)
    assert sent(end, peer, BEGIN)
    assert until(end, peer, BEGIN + 0.0101, BEGIN + 0.5)
    assert until(end, peer, BEGIN + 0.5001, BEGIN + 30) == []


def test_a_cancelled_image_is_reported_and_no_longer_sent() -> None:
    end, peer = client(), peer_of()
    number = end.submit(0, IMAGE, None, b"", BEGIN)
    end.cancel(number)
    end.cancel(number)
    assert out(end, peer, BEGIN) == [Cancel(number)]


def test_so_many_images_may_wait_and_no_more() -> None:
    end = client()
    for _ in range(MAX_IMAGES):
        assert not end.full
        end.submit(0, IMAGE, None, b"", BEGIN)
    assert end.full
    end.answer(5, 0, b"")
    assert not end.full


@pytest.mark.parametrize(("meta", "size"), [(bytes(MAX_META + 1), 10), (b"m", fragment_room(b"")), (b"", 1200)])
def test_what_does_not_fit_a_datagram_is_refused_at_once(meta: bytes, size: int) -> None:
    whole = WireImageFormat(IMAGE.format.kind, 0, size, 0, 1, 1, 1)
    with pytest.raises(WireError, match="expected at most"):
        client().submit(0, Coded(whole, (bytes(size),)), None, meta, BEGIN)


def test_fragments_are_spread_over_two_paths() -> None:
    end = client(2)
    end.submit(0, coded(k=20, n=30, size=1000), None, b"", BEGIN)
    paths = [path for path, _ in end.poll(BEGIN)]
    assert {path: paths.count(path) > 5 for path in (0, 1)} == {0: True, 1: True}


hostile = st.one_of(
    answer_parts(),
    st.builds(AnswerPart, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.just(3), st.binary(max_size=9)),
    st.builds(Interim, st.integers(0, 4), st.integers(0, 255), st.binary(max_size=9)),
    st.builds(Nack, st.integers(0, 4), st.lists(st.integers(0, 255), min_size=1, max_size=20).map(tuple)),
    reports,
    st.builds(
        lambda first, came: Report(0, first, 9, 9, tuple(came)), st.integers(0, 20),
        st.lists(st.none() | st.just(0.0), min_size=1, max_size=12),
    ),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(hostile, st.integers(0, 3), st.integers(0, 100)), max_size=40))
def test_authentic_frames_of_any_content_answer_nothing_twice(received: list[tuple[Frame, int, int]]) -> None:
    end, peer, now = client(), peer_of(), BEGIN
    for _ in range(4):
        end.submit(0, IMAGE, Deadline(BEGIN + 2), b"", BEGIN)
    count = len(sent(end, peer, now))
    for frame, path, wait_ms in received:
        now += wait_ms * 1e-3
        end.receive(*peer.seal(frame, path=path), now)
        count += len(sent(end, peer, now))
        assert {number for number, _ in end.interims} <= set(range(4))
        assert len(end.interims) <= MAX_IMAGES
    numbers = [number for number, _, _ in end.answered]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) <= set(range(4))
    assert count <= 4 * 6 * (1 + MAX_RESENDS)
    assert all(len(image.parts) <= MAX_ANSWER_PARTS for image in end._images.values())

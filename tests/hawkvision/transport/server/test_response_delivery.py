"""How a receiver's answers and interims reach its peer: copies, repetitions, and when they end."""

from __future__ import annotations

from hawkvision.transport.protocol.frames import INTERIM_ROOM, AnswerPart, Interim, Report
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.receiver import Receiver
from hawkvision.transport.server.response_delivery import MAX_INTERIMS
from tests.hawkvision.transport.server.test_receiver import answers, confirm, give
from tests.hawkvision.transport.session import BEGIN, Peer, coded, fragments, server


def interims(end: Receiver, peer: Peer, now: float) -> list[tuple[int, bytes]]:
    frames = peer.open(list(end.poll(now)))
    return [(frame.number, frame.body) for frame in frames if isinstance(frame, Interim)]


def test_an_answer_is_repeated_until_it_is_reported_and_not_after() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(coded()))
    end.answer(0, Status.OK, b"cat", BEGIN)
    assert answers(end, peer, BEGIN) == [AnswerPart(0, Status.OK, 0, 1, b"cat")]
    assert answers(end, peer, BEGIN + 0.5)
    assert answers(end, peer, BEGIN + 2.0)
    confirm(end, peer, end.channel.paths[0].next_sequence, BEGIN + 2.1)
    assert not answers(end, peer, BEGIN + 9)


def test_interim_responses_have_as_many_copies_as_responses_and_no_repetitions() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(coded()))
    end.interim(0, b"dog?", BEGIN)
    end.interim(0, b"cat?", BEGIN)
    assert interims(end, peer, BEGIN) == [(1, b"cat?")]
    assert end.next_timer(BEGIN) <= BEGIN + 0.003
    later = [interims(end, peer, BEGIN + wait_s) for wait_s in (0.003, 0.02, 0.5, 1.0, 2.0)]
    said = [(1, b"cat?")]
    assert later == [said, said, [], [], []], "three copies where the loss is not known, the last after a burst of loss"


def test_interim_responses_ask_for_no_report() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(coded()))
    path = end.channel.paths[0]
    before = path.next_sequence
    end.interim(0, b"cat?", BEGIN)
    assert interims(end, peer, BEGIN)
    assert path.next_sequence > before
    assert (path.sent, path.waiting_since) == ({}, None), "an end that does not know interims would look dead"


def test_with_two_paths_the_better_one_carries_the_first_copy() -> None:
    end, peer = server(), Peer()
    some = fragments(coded())
    for number, rtt_s in ((0, 0.08), (1, 0.02)):
        end.receive(*peer.seal(some[number], path=number), BEGIN)
        list(end.poll(BEGIN))
        end.channel.paths[number].where.used.proven = True
        end.channel.paths[number].rate.on_report([], [], rtt_s, BEGIN)
    give(end, peer, *some[2:])
    end.interim(0, b"cat?", BEGIN)
    assert [path for wait_s in (0.0, 0.003) for path, _ in end.poll(BEGIN + wait_s)] == [1, 0]


def test_after_the_answer_nothing_else_is_said() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(coded()))
    end.interim(0, b"dog?", BEGIN)
    end.answer(0, Status.OK, b"cat", BEGIN)
    end.interim(0, b"dog?", BEGIN)
    assert interims(end, peer, BEGIN) == []


def test_what_does_not_fit_one_datagram_is_not_said_nor_is_more_than_can_be_numbered() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(coded()))
    end.interim(0, bytes(INTERIM_ROOM + 1), BEGIN)
    assert interims(end, peer, BEGIN) == []
    for _ in range(MAX_INTERIMS + 9):
        end.interim(0, bytes(INTERIM_ROOM), BEGIN)
    assert interims(end, peer, BEGIN) == [(MAX_INTERIMS - 1, bytes(INTERIM_ROOM))]


def test_an_answer_of_many_parts_repeats_only_those_that_are_not_reported() -> None:
    end, peer = server(), Peer()
    give(end, peer, *fragments(coded()))
    before = end.channel.paths[0].next_sequence
    end.answer(0, Status.OK, bytes(3000), BEGIN)
    first = answers(end, peer, BEGIN)
    assert [part.part for part in first] == [0, 1, 2]
    end.receive(*peer.seal(Report(0, before, 0, 0, (0.0, None, 0.0))), BEGIN + 0.001)
    assert {part.part for part in answers(end, peer, BEGIN + 0.5)} == {1}

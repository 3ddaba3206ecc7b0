"""The channel: reports, losses, dead paths, unproven addresses; and what an authentic but hostile peer may send."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.transport.endpoint.channel import MAX_SENT, Channel
from hawkvision.transport.endpoint.path import (
    DEAD_AFTER_LEAST_S,
    LATE_FOR_S,
    MAX_MISSED,
    REORDERING,
    REPORT_AFTER,
    REPORT_DELAY_S,
    SILENT_TIMEOUTS,
)
from hawkvision.transport.protocol.frames import (
    AnswerPart,
    Challenge,
    Ping,
    Report,
    Response,
    encode,
)
from hawkvision.transport.protocol.packet_protection import peek
from hawkvision.transport.protocol.wire import MAX_DATAGRAM, Drop
from tests.fuzz.examples import examples
from tests.hawkvision.transport.protocol.test_frames import reports
from tests.hawkvision.transport.session import BEGIN, CLIENT, SERVER, SESSION, Peer

PING = encode(Ping())


def channel(*paths: int) -> Channel[str]:
    made = Channel[str](SESSION, CLIENT, SERVER)
    for number in paths:
        made.path(number, BEGIN, proven=True)
    return made


def unproven() -> tuple[Channel[Any], Peer]:
    return Channel[Any](SESSION, SERVER, CLIENT), Peer()


def report_of(arrived: range | list[int], first: int = 0, path: int = 0) -> Report:
    came = set(arrived)
    return Report(path, first, 0, 0, tuple(0.0 if n in came else None for n in range(first, max(came) + 1)))


def test_reported_datagrams_are_delivered_and_overtaken_ones_lost() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    for number in range(REORDERING + 2):
        end.send(end.paths[0], PING, BEGIN, f"token {number}")
    end.receive(*peer.seal(report_of(list(range(1, REORDERING + 1)))), BEGIN + 0.04)
    assert end.delivered == [f"token {n}" for n in range(1, REORDERING + 1)]
    assert end.lost == ["token 0"]


def test_what_no_report_names_is_lost_after_the_timeout() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    for token in ("reported", "token"):
        end.send(end.paths[0], PING, BEGIN, token)
    end.receive(*peer.seal(report_of([0])), BEGIN + 0.04)
    timeout_s = end.paths[0].rate.timeout_s()
    end.expire(BEGIN + timeout_s - 0.001)
    assert not end.lost
    end.expire(BEGIN + timeout_s + 0.001)
    assert end.lost == ["token"]


def test_where_all_is_silent_a_path_is_pinged_before_anything_counts_as_lost() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    end.send(end.paths[0], PING, BEGIN, "reported")
    end.receive(*peer.seal(report_of([0])), BEGIN + 0.04)
    timeout_s, sent_at = end.paths[0].rate.timeout_s(), BEGIN + 1.0
    end.send(end.paths[0], PING, sent_at, "token")
    assert min(end.timers(sent_at)) <= sent_at + timeout_s
    end.expire(sent_at + timeout_s + 0.001)
    assert len(list(end.due(sent_at + timeout_s + 0.001))) == 1
    assert not end.lost
    end.expire(sent_at + SILENT_TIMEOUTS * timeout_s + 0.001)
    assert end.lost == ["token"]


def test_a_run_of_losses_is_one_run_however_many_timeouts_find_it() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    path, sent_at = end.paths[0], [BEGIN + 0.05 * sequence for sequence in range(60)]
    lost = range(40, 48)
    for sequence, at in enumerate(sent_at):
        end.send(path, PING, at)
        end.expire(at)
        end.receive(*peer.seal(report_of([n for n in range(sequence + 1) if n not in lost])), at + 0.01)
        end.expire(at + 0.01)
    assert path.rate.loss.ratio == pytest.approx(len(lost) / 60)
    assert path.rate.loss.burst == pytest.approx(len(lost))


def test_a_path_is_behind_before_its_reports_are_overdue() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    path = end.paths[0]
    end.send(path, PING, BEGIN)
    end.receive(*peer.seal(report_of([0])), BEGIN + 0.01)
    assert not path.behind(BEGIN + 1.0), "nothing is waited for"
    end.send(path, PING, BEGIN + 1.0)
    overdue = next(at for step in range(1000) if path.suspect(at := BEGIN + 1.0 + step * 1e-3))
    behind = next(at for step in range(1000) if path.behind(at := BEGIN + 1.0 + step * 1e-3))
    assert BEGIN + 1.0 + 0.01 < behind < overdue
    end.receive(*peer.seal(report_of([0, 1])), behind)
    assert not path.behind(behind)


def test_a_path_is_behind_after_a_report_of_what_was_given_up_until_one_of_something_later() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    path = end.paths[0]
    for sequence in range(2):
        end.send(path, PING, BEGIN + sequence)
        late = BEGIN + 1.0 + 3.0 * SILENT_TIMEOUTS * path.rate.timeout_s()
        end.expire(BEGIN + 0.01 if sequence == 0 else late)
        end.receive(*peer.seal(report_of(range(sequence + 1))), BEGIN + 0.01 if sequence == 0 else late)
    end.send(path, PING, late + 0.01)
    assert path.behind(late + 0.01), "what is under way may take as long"
    end.receive(*peer.seal(report_of([0, 1])), late + 0.011)
    assert path.behind(late + 0.011), "the same report again says nothing new"
    assert not path.behind(late + 1.1 * LATE_FOR_S), "it says nothing for long"
    end.receive(*peer.seal(report_of([0, 1, 2])), late + 0.02)
    assert not path.behind(late + 0.02), "that one came in time"


def test_what_a_slow_link_brings_late_was_not_lost() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    for sequence in range(2):
        end.send(end.paths[0], PING, BEGIN + sequence, f"token {sequence}")
        late_s = 0.04 + 1.5 * sequence * end.paths[0].rate.timeout_s()
        end.expire(BEGIN + sequence + late_s)
        end.receive(*peer.seal(report_of(range(sequence + 1))), BEGIN + sequence + late_s)
    assert end.delivered == ["token 0", "token 1"]
    assert end.paths[0].rate.loss.ratio == 0.0


@pytest.mark.parametrize("reported", [[0], [1], [0, 1, 2, 3]])
def test_a_late_report_takes_a_loss_back(reported: list[int]) -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    path = end.paths[0]
    for number in range(4):
        end.send(path, PING, BEGIN, f"token {number}")
    end.expire(BEGIN + 10.0)
    assert (path.rate.loss.ratio, path.rate.loss.burst) == (1.0, 4.0)
    end.receive(*peer.seal(report_of(reported)), BEGIN + 10.0)
    end.receive(*peer.seal(report_of(reported)), BEGIN + 10.1)  # as reports do, it says so again
    left = 4 - len(reported)
    assert (path.rate.loss.ratio, path.rate.loss.burst) == (left / 4, max(left, 1))
    assert not end.delivered, "the owner was told that they are lost, and once"


def test_a_report_measures_the_round_trip_without_the_peers_delay() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    end.send(end.paths[0], PING, BEGIN)
    end.receive(*peer.seal(Report(0, 0, 0, 8000, (0.0,))), BEGIN + 0.048)
    assert end.paths[0].rate.rtt_s == pytest.approx(0.040)


def test_a_report_is_due_after_a_while_or_many_datagrams() -> None:
    end, peer = unproven()
    for _ in range(REPORT_AFTER - 1):
        end.receive(*peer.seal(Ping()), BEGIN)
    path = end.paths[0]
    assert path.report_at == BEGIN + REPORT_DELAY_S
    end.receive(*peer.seal(Ping()), BEGIN + 0.001)
    assert path.report_at == BEGIN + 0.001


def test_reports_are_not_reported_themselves() -> None:
    end, peer = unproven()
    end.path(0, BEGIN, proven=True)
    end.send(end.paths[0], PING, BEGIN)
    end.receive(*peer.seal(report_of([0])), BEGIN)
    assert end.paths[0].report_at is None


def test_a_report_of_what_was_never_sent_changes_nothing() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    end.send(end.paths[0], PING, BEGIN, "token")
    end.receive(*peer.seal(report_of(range(2))), BEGIN + 0.01)
    end.receive(*peer.seal(report_of([0], path=3)), BEGIN + 0.01)
    assert not end.delivered
    assert end.drops == {Drop.MALFORMED: 2}
    assert end.paths[0].rate.rtt_s is None


def test_one_silent_path_of_two_dies_and_its_datagrams_are_lost_at_once() -> None:
    end, peer = channel(0, 1), Peer(SERVER, CLIENT)
    end.send(end.paths[0], PING, BEGIN, "on the dead one")
    end.send(end.paths[1], PING, BEGIN, "on the living one")
    end.receive(*peer.seal(report_of([0], path=1), path=1), BEGIN + 0.01)
    later = end.paths[0].dies_at + 0.001
    end.expire(later)
    assert end.lost == ["on the dead one"]
    assert [path.number for path in end.usable(later)] == [1]


def test_a_dead_path_is_probed_at_growing_intervals_and_revives_when_heard() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    end.send(end.paths[0], PING, BEGIN)
    probes, now = list[float](), BEGIN
    while now < BEGIN + 10:
        now += 0.01
        probes += [now] * len(list(end.due(now)))
    gaps = [round(b - a, 1) for a, b in itertools.pairwise(probes)]
    assert gaps[:4] == [0.1, 0.2, 0.4, 0.8]
    assert set(gaps[4:]) == {1.0}
    end.receive(*peer.seal(Ping()), now)
    assert not end.paths[0].dead(now)


def test_many_challenges_in_a_datagram_get_one_response() -> None:
    end, peer = unproven()
    end.path(0, BEGIN, proven=True)
    end.receive(*peer.seal(*[Challenge(bytes([n] * 8)) for n in range(130)]), BEGIN)
    frames = peer.open(list(end.due(BEGIN)))
    assert [frame for frame in frames if isinstance(frame, Response)] == [Response(b"\x81" * 8)]


HERE, THERE, ELSEWHERE = ("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.3", 3)


def proven_at(address: tuple[str, int]) -> tuple[Channel[Any], Peer]:
    """An end whose peer has proven that it receives there."""
    end, peer = unproven()
    end.receive(*peer.seal(Ping()), BEGIN, address)
    (challenge,) = (frame for frame in peer.open(list(end.due(BEGIN))) if isinstance(frame, Challenge))
    end.receive(*peer.seal(Response(challenge.token)), BEGIN, address)
    assert end.paths[0].proven
    list(end.due(BEGIN + 1))
    return end, peer


def challenged(end: Channel[Any], peer: Peer) -> tuple[tuple[str, int], Challenge]:
    """Who was challenged aside, and with what."""
    ((address, datagram),) = end.asides
    end.asides.clear()
    (challenge,) = peer.open([(0, datagram)])
    assert isinstance(challenge, Challenge)
    return address, challenge


def test_a_new_address_is_challenged_at_once_and_the_old_one_kept_until_it_has_answered() -> None:
    end, peer = proven_at(HERE)
    where = end.paths[0].where
    end.receive(*peer.seal(Ping()), BEGIN + 1, THERE)
    address, challenge = challenged(end, peer)
    assert (address, where.used.address, where.used.proven) == (THERE, HERE, True)
    assert where.destinations(40, BEGIN + 1) == (HERE, THERE)
    end.receive(*peer.seal(Response(b"guessed!")), BEGIN + 1.01, THERE)
    end.receive(*peer.seal(Response(challenge.token)), BEGIN + 1.01, HERE)
    assert where.used.address == HERE, "it must answer from where it claims to be"
    end.receive(*peer.seal(Response(challenge.token)), BEGIN + 1.02, THERE)
    assert (where.used.address, where.used.proven, where.claim) == (THERE, True, None)


def test_a_port_is_a_nats_affair_and_another_host_is_another_link() -> None:
    rates = []
    for address in (THERE, ELSEWHERE):
        end, peer = proven_at(HERE)
        end.send(end.paths[0], PING, BEGIN + 1, "token")
        before = end.paths[0].rate
        end.receive(*peer.seal(Ping()), BEGIN + 1, address)
        end.receive(*peer.seal(Response(challenged(end, peer)[1].token)), BEGIN + 1, address)
        rates.append((end.paths[0].rate is before, "token" in end.lost))
    assert rates == [(True, False), (False, True)]


def test_a_dead_path_that_may_not_be_sent_to_does_not_keep_the_timer_ringing() -> None:
    end, peer = unproven()
    end.receive(*peer.seal(Ping()), BEGIN)
    list(end.due(BEGIN))
    end.paths[0].where.used.bytes_in = 0  # what may be sent is used up
    now = BEGIN + 5
    end.expire(now)
    assert list(end.due(now)) == []
    assert min(end.timers(now), default=math.inf) > now


def test_a_report_that_may_not_leave_yet_is_not_forgotten() -> None:
    end, peer = unproven()
    end.receive(*peer.seal(Ping()), BEGIN)
    assert not [f for f in peer.open(list(end.due(BEGIN + 1))) if isinstance(f, Report)]
    end.receive(*peer.seal_bytes(PING * 900), BEGIN + 1)
    (report,) = (f for f in peer.open(list(end.due(BEGIN + 2))) if isinstance(f, Report))
    assert len(report.offsets_s) == 2
    assert None not in report.offsets_s


def test_a_frame_beside_a_report_still_fits_a_datagram() -> None:
    end, peer = unproven()
    for _ in range(200):
        end.receive(*peer.seal(Ping()), BEGIN)
    for size in range(0, 1160, 7):
        frames = end.with_report(end.paths[0], encode(AnswerPart(1, 0, 0, 1, bytes(size))), BEGIN)
        assert len(end.send(end.paths[0], frames, BEGIN)) <= MAX_DATAGRAM


def test_at_most_so_many_datagrams_are_remembered() -> None:
    end = channel(0)
    for number in range(MAX_SENT + 100):
        end.send(end.paths[0], PING, BEGIN, str(number))
    assert len(end.paths[0].sent) == MAX_SENT
    assert end.lost == [str(n) for n in range(100)]
    end.expire(BEGIN + 100.0)
    assert (len(end.paths[0].sent), len(end.paths[0].missed)) == (0, MAX_MISSED)


def test_a_peer_that_sends_for_long_fills_nothing() -> None:
    end, peer = unproven()
    for step in range(5000):
        end.receive(*peer.seal(Ping(), path=step % 4), BEGIN + step * 1e-3)
        list(end.due(BEGIN + step * 1e-3))
    assert len(end.paths) == 4
    assert all(len(path.received) <= 513 for path in end.paths.values())
    assert not end.replies


def test_sequences_far_apart_keep_reports_short() -> None:
    end, peer = unproven()
    end.path(0, BEGIN, proven=True)
    for skip in (0, 10, 500, 2000, 1 << 40):
        end.receive(*peer.seal_bytes(PING, skip=skip), BEGIN)
        sent = list(end.due(BEGIN + 1))
        assert all(len(datagram) <= MAX_DATAGRAM for _, datagram in sent)
        assert peer.open(sent)


def test_the_clock_of_reports_goes_on_beyond_its_32_bits() -> None:
    end, peer = channel(0), Peer(SERVER, CLIENT)
    for n, clock_us in enumerate([2**32 - 1000, 500, 1500]):
        end.send(end.paths[0], PING, BEGIN + n)
        end.receive(*peer.seal(Report(0, n, clock_us, 0, (0.0,))), BEGIN + n + 0.04)
    assert end.paths[0].clock_s == pytest.approx((2**32 + 1500) * 1e-6)


def test_a_path_lives_while_it_waits_less_than_three_round_trips() -> None:
    end = channel(0)
    end.send(end.paths[0], PING, BEGIN)
    assert not end.paths[0].dead(BEGIN + DEAD_AFTER_LEAST_S - 0.001)
    assert end.paths[0].dead(BEGIN + 10)


payloads = st.one_of(
    st.binary(min_size=1, max_size=300),
    reports.map(encode),
    st.lists(reports.map(encode), max_size=3).map(b"".join),
    st.builds(lambda first, offsets: encode(Report(0, first, 5, 5, tuple(offsets))), st.integers(0, 20),
              st.lists(st.none() | st.just(0.0) | st.just(0.004), min_size=1, max_size=30)),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(payloads, st.integers(0, 3), st.integers(0, 50)), max_size=30))
def test_authentic_datagrams_of_any_bytes_do_no_harm(datagrams: list[tuple[bytes, int, int]]) -> None:
    end, peer, now = channel(0, 1), Peer(SERVER, CLIENT), BEGIN
    for payload, path, wait_ms in datagrams:
        end.send(end.paths[0], PING, now, "token")
        now += wait_ms * 1e-3
        end.receive(*peer.seal_bytes(payload or b"\0", path), now)
        end.expire(now)
        for _, datagram in end.due(now):
            assert peek(datagram).session == SESSION
        assert min(end.timers(now), default=math.inf) > now - 10
    assert len(end.delivered) + len(end.lost) + sum(len(p.sent) for p in end.paths.values()) >= len(datagrams)

"""Seeded simulations in virtual time: when an alarm comes, for whom, and what lifts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hawkvision.guarantee.bets import HORIZON, MOST_SHARE, WINDOW, Claim, Claims, Log
from hawkvision.guarantee.monitor import (
    CLOCK_SKEW_S,
    LONGEST_WAIT_S,
    MOST_WAITING,
    NODE,
    Dates,
    Due,
    Stream,
    StreamState,
)
from tests.hawkvision.guarantee.simulated import CLAIMS, EIGHT, SHARE, Node, delay

SHIPPED = Dates()
OTHERS = Claims("q", "edge", CLAIMS.claims, 0.05)


@pytest.mark.parametrize(
    ("times", "quiet", "within"),
    [(1.5, 0, 16_900), (1.5, 2000, 38_300), (2, 0, 6_800), (2, 2000, 11_900), (4, 0, 1_600), (4, 2000, 2_000)],
)
def test_the_alarm_comes_soon_also_after_a_quiet_past(times: float, quiet: int, within: int) -> None:
    assert np.median([delay(times, quiet, np.random.default_rng(seed)) for seed in range(9)]) <= within


@pytest.mark.parametrize("which", [slice(0, 8), slice(5, 6)], ids=["all claims", "one claim"])
def test_renewing_every_hundred_audits_delays_no_alarm(which: slice) -> None:
    """Thresholds move a little and their number changes with each renewal; the bets stay what they were."""

    def found(seed: int, every: int) -> int:
        rng, log, audits = np.random.default_rng(seed), Log(EIGHT, 0.5), 0
        while not log.alarm and audits < 20_000:
            audits += 1
            score = rng.choice(np.arange(8)[which]) / 10 + 0.05
            log.record(score, float(rng.random() < 0.1))
            if audits % every == 0:
                moved = tuple(Claim(k / 10 + rng.uniform(-0.02, 0.02), 0.05) for k in range(8 - audits // every % 2))
                log = Log(Claims("p", "edge", moved, 0.05), 0.5, log.kept())
        return audits

    assert np.median([found(seed, 100) for seed in range(9)]) <= 1.3 * np.median(
        [found(seed, 10**6) for seed in range(9)]
    )


@pytest.mark.parametrize("every", [100, HORIZON])
@pytest.mark.parametrize("fractions", [False, True])
def test_traffic_on_the_very_bounds_raises_false_alarms_no_oftener_than_stated(fractions: bool, every: int) -> None:
    """Also while certificates are renewed."""
    alarms = 0
    for seed in range(30):
        rng, log = np.random.default_rng(seed), Log(CLAIMS, 0.5)
        for audit in range(HORIZON):
            if audit % every == every - 1:
                log = Log(Claims("q", "edge", CLAIMS.claims[audit // every % 2 :], 0.05), 0.5, log.kept())
            differs = rng.random() < (0.1 if fractions else 0.05)
            log.record(0.9 if rng.random() < 0.4 else 0.2, float(differs) * (0.5 if fractions else 1.0))
            if log.alarm:
                break
        alarms += log.alarm
    assert alarms <= 3  # 2.5 % of 30 are expected at most


@pytest.mark.parametrize(
    ("who", "within"),
    [
        (lambda number: ("me", None), 2_000),
        (lambda number: ("me", f"visit {number // 50}"), 2_000),
        (lambda number: ("me", f"camera {number % 200}"), 2_000),
        (lambda number: (f"caller {number % 1000}", None), 2_000),
        (lambda number: (f"caller {number // 50}", None), 2_000),
    ],
    ids=["one caller", "a stream per visit", "200 cameras", "1,000 callers", "a caller per visit"],
)
def test_wrong_answers_are_seen_whatever_names_they_come_under(
    who: Callable[[int], tuple[str, str | None]], within: int
) -> None:
    for seed in range(5):
        node = Node(seed)
        said = [node.request(1.0, *who(number)) for number in range(within + 1000)]
        assert all(said[within:])


@pytest.mark.parametrize("names", ["callers", "cameras of one caller"])
def test_one_bad_camera_of_twenty_suspends_itself_and_two_suspend_the_node(names: str) -> None:
    def ask(node: Node, number: int, differs: float) -> bool:
        return node.request(differs, *((str(number), None) if names == "callers" else ("me", str(number))))

    for seed in range(3):
        node = Node(seed)
        for _ in range(1500):
            for number in range(20):
                ask(node, number, 1.0 if number == 0 else 0.02)
        assert [ask(node, number, 0.0) for number in range(20)] == [True] + 19 * [False]
    for _ in range(1000):
        for number in range(20):
            ask(node, number, 1.0 if number < 2 else 0.02)
    assert all(ask(node, number, 0.0) for number in range(20))


def test_another_caller_that_uses_a_streams_name_neither_lifts_nor_hides_its_alarm() -> None:
    node = Node()
    for _ in range(2000):
        node.request(0.0, "other", "yard")
    assert (
        node.until(True, 2000, lambda number: node.request(1.0, "me", "yard") or node.request(0.0, "other", "yard"))
        < 2000
    )
    for _ in range(20_000):
        node.request(0.0, "other", "yard")
    assert node.watched("me", "yard").suspended
    assert not node.watched("other", "yard").suspended


def test_streams_that_make_room_lose_no_evidence() -> None:
    node = Node(limit=4)
    said = [node.request(0.2, f"caller {visit}") for visit in range(100) for _ in range(200)]
    assert len(node.monitor) <= 8
    assert all(said[10_000:])


def test_an_alarm_outlives_other_names_other_certificates_restarts_and_whatever_comes_together() -> None:
    node = Node(limit=20)
    node.suspend("me", "yard")
    for number in range(2000):
        node.request(0.02, f"other {number}")
    assert len(node.monitor) == 21
    for profile in ("q", "p"):
        node.monitor.adopt({f"{profile}/edge"})
        assert node.watched("me", "yard").suspended
        assert not node.watched("other 1").suspended
    node = node.restarted(20)
    assert node.watched("me", "yard").suspended
    assert not node.watched("other 1").suspended
    node.claims = OTHERS
    node.monitor.adopt({"q/edge"})
    assert 5000 > node.until(False, 5000, lambda number: node.request(0.0, "me", "yard")) > 100
    node = node.restarted(20)
    for number in range(2000):
        node.request(0.02, f"other {number}")
    assert node.watched("me", "yard").suspended, "the certificate in force again is the one that failed"


def test_certificates_that_come_and_go_forget_no_alarm_that_was_raised_before() -> None:
    """Each further alarm is harder to end."""
    stream = Stream(NODE, 0.5)
    for _ in range(3):
        while not stream.alarm:
            stream.record(CLAIMS, 0.9, 1.0, 0.0)
        while stream.alarm and stream.log(CLAIMS).state.alarms < 3:
            stream.record(CLAIMS, 0.9, 0.0, 0.0)
    for name in ("q/edge", "p/edge"):
        stream.keep_only(frozenset({name}))
    assert stream.alarm
    assert stream.log(CLAIMS).state.alarms == 3


def test_audits_of_which_no_certificate_in_force_takes_the_outcome_are_missing() -> None:
    """Else certificates that are renewed while audits are under way could certify what nobody checks."""
    node = Node()
    watched, due = node.watched(), None
    while due is None:
        due = node.monitor.draw(watched)
    node.monitor.adopt({"q/edge"})
    node.monitor.settle(due, [(CLAIMS, 0.9, 1.0)])
    assert list(node.monitor.node.due) == [True]
    assert not node.monitor.node.state.logs


def images(first: float, newest: float) -> Dates:
    """Of a certificate's images, seconds after the first alarm."""
    return Dates(2e9 + first, 2e9 + newest)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_certificate_ends_the_nodes_alarm_if_that_is_older_than_all_of_its_images(restarts: bool) -> None:
    node = Node(states={NODE: StreamState(carried=True, raised=2e9)})

    def adopt(dates: Dates, profile: str = "p") -> None:
        nonlocal node
        if restarts:
            node = node.restarted(dates=dates, profile=profile)
        else:
            node.monitor.adopt({f"{profile}/edge"}, dates)

    for dates in (SHIPPED, images(-1000.0, 200.0), images(0.0, 200.0)):
        adopt(dates)
        assert node.watched().suspended, "its oldest image may be older than the alarm"
    adopt(images(0.5, 200.0), "q")
    assert not node.watched().suspended


@pytest.mark.parametrize("restarts", [False, True])
def test_no_certificate_ends_the_alarm_of_a_stream(restarts: bool) -> None:
    node = Node()
    node.suspend("me", "yard")
    later = images(1e6, 1e6)
    if restarts:
        node = node.restarted(dates=later, profile="q")
    else:
        node.monitor.adopt({"q/edge"}, later)
    assert node.watched("me", "yard").suspended
    assert not node.watched("me").suspended


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("first", "whose", "ended"), [(0.5, "yard", True), (0.0, "yard", False), (0.5, "door", False)])
def test_a_certificate_from_later_images_of_a_stream_alone_ends_its_alarm(
    restarts: bool, first: float, whose: str, ended: bool
) -> None:
    node = Node()
    node.suspend("me", "yard")
    dates = Dates(2e9 + first, 2e9 + 200.0, node.watched("me", whose).logs[0].key)
    if restarts:
        node = node.restarted(dates=dates, profile="q")
    else:
        node.monitor.adopt({"q/edge"}, dates)
    assert node.watched("me", "yard").suspended is not ended


def test_a_certificate_from_days_to_come_ends_no_alarm() -> None:
    node = Node(states={NODE: StreamState(carried=True, raised=2e9)})
    later = images(2.0 * CLOCK_SKEW_S, 3.0 * CLOCK_SKEW_S)
    node.monitor.adopt({"p/edge"}, later)
    assert node.watched().suspended, "the images were taken while the clock was wrong"
    node.wall.advance(CLOCK_SKEW_S)
    node.monitor.adopt({"p/edge"}, later)
    assert not node.watched().suspended


def test_an_alarm_before_the_clock_was_set_is_ended_by_no_certificate() -> None:
    node = Node(wall=60.0)
    node.monitor.node.suspend(node.monitor._now, "a test")
    node.wall.advance(2e9)
    node.monitor.adopt({"p/edge"}, images(1e6, 1e6))
    assert node.watched().suspended


def test_a_certificate_never_ends_an_alarm_about_itself_whatever_the_clock_says() -> None:
    mine = images(5000.0, 6000.0)
    node = Node(dates=mine)
    node.monitor.node.suspend(node.monitor._now, "a test")
    for _ in range(2):
        node.monitor.adopt({"p/edge"}, mine)
        assert node.watched().suspended
        node = node.restarted(dates=mine)
    node.monitor.adopt({"p/edge"}, images(6001.0, 6001.0))
    assert not node.watched().suspended


def test_alarms_of_which_nobody_knows_when_they_were_raised_count_as_of_now() -> None:
    node = Node(states={NODE: StreamState(carried=True)})
    node.monitor.adopt({"p/edge"}, images(0.0, 0.0))
    assert node.watched().suspended
    kept = node.rows[NODE]
    assert kept is not None
    assert kept.state.raised == node.wall.now(), "and are written"
    assert "cannot be read" in kept.state.cause
    node.monitor.adopt({"p/edge"}, images(1.0, 1.0))
    assert not node.watched().suspended


def test_a_certificate_made_after_it_ends_the_alarm_for_streams_that_were_forgotten() -> None:
    node = Node(limit=20)
    for number in range(21):
        node.suspend(f"caller {number}", "yard")
    assert node.monitor.node.state.lost
    node.monitor.adopt({"p/edge"}, images(1.0, 1.0))
    assert not node.monitor.node.alarm
    assert node.watched("caller 5", "yard").suspended


def test_a_node_that_has_forgotten_an_alarm_stays_in_alarm() -> None:
    node = Node(limit=20)
    for number in range(20):
        node.suspend(f"caller {number}", "yard")
        for _ in range(1000):
            node.request(0.0, "quiet")
    assert not node.watched("caller 0").suspended
    node.suspend("caller 20", "yard")
    assert node.watched("caller 0").suspended
    for each in (node, node.restarted()):
        for number in range(20_000):
            each.request(0.0, f"other {number % 10}")
        assert each.watched("quite another").suspended
        assert each.monitor.node.state.cause == "more streams are in alarm than can be remembered"


def test_an_alarm_says_why_also_after_a_restart() -> None:
    node = Node()
    for _ in range(10 * WINDOW):
        node.request(0.0, "me", "yard")
    quiet = sum(log.state.audits for log in node.watched("me", "yard").logs[0].logs.values())
    assert quiet > 0
    node.suspend("me", "yard")
    yard = node.watched("me", "yard").logs[0]
    (log,) = yard.logs.values()
    differing = log.state.audits - quiet
    assert yard.state.cause == (
        f"edge differs from the reference stage in {differing} of the last {log.state.audits} audits with a score of "
        "at least 0.5, more often than certified: 2 %"
    )
    assert node.restarted().watched("me", "yard").logs[0].state.cause == yard.state.cause


def test_the_disagreement_at_a_threshold_is_that_of_the_last_audits() -> None:
    log = Log(CLAIMS, 0.5)
    assert log.differing(0.5) == (0.0, 0)
    for number in range(WINDOW):
        log.record(0.9 if number % 2 else 0.2, 1.0)
    assert log.differing(-math.inf) == (WINDOW, WINDOW)
    assert log.differing(0.5) == (WINDOW / 2, WINDOW)
    for _ in range(WINDOW // 2):
        log.record(0.9, 0.0)
    assert log.differing(0.5) == (WINDOW / 4, WINDOW)


@pytest.mark.parametrize(
    ("scores", "differs", "returns"),
    [((0.2, 0.9), (0.0, 0.0), True), ((0.2, 0.9), (0.02, 0.005), True), ((0.2, 0.9), (0.0, 0.16), False),
     ((0.2, 0.9), (0.12, 0.0), False)],
    ids=["agreeing", "well within", "another claim at four times its limit", "the claim that failed"],
)  # fmt: skip
def test_only_traffic_that_keeps_every_claim_lifts_an_alarm(
    scores: Sequence[float], differs: Sequence[float], returns: bool
) -> None:
    for seed in range(5):
        node = Node(seed)
        node.suspend()
        if not returns:  # the lower threshold's claim alone has failed
            assert node.monitor.node.alarm or node.watched().suspended
        found = node.until(
            False,
            15_000,
            lambda number: node.request(differs[number % 2], score=scores[number % 2]),  # noqa: B023
        )
        assert (found < 15_000) is returns


def test_audits_that_wait_are_counted_in_their_order_and_may_be_missing_as_often_as_was_certified() -> None:
    node = Node()
    watched = node.watched()
    dues: list[Due] = []
    while len(dues) < 10:
        due = node.monitor.draw(watched)
        if due is not None:
            dues.append(due)
    log = node.monitor.node
    for due in dues[:0:-1]:
        node.monitor.settle(due, [(CLAIMS, 0.9, 0.0)])
        assert not log.due
    assert watched.monitored(0.05)
    node.clock.advance(LONGEST_WAIT_S + 1)
    assert not watched.monitored(1.0)
    node.monitor.settle(dues[0], None)
    assert list(log.due) == [True] + 9 * [False]
    assert [watched.monitored(share) for share in (0.05, 0.1)] == [False, True]
    assert len(node.monitor.node.state.logs) == 1
    for _ in range(WINDOW):
        log.count(missing=False)
    assert log.missing == 0


def test_waiting_audits_are_bounded_and_those_that_a_restart_loses_are_missing() -> None:
    node = Node()
    settled = 0
    while not settled:
        due = node.monitor.draw(node.watched(f"caller {node.rng.random()}"))
        settled += due is not None and due.settled
    assert len(node.monitor._waiting) == MOST_WAITING
    again = node.restarted()
    assert again.monitor.node.missing == WINDOW
    assert not again.watched().monitored(0.05)


def test_what_the_datacenter_refuses_of_one_caller_is_not_missing_for_others() -> None:
    node = Node()
    for _ in range(1000):
        due = node.monitor.draw(node.watched("mallory"))
        if due is not None:
            node.monitor.settle(due, None, refused=True)
    assert [node.watched(caller).monitored(0.05) for caller in ("mallory", "me")] == [False, True]


def test_a_suspicious_stream_is_audited_more_and_counts_no_more_in_the_nodes_log() -> None:
    node = Node(3)
    alarmed = node.watched("me", "yard").logs[0]
    alarmed.suspicion = math.inf
    counts = {"yard": 0, "server": 0}
    drawn = {"yard": 0, "server": 0}
    for _ in range(20_000):
        for name in counts:
            due = node.monitor.draw(node.watched("me", name))
            if due is not None:
                drawn[name] += 1
                counts[name] += node.monitor.node in due.streams
    assert drawn["yard"] == pytest.approx(MOST_SHARE * 20_000, rel=0.1)
    assert drawn["server"] == counts["server"] == pytest.approx(SHARE * 20_000, rel=0.2)
    assert counts["yard"] == pytest.approx(SHARE * 20_000, rel=0.2)


def test_a_restart_goes_on_where_the_log_was_and_a_state_of_other_claims_keeps_its_alarm() -> None:
    node = Node()
    for _ in range(5000):
        node.request(0.05)
    again = node.restarted()
    for before, after in zip(node.watched().logs, again.watched().logs, strict=True):
        assert before.log(CLAIMS).kept() == after.log(CLAIMS).kept()
    fewer = Claims("p", "edge", CLAIMS.claims[:1], 0.05)
    node.suspend()
    state = node.restarted().monitor.kept(node.watched().logs[0])
    assert Stream(NODE, 0.5, state).log(fewer).alarm


def test_an_alarm_about_no_stage_is_one_of_every_stage_that_counts_while_it_stands() -> None:
    between = Claims("p", "medium at a drop of 0.01", CLAIMS.claims[:1], 0.05)
    stream = Stream(NODE, 0.5, StreamState(carried=True))
    for claims in (CLAIMS, between):
        stream.record(claims, 0.9, 0.0, 0.0)
    while stream.log(CLAIMS).alarm:
        stream.record(CLAIMS, 0.9, 0.0, 0.0)
    assert stream.alarm
    while stream.log(between).alarm:
        stream.record(between, 0.9, 0.0, 0.0)
    assert not stream.alarm

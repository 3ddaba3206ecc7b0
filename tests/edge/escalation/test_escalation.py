"""Deadlines and a datacenter that misbehaves: the edge answers, flagged, and never with a 500."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller
from tests.edge.peer import ANSWER_CLASS, Peer, running_peer
from tests.images import encoded
from tests.waiting import wait_until


@pytest.fixture
def lonely() -> Iterator[ServerProcess]:
    """A node whose datacenter's port is closed."""
    with running_peer() as gone:
        url = gone.url
    with running("edge", "--port", "0", "--backend", "noop", "--datacenter-url", url) as node:
        yield node


def test_unreachable_datacenter_gives_degraded_answers(lonely: ServerProcess) -> None:
    caller = Caller(lonely)
    for query in (
        "quality=best",
        "quality=best&deadline_ms=500",
        "max_accuracy_drop=0.005",
        "quality=best&on_miss=wait",
    ):
        reply = caller.classify(encoded(), query)
        assert reply.status == 200, reply.body
        assert (reply.json["tier"], reply.json["degraded"]) == ("edge", True)
        assert reply.json["accuracy"]["status"] != "certified"
        assert reply.json["accuracy"]["max_drop"] is None
    caller.close()


def test_a_datacenter_that_comes_back_is_found_without_any_escalation(lonely: ServerProcess) -> None:
    caller = Caller(lonely)
    listed = caller.get("/v1/targets").json["datacenter"]["url"]
    assert caller.classify(encoded(), "quality=best").json["degraded"]
    with running_peer(port=int(listed.rpartition(":")[2])):
        until = monotonic() + 30
        while not caller.get("/v1/targets").json["datacenter"]["up"]:
            assert monotonic() < until
            assert not caller.classify(encoded(), "quality=fast").json["escalated"]
        assert caller.classify(encoded(), "quality=best").json["tier"] == "datacenter"
    caller.close()


def test_node_without_datacenter_answers_alone() -> None:
    with running("edge", "--port", "0", "--backend", "noop") as node:
        caller = Caller(node)
        assert not caller.classify(encoded(), "quality=fast").json["degraded"]
        assert caller.classify(encoded(), "quality=best").json["degraded"]
        targets = caller.get("/v1/targets").json
        assert caller.classify(encoded(), f"min_accuracy={targets['maximum_min_accuracy']}").status == 200
        assert caller.classify(encoded(), f"min_accuracy={targets['maximum_min_accuracy'] + 0.001}").status == 422
        assert {entry["escalation"] for entry in targets["targets"]} == {0.0}
        caller.close()


@pytest.mark.parametrize(
    ("status", "code"), [(429, "overloaded"), (500, "internal"), (503, "not_ready"), (504, "deadline_missed")]
)
def test_datacenter_errors_degrade(caller: Caller, peer: Peer, status: int, code: str) -> None:
    peer.status, peer.error_code = status, code
    until = monotonic() + 30
    answers = []
    # After the errors of an earlier case the link is left alone for a moment; then it is asked again.
    asked = len(peer.bodies)
    while len(peer.bodies) == asked and monotonic() < until:
        answers.append(caller.classify(encoded(), "quality=best"))
    assert len(peer.bodies) > asked
    assert {(a.status, a.json["tier"], a.json["degraded"]) for a in answers} == {(200, "edge", True)}


def test_a_malformed_reply_degrades(caller: Caller, peer: Peer) -> None:
    peer.garbage = True
    assert caller.classify(encoded(), "quality=best").json["degraded"]


def wait_for_link(caller: Caller) -> None:
    """Until the node escalates again for callers with a deadline, after misses of earlier tests."""
    wait_until(lambda: caller.classify(encoded(), "quality=best&deadline_ms=20000").json["tier"] == "datacenter")


def test_a_fault_that_the_datacenter_finds_in_the_image_is_reported_to_the_caller(caller: Caller, peer: Peer) -> None:
    wait_for_link(caller)
    peer.status, peer.error_code = 400, "bad_image"
    reply = caller.classify(encoded(), "quality=best")
    assert (reply.status, reply.json["code"]) == (400, "bad_image")


def test_on_miss_fail_says_504(caller: Caller, peer: Peer) -> None:
    wait_for_link(caller)
    peer.delay_s = 20.0
    reply = caller.classify(encoded(), "quality=best&deadline_ms=400&on_miss=fail")
    assert (reply.status, reply.json["code"]) == (504, "deadline_missed")


def test_a_deadline_that_the_round_trip_may_meet_is_escalated_whatever_on_miss(caller: Caller, peer: Peer) -> None:
    wait_for_link(caller)
    for delay_s in (0.0, 0.5) * 4:  # about a quarter of a second on average, and as much more or less
        peer.delay_s = delay_s
        assert caller.classify(encoded(), "quality=best&deadline_ms=20000").json["tier"] == "datacenter"
    peer.delay_s = 0.0
    for on_miss in ("fail", "degrade"):
        tried = caller.classify(encoded(), f"quality=best&deadline_ms=20000&on_miss={on_miss}").json
        assert (tried["tier"], tried["degraded"]) == ("datacenter", False)


def test_on_miss_wait_waits_and_reports_the_missed_deadline(caller: Caller, peer: Peer) -> None:
    wait_for_link(caller)
    peer.delay_s = 0.3
    reply = caller.classify(encoded(), "quality=best&deadline_ms=50&on_miss=wait").json
    assert (reply["tier"], reply["index"], reply["degraded"]) == ("datacenter", ANSWER_CLASS, False)
    assert reply["deadline_met"] is False


def test_uncertain_images_escalate_and_confident_ones_stay(caller: Caller, peer: Peer) -> None:
    """The no-op backend is equally unsure of everything, so only the target decides."""
    wait_for_link(caller)
    assert caller.classify(encoded(), "min_confidence=1").json["reason"] == "low_confidence"
    assert caller.classify(encoded(), "min_confidence=0").json["tier"] == "edge"


@pytest.mark.parametrize(("status", "code"), [(500, "bad_image"), (413, "too_large")])
def test_a_fault_of_the_datacenter_is_not_reported_as_the_callers(
    caller: Caller, peer: Peer, status: int, code: str
) -> None:
    wait_for_link(caller)
    peer.status, peer.error_code = status, code
    assert caller.classify(encoded(), "quality=best").json["degraded"] is True


def test_a_request_that_outlasts_the_drain_is_refused() -> None:
    with (
        running_peer(delay_s=30.0) as slow,
        running(
            "edge", "--port", "0", "--backend", "noop", "--datacenter-url", slow.url, "--drain-timeout-s", "1"
        ) as node,
        ThreadPoolExecutor(1) as pool,
    ):
        caller = Caller(node)
        waiting = pool.submit(caller.classify, encoded(), "quality=best")
        until = monotonic() + 30
        while not slow.bodies:
            assert monotonic() < until
        node.process.terminate()
        reply = waiting.result()
        caller.close()
        assert (reply.status, reply.json["code"]) == (503, "not_ready")
        assert node.process.wait(60) == 0

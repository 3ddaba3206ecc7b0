"""Deadlines choose which answers remain: what says `certified` then loses no more than it states."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from hawkvision.guarantee.answered import (
    LEAST,
    MOST_TARGETS,
    MOST_WINDOWS,
    USED_SHARE,
    WINDOW,
    AnsweredRequests,
    WindowState,
    stated_drop,
)

REQUESTS = 20_000


def certified_losses(max_drop: float, escalated: float, in_vain: Callable[[int], float], callers: int) -> list[float]:
    """The losses of the answers that say `certified`, of a certificate that is as tight as it may be.

    `in_vain` gives the probability that the reply to an escalated image comes too late, by the number of the request.
    """
    rng, answered, losses = random.Random(1), AnsweredRequests(), list[float]()
    loss_at_edge = USED_SHARE * max_drop / (1.0 - escalated)
    for request in range(REQUESTS):
        caller, goes_on = f"caller {request * callers // REQUESTS}", rng.random() < escalated
        missing = goes_on and rng.random() < in_vain(request) / escalated
        if not missing and answered.enough(caller, "drop"):
            losses.append(0.0 if goes_on else loss_at_edge)
        answered.add(caller, "drop", as_routed=not missing)
    return losses


@pytest.mark.parametrize(("max_drop", "escalated"), [(0.02, 0.57), (0.05, 0.38), (0.10, 0.19)])
@pytest.mark.parametrize("callers", [1, 400])
@pytest.mark.parametrize(
    ("in_vain", "least", "most"),
    [
        (lambda _: 0.0, 1.0, 1.0),
        (lambda _: 0.03, 0.9, 1.0),
        (lambda _: 0.08, 0.0, 0.01),
        (lambda _: 1.0, 0.0, 0.01),
        (lambda request: float(request % 4_000 < 200), 0.5, 1.0),
    ],
    ids=["patient", "few missed", "too many missed", "only the edge in time", "outages"],
)
def test_what_says_certified_loses_no_more_than_it_states(
    max_drop: float, escalated: float, callers: int, in_vain: Callable[[int], float], least: float, most: float
) -> None:
    """Without windows these drops are 0.044, 0.077 and 0.117 where only the edge's answers are in time."""
    losses = certified_losses(max_drop, escalated, in_vain, callers)
    assert least <= len(losses) / REQUESTS <= most
    if most > 0.01:
        assert sum(losses) / len(losses) <= 1.03 * stated_drop(USED_SHARE * max_drop), "3 %: which images came"


def late(answered: AnsweredRequests, caller: str, requests: int = LEAST) -> None:
    """A caller to whom nothing was answered as routed."""
    for _ in range(requests):
        answered.add(caller, "fast", as_routed=False)


def test_one_in_twenty_of_the_last_thousand_may_be_missing() -> None:
    answered = AnsweredRequests()
    for request in range(3 * WINDOW):
        answered.add("a", "fast", as_routed=request % 20 != 19)
        assert answered.enough("a", "fast")
    answered.add("a", "fast", as_routed=False)
    assert not answered.enough("a", "fast")
    assert answered.enough("a", "balanced")
    for _ in range(WINDOW):
        answered.add("a", "fast", as_routed=True)
    assert answered.enough("a", "fast")


def test_who_is_late_is_never_forgotten_and_callers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hawkvision.guarantee.answered.MOST_WINDOWS", 50)
    answered = AnsweredRequests()
    late(answered, "bad")
    for number in range(2 * WINDOW):
        answered.add(f"caller {number}", "fast", as_routed=True)
    assert answered.enough("caller 1", "fast"), "the shared window forgets what is a thousand requests old"
    assert not answered.enough("bad", "fast")
    for number in range(60):
        late(answered, f"bad {number}")
    assert len(answered.state) == 50 + 1
    for _ in range(WINDOW):
        answered.add("newcomer", "fast", as_routed=True)
    assert answered.enough("newcomer", "fast"), "by the shared window, for nobody makes room"
    late(answered, "another newcomer", 51)
    assert not answered.enough("newcomer", "fast")
    assert not answered.enough("bad", "fast")


def test_targets_are_bounded_and_those_too_many_are_never_certified() -> None:
    answered = AnsweredRequests()
    for number in range(2 * MOST_TARGETS):
        answered.add("a", str(number), as_routed=True)
        assert answered.enough("a", str(number)) == (number < MOST_TARGETS)


def test_windows_outlive_a_restart() -> None:
    answered = AnsweredRequests()
    late(answered, "bad", 3 * LEAST)
    late(answered, "few", 7)
    kept = msgspec.json.decode(msgspec.json.encode(answered.state), type=dict[str, WindowState])
    again = AnsweredRequests(kept)
    assert again.state == answered.state
    assert [again.enough(caller, "fast") for caller in ("bad", "few", "new")] == [False] * 3


@pytest.mark.parametrize("state", [(-1, "0"), (WINDOW + 1, "0"), (3, "8"), (3, "-1"), (3, "wrong")])
def test_a_state_that_cannot_be_is_refused(state: WindowState) -> None:
    with pytest.raises(ValueError, match=r"state|invalid literal"):
        AnsweredRequests({"a/fast": state})


def test_more_windows_than_there_can_be_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        AnsweredRequests({f"{number}/fast": (0, "0") for number in range(MOST_WINDOWS + 1)})

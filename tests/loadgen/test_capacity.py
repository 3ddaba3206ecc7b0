"""Capacity: the search, what a probe means, and one search against a real server."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.process import ServerProcess
from loadgen.__main__ import main
from loadgen.capacity import Search, judge
from loadgen.record import UNANSWERED, Outcome


def searched(search: Search, capacity: float, hiccup: int = -1) -> int:
    """Search a server that holds up to `capacity`, but for one hiccup; the number of probes."""
    probes = 0
    while (rate := search.next()) is not None:
        search.tell(rate, rate <= capacity and probes != hiccup)
        probes += 1
    return probes


@given(st.floats(0.2, 1e5), st.floats(0.2, 1e4), st.floats(0.01, 0.5), st.integers(-1, 40))
def test_bracket_holds_the_capacity_whatever_hiccups(capacity: float, first: float, width: float, hiccup: int) -> None:
    search = Search(first, width, 1e6, probes_left=200)
    searched(search, capacity, hiccup)
    assert search.low <= capacity < search.high
    assert search.high <= search.low * (1 + width) * (1 + 1e-9) or search.high < 0.2


@given(st.floats(0.2, 1e5), st.integers(1, 20))
def test_search_ends_after_its_probes(capacity: float, most: int) -> None:
    search = Search(8.0, 0.001, 1e6, probes_left=most)
    assert searched(search, capacity) <= most
    assert search.low <= capacity < search.high


def test_no_rate_beyond_the_generators_own_is_tried() -> None:
    search = Search(8.0, 0.05, 100.0, probes_left=50)
    assert searched(search, capacity=1e9) == 5  # 8, 16, 32, 64, 100
    assert (search.low, search.high) == (100.0, math.inf)


def test_rate_counts_as_failed_only_the_second_time() -> None:
    search = Search(8.0, 0.05, 1e6, probes_left=9)
    search.tell(8.0, held=False)
    assert (search.next(), search.high) == (8.0, math.inf)
    search.tell(8.0, held=False)
    assert (search.next(), search.high) == (4.0, 8.0)


def outcomes(latency_ms: float, status: int, n: int, right: bool | None = None) -> list[Outcome]:
    return [Outcome(0.0, 0.001, latency_ms / 1e3, 0, 0, status, right=right)] * n


def test_probe_holds_when_ninety_nine_of_a_hundred_are_in_time() -> None:
    assert judge(1.0, outcomes(10, 200, 995) + outcomes(500, 200, 5), 20.0, None).held
    assert not judge(1.0, outcomes(10, 200, 980) + outcomes(500, 200, 20), 20.0, None).held


def test_what_was_not_answered_took_for_ever() -> None:
    probe = judge(1.0, outcomes(10, 200, 98) + outcomes(1, UNANSWERED, 2), 20.0, None)
    assert (probe.held, probe.p99_ms) == (False, None)


def test_accuracy_is_of_all_requests() -> None:
    mixed = outcomes(1, 200, 90, right=True) + outcomes(1, 200, 9, right=False) + outcomes(1, 429, 1)
    assert judge(1.0, mixed, 20.0, 0.9).accuracy == 0.9
    assert not judge(1.0, mixed, 20.0, 0.91).held
    assert not judge(1.0, outcomes(1, 200, 100), 20.0, 0.5).held


def test_no_outcomes_hold_nothing() -> None:
    assert not judge(1.0, [], 20.0, None).held


def test_command_finds_a_rate_and_writes_its_probes(
    null: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "capacity.json"
    words = [
        "find-capacity", "--url", null.url, "--p99-ms", "5000", "--from-rate", "200", "--probe-requests", "100",
        "--probe-s", "0.5", "--max-probes", "1", "--no-noise", "--json", str(report),
    ]  # fmt: skip
    assert main(words) == 0
    assert "capacity: 200 requests/s at P99 ≤ 5000 ms, and perhaps more" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert (found["low"], found["high"], len(found["probes"]), found["probes"][0]["held"]) == (200.0, None, 1, True)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--p99-ms", "0"), ("--from-rate", "0"), ("--min-accuracy", "2"), ("--probe-requests", "9"), ("--max-probes", "0"),
     ("--precision", "nan"), ("--probe-s", "-1")],
)  # fmt: skip
def test_impossible_options_are_named(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-capacity", "--url", "http://127.0.0.1:1", "--p99-ms", "10", option, value]) == 1
    assert option in capsys.readouterr().err

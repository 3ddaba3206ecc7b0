"""The page of a comparison of policies: its headline, its claims and its bytes."""

from __future__ import annotations

import re

import msgspec
import pytest

from loadgen.reports.page import page
from tests.bench.policies.goal_checks import PolicyCell, PolicyResult, judge
from tests.bench.policies.report_goals import goals_page, headline_of
from tests.bench.policies.test_goal_checks import result
from tests.loadgen.reports.test_page import HOSTILE, cells_of, series_of, short, tree


@pytest.fixture(scope="module")
def judged() -> str:
    return judged_page(
        result("hawkvision", 50.0, wrong=2, uplink=400_000),
        result("infaas", 500.0, uplink=2_000_000),
        result("all-edge", 20.0, wrong=40),
    )


def cell_of(*results: PolicyResult) -> PolicyCell:
    return PolicyCell("a link", 20.0, results={each.run.name: each for each in results})


def judged_page(*results: PolicyResult) -> str:
    return goals_page([each.run for each in results], *judge(cell_of(*results)))


def test_comparison_of_policies_begins_with_its_claims(judged: str) -> None:
    claim = cells_of(judged, "right within the deadline, ours less theirs")
    assert claim["claim"] == "right within the deadline, ours less theirshawkvision"
    assert (claim["against"], claim["goal"], claim["met"]) == ("infaas", "> 0", "✓ met")
    assert claim["value"].startswith("+99.0%")
    assert claim["measured"] == "99.0% and 0.0%"
    latency = cells_of(judged, "P99, theirs over ours")
    assert re.fullmatch(r"9\.65 \?\d\.\d+ to \d+\.\d+", latency["value"])
    assert latency["met"] == "? cannot be said", "ours is the less accurate"


def test_headline_of_a_comparison_is_what_is_right_in_time(judged: str) -> None:
    parsed = tree(judged)
    assert parsed.findtext(".//h1") == (
        "hawkvision: 99.0 % right within 100 ms, more often than infaas and all-edge; no accuracy target shown to be "
        "missed"
    )
    assert parsed.findtext(".//p[@class='lead']") == (
        "200 requests at 20 a second on poisson:8; P50 51 ms, not at equal accuracy with infaas and all-edge; "
        "P99 52 ms, not at equal accuracy with infaas and all-edge; right and in time: 99.0 %, against 80.0 % "
        "(all-edge) and 0.0 % (infaas); 2.0 kB to the datacenter per request, against 10.0 (infaas) and 0.0 "
        "(all-edge); 3 of 7 claims met, 4 cannot be said."
    )


def test_headline_names_those_at_equal_accuracy_alone() -> None:
    results = [result("hawkvision", 50.0, wrong=2), result("static", 500.0), result("infaas", 60.0, wrong=2)]
    _, claims = judge(cell_of(*results))
    claim, lead = headline_of(claims)([series_of(each.run) for each in results], ())
    assert claim.startswith(
        "hawkvision: 99.0 % right within 100 ms, more often than static, no difference shown to infaas"
    )
    assert "P99 52 ms, at equal accuracy faster than infaas (1.2x), not at equal accuracy with static" in lead


def test_bytes_of_a_comparison_are_those_to_the_datacenter(judged: str) -> None:
    plain = page([short("hawkvision"), short("infaas", slow=3, honest=False)])
    assert cells_of(judged, "infaas", 1)["kB to the datacenter"] == "10.0"
    assert "right and in time 99.0%, 2.0 kB to the datacenter per request" in judged
    assert "KiB sent" in cells_of(plain, "infaas")
    assert "KiB sent per request" in plain


def test_comparison_that_claims_nothing_has_bytes_to_the_datacenter_all_the_same() -> None:
    results = [result("static", 50.0, uplink=400_000), result("infaas", 50.0, uplink=2_000_000)]
    text = judged_page(*results)
    lead = tree(text).findtext(".//p[@class='lead']") or ""
    assert "2.0 kB to the datacenter per request, against 10.0 (infaas)" in lead
    assert "<h2>Claims" not in text


def test_claims_are_no_markup() -> None:
    results = [result("hawkvision", 50.0), result("infaas", 500.0)]
    rows, claims = judge(cell_of(*results))
    odd = [
        msgspec.structs.replace(claim, what=HOSTILE, against=HOSTILE, goal=HOSTILE, note=HOSTILE) for claim in claims
    ]
    text = goals_page([each.run for each in results], rows, odd)
    assert "<img" not in text
    assert tree(text).find(".//h1") is not None


def test_page_of_a_comparison_parses_strictly(judged: str) -> None:
    assert tree(judged).find(".//h1") is not None

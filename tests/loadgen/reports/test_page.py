"""The page: it stands by itself, believes no name, says what was measured, and stays small."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element

import html5lib
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from hawkvision.reports.svg import Kind, Scale, linear_scale, log_scale, path, ticks
from loadgen.analysis.compare import compare_all
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import summarise
from loadgen.reports.charts import ChartSeries
from loadgen.reports.page import page, write_html
from loadgen.reports.page_text import headline, milliseconds, warnings_of
from loadgen.reports.timeline import link_words, timeline, timelines, windows
from loadgen.workload.record import LinkSample, NoiseFloor, Run, TargetClass
from tests.loadgen.runs import FIVE, answer, drive, origin, plausible, refusal, run_of

HOSTILE = "<img src=x onerror=alert(1)>&\"'"


def series_of(run: Run) -> ChartSeries:
    return ChartSeries(run, counted_of(run), summarise(run))


def short(name: str, *, slow: float = 1.0, honest: bool = True) -> Run:
    return plausible(name, duration_s=15, slow=slow, honest=honest)


@pytest.fixture(scope="module")
def alone() -> str:
    return page([short("hawkvision")])


@pytest.fixture(scope="module")
def three() -> str:
    return page([short("hawkvision"), short("infaas", slow=3, honest=False), short("static", slow=2, honest=False)])


@pytest.fixture(params=["alone", "three"])
def either(request: pytest.FixtureRequest) -> str:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, str)
    return found


def tree(text: str) -> Element:
    parsed = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)
    assert isinstance(parsed, Element)
    return parsed


def test_page_parses_strictly(either: str) -> None:
    assert tree(either).find(".//h1") is not None


def test_page_fetches_nothing(either: str) -> None:
    for element in tree(either).iter():
        assert element.tag not in ("link", "img", "iframe", "object", "base", "form")
        assert not {"src", "href", "srcset", "action"} & set(element.attrib)
    assert not re.search(r"url\(|@import|https?://(?!127\.0\.0\.1)", either)


def test_page_allows_its_own_script_alone(either: str) -> None:
    assert "default-src 'none'" in either
    assert len(re.findall(r"script-src 'sha256-[\w+/=]{44}'", either)) == 1
    assert not re.search(r"\son\w+=", either)


def test_ids_are_unique_and_every_chart_is_named(either: str) -> None:
    parsed = tree(either)
    ids = [element.attrib["id"] for element in parsed.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    charts = [element for element in parsed.iter() if element.attrib.get("role") == "img"]
    assert len(charts) >= 5
    assert all(set(chart.attrib["aria-labelledby"].split()) <= set(ids) for chart in charts)


def frontier(text: str) -> list[str]:
    """What each point of the chart says of itself."""
    chart = tree(text).find(".//*[@aria-labelledby='frontier-t frontier-d']")
    titles = [] if chart is None else [each.text or "" for each in chart.iter() if each.tag.endswith("title")]
    return titles[1:]


def test_one_run_has_a_point_per_target_in_the_frontier() -> None:
    targets = (TargetClass({"quality": "fast"}, 0.5), TargetClass({"max_accuracy_drop": "0.01"}, 0.5))
    outcomes = [
        answer(k / 10, 80 if k % 2 else 20, target=k % 2, right=k % 10 != 0, image=k, sent_bytes=1024 * (1 + k % 2))
        for k in range(40)
    ]
    run = run_of(outcomes, targets=targets)
    assert frontier(page([run])) == [
        "quality=fast: P99 20 ms, right and in time 80.0%, 1.0 KiB sent per request",
        "max_accuracy_drop=0.01: P99 80 ms, right and in time 100.0%, 2.0 KiB sent per request",
    ]


def test_frontier_of_several_runs_has_a_point_per_run(three: str) -> None:
    assert [said.split(":")[0] for said in frontier(three)] == ["hawkvision", "infaas", "static"]


def labels(text: str, chart: str) -> list[str]:
    """The texts in a chart of the page."""
    found = tree(text).find(f".//*[@aria-labelledby='{chart}-t {chart}-d']")
    assert found is not None
    return [each.text or "" for each in found.iter() if each.tag.endswith("text")]


def test_targets_are_told_apart_in_charts_whether_their_drops_were_measured_or_not() -> None:
    asked = {"max_accuracy_drop": ("0.01", "0.02"), "min_accuracy": ("0.8",), "min_confidence": ("0.123456789",)}
    targets = tuple(TargetClass({field: value}, 0.25) for field, values in asked.items() for value in values)
    outcomes = [answer(k / 10, 20, target=k % 4, right=k % 9 != 0, image=k) for k in range(80)]
    bare, measured = (
        run_of(outcomes, name=name, targets=targets, reference=reference)
        for name, reference in (("bare", None), ("measured", dict.fromkeys(range(80), True)))
    )
    wanted = ["give up ≤ 1 pt", "give up ≤ 2 pt", "accuracy ≥ 80 %", "min_confidence=0.12…"]
    for shown in (labels(page([bare, measured]), "drops"), labels(page([measured]), "drops")):
        assert [label for label in shown if label in wanted] == wanted
    assert [label for label in labels(page([bare]), "frontier") if label in wanted] == wanted[:3]


def test_nothing_to_put_side_by_side_has_no_frontier() -> None:
    assert frontier(page([run_of([answer(k / 10, 10) for k in range(30)])])) == []
    unlabelled = [answer(k / 10, 10, target=k % 5, right=None) for k in range(30)]
    assert frontier(page([run_of(unlabelled, targets=FIVE, labelled=False)])) == []


def test_curves_differ_by_more_than_colour(three: str) -> None:
    chart = three[three.index('aria-labelledby="latency-t') :]
    dashes = re.findall(r'class="line run r(\d)[^"]*"(?: stroke-dasharray="([^"]+)")?', chart[: chart.index("</svg>")])
    assert len({dash for _, dash in dashes}) == len(dashes) == 3


def test_nothing_from_outside_is_markup() -> None:
    targets = (TargetClass({"quality": HOSTILE}, 1.0),)
    links = (LinkSample(0.0, HOSTILE, 5.0, 1.0, 0.1), LinkSample(1.0, HOSTILE, 5.0, 1.0, 0.1, up=False))
    run = run_of([answer(k / 10, 10, image=k) for k in range(30)] + [refusal(2.5, 1, 500, HOSTILE)], name=HOSTILE,
                 targets=targets, links=links, made=origin(command=HOSTILE), schedule=HOSTILE)  # fmt: skip
    run = msgspec.structs.replace(
        run, url=HOSTILE, data=HOSTILE, protocol=HOSTILE, reference=dict.fromkeys(range(30), True)
    )
    for text in (page([run]), page([run, run])):
        assert "<img" not in text
        assert all(not any(key.startswith("on") for key in element.attrib) for element in tree(text).iter())
        assert "&lt;img src=x" in text


def test_page_of_many_requests_stays_small() -> None:
    many = [answer(k / 400, 5 + k % 97, image=k) for k in range(8_000)]
    links = tuple(LinkSample(k / 100, "edge-dc", 1.0 + k % 7, 10.0, 0.01 * (k % 3)) for k in range(2_000))
    assert len(page([run_of(many, duration_s=20, links=links)])) < 120_000


def test_odd_runs_have_pages() -> None:
    nothing_came = run_of([refusal(1.0, 3), refusal(2.0, 3)])
    one_request = run_of([answer(1.0, 5)], deadline_ms=None, labelled=False)
    for run in (nothing_came, one_request):
        assert tree(page([run])).find(".//h1") is not None
    assert tree(page([nothing_came, one_request])).find(".//h1") is not None


@pytest.mark.parametrize("n", [0, 13])
def test_too_few_or_too_many_runs_are_refused(n: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 12 runs, got {n}"):
        page([short("x")] * n)


def test_page_is_written_whole(tmp_path: Path) -> None:
    run = short("hawkvision")
    write_html([run], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page([run])


def test_headline_of_one_run_is_made_of_its_numbers() -> None:
    outcomes = [answer(k / 100, 50 if k % 10 else 150, right=k % 4 != 0, image=k) for k in range(1_000)]
    claim, lead = headline([series_of(run_of(outcomes, name="mine", duration_s=10))], ())
    assert claim == "mine: 10.0 % of the requests miss their deadline of 100 ms, 70.0 % right and in time"
    assert lead.startswith("1,000 requests at 100 a second on poisson:8: half of all answered within 50 ms, P99 150 ms")


def test_percentiles_that_are_lower_bounds_have_arrows_and_the_page_says_what_they_mean() -> None:
    """Of 100 requests two were not answered: P50 and P90 are known, P99 and P99.9 are at least the deadline."""
    answered = [answer(k / 10, 10 + k % 50, image=k) for k in range(98)]
    failed = [refusal(9.8 + k / 10, 1, 0, "unreachable", image=98 + k) for k in range(2)]
    with_failures, without = page([run_of(answered + failed)]), page([run_of(answered)])
    chart = tree(with_failures).find(".//*[@aria-labelledby='percentiles-t percentiles-d']")
    assert chart is not None
    assert sum("onwards" in each.attrib.get("class", "") for each in chart.iter()) == 2
    assert "Arrow: at least so much" in with_failures
    assert not any("onwards" in each.attrib.get("class", "") for each in tree(without).iter())
    assert "Arrow:" not in without


def test_page_names_the_link_that_a_run_was_behind() -> None:
    run = msgspec.structs.replace(short("mine"), link="lte")
    assert " a second on poisson:8 behind lte: half" in headline([series_of(run)], ())[1]
    assert '<p class="kicker">HawkVision load test · poisson:8 behind lte ·' in page([run])


@pytest.mark.parametrize("deadline_ms", [None, 100.0])
def test_headline_of_a_run_that_was_mostly_not_answered_begins_with_that(deadline_ms: float | None) -> None:
    outcomes = [answer(k / 10, 30) if k < 40 else refusal(k / 10, 1, 0, "unreachable") for k in range(100)]
    claim, lead = headline([series_of(run_of(outcomes, name="killed", deadline_ms=deadline_ms))], ())
    assert claim.startswith("killed: 60.0 % got no answer (unreachable), 40.0 % right")
    assert "half of all answered" not in lead
    assert lead.endswith("60 not answered (60 unreachable).")


def test_headline_of_several_runs_says_which_are_slower() -> None:
    runs = [
        run_of([answer(k / 10, factor * (10 + k % 50), image=k) for k in range(400)], name=name, duration_s=40)
        for name, factor in (("ours", 1), ("slow", 4), ("quick", 0.5), ("twin", 1))
    ]
    claim, _ = headline([series_of(run) for run in runs], compare_all(runs))
    assert claim == ("ours: P99 59 ms, faster than slow (4.0x); slower than quick (2.0x); no difference shown to twin")


def test_headline_names_runs_whose_failures_leave_it_open_which_is_faster() -> None:
    answers = [answer(k / 10, 10 + k % 50, image=k) for k in range(400)]
    failed = [refusal(each.due_s, 1, 0, "unreachable", image=each.image) for each in answers]
    runs = [
        run_of(outcomes, name=name, duration_s=40, deadline_ms=None)
        for name, outcomes in (
            ("ours", answers), ("killed", answers[:100] + failed[100:]), ("dead", failed), ("twin", answers)
        )
    ]  # fmt: skip
    assert headline([series_of(run) for run in runs], compare_all(runs))[0] == (
        "ours: P99 59 ms, no difference shown to twin; cannot be compared with killed (75.0 % got no answer) and dead "
        "(100.0 % got no answer)"
    )


def test_silently_missed_target_is_in_the_headline() -> None:
    outcomes = [answer(k / 100, 10, right=k % 4 != 0, image=k) for k in range(400)]
    run = run_of(outcomes, targets=(TargetClass({"min_accuracy": "0.9"}, 1.0),))
    assert headline([series_of(run)], ())[0].endswith("; 1 of 1 accuracy targets missed silently")


def cells_of(text: str, name: str, number: int = 0) -> dict[str, str]:
    """A row of one of the page's tables, by column."""
    table = tree(text).findall(".//table")[number]
    columns = ["".join(cell.itertext()) for cell in table.findall("./thead/tr/th")]
    rows = [["".join(cell.itertext()) for cell in row] for row in table.findall("./tbody/tr")]
    return dict(zip(columns, next(row for row in rows if name in row[0]), strict=True))


def test_page_says_what_share_was_shed_and_how_long_the_tail_is() -> None:
    outcomes = [refusal(k / 10, 1) if k % 4 == 0 else answer(k / 10, 50) for k in range(40)]
    shedding, other = run_of(outcomes, name="shedding"), run_of([answer(k / 10, 10 + k) for k in range(40)], name="b")
    (cards,) = ("".join(each.itertext()) for each in tree(page([shedding])).findall(".//dl[@class='cards']"))
    assert "P99.9 latency≥ 100 ms ?" in cards
    assert "not answered1010 shed, 25.0 % of all" in cards
    row = cells_of(page([other, shedding]), "shedding")
    assert row["shed"] == "25.0 %10"
    assert row["P99.9"].startswith("≥ 100 ms ?")


def test_page_without_claims_says_nothing_of_them(alone: str, three: str) -> None:
    for text in (alone, three):
        assert "<h2>Claims" not in text
        assert "to the datacenter" not in text
        assert "from callers to the edge" not in text


def test_doubts_about_a_run_are_said_first() -> None:
    outcomes = [msgspec.structs.replace(answer(k / 10, 50), sent_s=k / 10 + 0.02) for k in range(50)]
    run = run_of(outcomes, noise=NoiseFloor(9.0, 20.0, 5.0), interrupted=True, labelled=False)
    made = msgspec.structs.replace(origin(), load_before=1.9)
    run = msgspec.structs.replace(run, steady=False, origin=made, stolen=0.03, slowed=0.12)
    said = " ".join(warnings_of([series_of(run)], ()))
    for word in ("Interrupted", "Not steady", "50 requests; reached on", "load 1.9", "by 20 ms or more",
                 "part of P50 is", "part of P99 is", "5 requests a second", "no labels",
                 "partly the host's (3.0 % of what was wanted)",
                 "partly the host's (by 12.0 % on average)"):  # fmt: skip
        assert word in said


def test_page_says_in_how_many_rounds_a_run_was_not_steady() -> None:
    run = run_of([answer(k / 10, 50 + k % 49) for k in range(50)])
    odd = msgspec.structs.replace(run, steady=False, rounds_steady=[True, False, None])
    assert "Not steady; the second half does not look like the first (in 1 of 3 rounds)." in warnings_of(
        [series_of(odd)], ()
    )
    assert "<dt>steady</dt><dd>no, in 1 of 3 rounds</dd>" in page([odd])
    unknown = msgspec.structs.replace(odd, steady=None, rounds_steady=[True, None])
    assert "<dt>steady</dt><dd>not tested, in 1 of 2 rounds</dd>" in page([unknown])


def test_doubt_that_several_runs_share_is_said_once() -> None:
    quick, slow = [answer(k / 10, 50 + k % 49) for k in range(50)], [answer(k / 10, 50) for k in range(999)]
    runs = [series_of(run_of(outcomes, name=name)) for name, outcomes in (("a", quick), ("b", quick), ("c", slow))]
    doubt = "Too short for its P99, whose interval is probably too narrow"
    assert warnings_of(runs[:2], ()) == [f"{doubt} (50 requests; reached once)."]
    assert warnings_of(runs[1:], ()) == [
        f"{doubt}: b (50 requests; reached once) and c (999 requests; reached on 999 separate occasions)."
    ]


def test_windows_see_when_requests_failed() -> None:
    outcomes = [refusal(k / 10, 1) if 300 <= k < 400 else answer(k / 10, 10) for k in range(600)]
    seen = windows(series_of(run_of(outcomes, duration_s=60)))
    during = (seen.at_s > 32) & (seen.at_s < 38)
    assert seen.unanswered[during].min() == 1.0
    assert seen.unanswered[(seen.at_s < 28) | (seen.at_s > 42)].max() == 0.0


def lines(chart: str) -> list[list[float]]:
    """How far down each point of each line of a chart is."""
    return [
        [float(point.split()[1]) for point in re.findall(r"[\d.]+ [\d.]+", drawn)]
        for drawn in re.findall(r'<path d="([^"]+)"', chart)
    ]


def test_server_that_dies_does_not_get_faster_over_time() -> None:
    outcomes = [answer(k / 10, 30) if k < 300 else refusal(k / 10, 1, 0, "unreachable") for k in range(600)]
    killed = series_of(run_of(outcomes, duration_s=60, deadline_ms=None))
    for chart in (timeline(killed, 1080.0, "t"), timelines([killed, killed], 1080.0, "t")):
        for line in lines(chart)[:2]:
            assert (line[-1], min(line)) == (30.0, 30.0), "at the upper edge"
            assert line[0] > 30.0


def test_link_is_described_by_its_extremes() -> None:
    samples = [one for one in drive(60.0) if one.link == "edge-dc"]
    rates = [one.rate_mbit_s for one in samples if one.up and one.rate_mbit_s is not None]
    assert link_words("edge-dc", samples, 60.0).startswith(f"edge-dc: {min(rates):g}–{max(rates):g} Mbit/s, loss up to")
    assert "down 2 s" in link_words(
        "edge-dc", [LinkSample(0, "l", None, 1, 0, up=False), LinkSample(2, "l", None, 1, 0)], 9.0
    )
    assert link_words("l", [LinkSample(0, "l", None, 0, 0)], 9.0) == "l: unlimited"


POSITIVE = st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=8)


@given(POSITIVE)
def test_log_scale_shows_every_value_and_few_ticks(values: list[float]) -> None:
    scale = log_scale(values, 0.0, 100.0)
    assert all(0 < scale.at(value) < 100 for value in values)
    assert 1 <= len(ticks(scale)) <= 12


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_linear_scale_shows_every_value_and_few_ticks(values: list[float]) -> None:
    scale = linear_scale(values, 100.0, 0.0)
    assert all(0 <= scale.at(value) <= 100 for value in values)
    assert 1 <= len(ticks(scale)) <= 7


@pytest.mark.parametrize("kind", ["linear", "log", "tail"])
def test_values_beyond_a_scale_stay_in_the_chart(kind: Kind) -> None:
    scale = Scale(0.1, 0.9, 10.0, 20.0, kind)
    assert (scale.at(-5.0), scale.at(1.0)) == (10.0, 20.0)


def test_line_breaks_where_nothing_is_known() -> None:
    assert 'd="M0 0L1 1M3 3"' in path([0, 1, 2, 3], np.array([0, 1, np.nan, 3]), "run")


def test_times_have_three_digits_and_a_unit() -> None:
    assert [milliseconds(ms) for ms in (0.1234, 8.43, 104.4, 1_354)] == ["0.123 ms", "8.43 ms", "104 ms", "1.35 s"]

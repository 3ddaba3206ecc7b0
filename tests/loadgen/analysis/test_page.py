"""The page of load tests: it stands by itself, believes no name, shows what was measured, and stays small."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

import html5lib
import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from loadgen.analysis.compare import compare_all
from loadgen.analysis.page import MeasuredRun, doubts_of, page, timeline, windows
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import summarise
from loadgen.workload.record import LinkSample, NoiseFloor, Run, TargetClass
from tests.hawkvision.report.test_charts import assert_legible
from tests.loadgen.runs import FIVE, answer, origin, plausible, refusal, run_of

HOSTILE = "<img src=x onerror=alert(1)>&\"'"


def measured(run: Run) -> MeasuredRun:
    return MeasuredRun(run, counted_of(run), summarise(run))


def short(name: str, *, slow: float = 1.0, honest: bool = True) -> Run:
    return plausible(name, slow=slow, honest=honest)


@pytest.fixture(scope="module")
def three() -> str:
    return page([short("hawkvision"), short("infaas", slow=3, honest=False), short("static", slow=2, honest=False)])


@pytest.fixture(scope="module")
def alone() -> str:
    return page([short("hawkvision")])


def tree(text: str) -> Element:
    parsed = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)
    assert isinstance(parsed, Element)
    return parsed


@pytest.mark.parametrize("name", ["alone", "three"])
def test_page_is_strict_loads_nothing_and_its_charts_are_named_and_legible(
    name: str, request: pytest.FixtureRequest
) -> None:
    text = request.getfixturevalue(name)
    for element in tree(text).iter():
        assert element.tag not in ("link", "img", "iframe", "object", "base", "form", "script")
        assert not {"src", "href", "srcset", "action"} & set(element.attrib)
    assert not re.search(r"url\(|@import|https?://(?!127\.0\.0\.1)|\son\w+=", text)
    charts = re.findall(r"<svg.*?</svg>", text)
    assert len(charts) >= 5
    for chart in charts:
        assert re.search(r'role="img" aria-label="\w', chart)
        assert_legible(chart)


def texts(text: str, chart: str) -> list[str]:
    """The texts of a chart of the page; none if it is not there."""
    found = re.search(rf'<svg[^>]*aria-label="{chart}".*?</svg>', text)
    return [] if found is None else re.findall(r"<text[^>]*>([^<]*)</text>", found[0])


def test_accuracy_is_shown_against_latency_per_run_or_per_target_of_one(alone: str, three: str) -> None:
    assert {"hawkvision", "infaas", "static"} <= set(texts(three, "Accuracy against latency"))
    assert {"give up ≤ 1 pt", "quality=fast"} <= set(texts(alone, "Accuracy against latency"))
    assert texts(page([run_of([answer(k / 10, 10) for k in range(30)])]), "Accuracy against latency") == []
    unlabelled = [answer(k / 10, 10, target=k % 5, right=None) for k in range(30)]
    assert texts(page([run_of(unlabelled, targets=FIVE, labelled=False)]), "Accuracy against latency") == []


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
    for runs in ([nothing_came], [one_request], [nothing_came, one_request]):
        assert tree(page(runs)).find(".//h1") is not None


@pytest.mark.parametrize("n", [0, 13])
def test_too_few_or_too_many_runs_are_refused(n: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 12 runs, got {n}"):
        page([short("x")] * n)


def test_percentiles_that_are_lower_bounds_have_arrows() -> None:
    """Of 100 requests two were not answered, so the P99 is at least the deadline."""
    answered = [answer(k / 10, 10 + k % 50, image=k) for k in range(98)]
    failed = [refusal(9.8 + k / 10, 1, 0, "unreachable", image=98 + k) for k in range(2)]
    one, other = run_of(answered, name="one"), run_of(answered + failed, name="other")
    assert page([one, other]).count('class="line at-least') == 1
    assert 'class="line at-least' not in page([one, one])


def cells_of(text: str, name: str, number: int = 0) -> dict[str, str]:
    """A row of one of the page's tables, by column."""
    table = tree(text).findall(".//table")[number]
    columns = ["".join(cell.itertext()) for cell in table.findall("./thead/tr/th")]
    rows = [["".join(cell.itertext()) for cell in row] for row in table.findall("./tbody/tr")]
    return dict(zip(columns, next(row for row in rows if name in row[0]), strict=True))


def test_page_shows_what_share_was_shed_and_how_long_the_tail_is() -> None:
    outcomes = [refusal(k / 10, 1) if k % 4 == 0 else answer(k / 10, 50) for k in range(40)]
    shedding, other = run_of(outcomes, name="shedding"), run_of([answer(k / 10, 10 + k) for k in range(40)], name="b")
    (cards,) = ("".join(each.itertext()) for each in tree(page([shedding])).findall(".//dl[@class='cards']"))
    assert "P99.9 latency≥ 100 ms ?" in cards
    assert "not answered1010 shed, 25.0 %" in cards
    row = cells_of(page([other, shedding]), "shedding")
    assert row["shed"] == "25.0 %10"
    assert row["P99.9"].startswith("≥ 100 ms ?")


def test_doubts_about_runs_come_first() -> None:
    outcomes = [msgspec.structs.replace(answer(k / 10, 50), sent_s=k / 10 + 0.02) for k in range(50)]
    run = run_of(outcomes, noise=NoiseFloor(9.0, 20.0, 5.0), interrupted=True, labelled=False)
    made = msgspec.structs.replace(origin(), load_before=1.9)
    run = msgspec.structs.replace(run, steady=False, origin=made, stolen=0.03, link="lte")
    other = run_of([answer(k / 10, 50) for k in range(999)], name="other", deadline_ms=None)
    found = " ".join(doubts_of([measured(run), measured(other)], compare_all([run, other])))
    for words in ("interrupted", "not steady", "too short for its P99: 50 requests", "load 1.9",
                  "by 20 ms or more", "of P50 are", "of P99 are", "5 requests a second", "no labels",
                  "held back 3.0 % of the processor time", "not the same requests", "behind no link",
                  "different deadlines"):  # fmt: skip
        assert words in found
    assert doubts_of([measured(run_of([answer(k / 10, 50) for k in range(2_000)]))], ()) == []


def test_windows_contain_when_requests_failed() -> None:
    outcomes = [refusal(k / 10, 1) if 300 <= k < 400 else answer(k / 10, 10) for k in range(600)]
    at, _, _, _, unanswered, _ = windows(measured(run_of(outcomes, duration_s=60)))
    assert unanswered[(at > 32) & (at < 38)].min() == 1.0
    assert unanswered[(at < 28) | (at > 42)].max() == 0.0


def test_server_that_dies_does_not_get_faster_over_time() -> None:
    outcomes = [answer(k / 10, 30) if k < 300 else refusal(k / 10, 1, 0, "unreachable") for k in range(600)]
    killed = measured(run_of(outcomes, duration_s=60, deadline_ms=None))
    for chart in (timeline([killed]), timeline([killed, killed])):
        lines = [each for each in re.findall(r'<path d="([^"]+)"', chart) if each.count("L") > 10][:2]
        for line in lines:
            heights = [float(point.split()[1]) for point in re.findall(r"[\d.]+ [\d.]+", line)]
            assert heights[-1] == min(heights) < heights[0], "at the upper edge"

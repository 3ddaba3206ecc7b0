"""Charts cut no text off, draw no text over another, and keep what lies beyond an axis at its end."""

from __future__ import annotations

import itertools
import math
from xml.etree.ElementTree import Element, fromstring

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hawkvision.report.charts import LETTER, Axis, Chart, Kind, text_width
from hawkvision.report.html import cell, page, percent, table, tag


def texts(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Each text with its box, as wide as `text_width` reckons."""
    found = []
    for each in fromstring(svg).iter("text"):
        content, x, y = each.text or "", float(each.attrib["x"]), float(each.attrib["y"])
        width = text_width(content)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[each.attrib["text-anchor"]]
        found.append((content, left, y - 0.8 * LETTER, left + width, y + 0.2 * LETTER))
    return found


def assert_legible(svg: str) -> None:
    _, _, width, height = map(float, fromstring(svg).attrib["viewBox"].split())
    boxes = texts(svg)
    for content, left, top, right, bottom in boxes:
        assert left >= -0.1 and top >= -0.1 and right <= width + 0.1 and bottom <= height + 0.1, content  # noqa: PT018
    for (one, *first), (other, *second) in itertools.combinations(boxes, 2):
        apart = first[0] >= second[2] or second[0] >= first[2] or first[1] >= second[3] or second[1] >= first[3]
        assert apart, f"{one!r} lies over {other!r}"


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=40)
FLOATS = st.floats(1e-3, 1e7)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(NAMES, FLOATS, FLOATS), min_size=1, max_size=8), st.sampled_from(["linear", "log"]), NAMES)
@example([("a", 30_000.0, 1.0), ("b", 1.0, 1.0), ("hawkvision-datagram", 1.0, 1.0)], "log", "latency " * 12)
@example([(f"static@{k}", 1.0, 1.0) for k in range(12)], "linear", "right and in time")
def test_no_text_is_cut_off_or_lies_over_another(points: list[tuple[str, float, float]], kind: Kind, name: str) -> None:
    x = Axis(name, [x for _, x, _ in points], kind, "ms")
    chart = Chart("", x, Axis(name, [y for _, _, y in points], kind), series=[label for label, *_ in points])
    chart.limit("deadline", x=points[0][1])
    chart.limit("target", y=points[0][2])
    for place, (label, at_x, at_y) in enumerate(points):
        chart.point(place, at_x, at_y, label=label)
    assert_legible(chart.svg())


@given(st.lists(NAMES, min_size=1, max_size=8), st.integers(1, 6))
def test_rows_have_room_for_their_names(rows: list[str], series: int) -> None:
    names = [f"run {k}" for k in range(series)]
    assert_legible(
        Chart("", Axis("points", [-3, 30]), Axis("", kind="rows", rows=rows), series=names, height=None).svg()
    )


def test_label_that_finds_no_place_is_left_to_the_pointer() -> None:
    chart = Chart("", Axis("x", [0, 1]), Axis("y", [0, 1]))
    for place in range(60):
        chart.point(place, 0.5, 0.5, f"point {place}", label=f"label {place}")
    svg = chart.svg()
    assert_legible(svg)
    assert "label 0" in svg
    assert "label 59" not in svg
    assert "<title>point 59</title>" in svg


@pytest.mark.parametrize("kind", ["linear", "log"])
@given(values=st.lists(FLOATS, min_size=1, max_size=8))
def test_axis_shows_every_value_and_few_ticks(kind: Kind, values: list[float]) -> None:
    axis = Axis("", [*values, math.nan, math.inf], kind)
    assert all(0 < axis.at(value) < 1 for value in values)
    assert 1 <= len(axis.ticks()) <= 12


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_values_beyond_an_axis_lie_at_its_end(kind: Kind) -> None:
    axis = Axis("", [0.1, 0.9], kind)
    assert (axis.at(-5.0), axis.at(1e9)) == (0.0, 1.0)


def test_line_breaks_where_nothing_is_known_and_ends_at_the_edge_of_what_is_infinite() -> None:
    chart = Chart("", Axis("", [0, 3]), Axis("", [0, 3]))
    chart.line(0, [0, 1, 2, 3], np.array([0, 1, math.nan, math.inf]))
    drawn = next(each.attrib["d"] for each in fromstring(chart.svg()).iter("path"))
    assert [drawn.count(letter) for letter in "ML"] == [2, 1]
    assert float(drawn.split()[-1]) == chart.at(0, 1e9)[1]


def test_series_differ_by_more_than_colour() -> None:
    chart = Chart("", Axis("", [0, 1]), Axis("", [0, 1]))
    for series in range(5):
        chart.line(series, [0, 1], [0, 1])
        chart.point(series, 0.5, 0.5)
    drawn = fromstring(chart.svg())
    assert len({each.attrib.get("stroke-dasharray", "") for each in drawn.iter("path")}) == 5
    assert len({each.attrib["points"] for each in drawn.iter("polygon")}) == 5


def test_what_is_no_markup_is_escaped() -> None:
    hostile = "<img src=x onerror=alert(1)>&\"'"
    chart = Chart(hostile, Axis(hostile, [1]), Axis(hostile, kind="rows", rows=[hostile]), series=[hostile, hostile])
    chart.point(0, 1, 0, hostile, label=hostile)
    assert isinstance(fromstring(chart.svg()), Element)
    text = page(hostile, table([hostile], [[hostile, cell(hostile, hostile)]]), tag("p", hostile, kind=hostile))
    assert "<img" not in text
    assert text.count("&lt;img") == 7


def test_page_loads_nothing_and_shares_are_written_with_a_digit() -> None:
    assert "default-src 'none'" in page("x")
    assert percent(0.9844) == "98.4 %"

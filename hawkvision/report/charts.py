"""Charts as SVG in which no text is cut off and no two texts lie over one another.

Fonts differ between machines, so a chart reckons with widths of letters that no common font exceeds. Its margins hold
the longest labels of its axes. Labels of points are placed last, at the first place beside their point where they touch
no other text and no marker; where there is none, the name remains as what the pointer shows. Colours are CSS variables
of the page. A series is told apart by colour, dash and marker together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.report.html import Html, join, tag

Values: TypeAlias = Sequence[float] | NDArray[np.float64]
Kind: TypeAlias = Literal["linear", "log", "tail", "rows"]

LETTER: Final = 12.0
"""Height of text in a chart's own units, which are nearly pixels."""
LINE: Final = LETTER + 4
WIDTH: Final = 560.0
DASHES: Final = ("", "7 3", "2 2.5", "9 3 2 3", "4 2")
COLOURS: Final = 8
MARKER: Final = 4.5
"""Half the width of a marker."""


def text_width(content: str) -> float:
    """How wide a text is at most, in a chart's units: DejaVu Sans, the widest font of the style sheet, and a bit."""
    return LETTER * sum(map(_letter_width, content))


def _letter_width(letter: str) -> float:
    if letter in " .,:;'|!/()[]fijlrtI-":
        return 0.43
    if letter.isascii() and letter.isalnum() and letter not in "mwMW":
        return 0.8 if letter.isupper() else 0.65
    return 1.0 if ord(letter) < 0x2E80 else 1.5


def fitted(content: str, room: float) -> str:
    """The text, or as much of its beginning as fits with an ellipsis."""
    if text_width(content) <= room:
        return content
    while content and text_width(content) + LETTER > room:
        content = content[:-1]
    return f"{content}…"


class Axis:
    """Values to places from 0 to 1. Values beyond an end of the axis lie at that end.

    The axis holds the finite ones of `values` with a margin, a share of their range. `log` spans at least a factor of
    four. `tail` opens up shares near 1: 90 %, 99 % and 99.9 % are equally far apart. `rows` has names instead of
    numbers: the row k lies from k to k + 1, and the first on top.
    """

    def __init__(
        self,
        name: str,
        values: Iterable[float] = (),
        kind: Kind = "linear",
        unit: str = "",
        rows: Sequence[str] = (),
        margin: float = 0.08,
    ) -> None:
        self.name, self.kind, self.unit, self.rows = name, kind, unit, rows
        known = [value for value in values if math.isfinite(value) and (value > 0 or kind != "log")]
        low, high = min(known, default=1.0 * (kind == "log")), max(known, default=10.0 if kind == "log" else 1.0)
        if kind == "rows":
            low, high = float(len(rows)), 0.0
        elif kind == "log":
            low, high = low / (1 + margin), high * (1 + margin)
            if high / low < 4.0:
                centre = math.sqrt(low * high)
                low, high = centre / 2.0, centre * 2.0
        elif kind == "linear":
            span = (high - low) or max(abs(high), 1.0)
            low, high = low - margin * span, high + margin * span
        self.low, self.high = low, high

    def at(self, value: float) -> float:
        """Where a value lies."""
        low, high, here = map(self._stretched, (self.low, self.high, value))
        return min(1.0, max(0.0, (here - low) / (high - low) if high != low else 0.5))

    def _stretched(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, 1e-9))
        return -math.log10(max(1.0 - value, 1e-9)) if self.kind == "tail" else value

    def ticks(self, most: int = 7) -> list[float]:
        """Round values on the axis, not many more than `most`; the middle of each row."""
        if self.kind == "rows":
            return [place + 0.5 for place in range(len(self.rows))]
        if self.kind == "tail":
            return [share for share in (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999) if self.low <= share <= self.high]
        if self.kind == "log":
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for mantissas in ((1, 2, 5), (1, 3), (1,)):
                found = [m * 10.0**d for d in decades for m in mantissas if self.low <= m * 10.0**d <= self.high]
                if len(found) <= most:
                    break
            return found
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 2.0))
        while (self.high - self.low) / step > most:
            step *= 2.5 if f"{step:e}".startswith("2") else 2.0
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]

    def written(self, value: float) -> str:
        """A tick's label: `2.5`, `40 %`, `3 s` of milliseconds, the name of a row."""
        if self.kind == "rows":
            return self.rows[int(value)]
        if self.unit == "%":
            return f"{100 * value:.6g} %"
        if self.unit == "ms":
            return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
        return f"{value:.6g}"


class Chart:
    """A chart to which lines, points and limits are added, in the units of its axes.

    Args:
        title: what readers of screens are told.
        x: the horizontal axis.
        y: the vertical axis.
        series: names in the legend, which is drawn where there are two or more; a mark names its series by number.
        height: of the whole; None makes room for the rows of `y` with all series.
        width: of the whole.
        left: least margin on the left, for charts that stand above another.
    """

    def __init__(
        self,
        title: str,
        x: Axis,
        y: Axis,
        *,
        series: Sequence[str] = (),
        height: float | None = 300.0,
        width: float = WIDTH,
        left: float = 0.0,
    ) -> None:
        self._title, self._x, self._y, self._width = title, x, y, width
        self._marks: list[str] = []
        self._taken: list[tuple[float, float, float, float]] = []
        self._labels: list[tuple[float, float, str, str]] = []
        labels = [fitted(y.written(tick), 0.4 * width) for tick in y.ticks()]
        self._left = max(left, max(map(text_width, labels), default=0.0) + 10)
        self._right = width - max(text_width(x.written(tick)) / 2 for tick in x.ticks() or [0.0]) - 4
        legend, above = self._legend(series)
        self._top = above + (LINE + 6 if y.name else LETTER)
        if height is None:
            height = self._top + max(22, 13 * len(series) + 12) * len(y.rows) + 2 * LINE + 10
        self._height, self._bottom = height, height - (2 * LINE + 10 if x.name else LINE + 10)
        self._draw_axes(labels)
        self._marks += legend

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a value in the chart's own units."""
        left, right, top, bottom = self._left, self._right, self._top, self._bottom
        return left + self._x.at(x) * (right - left), bottom - self._y.at(y) * (bottom - top)

    def line(self, series: int, xs: Values, ys: Values, *, dash: str | None = None, name: str = "") -> None:
        """A line, broken where a value is not a number; infinite values lie at the edge."""
        parts, drawing = list[str](), False
        for x, y in zip(xs, ys, strict=True):
            known = not (math.isnan(x) or math.isnan(y))
            if known:
                here = self.at(float(x), float(y))
                parts.append(f"{'L' if drawing else 'M'}{_written(*here)}")
            drawing = known
        dashes = DASHES[series % len(DASHES)] if dash is None else dash
        given = {"stroke_dasharray": dashes} if dashes else {}
        self._marks.append(tag("path", *_tooltip(name), d="".join(parts), kind=f"line {_colour(series)}", **given))

    def band(self, xs: Values, lows: Values, highs: Values) -> None:
        """The area between two lines."""
        ends = [*zip(xs, lows, strict=True), *reversed(list(zip(xs, highs, strict=True)))]
        points = " ".join(_written(*self.at(x, y)) for x, y in ends if not (math.isnan(x) or math.isnan(y)))
        self._marks.append(tag("polygon", points=points, kind="band"))

    def point(
        self,
        series: int,
        x: float,
        y: float,
        name: str = "",
        *,
        x_interval: tuple[float, float] | None = None,
        y_interval: tuple[float, float] | None = None,
        hollow: bool = False,
        at_least: bool = False,
        label: str = "",
    ) -> None:
        """A marker with its intervals.

        Args:
            series: number of its series.
            x: its horizontal value.
            y: its vertical value.
            name: what the pointer shows.
            x_interval: ends of a horizontal interval.
            y_interval: ends of a vertical interval.
            hollow: whether it rests on little.
            at_least: whether `x` is a lower bound; an arrow says so.
            label: text beside it.
        """
        across, down = self.at(x, y)
        ends = [((low, y), (high, y)) for low, high in ([x_interval] if x_interval else [])]
        ends += [((x, low), (x, high)) for low, high in ([y_interval] if y_interval else [])]
        for start, end in ends:
            self._rule(self.at(*start), self.at(*end), f"line {_colour(series)}")
        kind = f"{'hollow' if hollow else 'solid'} {_colour(series)}"
        self._marks.append(tag("polygon", *_tooltip(name), points=_shape(series, across, down), kind=kind))
        if at_least:
            arrow = " ".join(_written(across + dx, down + dy) for dx, dy in ((7.5, -3.5), (11.0, 0.0), (7.5, 3.5)))
            self._marks.append(tag("polyline", points=arrow, kind=f"line at-least {_colour(series)}"))
        self._taken.append((across - MARKER, down - MARKER, across + MARKER + 7 * at_least, down + MARKER))
        if label:
            self._labels.append((across, down, label, "name"))

    def limit(self, label: str, *, x: float | None = None, y: float | None = None) -> None:
        """A dashed line at a value of `x` or of `y`, across the chart."""
        if x is not None:
            ends = [self.at(x, other) for other in (self._y.low, self._y.high)]
            place = (ends[1][0], min(ends[0][1], ends[1][1]) + LETTER)
        else:
            assert y is not None
            ends = [self.at(other, y) for other in (self._x.low, self._x.high)]
            place = (ends[1][0] - text_width(label) - 12, ends[1][1] - LETTER)
        self._rule(ends[0], ends[1], "limit")
        self._labels.append((*place, label, "name"))

    def box(self, x: tuple[float, float], y: tuple[float, float], kind: str, name: str = "") -> None:
        """A filled rectangle of a CSS class."""
        (left, bottom), (right, top) = self.at(x[0], y[0]), self.at(x[1], y[1])
        self._marks.append(
            tag(
                "rect", *_tooltip(name), x=f"{left:.1f}", y=f"{min(top, bottom):.1f}", width=f"{right - left:.1f}",
                height=f"{abs(bottom - top):.1f}", kind=kind,
            )
        )  # fmt: skip

    def svg(self) -> Html:
        """The chart as it is now."""
        size = f"0 0 {self._width:g} {self._height:g}"
        return tag(
            "svg", *self._marks, *self._placed_labels(), viewBox=size, role="img", aria_label=self._title,
            style=f"min-width:{0.65 * self._width:g}px;max-width:{1.25 * self._width:g}px",
        )  # fmt: skip

    def _placed_labels(self) -> list[Html]:
        """Each label at the first free place around its point."""
        drawn = []
        for x, y, label, kind in self._labels:
            label = fitted(label, 0.4 * self._width)
            width = text_width(label)
            places = [
                (left, y + dy)
                for dy in (0.0, -LINE, LINE, -2 * LINE, 2 * LINE)
                for left in (x + 9, x - 9 - width, x - width / 2)
            ]
            for left, middle in places:
                box = (left - 1, middle - 0.5 * LETTER, left + width + 1, middle + 0.6 * LETTER)
                if self._is_free(*box):
                    self._taken.append(box)
                    drawn.append(_text(left, middle + 0.35 * LETTER, label, "start", kind))
                    break
        return drawn

    def _is_free(self, left: float, top: float, right: float, bottom: float) -> bool:
        """Whether a box lies between the axes and touches no other label and no marker."""
        inside = left >= self._left and top >= self._top and right <= self._right and bottom <= self._bottom
        return inside and not any(
            left < other[2] and other[0] < right and top < other[3] and other[1] < bottom for other in self._taken
        )

    def _draw_axes(self, labels: Sequence[str]) -> None:
        x, y = self._x, self._y
        shown = -math.inf
        for tick in x.ticks():
            (across, bottom), (_, top) = self.at(tick, y.low), self.at(tick, y.high)
            self._rule((across, top), (across, bottom), "grid")
            half = text_width(x.written(tick)) / 2
            if across - half > shown:
                self._marks.append(_text(across, bottom + LINE + 2, x.written(tick), "middle"))
                shown = across + half + 4
        for tick, label in zip(y.ticks(), labels, strict=True):
            _, down = self.at(x.low, tick)
            self._rule((self._left, down), (self._right, down), "grid")
            self._marks.append(_text(self._left - 6, down + 0.35 * LETTER, label, "end"))
        self._rule((self._left, self._bottom), (self._right, self._bottom), "axis")
        name = fitted(x.name, self._width)
        half = text_width(name) / 2
        centre = min(max((self._left + self._right) / 2, half), self._width - half)
        self._marks.append(_text(centre, self._bottom + 2 * LINE + 4, name, "middle", "name"))
        self._marks.append(_text(0, self._top - 10, fitted(y.name, self._width), "start", "name"))

    def _legend(self, series: Sequence[str]) -> tuple[list[Html], float]:
        """The legend in rows that fit, and where it ends."""
        if len(series) < 2:
            return [], 0.0
        marks, across, down = list[Html](), 0.0, LETTER
        for number, name in enumerate(series):
            name = fitted(name, self._width - 26)
            width = 26 + text_width(name) + 8
            if across and across + width > self._width + 8:
                across, down = 0.0, down + LINE
            dashes = {"stroke_dasharray": DASHES[number % len(DASHES)]} if DASHES[number % len(DASHES)] else {}
            marks.append(tag("path", d=f"M{_written(across, down - 4)}h20", kind=f"line {_colour(number)}", **dashes))
            marks.append(tag("polygon", points=_shape(number, across + 10, down - 4), kind=f"solid {_colour(number)}"))
            marks.append(_text(across + 26, down, name, "start"))
            across += width
        return marks, down + 6

    def _rule(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        (x1, y1), (x2, y2) = start, end
        self._marks.append(tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", kind=kind))


def _written(x: float, y: float) -> str:
    return f"{x:.1f} {y:.1f}"


def _colour(series: int) -> str:
    return f"c{series % COLOURS}"


def _tooltip(name: str) -> list[Html]:
    return [tag("title", name)] if name else []


def _text(x: float, y: float, content: str, anchor: str, kind: str = "") -> Html:
    return tag("text", content, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, kind=kind) if content else join()


def _shape(series: int, x: float, y: float) -> str:
    """A series' own marker: circle, square, triangle, diamond, triangle upside down."""
    s = MARKER
    shapes = (
        [(s * math.cos(a), s * math.sin(a)) for a in np.linspace(0, 2 * math.pi, 13)[:-1].tolist()],
        [(-s * 0.9, -s * 0.9), (s * 0.9, -s * 0.9), (s * 0.9, s * 0.9), (-s * 0.9, s * 0.9)],
        [(0, -s * 1.2), (s * 1.1, s * 0.8), (-s * 1.1, s * 0.8)],
        [(0, -s * 1.3), (s * 1.3, 0), (0, s * 1.3), (-s * 1.3, 0)],
        [(0, s * 1.2), (s * 1.1, -s * 0.8), (-s * 1.1, -s * 0.8)],
    )
    return " ".join(_written(x + dx, y + dy) for dx, dy in shapes[series % len(shapes)])

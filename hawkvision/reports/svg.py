"""Parts of charts as SVG text: scales, axes, lines, dots with intervals.

Colours are CSS variables of the page, so that a chart follows light, dark and paper. A run is told apart by colour,
dash and marker together. Everything that is text is escaped here, and nowhere else in the charts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
COLOURS: Final = 8
DASHES: Final = ("", "7 3", "2 2.5", "9 3 2 3", "4 2")
TEXT: Final = 12.0
"""Height of letters in a chart's own units; charts are drawn about as wide as a phone, so this is nearly pixels."""

Kind: TypeAlias = Literal["linear", "log", "tail"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to places in a chart. `tail` opens up shares near 1: 90 %, 99 % and 99.9 % are equally far apart."""

    low: float
    high: float
    start: float
    end: float
    kind: Kind = "linear"

    def at(self, value: float) -> float:
        """Where a value is drawn; those beyond an end at that end."""
        low, high, here = (self._bent(one) for one in (self.low, self.high, value))
        part = (here - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, part)) * (self.end - self.start)

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, 1e-9))
        return -math.log10(max(1.0 - value, 1e-9)) if self.kind == "tail" else value


def log_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic scale for positive values, with a margin, that spans at least a factor of four."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0, 10.0]
    low, high = min(known) / 1.12, max(known) * 1.12
    if high / low < 4.0:
        intermediate = math.sqrt(low * high)
        low, high = intermediate / 2.0, intermediate * 2.0
    return Scale(low, high, start, end, "log")


def linear_scale(values: Iterable[float], start: float, end: float, *, room: float = 0.08) -> Scale:
    """A linear scale for these values, with a margin."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    span = (high - low) or max(abs(high), 1.0)
    return Scale(low - room * span, high + room * span, start, end)


def ticks(scale: Scale, most: int = 6) -> list[float]:
    """Round values within a scale, at most about so many."""
    if scale.kind == "tail":
        return [share for share in (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999) if scale.low <= share <= scale.high]
    if scale.kind == "log":
        decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        for mantissas in ((1, 2, 5), (1, 3), (1,)):
            found = [m * 10.0**d for d in decades for m in mantissas if scale.low <= m * 10.0**d <= scale.high]
            if len(found) <= most:
                break
        return found
    step = 10.0 ** math.floor(math.log10((scale.high - scale.low) / 2.0))
    while (scale.high - scale.low) / step > most:
        step *= 2.0 if f"{step:e}"[0] != "2" else 2.5
    first = math.ceil(scale.low / step - 1e-9)
    return [k * step for k in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def n(value: float) -> str:
    """A coordinate, as short as it can be."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    """A line of text; `kind` is its CSS class."""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{n(x)}" y="{n(y)}" text-anchor="{anchor}"{style}>{escape(content)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line: `grid`, `axis` or `limit`."""
    return f'<line x1="{n(x1)}" y1="{n(y1)}" x2="{n(x2)}" y2="{n(y2)}" class="{kind}"/>'


def series_class(run: int) -> str:
    """The CSS class that gives a run its colour; legends find it by this too."""
    return f"run r{run} c{run % COLOURS}"


def path(xs: Sequence[float] | Floats, ys: Sequence[float] | Floats, style: str, dash: str = "", name: str = "") -> str:
    """A line through points, broken where one is not finite; `name` is shown under the pointer."""
    parts: list[str] = []
    drawing = False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            parts.append(f"{'L' if drawing else 'M'}{n(x)} {n(y)}")
            drawing = True
        else:
            drawing = False
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{"".join(parts)}" class="line {style}"{dashes}>{_title(name)}</path>'


def marker(run: int, x: float, y: float, name: str = "", *, hollow: bool = False, size: float = 4.5) -> str:
    """A run's own shape: circle, square, triangle, diamond, the last two also turned over."""
    s = size
    shapes = (
        [(s * math.cos(a), s * math.sin(a)) for a in np.linspace(0, 2 * math.pi, 13)[:-1].tolist()],
        [(-s * 0.9, -s * 0.9), (s * 0.9, -s * 0.9), (s * 0.9, s * 0.9), (-s * 0.9, s * 0.9)],
        [(0, -s * 1.2), (s * 1.1, s * 0.8), (-s * 1.1, s * 0.8)],
        [(0, -s * 1.3), (s * 1.3, 0), (0, s * 1.3), (-s * 1.3, 0)],
        [(0, s * 1.2), (s * 1.1, -s * 0.8), (-s * 1.1, -s * 0.8)],
    )
    points = " ".join(f"{n(x + dx)},{n(y + dy)}" for dx, dy in shapes[run % len(shapes)])
    kind = "hollow" if hollow else "solid"
    return f'<polygon points="{points}" class="{kind} {series_class(run)}">{_title(name)}</polygon>'


def whisker(run: int, low: float, high: float, across: float, *, upright: bool = False) -> str:
    """An interval."""
    ends = (across, low, across, high) if upright else (low, across, high, across)
    x1, y1, x2, y2 = (n(end) for end in ends)
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="line thin {series_class(run)}"/>'


def area(xs: Sequence[float], low: Sequence[float], high: Sequence[float], kind: str) -> str:
    """The area between two lines."""
    ends = [*zip(xs, low, strict=True), *reversed(list(zip(xs, high, strict=True)))]
    points = " ".join(f"{n(x)},{n(y)}" for x, y in ends if math.isfinite(x) and math.isfinite(y))
    return f'<polygon points="{points}" class="{kind}"/>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    """An upright bar."""
    return f'<rect x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" class="{kind}"/>'


def legend(entries: Iterable[tuple[int, str, str]], x: float, y: float, right: float) -> list[str]:
    """The run, dash and name of each line or marker, in rows that end before `right`."""
    marks, at = list[str](), x
    for run, dash, name in entries:
        width = 34 + 0.56 * TEXT * len(name)
        if at > x and at + width > right:
            at, y = x, y + TEXT + 4
        marks.append(path([at, at + 18], [y - 4, y - 4], series_class(run), dash))
        marks += [marker(run, at + 9, y - 4, size=3.5), text(at + 23, y, name)]
        at += width
    return marks


def onwards(run: int, x: float, y: float) -> str:
    """An arrowhead beside a mark, for a value that is a lower bound."""
    points = " ".join(f"{n(x + dx)},{n(y + dy)}" for dx, dy in ((7.5, -3.5), (11.0, 0.0), (7.5, 3.5)))
    return f'<polyline points="{points}" class="line thin onwards {series_class(run)}"/>'


def svg(name: str, width: float, height: float, title: str, description: str, marks: Iterable[str]) -> str:
    """A chart with an accessible title and description."""
    return (
        f'<svg viewBox="0 0 {n(width)} {n(height)}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f"{''.join(marks)}</svg>"
    )


def _title(name: str) -> str:
    return f"<title>{escape(name)}</title>" if name else ""


def bottom_axis(scale: Scale, y: float, top: float, label: str, unit: str = "", most: int = 6) -> list[str]:
    """Grid lines up to `top`, tick labels and a name below."""
    marks = []
    for tick in ticks(scale, most):
        x = scale.at(tick)
        marks += [rule(x, top, x, y, "grid"), text(x, y + TEXT + 3, written(tick, unit), "intermediate")]
    marks.append(rule(scale.start, y, scale.end, y, "axis"))
    if label:
        marks.append(text((scale.start + scale.end) / 2, y + 2 * TEXT + 8, label, "intermediate", "name"))
    return marks


def left_axis(
    scale: Scale, x: float, right: float, label: str, unit: str = "", most: int = 6, gap: float = TEXT
) -> list[str]:
    """Grid lines to `right`, tick labels and, so far above them, a name."""
    marks = []
    for tick in ticks(scale, most):
        y = scale.at(tick)
        marks += [rule(x, y, right, y, "grid"), text(x - 5, y + TEXT * 0.35, written(tick, unit), "end")]
    marks.append(text(0, min(scale.start, scale.end) - gap, label, "start", "name"))
    return marks


def written(value: float, unit: str = "") -> str:
    """A tick: `2.5`, `40 %` of a share, `3 s` of milliseconds."""
    if unit == "%":
        return f"{100 * value:.6g} %"
    if unit == "ms":
        return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
    return f"{value:.6g}{unit and ' ' + unit}"

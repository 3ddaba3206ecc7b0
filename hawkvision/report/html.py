"""Pages and tables as HTML. A plain `str` is escaped; `Html`, which these functions return, is not escaped again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


class Html(str):
    """Markup."""

    __slots__ = ()


def tag(name: str, *content: str, kind: str = "", **attributes: object) -> Html:
    """An element. `kind` is its CSS class; underscores in names of attributes stand for hyphens."""
    given = {"class": kind, **attributes} if kind else attributes
    opened = name + "".join(f' {key.replace("_", "-")}="{escape(str(value))}"' for key, value in given.items())
    return Html(f"<{opened}>{join(*content)}</{name}>")


def join(*content: str) -> Html:
    """Parts of a page in a row."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in content))


def page(title: str, *body: str) -> str:
    """A whole page, which tells the browser to load nothing."""
    head = join(
        Html(
            '<meta charset="utf-8">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
        ),
        tag("title", title),
        tag("style", Html(files("hawkvision.report").joinpath("page.css").read_text(encoding="utf-8"))),
    )
    whole = tag("html", tag("head", head), tag("body", tag("main", *body)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def cell(value: str, small: str = "", kind: str = "") -> Html:
    """A cell with a small line below its value. Kinds: `words` (aligned left, may wrap), `code`, `good`, `bad`."""
    return tag("td", value, *([tag("small", small)] if small else []), kind=kind)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, first: bool = False) -> Html:
    """A table that scrolls where it is wider than its place; what is no `cell` of a row is its heading or a number.

    The first row is highlighted, if `first`, as the baseline of the others.
    """
    drawn = []
    for place, (name, *values) in enumerate(rows):
        cells = [value if isinstance(value, Html) else cell(value) for value in values]
        drawn.append(tag("tr", tag("th", name, scope="row"), *cells, kind="first" * (first and place == 0)))
    titles = tag("tr", *(tag("th", name, scope="col") for name in head))
    return tag("div", tag("table", tag("thead", titles), tag("tbody", *drawn)), kind="scroll")


def facts(rows: Iterable[tuple[str, ...]], kind: str = "facts") -> Html:
    """Names with their values, which may have a small line below; of the kind `cards` in large letters."""
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value, *(tag("small", each) for each in small if each)))
            for name, value, *small in rows
        ),
        kind=kind,
    )


def figure(title: str, drawn: Html, caption: str = "") -> Html:
    """A chart with its title and caption."""
    return tag("figure", tag("h3", title), tag("div", drawn, kind="chart"), tag("figcaption", caption))


def columns(*figures: Html) -> Html:
    """Figures side by side where there is room."""
    return tag("div", *figures, kind="columns")


def details(summary: str, *content: str, unfolded: bool = False) -> Html:
    """Content that is folded below its summary."""
    return tag("details", tag("summary", summary), *content, **({"open": ""} if unfolded else {}))


def percent(share: float, digits: int = 1) -> str:
    """`98.4 %`."""
    return f"{100 * share:.{digits}f} %"

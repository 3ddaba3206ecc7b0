"""Commands and options: what a declaration reads, refuses and shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from hawkvision.core.command_line import ARGUMENT, Group, Program, call, options_of, run

SEEN: list[Any] = []


def ask(
    images: Annotated[list[str], Meta(description="Images.", extra=ARGUMENT)],
    out: Annotated[Path, Meta(description="Where to.", extra={"variable": "ASK_OUT"})],
    rate: Annotated[float, Meta(gt=0, description="Images per second. Not more.", title="Load")] | None = None,
    json_: Annotated[bool, Meta(description="Print JSON.")] = False,
    quality: Annotated[Literal["fast", "best"], Meta(description="What for.")] = "fast",
    tag: Annotated[tuple[str, ...], Meta(description="Several.", extra={"name": "--label"})] = (),
) -> int | None:
    """Ask about images.

    And wait.
    """
    SEEN.append((images, rate, json_, quality, out, tag))
    return 3 if json_ else None


def draw(shape: Shape) -> int | None:
    """Draw a shape."""
    SEEN.append(shape)
    return None


class Shape(msgspec.Struct, kw_only=True, frozen=True, rename=lambda name: f"shape_{name}"):
    """A shape."""

    side: Annotated[int, Meta(ge=1, description="Pixels.")] = 5


def before(version: Annotated[bool, Meta(description="Print it.")] = False) -> int | None:
    """Options of all commands."""
    return 0 if version else None


def other(words: Sequence[str], prog: str) -> int:
    SEEN.append((prog, *words))
    return 4


def nothing() -> None:
    """Do nothing."""


ALL = Group("Everything.", {"Ask": {"ask": ask, "nothing": nothing}, "": {"other": Program("Another.", other)}}, before)
NESTED = Group("Nested.", {"": {"all": ALL, "nothing": nothing}})


def test_values_are_those_of_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["a", "b", "--rate", "2", "--json", "--quality=best", "--out", "~/x", "--label", "c", "--label", "d"]
    assert call(ask, words, "ask") == 3
    assert SEEN.pop() == (["a", "b"], 2.0, True, "best", Path.home() / "x", ("c", "d"))
    monkeypatch.setenv("ASK_OUT", "y")
    assert call(ask, ["a"], "ask") == 0
    assert SEEN.pop() == (["a"], None, False, "fast", Path("y"), ())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a"], "missing --out"),
        (["--out", "x"], "IMAGES"),
        (["a", "--out", ""], "--out: Expected a path, got an empty text"),
        (["a", "--out", "x", "--rate", "-1"], "--rate: Expected `float` > 0.0"),
        (["a", "--out", "x", "--rate", "much"], "--rate: Expected `float"),
        (["a", "--out", "x", "--quality", "good"], "--quality: Expected one of fast, best, got 'good'"),
        (["a", "--out", "x", "--nothing"], "--nothing"),
        (["a", "--out", "x", "--qual", "best"], "--qual"),
    ],
)
def test_a_wrong_command_line_is_explained(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(ask, words, "ask")
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_command_is_found_by_its_words() -> None:
    assert run(NESTED, ["all", "other", "--x", "1"], "p") == 4
    assert SEEN.pop() == ("p all other", "--x", "1")
    assert run(ALL, ["--version", "ask"], "p") == 0
    assert run(NESTED, ["nothing"], "p") == 0
    assert run(NESTED, [], "p") == 2


@pytest.mark.parametrize("words", [["all", "asks"], ["nothing", "x"], ["all", "--unknown", "ask"]])
def test_an_unknown_command_or_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(NESTED, words, "p")
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_fields_of_a_struct_are_options_under_the_names_of_its_encoding() -> None:
    (side,) = options_of(Shape)
    assert options_of(draw) == (side,)
    assert (side.name, side.flag, side.bounds, side.read("7")) == ("shape_side", "--shape-side", "at least 1", 7)
    with pytest.raises(ValueError, match="Expected `int` >= 1"):
        side.read("0")

"""What the command line prints of answers and errors."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hawkvision.cli.answer_table import AnswerTable
from hawkvision.cli.demo import show_error
from hawkvision.core.errors import NotReady
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    Basis,
    LabelledClass,
    MaxAccuracyDrop,
    Tier,
    Timing,
)
from hawkvision.tasks.classification import Classification

ANSWER = Answer(
    id="a1",
    task="imagenet",
    prediction=Classification((LabelledClass("tabby", 281, 0.83),)),
    model="mobilenet_v2_int8",
    tier=Tier.EDGE,
    accuracy=AccuracyGuarantee(MaxAccuracyDrop(0.01), AccuracyStatus.CERTIFIED, Basis.LABELLED, 0.01, 0.05, 680),
    timing_ms=Timing(1.0, 0.1, 4.0, total=5.2),
)


def page() -> tuple[Console, io.StringIO]:
    paper = io.StringIO()
    return Console(file=paper, width=200), paper


@pytest.mark.parametrize("text", ["cat[small].png", "[/tmp/ray]", "[red]", "plain.png"])
def test_names_and_labels_are_shown_as_they_are(text: str) -> None:
    console, paper = page()
    table = AnswerTable()
    table.add(text, replace(ANSWER, prediction=Classification((LabelledClass(f"{text} again", 281, 0.83),))))
    table.show(console)
    assert f"{text} " in paper.getvalue()
    assert f"{text} again" in paper.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_the_table_fits_the_terminal(width: int) -> None:
    paper = io.StringIO()
    table = AnswerTable()
    for number in range(3):
        table.add(f"a-long-name-of-a-file-{number}.jpg", replace(ANSWER, degraded=True))
    table.show(Console(file=paper, width=width))
    lines = paper.getvalue().splitlines()
    assert len(lines) == 4, "no cell is wrapped"
    assert max(map(len, lines)) <= width
    assert "tabby" in lines[1]


def test_errors_are_shown_as_they_are() -> None:
    console, paper = page()
    show_error(console, NotReady("it said: log in [/tmp/ray/session] [bold]"))
    assert paper.getvalue() == "error: it said: log in [/tmp/ray/session] [bold]\n"

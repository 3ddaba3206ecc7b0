"""What the command line prints of answers."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hawkvision.cli.answer_table import AnswerTable
from hawkvision.core.types import LabelledClass
from hawkvision.tasks.classification import Classification
from tests.hawkvision.client.client_node import ANSWER


@pytest.mark.parametrize("text", ["cat[small].png", "[/tmp/ray]", "[red]", "plain.png"])
def test_names_and_labels_are_shown_as_they_are(text: str) -> None:
    paper, table = io.StringIO(), AnswerTable()
    table.add(text, replace(ANSWER, prediction=Classification((LabelledClass(f"{text} again", 281, 0.83),))))
    table.show(Console(file=paper, width=200))
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

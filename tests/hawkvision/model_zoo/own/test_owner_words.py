"""Files and words that an owner gives: read, or refused with the place that is wrong."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from hawkvision.model_zoo.own.graphs.owner_facts import number, numbers, option_values, sides
from hawkvision.model_zoo.own.reference_predictions import LabelReference, read_reference
from hawkvision.tasks.classification import ClassificationKind
from hawkvision.tasks.counting import CountingKind
from hawkvision.tasks.detection import DetectionKind
from hawkvision.tasks.multi_label import MultiLabelKind
from tests.fuzz.examples import SHARED_FIXTURE, examples

LABELS = ("cat", "7", "grey, owl")
COUNTS = {"groups": {"all": list(LABELS)}, "max_error": 3.0}
OBJECT = {"label": "cat", "confidence": 0.5, "box": [0.0, 0.25, 0.5, 1.0]}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "classification": (ClassificationKind(LABELS, {}), {"top_k": [{"label": "7", "confidence": 0.5}]}),
    "multi_label": (MultiLabelKind(LABELS, {}), {"labels": [{"label": "cat", "confidence": 0.5}], "confidence": 1.0}),
    "detection": (DetectionKind(LABELS, {}), {"objects": [OBJECT, {**OBJECT, "index": 2}]}),
    "counting": (CountingKind(LABELS, COUNTS), {"counts": {"image": {"all": 3}}}),
}


def read(folder: Path, text: str | bytes, kind: str = "classification") -> Any:
    path = folder / "predictions.any"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        return read_reference(path, KINDS[kind][0])
    except ConfigError as error:
        assert "predictions.any" in str(error)  # noqa: PT017
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_json_lines_are_predictions_of_their_kind_or_refused(tmp_path: Path, kind: str) -> None:
    judge, prediction = KINDS[kind]
    (found,) = read(tmp_path, json.dumps({"file": "a.jpg", **prediction}) + "\n\n", kind)
    assert found.file == "a.jpg"
    assert isinstance(found, LabelReference) or found.difference(judge, found.prediction) == 0.0
    for line in (b'{"file": "a.jpg"}', b'{"file":' + b"[" * 5000, b'{"file": "a", "objects": [{"label": []}]}'):
        assert read(tmp_path, line, kind) is None


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)


@given(
    st.lists(
        st.tuples(
            names.filter(lambda name: name.strip() == name and "\r" not in name),
            st.sampled_from(range(3)),
            st.none() | st.floats(0.0, 1.0),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(suppress_health_check=SHARED_FIXTURE, max_examples=examples(300))
def test_predictions_come_back_from_a_table_as_written(tmp_path: Path, rows: list[tuple[str, int, Any, bool]]) -> None:
    """With quoted commas, quotes and line ends, and characters at which Python splits lines and tables do not."""
    written = io.StringIO()
    table = csv.writer(written)
    table.writerow(["Image", "Predicted", "Score"])
    for file, index, probability, by_label in rows:
        # The label "7" is meant by its text, not class 7; so a label comes before an index.
        table.writerow([file, LABELS[index] if by_label else index, "" if probability is None else repr(probability)])
    found = read(tmp_path, written.getvalue())
    assert found == [LabelReference(file, index, probability) for file, index, probability, _ in rows]


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (number, "1/255", 1 / 255),
        (number, "1" * 5000, None),
        (number, "1/1e-400", None),
        (number, "nan", None),
        (numbers, "0.5,-1", [0.5, -1.0]),
        (numbers, "0.5,,1", None),
        (sides, "48x80", (48, 80)),
        (sides, "48", (48, 48)),
        (sides, "x80", None),
        (lambda option, text: option_values(option, [text]), "a=[1, 2]", {"a": [1, 2]}),
        (lambda option, text: option_values(option, [text]), "a=word", {"a": "word"}),
        (lambda option, text: option_values(option, [text]), "a", None),
        (lambda option, text: option_values(option, [text]), "a=" + "[" * 100_000, {"a": "[" * 100_000}),
    ],
)
def test_words_of_a_command_line_are_read_or_refused(read: Callable[[str, str], Any], text: str, expected: Any) -> None:
    if expected is not None:
        found = read("--option", text)
        assert (list(found) if isinstance(expected, list) else found) == expected
        return
    with pytest.raises(ConfigError, match="--option"):
        read("--option", text)

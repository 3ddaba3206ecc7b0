"""Files and words that an owner gives: read, or refused with the place that is wrong."""

from __future__ import annotations

import csv
import io
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from hawkvision.model_zoo.own.graphs.owner_facts import number, numbers, option_values, sides
from hawkvision.model_zoo.own.reference_predictions import LabelReference, WholeReference, read_reference
from hawkvision.model_zoo.own.task_folder import label_text, read_labels
from hawkvision.tasks.classification import ClassificationKind
from hawkvision.tasks.counting import CountingKind
from hawkvision.tasks.detection import DetectionKind
from hawkvision.tasks.multi_label import MultiLabelKind
from tests.fuzz.examples import SHARED_FIXTURE, examples
from tests.fuzz.json_documents import altered

LABELS = ("cat", "7", "grey, owl")
COUNTS = {"groups": {"all": list(LABELS)}, "max_error": 3.0}
OBJECT = {"label": "cat", "confidence": 0.5, "box": [0.0, 0.25, 0.5, 1.0]}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "classification": (ClassificationKind(LABELS, {}), {"top_k": [{"label": "7", "confidence": 0.5}]}),
    "multi_label": (MultiLabelKind(LABELS, {}), {"labels": [{"label": "cat", "confidence": 0.5}], "confidence": 1.0}),
    "detection": (DetectionKind(LABELS, {}), {"objects": [OBJECT, {**OBJECT, "index": 2}]}),
    "counting": (CountingKind(LABELS, COUNTS), {"counts": {"image": {"all": 3}}}),
}
ALL = pytest.mark.parametrize("kind", KINDS)


def read(folder: Path, text: str | bytes, kind: str = "classification") -> Any:
    path = folder / "predictions.any"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        return read_reference(path, KINDS[kind][0])
    except ConfigError as error:
        assert "predictions.any" in str(error)  # noqa: PT017
        return None


@ALL
@given(st.data())
@settings(suppress_health_check=SHARED_FIXTURE, max_examples=examples(300))
def test_altered_json_lines_are_predictions_or_refused(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    line = {"file": "a.jpg", **KINDS[kind][1]}
    changed = data.draw(altered(line) | st.just(line))
    found = read(tmp_path, json.dumps(line) + "\n\n" + json.dumps(changed), kind)
    if found is not None:
        used, judge = found[1], KINDS[kind][0]
        assert isinstance(used.file, str)
        if isinstance(used, WholeReference):
            assert used.difference(judge, used.prediction) == 0.0
        assert used.described(judge)


@ALL
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@example(b'{"file":' + b"[" * 5000)
@example(b'{"file": "a", "objects": [{"label": []}]}')
@settings(suppress_health_check=SHARED_FIXTURE, max_examples=examples(200))
def test_any_bytes_are_predictions_or_refused(tmp_path: Path, kind: str, data: bytes) -> None:
    found = read(tmp_path, data, kind)
    assert found is None or found


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
    ("text", "says"),
    [
        ("file,label\n\na.png,cat\n\nb.png,dog\n", "line 5: 'dog' is no label"),
        ("file,label\na.png," + "1" * 5000, "line 2: '111.*is no label of the task and no index below 3"),
        ('file,label\na.png,"' + "x" * 200_000, "line 2: field larger than field limit"),
        ('file,label\n"a\nb.png",cat\nc.png,9', "line 4: '9' is no label"),
    ],
)
def test_the_line_of_a_table_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_reference(path, KINDS["classification"][0])


@given(st.binary(max_size=100) | st.text("ab\n\r \x1c\x85\u2028é", max_size=20).map(str.encode))
@settings(suppress_health_check=SHARED_FIXTURE, max_examples=examples(300))
def test_labels_of_a_file_are_the_lines_of_the_one_that_is_written(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "labels"
    path.write_bytes(data)
    try:
        labels = read_labels(path)
    except ConfigError as error:
        assert "--labels" in str(error)  # noqa: PT017
        return
    assert tuple(label_text(labels).decode().splitlines()) == labels
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("name", ["two\nlines", "two\u2028lines", b"latin-\xe9".decode(errors="surrogateescape")])
def test_a_folder_whose_name_is_no_line_of_text_is_no_label(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="no line of text in UTF-8"):
        read_labels(tmp_path)


WORDS = st.text("0123456789./x,e+-=[]{}\"nai '", max_size=12) | st.text(max_size=6)


@given(WORDS)
@example("1" * 5000)
@example("1/1e-400")
def test_words_of_a_command_line_are_numbers_or_refused(text: str) -> None:
    with suppress(ConfigError):
        assert math.isfinite(number("--scale", text))
    with suppress(ConfigError):
        assert all(map(math.isfinite, numbers("--mean", text)))
    with suppress(ConfigError):
        assert all(0 <= side < 10**9 for side in sides("--size", text))


@given(st.lists(WORDS, max_size=3))
@example(["a=" + "[" * 100_000])
def test_options_of_a_command_line_are_read_or_refused(words: list[str]) -> None:
    with suppress(ConfigError):
        msgspec.json.encode(option_values("--option", words))

"""The fields of a request, and their errors."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.servers.shared.request_fields import FIELDS, MAX_FIELDS, parse_request, read_headers, read_query, read_task
from hawkvision.core.errors import BadField
from hawkvision.core.types import MaxAccuracyDrop, MinAccuracy, MinConfidence, OnMiss, Quality, RequestFields


def parse(query: bytes, *headers: tuple[bytes, bytes]) -> RequestFields:
    return parse_request(read_query(query) + read_headers(headers))


def test_the_default_request_is_balanced_without_a_deadline() -> None:
    assert parse(b"") == RequestFields(target=Quality.BALANCED, deadline_ms=None, on_miss=OnMiss.DEGRADE, top_k=5)


@pytest.mark.parametrize("query", [b"&", b"&&&", b"quality=balanced&", b"&quality=balanced&&top_k=5"])
def test_empty_pairs_are_skipped(query: bytes) -> None:
    assert parse(query) == RequestFields()


@pytest.mark.parametrize(
    ("query", "target"),
    [
        (b"min_accuracy=0.8", MinAccuracy(0.8)),
        (b"max_accuracy_drop=0", MaxAccuracyDrop(0.0)),
        (b"quality=best", Quality.BEST),
        (b"min_confidence=1e-1", MinConfidence(0.1)),
    ],
)
def test_each_target_field_is_understood(query: bytes, target: object) -> None:
    assert parse(query).target == target


def test_headers_say_the_same_as_the_query() -> None:
    by_header = parse(
        b"", (b"x-hawkvision-max-accuracy-drop", b"0.02"), (b"x-hawkvision-deadline-ms", b" 80 "), (b"accept", b"*/*")
    )
    assert by_header == parse(b"max_accuracy_drop=0.02&deadline_ms=80")


def test_all_fields_together() -> None:
    request = parse(b"task=imagenet&quality=fast&deadline_ms=80.5&on_miss=fail&stream=cam%201&top_k=3&kind=detection")
    assert request == RequestFields("imagenet", Quality.FAST, 80.5, OnMiss.FAIL, "cam 1", 3, "detection")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (b"accuracy=0.8", "unknown field 'accuracy'; known fields: task, kind, min_accuracy"),
        (b"min_accuracy=1.5", "min_accuracy: expected a fraction from 0 to 1, got '1.5'"),
        (b"min_accuracy=nan", "expected a number"),
        (b"min_accuracy=0_1", "expected a number"),
        (b"min_accuracy=", "expected a number"),
        (b"min_accuracy=0.8&quality=best", "at most one of .*got min_accuracy and quality"),
        (b"quality=great", "expected one of fast, balanced, best; got 'great'"),
        (b"deadline_ms=0", "more than 0"),
        (b"deadline_ms=-5", "more than 0"),
        (b"deadline_ms=1e9", "at most 600000"),
        (b"on_miss=panic", "degrade, wait, fail"),
        (b"top_k=0", "whole number from 1 to 100"),
        (b"top_k=2.5", "whole number"),
        (b"top_k=%C2%B2", "whole number"),
        (b"top_k=3&top_k=4", r"top_k: expected one value, got '3' \(query\) and '4' \(query\)"),
        (b"stream=", "1 to 128 printable"),
        (b"stream=a%00b", "printable"),
        (b"stream=" + b"x" * 129, "1 to 128"),
        (b"quality", "name=value"),
        (b"stream=%ff", "name=value"),
        (b"&".join([b"top_k=3"] * (MAX_FIELDS + 1)), "at most 32"),
    ],
)
def test_bad_fields_are_refused_with_what_and_where(query: bytes, says: str) -> None:
    with pytest.raises(BadField, match=says):
        parse(query)


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert parse(b"top_k=3", (b"x-hawkvision-top-k", b"3")).top_k == 3


def test_header_and_query_that_differ_contradict_each_other() -> None:
    with pytest.raises(BadField, match=r"top_k: expected one value, got '3' \(query\) and '4' \(header\)"):
        parse(b"top_k=3", (b"x-hawkvision-top-k", b"4"))


def test_zero_has_no_sign() -> None:
    assert str(parse(b"min_accuracy=-0").target) == "MinAccuracy(value=0.0)"


@pytest.mark.parametrize("query", [b"taks=coco", b"task=", b"task=coco&task=dogs", b"task"])
def test_a_page_takes_one_task_and_no_other_field(query: bytes) -> None:
    assert read_task(b"task=coco&task=coco") == "coco"
    with pytest.raises(BadField):
        read_task(query)


@given(st.binary(max_size=60))
def test_any_query_is_understood_or_refused(query: bytes) -> None:
    with contextlib.suppress(BadField):
        assert isinstance(parse(query), RequestFields)


@given(st.sampled_from(sorted(FIELDS)), st.text(max_size=30))
def test_any_value_is_understood_or_refused(name: str, text: str) -> None:
    with contextlib.suppress(BadField):
        assert isinstance(parse_request([("query", name, text)]), RequestFields)

"""The innermost layer: errors, clock, trace context, answers."""

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core import errors
from hawkvision.core.clock import ManualClock
from hawkvision.core.errors import HawkVisionError, Overloaded, TargetUnreachable
from hawkvision.core.trace_context import parse_traceparent, start_trace
from hawkvision.core.types import AccuracyGuarantee, AccuracyStatus, Answer, Basis, LabelledClass, Quality, Tier
from hawkvision.tasks.classification import Classification

KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HawkVisionError) and kind.code
]


def make(kind: type[HawkVisionError]) -> HawkVisionError:
    if issubclass(kind, Overloaded):
        return kind("what, expected, where", 2.5)
    if issubclass(kind, TargetUnreachable):
        return kind("what, expected, where", 0.8)
    return kind("what, expected, where")


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_pickling_with_all_they_carry(kind: type[HawkVisionError]) -> None:
    error = make(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert copy.body() == error.body()


def test_error_codes_are_distinct_and_documented_in_the_tree() -> None:
    concrete = [kind for kind in KINDS if kind.code != "error"]
    codes = [kind.code for kind in concrete]
    assert len(set(codes)) == len(codes)
    assert errors.__doc__ is not None
    undocumented = [kind.__name__ for kind in concrete if f" {kind.__name__} " not in errors.__doc__]
    assert not undocumented


def test_manual_clock_moves_only_forward() -> None:
    clock = ManualClock(5.0)
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1.0)


def test_trace_context_round_trips_and_children_stay_in_the_trace() -> None:
    trace = start_trace()
    assert parse_traceparent(trace.header()) == trace
    child = trace.child()
    assert child.trace_id == trace.trace_id
    assert child.span_id != trace.span_id


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    ],
)
def test_malformed_trace_headers_are_ignored(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_later_trace_versions_with_more_fields_are_understood() -> None:
    parsed = parse_traceparent("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes-next")
    assert parsed is not None
    assert parsed.span_id == "b7ad6b7169203331"


@given(st.text(max_size=80))
def test_any_trace_header_is_parsed_or_ignored(header: str) -> None:
    parsed = parse_traceparent(header)
    assert parsed is None or parsed.trace_id in header


def test_an_answer_leads_with_its_most_probable_class() -> None:
    guarantee = AccuracyGuarantee(Quality.FAST, AccuracyStatus.CERTIFIED, Basis.LABELLED, 0.05, 0.05, 700)
    answer = Answer(
        "1",
        "imagenet",
        Classification((LabelledClass("cat", 3, 0.9), LabelledClass("dog", 4, 0.1))),
        "m",
        Tier.EDGE,
        guarantee,
    )
    written = answer.to_json()
    assert (written["label"], written["index"], written["confidence"]) == ("cat", 3, 0.9)
    assert (answer.label, answer.index, answer.confidence) == ("cat", 3, 0.9)
    assert written["accuracy"]["target"] == {"quality": "fast"}

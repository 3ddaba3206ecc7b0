"""The innermost layer: errors and trace context."""

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core import errors
from hawkvision.core.errors import HawkVisionError, Overloaded, TargetUnreachable
from hawkvision.core.trace_context import parse_traceparent, start_trace

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


def test_error_codes_are_distinct() -> None:
    codes = [kind.code for kind in KINDS if kind.code != "error"]
    assert len(set(codes)) == len(codes)


def test_trace_context_round_trips_and_children_stay_in_the_trace() -> None:
    trace = start_trace()
    assert parse_traceparent(trace.header()) == trace
    assert trace.child().request_id == trace.named(trace.trace_id).request_id == trace.trace_id
    child = trace.named("order-17").child()
    assert (child.trace_id, child.request_id) == (trace.trace_id, "order-17")
    assert child.span_id != trace.span_id
    later = parse_traceparent(f"01{trace.header()[2:]}-what-comes-next")
    assert later is not None
    assert later.span_id == trace.span_id


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


@given(st.text(max_size=80))
def test_any_trace_header_is_parsed_or_ignored(header: str) -> None:
    parsed = parse_traceparent(header)
    assert parsed is None or parsed.trace_id in header

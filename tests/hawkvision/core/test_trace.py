"""The context that a request carries from process to process."""

from __future__ import annotations

from hawkvision.core.trace_context import parse_traceparent, start_trace


def test_a_child_span_keeps_the_trace_and_the_callers_request_id() -> None:
    span = start_trace().named("order-17")
    child = span.child()
    assert (child.trace_id, child.request_id) == (span.trace_id, "order-17")
    assert child.span_id != span.span_id


def test_a_request_without_an_id_of_its_own_has_that_of_its_trace() -> None:
    span = start_trace()
    assert span.child().request_id == span.named(span.trace_id).request_id == span.trace_id


def test_a_traceparent_names_the_same_span_again() -> None:
    span = start_trace()
    assert parse_traceparent(span.header()) == span

"""The messages between the server and replicas: what goes in comes out, and versions refuse each other clearly."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from hawkvision.core import __version__
from hawkvision.core.errors import (
    BadImage,
    DeadlineMissed,
    HawkVisionError,
    InternalError,
    NotReady,
    Overloaded,
    TargetUnreachable,
    TooLarge,
)
from hawkvision.core.logs import RequestIds
from hawkvision.datacenter.deployment.messages import (
    PROTOCOL,
    Part,
    Presence,
    check_protocol,
    decode_presence,
    decode_reply,
    decode_request,
    encode_answers,
    encode_failure,
    encode_presence,
    encode_request,
)
from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.datacenter.stages.ensemble import AcceptThreshold, Augmentation, EvaluationRequest, VariantAnswer
from hawkvision.tasks.class_scores import Score

NAMES = st.text(max_size=12)
NUMBERS = st.floats(allow_nan=False)
STAGES = st.builds(ServedStage, NAMES, st.lists(NAMES, max_size=3).map(tuple), st.booleans(), NUMBERS)
EVALUATIONS = st.builds(
    EvaluationRequest,
    STAGES,
    st.dictionaries(NAMES, st.sampled_from(Augmentation), max_size=3),
    st.none() | st.builds(AcceptThreshold, st.sampled_from(Score), NUMBERS),
)
OUTPUTS = arrays(np.float32, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


def answers(statement: str) -> st.SearchStrategy[VariantAnswer]:
    """Answers of one process."""
    views, batch_sizes = st.sampled_from(Augmentation), st.integers(1, 64)
    return st.builds(VariantAnswer, NAMES, views, OUTPUTS, NUMBERS, NUMBERS, NUMBERS, batch_sizes, st.just(statement))


@given(st.lists(EVALUATIONS, max_size=3), st.none() | NUMBERS, st.none() | st.builds(RequestIds, NAMES, NAMES))
def test_a_request_arrives_as_it_was_sent(
    evaluations: list[EvaluationRequest], left_ms: float | None, ids: RequestIds | None
) -> None:
    request = tuple(evaluations), left_ms, ids
    assert decode_request(encode_request(*request)) == request


@given(NAMES.flatmap(lambda said: st.lists(st.lists(answers(said), max_size=3).map(tuple), max_size=3)))
def test_answers_arrive_as_they_were_sent(parts: list[Part]) -> None:
    received = decode_reply(encode_answers(parts))
    assert [list(map(plain, part)) for part in received] == [list(map(plain, part)) for part in parts]


@pytest.mark.parametrize(("shape", "numbers"), [((3,), 4), ((2, 2), 3), ((-1,), 2), ((2, -1), 2), ((), 2)])
def test_an_output_whose_shape_does_not_fit_its_numbers_is_malformed(shape: tuple[int, ...], numbers: int) -> None:
    answer = ("small", "upright", shape, bytes(4 * numbers), 0.0, 0.0, 0.0, 1)
    with pytest.raises(InternalError, match="malformed"):
        decode_reply(msgspec.msgpack.encode(["answers", "statement", [[answer]]]))


def plain(answer: VariantAnswer) -> tuple[object, ...]:
    row = answer.output
    times = (answer.decode_ms, answer.queue_ms, answer.infer_ms)
    return answer.variant, answer.augmentation, row.shape, row.tobytes(), times, answer.batch_size, answer.statement


@pytest.mark.parametrize(
    "error", [BadImage("no image"), DeadlineMissed("late"), TooLarge("big"), NotReady("no"), Overloaded("full", 2.5)]
)
def test_an_error_arrives_as_itself(error: HawkVisionError) -> None:
    with pytest.raises(type(error)) as raised:
        decode_reply(encode_failure(error))
    assert vars(raised.value) == vars(error)


@pytest.mark.parametrize("error", [TargetUnreachable("too much", 0.9), type("New", (NotReady,), {"code": "new"})("x")])
def test_an_error_that_cannot_be_rebuilt_arrives_as_a_defect_with_its_message(error: HawkVisionError) -> None:
    with pytest.raises(InternalError, match=error.message):
        decode_reply(encode_failure(error))


@given(st.binary(max_size=80))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    for decode in (decode_request, decode_reply, decode_presence):
        with suppress(HawkVisionError):
            decode(data)


def test_a_presence_of_another_version_is_refused_and_names_both() -> None:
    other = encode_presence(Presence(PROTOCOL + 1, "9.8.7", "statement"))
    with pytest.raises(
        NotReady, match=rf"speaks {PROTOCOL + 1} \(9.8.7\) and this server {PROTOCOL} \({__version__}\)"
    ):
        decode_presence(other)


def test_a_presence_of_a_newer_version_may_have_more_fields() -> None:
    (*fields,) = msgspec.msgpack.decode(encode_presence(Presence(PROTOCOL, "9.8.7", "statement")))
    assert decode_presence(msgspec.msgpack.encode([*fields, {"more": 1}])).statement == "statement"


def test_a_request_of_another_version_is_refused_and_names_both() -> None:
    check_protocol(PROTOCOL)
    with pytest.raises(NotReady, match=rf"speaks {PROTOCOL + 1} and this replica {PROTOCOL} \({__version__}\)"):
        check_protocol(PROTOCOL + 1)

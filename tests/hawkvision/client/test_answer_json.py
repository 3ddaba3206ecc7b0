"""Answers come through JSON as they were, and anything else is a bad reply."""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.client.response import BadReply, answer_from_json
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    Basis,
    LabelledClass,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Reason,
    StatusReason,
    Tier,
    Timing,
)
from hawkvision.tasks.classification import Classification
from tests.hawkvision.client.client_node import ANSWER

fractions = st.floats(0.0, 1.0)
names = st.text(min_size=1, max_size=20)
times = st.floats(0.0, 1e6)
targets = st.one_of(
    st.builds(MinAccuracy, fractions),
    st.builds(MaxAccuracyDrop, fractions),
    st.builds(MinConfidence, fractions),
    st.sampled_from(Quality),
)
guarantees = st.builds(
    AccuracyGuarantee,
    targets,
    st.sampled_from(AccuracyStatus),
    st.none() | st.sampled_from(Basis),
    *(st.none() | fractions for _ in ("max_drop", "watched_max_drop", "delta")),
    *(st.none() | st.integers(1, 10**9) for _ in ("n", "labels")),
    *(st.none() | st.datetimes(timezones=st.just(UTC)) for _ in ("since", "until")),
    status_reason=st.none() | st.sampled_from(StatusReason),
)
answers = st.builds(
    Answer,
    id=names,
    task=names,
    prediction=st.lists(st.builds(LabelledClass, names, st.integers(0, 10**6), fractions), min_size=1, max_size=5).map(
        lambda found: Classification(tuple(found))
    ),
    model=names,
    tier=st.sampled_from(Tier),
    accuracy=guarantees,
    escalated=st.booleans(),
    reason=st.none() | st.sampled_from(Reason),
    degraded=st.booleans(),
    received_fraction=fractions,
    deadline_met=st.none() | st.booleans(),
    timing_ms=st.builds(Timing, times, times, times, times, times, times),
)


def rounded(answer: Answer) -> Answer:
    """What `to_json` keeps of an answer."""
    return replace(
        answer,
        prediction=Classification(
            tuple(msgspec.structs.replace(p, confidence=round(p.confidence, 6)) for p in answer.top_k)
        ),
        timing_ms=Timing(**{name: round(value, 3) for name, value in asdict(answer.timing_ms).items()}),
    )


@given(answers)
def test_answer_survives_the_wire_but_for_rounding(answer: Answer) -> None:
    assert answer_from_json(json.loads(json.dumps(answer.to_json())), Classification) == rounded(answer)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(ANSWER.to_json())), json_values)
def test_no_value_of_any_field_raises_anything_but_bad_reply(key: str, value: object) -> None:
    with suppress(BadReply):
        assert isinstance(answer_from_json(ANSWER.to_json() | {key: value}, Classification), Answer)

"""Replies to escalations as JSON: the bytes of earlier releases, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import MALFORMED
from hawkvision.core.escalation_api import EscalationReply, EscalationTiming, IntermediateResult
from hawkvision.core.types import LabelledClass
from hawkvision.tasks.counting import CountingKind, Counts
from hawkvision.tasks.detection import DetectedObject, Detection, DetectionKind
from hawkvision.tasks.multi_label import LabelSet, MultiLabelKind
from hawkvision.tasks.serving import decode_reply, encode_reply
from tests.fuzz.json_documents import altered
from tests.hawkvision.tasks.classes import classes, predicted

TIMING = EscalationTiming(1.5, 0.25, 30.0, 32.0, 12.5)
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "classification": (classes(10), predicted((3, 0.75), (7, 0.25)), predicted((7, 0.0))),
    "detection": (
        DetectionKind(("person", "car"), {}),
        Detection((DetectedObject("car", 1, 0.75, (0.0, 0.25, 0.5, 1.0)),), 0.5),
        Detection((), 1.0),
    ),
    "counting": (
        CountingKind(("person", "car"), {"groups": {"cars": ["car"], "all": ["person", "car"]}, "max_error": 5.0}),
        Counts({"image": {"cars": 3, "all": 5}}, 0.5),
        Counts({"image": {"cars": 0, "all": 0}}, 1.0),
    ),
    "multi_label": (
        MultiLabelKind(("person", "car"), {}),
        LabelSet((LabelledClass("car", 1, 0.75), LabelledClass("person", 0, 0.5)), 0.5),
        LabelSet((), 0.25),
    ),
}
ALL = pytest.mark.parametrize("name", KINDS)


def test_a_class_that_was_passed_over_has_the_bytes_of_release_0_2() -> None:
    over = IntermediateResult(predicted((7, 0.5), (3, 0.25)), 0.5, "ab/int8")
    reply = EscalationReply(predicted((3, 0.75)), "ensemble", TIMING, 1, 0.75, over, 0.5, 80, None, "cd/int8")
    assert encode_reply(classes(10), reply) == (
        b'{"top_k":[{"index":3,"confidence":0.75}],"model":"ensemble",'
        b'"timing_ms":{"decode":1.5,"queue":0.25,"infer":30.0,"total":32.0,"first":12.5},"batch_size":1,"score":0.75,'
        b'"passed_over":{"index":7,"score":0.5,"fingerprint":"ab/int8"},"received_fraction":0.5,"quality":80,'
        b'"part":null,"fingerprint":"cd/int8"}'
    )


@ALL
def test_a_reply_is_read_as_it_was_written(name: str) -> None:
    kind, prediction, over = KINDS[name]
    reply = EscalationReply(
        prediction, "ensemble", TIMING, 2, 0.75, IntermediateResult(over, 0.5, "ab/int8"), 0.5, 80, None, "cd/int8"
    )
    assert decode_reply(kind, encode_reply(kind, reply)) == reply


@ALL
@given(data=st.data())
def test_an_altered_reply_is_malformed_or_a_prediction_that_everything_can_use(name: str, data: st.DataObject) -> None:
    kind, prediction, over = KINDS[name]
    reply = EscalationReply(prediction, "ensemble", TIMING, 2, 0.75, IntermediateResult(over, 0.5))
    fields = data.draw(altered(msgspec.json.decode(encode_reply(kind, reply))))
    try:
        read = decode_reply(kind, msgspec.json.encode(fields))
    except (*MALFORMED, ValueError):
        return
    assert kind.disagreement(read.prediction, read.prediction) == 0.0
    assert 0.0 <= kind.disagreement(read.prediction, prediction) <= 1.0
    if read.passed_over is not None:
        assert 0.0 <= kind.disagreement(read.passed_over.prediction, read.prediction) <= 1.0
    assert decode_reply(kind, encode_reply(kind, read)) == read
    assert 0.0 <= kind.confidence(read.prediction) <= 1.0
    json.dumps(read.prediction.to_json(), allow_nan=False)
    for tensor in kind.tensors([read.prediction, prediction]).values():
        assert math.prod(tensor.shape) == len(tensor.values)


@pytest.mark.parametrize("box", [[0.5, 0.0, 0.5, 1.0], [0.5, 0.0, 0.25, 1.0], [0.0, 0.5, 1.0, 0.5 + 1e-9]])
def test_a_box_without_area_is_refused(box: list[float]) -> None:
    """It would disagree with itself."""
    kind, prediction, _ = KINDS["detection"]
    fields = msgspec.json.decode(encode_reply(kind, EscalationReply(prediction, "ensemble", TIMING, 2)))
    fields["objects"][0]["box"] = box
    with pytest.raises(ValueError, match="x1 < x2 and y1 < y2"):
        decode_reply(kind, msgspec.json.encode(fields))

"""Predictions of every kind as callers read them: tensors of the Open Inference Protocol, and DeepStack's form."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from edge.servers.deepstack import MOST, parse, reply
from edge.servers.oip.decoding import PREDICTION, outputs_of, parse_infer
from edge.servers.oip.encoding import encode_answers
from hawkvision.core.errors import BadField, RequestError
from hawkvision.core.types import AccuracyGuarantee, AccuracyStatus, Answer, Basis, Quality, Tier
from hawkvision.tasks.classification import ClassificationKind
from hawkvision.tasks.counting import CountingKind
from hawkvision.tasks.detection import DetectionKind
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.multi_label import MultiLabelKind
from tests.hawkvision.imaging.images import encode, oriented, scene
from tests.hawkvision.tasks.drawn import box_tensors, logits

LABELS = ("person", "car", "größer, 7")
COUNTS = {"groups": {"all": list(LABELS), "cars": ["car"]}, "max_error": 3.0}
REGIONS = {"left": [0.0, 0.0, 0.5, 1.0], "right": [0.5, 0.0, 1.0, 1.0]}
KINDS: dict[str, Any] = {
    "classification": (ClassificationKind(LABELS, {}), logits),
    "multi_label": (MultiLabelKind(LABELS, {}), box_tensors),
    "detection": (DetectionKind(LABELS, {"threshold": 0.3}), box_tensors),
    "counting": (CountingKind(LABELS, {**COUNTS, "regions": REGIONS}), box_tensors),
}
GUARANTEE = AccuracyGuarantee(Quality.FAST, AccuracyStatus.CERTIFIED, Basis.SHIPPED, 0.02, delta=0.05, n=1000)
LENGTH = struct.Struct("<I")


def answers_of(data: st.DataObject, name: str, most: int = 3) -> tuple[TaskKind[Any], list[Answer]]:
    kind, drawn = KINDS[name]
    n = data.draw(st.integers(1, most))
    outputs = kind.outputs(data.draw(drawn(n, len(LABELS))), 1.0)
    return kind, [Answer("id", "task", kind.predict(each, 2), "small", Tier.EDGE, GUARANTEE) for each in outputs]


def unpacked(datatype: str, raw: bytes) -> Sequence[Any]:
    if datatype != "BYTES":
        return list(np.frombuffer(raw, "<i8" if datatype == "INT64" else "<f4").tolist())
    found = []
    while raw:
        (size,) = LENGTH.unpack_from(raw)
        found.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return found


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_binary_and_json_tensors_say_what_the_predictions_say(name: str, data: st.DataObject) -> None:
    kind, answers = answers_of(data, name)
    of_kind: type[TaskKind[Any]] = type(kind)
    names = list(outputs_of(of_kind))
    binary = [data.draw(st.booleans()) for _ in names]
    head = {
        "inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["eA=="]}],
        "outputs": [{"name": n, "parameters": {"binary_data": b}} for n, b in zip(names, binary, strict=True)],
    }
    body, size = encode_answers(parse_infer("task", of_kind, json.dumps(head).encode(), None), kind, answers)
    assert (size is None) == (not any(binary))
    said, rest = json.loads(body[:size]), body[len(body) if size is None else size :]
    tensors = kind.tensors([each.prediction for each in answers])
    for output, stated in zip(said["outputs"], names, strict=True):
        assert output["name"] == stated
        values = output.get("data")
        if values is None:
            length = output["parameters"]["binary_data_size"]
            values, rest = unpacked(output["datatype"], rest[:length]), rest[length:]
        assert math.prod(output["shape"]) == len(values)
        assert output["shape"][0] == len(answers)
        if stated == PREDICTION:
            assert [json.loads(each) for each in values] == [json_of(each) for each in answers]
        else:
            expected = tensors[stated].values
            assert values == (expected if output["datatype"] != "FP32" else pytest.approx(expected, rel=1e-6))
    assert not rest


def json_of(answer: Answer) -> Any:
    """What the JSON of a prediction says."""
    return json.loads(json.dumps(answer.prediction.to_json()))


@given(st.data(), st.integers(1, 8), st.tuples(st.integers(1, 40), st.integers(1, 40)), st.floats(0, 1))
def test_objects_in_the_form_of_deepstack_are_pixels_of_the_upright_image(
    data: st.DataObject, orientation: int, size: tuple[int, int], least: float
) -> None:
    _, (answer,) = answers_of(data, "detection", most=1)
    height, width = size
    image = encode(Image.fromarray(scene(height, width)), "jpeg", exif=oriented(orientation))
    most = data.draw(st.integers(1, MOST))
    found = reply(answer, image, least, most)
    width, height = (height, width) if orientation >= 5 else (width, height)
    objects = [each for each in answer.to_json()["objects"] if each["confidence"] >= least][:most]
    assert [(each.label, each.confidence) for each in found.predictions] == [
        (each["label"], each["confidence"]) for each in objects
    ]
    for said, each in zip(found.predictions, objects, strict=True):
        assert 0 <= said.x_min <= said.x_max <= width
        assert 0 <= said.y_min <= said.y_max <= height
        assert abs(said.x_max - each["box"][2] * width) <= 0.5
    assert found.success


NAMES = st.sampled_from(["api_key", "min_confidence", "admin_key", "image", "top_k", "task", "deadline_ms"]) | st.text(
    max_size=8
)
VALUES = st.sampled_from(["0.5", "nan", "inf", "-1", "1e999", "5", "0", "²", "1" * 5000]) | st.text(max_size=8)
FIELDS = st.lists(st.tuples(st.sampled_from(["query", "multipart"]), NAMES, VALUES), max_size=4)


@given(FIELDS, FIELDS)
@example([], [("multipart", "min_confidence", "nan")])
@example([("query", "top_k", "²")], [])
def test_any_fields_are_a_request_of_deepstack_or_refused(query: Any, fields: Any) -> None:
    try:
        _, least, most, authorization = parse("/v1/vision/detection", query, fields)
    except RequestError as error:
        assert isinstance(error, BadField)  # noqa: PT017
        return
    assert 0.0 <= least <= 1.0
    assert most >= 1
    assert authorization is None or authorization.startswith("Bearer ")

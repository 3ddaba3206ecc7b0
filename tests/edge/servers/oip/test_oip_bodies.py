"""Bodies of the Open Inference Protocol: decoding, errors that name the part, encoding."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.servers.oip.decoding import MAX_IMAGES, MAX_JSON_VALUES, InferRequest, parse_infer
from edge.servers.oip.encoding import encode_answers
from edge.servers.shared.request_fields import FIELDS
from hawkvision.core.errors import BadField
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    Basis,
    LabelledClass,
    MaxAccuracyDrop,
    MinAccuracy,
    Quality,
    Tier,
)
from hawkvision.tasks.classification import Classification, ClassificationKind

TASK = "imagenet"
KIND = ClassificationKind([f"class {number}" for number in range(10)], {})
IMAGES = (b"\xff\xd8one", b"", b"three")


def elements(*images: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(image)) + image for image in images)


def binary(*images: bytes, **changes: Any) -> tuple[bytes, str]:
    """A body with its images in binary, and the length of its JSON; `changes` replace parts of the JSON."""
    data = elements(*images)
    tensor = {"name": "image", "shape": [len(images)], "datatype": "BYTES"}
    head = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}], **changes}
    text = json.dumps(head).encode()
    return text + data, str(len(text))


def in_json(*images: bytes, **changes: Any) -> bytes:
    """A body with its images in base64; `changes` replace parts of the input."""
    data = [base64.b64encode(image).decode() for image in images]
    tensor = {"name": "image", "shape": [len(images)], "datatype": "BYTES", "data": data, **changes}
    return json.dumps({"inputs": [tensor]}).encode()


def answer(
    index: int = 3, confidence: float = 0.75, status: AccuracyStatus = AccuracyStatus.CERTIFIED, **more: Any
) -> Answer:
    top = Classification((LabelledClass(f"class {index}", index, confidence), LabelledClass("other", 9, 0.125)))
    guarantee = AccuracyGuarantee(Quality.FAST, status, Basis.SHIPPED, 0.02, delta=0.05, n=1000)
    return Answer("id", TASK, top, more.pop("model", "small"), more.pop("tier", Tier.EDGE), guarantee, **more)


# ------------------------------------------------------------------------------------------------------- reading


@given(images=st.lists(st.binary(max_size=40), min_size=1, max_size=MAX_IMAGES))
def test_images_come_out_of_a_binary_body_as_they_went_in(images: list[bytes]) -> None:
    assert parse_infer(TASK, ClassificationKind, *binary(*images)).images == tuple(images)


@given(images=st.lists(st.binary(max_size=40), min_size=1, max_size=MAX_IMAGES))
def test_images_come_out_of_a_json_body_as_they_went_in(images: list[bytes]) -> None:
    assert parse_infer(TASK, ClassificationKind, in_json(*images), None).images == tuple(images)


def test_a_batch_dimension_and_nested_data_are_read() -> None:
    nested = [[base64.b64encode(image).decode()] for image in IMAGES]
    assert parse_infer(TASK, ClassificationKind, in_json(*IMAGES, shape=[3, 1], data=nested), None).images == IMAGES


def test_a_raw_body_is_one_image() -> None:
    asked = parse_infer(TASK, ClassificationKind, b"\xff\xd8raw", "0", [("query", "quality", "best")])
    assert (asked.images, asked.request.target) == ((b"\xff\xd8raw",), Quality.BEST)


@pytest.mark.parametrize(
    ("parameters", "target", "deadline_ms", "stream"),
    [
        ({"min_accuracy": 0.5}, MinAccuracy(0.5), None, None),
        ({"max_accuracy_drop": "0.01", "deadline_ms": 80}, MaxAccuracyDrop(0.01), 80.0, None),
        ({"quality": "fast", "timeout": 50_000, "priority": 1}, Quality.FAST, 50.0, None),
        ({"timeout": 50_000, "deadline_ms": 20, "sequence_id": 7, "sequence_start": True}, Quality.BALANCED, 20.0, "7"),
        ({"stream": "server", "sequence_id": 7, "timeout": 0}, Quality.BALANCED, None, "server"),
    ],
)
def test_parameters_are_the_fields_of_classify_and_those_of_triton_s_client(
    parameters: dict[str, Any], target: object, deadline_ms: float | None, stream: str | None
) -> None:
    request = parse_infer(TASK, ClassificationKind, *binary(b"x", parameters=parameters)).request
    assert (request.task, request.target, request.deadline_ms, request.stream) == (TASK, target, deadline_ms, stream)


@pytest.mark.parametrize("value", ["base64", 1, True, None, [1, {"a": [2]}], {"deep": {"er": None}}])
def test_unknown_parameters_are_ignored_and_named(value: object) -> None:
    known = {"binary_data_size": len(elements(b"x"))}
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "parameters": {**known, "of_input": value}}
    outputs = [{"name": "label", "parameters": {"of_output": value, "binary_data": False}}]
    more = {"parameters": {"max_acuracy_drop": value, "quality": "fast"}, "outputs": outputs}
    asked = parse_infer(TASK, ClassificationKind, *binary(b"x", inputs=[tensor], **more))
    assert asked.images == (b"x",)
    assert asked.request.target == Quality.FAST
    names = ("max_acuracy_drop", "of_input", "of_output")
    assert asked.ignored == (() if value is None else names)
    said = json.loads(encode_answers(asked, KIND, [answer()])[0])["parameters"]
    assert said.get("ignored_parameters") == (None if value is None else ",".join(names))


def test_optional_members_may_be_null() -> None:
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["eA=="], "parameters": None}
    head = {"id": None, "parameters": None, "outputs": None, "inputs": [tensor]}
    asked = parse_infer(TASK, ClassificationKind, json.dumps(head).encode(), None)
    assert (asked.id, asked.images, len(asked.outputs)) == ("", (b"x",), 3)
    named = {
        **head,
        "outputs": [{"name": "label", "parameters": None}],
        "parameters": {"quality": None, "stream": None},
    }
    assert parse_infer(TASK, ClassificationKind, json.dumps(named).encode(), None).request.target == Quality.BALANCED


def _input(**changes: Any) -> Callable[[], tuple[bytes, str | None]]:
    return lambda: (in_json(b"x", **changes), None)


def _with(*images: bytes, cut: int | None = None, length: str | None = None, **changes: Any) -> Any:
    def make() -> tuple[bytes, str]:
        body, said = binary(*(images or (b"x",)), **changes)
        return body[:cut], length or said

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: (b"", None), "body: not an inference request"),
        (lambda: (b"{", None), "body: not an inference request"),
        (lambda: (b'{"inputs": "\xff"}', None), "body: not an inference request"),
        (lambda: (b'{"id": 4, "inputs": []}', None), r"\$.id"),
        (lambda: (b'{"inputs": []}', None), "inputs: expected one input, 'image'; got none"),
        (lambda: (b'{"inputs": [{"name": "image", "shape": [1.5]}]}', None), r"\$.inputs\[0\].shape"),
        (_input(name="x"), "inputs: expected one input, 'image'; got 'x'"),
        (_input(datatype="FP32"), r"inputs\[0\] \(image\).datatype"),
        (_input(shape=[]), r"inputs\[0\] \(image\).shape"),
        (_input(shape=[1, 2]), r"inputs\[0\] \(image\).shape"),
        (_input(shape=[0], data=[]), r"inputs\[0\] \(image\).shape"),
        (_input(shape=[MAX_IMAGES + 1]), r"inputs\[0\] \(image\).shape"),
        (_input(shape=[-1]), r"inputs\[0\] \(image\).shape"),
        (_input(shape=[2]), r"inputs\[0\] \(image\).data: expected 2 elements"),
        (_input(data=[["eA==", "eA=="]]), r"inputs\[0\] \(image\).data: expected 1 elements"),
        (_input(data=["no base64!"]), r"inputs\[0\] \(image\).data\[0\]"),
        (_input(data=["ä"]), r"inputs\[0\] \(image\).data\[0\]"),
        (_input(data=None), "either `data` or"),
        (_input(parameters={"binary_data_size": 3}), "either `data` or"),
        (_input(parameters={"shared_memory_region": "x"}), "shared_memory_region: this server shares no memory"),
        (_with(outputs=[{"name": "label", "parameters": {"shared_memory_region": "x"}}]), "shares no memory"),
        (lambda: (in_json(b"x") + b"more", str(len(in_json(b"x")))), "4 bytes behind the JSON belong to no input"),
        (_with(cut=-1), "binary_data_size: 5, but 4 bytes"),
        (_with(length="99999"), "Inference-Header-Content-Length"),
        (_with(length="-1"), "Inference-Header-Content-Length"),
        (_with(length="²"), "Inference-Header-Content-Length"),
        (_with(outputs=[{"name": "logits"}]), r"outputs\[0\].name"),
        (_with(outputs=[{"name": "label"}] * 2), r"outputs\[1\].name"),
        (_with(outputs=[{"name": "label"}] * 5), "outputs: expected each"),
        (_with(outputs=[{"name": "label", "parameters": {"binary_data": 1}}]), r"outputs\[0\].parameters.binary_data"),
        (
            _with(outputs=[{"name": "label", "parameters": {"classification": 3}}]),
            "in the output 'confidence'",
        ),
        (_with(outputs=[{"name": "confidence", "parameters": {"classification": -1}}]), "1 to 100 classes"),
        (
            _with(parameters={"min_accuracy": [[0.5]]}),
            "min_accuracy: expected a number or a string, got a l",
        ),
        (_with(parameters={"timeout": {"s": 1}}), "parameters.timeout: expected microseconds, .*; got an object"),
        (_with(parameters={"sequence_id": 10**30}), "parameters.sequence_id: .*; got a number out of range"),
        (_with(parameters={"min_accuracy": True}), "parameters.min_accuracy: expected a number or a string"),
        (_with(parameters={"min_accuracy": 2}), "min_accuracy: expected a fraction"),
        (_with(parameters={"deadline_ms": 10**25}), "deadline_ms: the number is out of range"),
        (_with(parameters={"timeout": -1}), "parameters.timeout"),
        (_with(parameters={"sequence_id": 1.5}), "parameters.sequence_id"),
        (_with(parameters={"binary_data_output": "yes"}), "parameters.binary_data_output"),
        (lambda: (b"\xff\xd8\xff\xe0JFIF", None), "one image as it is, set Inference-Header-Content-Length: 0"),
        (_input(datatype="FP32", data=[0.5]), "images are sent encoded, as BYTES"),
        (_with(parameters={"task": "dogs"}), r"task: .*got 'imagenet' \(path\) and 'dogs' \(param"),
        (_with(parameters={f"p{i}": i for i in range(MAX_JSON_VALUES)}), "more than 10000 values"),
        (lambda: (b'{"parameters": {"a": ' + b"[" * 100_000, None), "nested too deeply"),
        (lambda: (b'{"extra": ' + b'{"a":' * 100_000, None), "nested too deeply"),
        (_with(parameters={"quality": "fastest"}), "quality: expected one of"),
        (_with(id="x" * 2000), "id: expected at most 1024"),
    ],
)
def test_malformed_parts_are_named(make: Callable[[], tuple[bytes, str | None]], says: str) -> None:
    with pytest.raises(BadField, match=says):
        parse_infer(TASK, ClassificationKind, *make())


@pytest.mark.parametrize(
    ("data", "count", "says"),
    [
        (b"\x01\0\0", 1, "the data end at byte 0, before element 0 of 1"),
        (b"\x02\0\0\0a", 1, "element 0 has 2 bytes, but only 1 are left"),
        (elements(b"a", b"b"), 1, "5 bytes are left behind the last of 1 elements"),
        (elements(b"a"), 2, "the data end at byte 5, before element 1 of 2"),
    ],
)
def test_elements_must_fill_their_data(data: bytes, count: int, says: str) -> None:
    tensor = {"name": "image", "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor]}).encode()
    with pytest.raises(BadField, match=says):
        parse_infer(TASK, ClassificationKind, text + data, str(len(text)))


def read_or_refuse(body: bytes, length: str | None) -> InferRequest | None:
    """The request, or None if it was refused as a bad field; any other error is a defect."""
    with contextlib.suppress(BadField):
        return parse_infer(TASK, ClassificationKind, body, length)
    return None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from([*FIELDS, "timeout", "sequence_id", "binary_data_output", "priority", "x"]), value=_JSON)
def test_arbitrary_values_of_any_parameter_are_read_or_refused(name: str, value: object) -> None:
    body, length = binary(b"x", parameters={name: value})
    asked = read_or_refuse(body, length)
    assert asked is None or asked.images == (b"x",)


@given(
    part=st.sampled_from(["id", "inputs", "parameters", "outputs", "name", "shape", "datatype", "data"]),
    value=_JSON,
)
def test_arbitrary_values_in_any_part_are_read_or_refused(part: str, value: object) -> None:
    tensor: dict[str, object] = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["eA=="]}
    head: dict[str, object] = {"inputs": [tensor], "id": "r"}
    (tensor if part in tensor else head)[part] = value
    asked = read_or_refuse(json.dumps(head).encode(), None)
    assert asked is None or len(asked.images) == 1


# ------------------------------------------------------------------------------------------------------- writing


def test_answers_are_written_in_json() -> None:
    asked = parse_infer(TASK, ClassificationKind, in_json(*IMAGES[:2]).replace(b"{", b'{"id": "r7", ', 1), None)
    body, json_bytes = encode_answers(asked, KIND, [answer(3), answer(4, 0.5)])
    said = json.loads(body)
    assert json_bytes is None
    assert (said["model_name"], said["model_version"], said["id"]) == (TASK, "1", "r7")
    assert said["outputs"] == [
        {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["class 3", "class 4"]},
        {"name": "index", "datatype": "INT64", "shape": [2], "data": [3, 4]},
        {"name": "confidence", "datatype": "FP32", "shape": [2], "data": [0.75, 0.5]},
    ]


def test_only_requested_outputs_are_written_in_the_requested_format() -> None:
    wanted = [{"name": "confidence", "parameters": {"binary_data": True}}, {"name": "label"}]
    body, json_bytes = encode_answers(
        parse_infer(TASK, ClassificationKind, *binary(b"x", outputs=wanted)), KIND, [answer()]
    )
    assert json_bytes is not None
    outputs = json.loads(body[:json_bytes])["outputs"]
    assert [output["name"] for output in outputs] == ["confidence", "label"]
    assert outputs[0]["parameters"] == {"binary_data_size": 4}
    assert np.frombuffer(body[json_bytes:], "<f4").tolist() == [0.75]


def test_the_classification_extension_lists_classes() -> None:
    wanted = [{"name": "confidence", "parameters": {"classification": 2}}]
    asked = parse_infer(TASK, ClassificationKind, *binary(b"x", outputs=wanted))
    (output,) = json.loads(encode_answers(asked, KIND, [answer()])[0])["outputs"]
    assert asked.request.top_k == 2
    assert (output["datatype"], output["shape"]) == ("BYTES", [1, 2])
    assert output["data"] == ["0.750000:3:class 3", "0.125000:9:other"]


def test_parameters_say_how_each_image_was_answered_and_the_worst_of_what_is_guaranteed() -> None:
    answers = [answer(), answer(status=AccuracyStatus.SUSPENDED, tier=Tier.DATACENTER, model="large", degraded=True)]
    said = json.loads(encode_answers(parse_infer(TASK, ClassificationKind, *binary(b"x", b"y")), KIND, answers)[0])[
        "parameters"
    ]
    assert (said["variant"], said["tier"]) == ("small,large", "edge,datacenter")
    assert (said["degraded"], said["status"], said["max_drop"]) == (True, "suspended", 0.02)
    assert said["target"] == "quality=fast"
    assert all(isinstance(value, str | bool | int | float) for value in said.values())

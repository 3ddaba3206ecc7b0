"""What a model found is what its decoder gives."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import BackendError, ManifestError
from hawkvision.core.types import Tensors
from hawkvision.tasks.boxes.rows import MOST
from hawkvision.tasks.decoders.decoder import Decoder
from hawkvision.tasks.decoders.registry import decoder_class, decoder_names
from hawkvision.tasks.detection import DetectionKind
from tests.hawkvision.tasks.decoders.raw import CLASSES, EXPORTS, SPEC, Objects, ends, yolov8

EXACT = {"CenterNet": 0.02}
"""Tolerance of coordinates in fractions, where the format rounds; 1e-5 of the others."""


KIND = DetectionKind([str(i) for i in range(CLASSES)], {"threshold": 0.06})


def decoder(export: str, **options: Any) -> Decoder:
    name, stated, _ = EXPORTS[export]
    return decoder_class(name)({**stated, **options}, SPEC, CLASSES)


@st.composite
def objects(draw: st.DrawFn) -> Objects:
    """At most one in each of six fields, with sides of 1/6 to 1/3 and different scores."""
    fields = draw(st.lists(st.integers(0, 5), unique=True, max_size=6))
    rows = []
    for field in fields:
        x, y = (field % 3) / 3, (field // 3) / 2
        left, top = draw(st.integers(1, 7)) / 64, draw(st.integers(1, 7)) / 64
        width, height = draw(st.integers(11, 13)) / 64, draw(st.integers(11, 20)) / 64
        rows.append((x + left, y + top, x + left + width, y + top + height))
    scores = draw(st.lists(st.integers(15, 95), unique=True, min_size=len(fields), max_size=len(fields)))
    classes = [draw(st.integers(0, CLASSES - 1)) for _ in fields]
    return Objects(
        np.array(rows, np.float64).reshape(-1, 4), np.array(sorted(scores, reverse=True)) / 100, np.array(classes, int)
    )


@pytest.mark.parametrize("export", EXPORTS)
@given(found=objects())
def test_boxes_come_back_from_what_such_a_model_gives(export: str, found: Objects) -> None:
    decoded = decoder(export)(EXPORTS[export][2](found))
    count = len(found.scores)
    assert decoded["boxes"].shape == (1, count, 4)
    np.testing.assert_allclose(decoded["scores"][0], found.scores, atol=1e-5)
    np.testing.assert_array_equal(decoded["classes"][0], found.classes)
    np.testing.assert_allclose(decoded["boxes"][0], found.boxes, atol=EXACT.get(export, 1e-5))


@pytest.mark.parametrize("export", EXPORTS)
@given(data=st.data())
def test_any_tensors_give_boxes_that_can_be_served_or_an_error_of_the_backend(export: str, data: st.DataObject) -> None:
    """Of the expected shapes and of others, with values that no model should give."""
    one = Objects(np.array([[0.2, 0.3, 0.5, 0.6]]), np.array([0.9]), np.array([1]))
    tensors = dict(EXPORTS[export][2](one))
    values = st.sampled_from([0.0, 0.5, 1.0, -1.0, 7.0, 1e30, -1e30, 3e38, np.inf, -np.inf, np.nan])
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors[name].copy()
        if data.draw(st.booleans()) and tensor.size:
            tensor.reshape(-1)[data.draw(st.integers(0, tensor.size - 1)) :: data.draw(st.integers(1, 9))] = data.draw(
                values
            )
        else:
            shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
            tensor = np.full(shape, data.draw(values), np.float32)
        tensors[name] = tensor
    try:
        decoded = decoder(export)(tensors)
    except BackendError:
        return
    assert all(np.isfinite(each).all() and each.dtype == np.float32 for each in decoded.values())
    assert ((decoded["scores"] >= 0) & (decoded["scores"] <= 1)).all()
    assert decoded["scores"].shape[1] <= MOST
    temperature = data.draw(st.sampled_from([1.0, 0.05, 20.0]))
    for output in KIND.outputs(decoded, temperature):
        prediction = KIND.predict(KIND.place(output, lambda corners: corners * 2.0 - 0.5), 1)
        reply = msgspec.json.encode(KIND.encode_reply(prediction))
        assert KIND.decode_reply(reply) == prediction
        assert KIND.disagreement(prediction, prediction) == 0.0
        assert 0.0 <= KIND.confidence(prediction) <= 1.0


@pytest.mark.parametrize("export", EXPORTS)
def test_images_of_a_batch_are_decoded_each_alone(export: str) -> None:
    first = Objects(np.array([[0.2, 0.3, 0.5, 0.6]]), np.array([0.9]), np.array([1]))
    second = Objects(np.array([[0.1, 0.1, 0.3, 0.4], [0.6, 0.5, 0.8, 0.8]]), np.array([0.8, 0.6]), np.array([0, 2]))
    alone = [EXPORTS[export][2](each) for each in (first, second)]
    both: Tensors = {name: np.concatenate([each[name] for each in alone]) for name in alone[0]}
    found = decoder(export)(both)
    assert (found["scores"] > 0).sum(axis=1).tolist() == [1, 2]
    for i, each in enumerate(alone):
        wanted = decoder(export)(each)
        for name, tensor in wanted.items():
            np.testing.assert_array_equal(found[name][i, : tensor.shape[1]], tensor[0])


def test_ten_thousand_classes_and_no_candidates_are_decoded() -> None:
    many = decoder_class("yolov8")({}, SPEC, 10_000)
    tensor = np.zeros((2, 4 + 10_000, 21), np.float32)
    tensor[1, :4, 5], tensor[1, 4 + 9_999, 5] = (96.0, 64.0, 20.0, 10.0), 0.9
    found = many({"output0": tensor})
    assert found["classes"][found["scores"] > 0].tolist() == [9_999]
    empty = many({"output0": tensor[:, :, :0]})
    assert {name: each.shape for name, each in empty.items()} == {
        "boxes": (2, 0, 4),
        "scores": (2, 0),
        "classes": (2, 0),
    }


# Suppression, maps, limits


def rows(*found: tuple[float, ...]) -> Tensors:
    each = np.array(found, np.float64)
    return ends(Objects(each[:, :4], each[:, 4], each[:, 5].astype(np.intp)))


LEFT, NEAR_LEFT = (0.1, 0.1, 0.4, 0.5), (0.12, 0.1, 0.42, 0.5)


def test_repetitions_are_suppressed_within_a_class() -> None:
    found = decoder("CenterNet's detections")(rows((*LEFT, 0.9, 0), (*NEAR_LEFT, 0.8, 0), (*NEAR_LEFT, 0.7, 1)))
    assert found["classes"].tolist() == [[0, 1]]
    kept = decoder("CenterNet's detections", iou=1.0)(rows((*LEFT, 0.9, 0), (*NEAR_LEFT, 0.8, 0)))
    assert kept["scores"].shape == (1, 2)


def test_classes_are_mapped_to_labels() -> None:
    mapped = decoder("yolov10", class_map=[-1, 2])(rows((*LEFT, 0.9, 0), (*NEAR_LEFT, 0.8, 1)))
    assert mapped["classes"].tolist() == [[2]]
    with pytest.raises(BackendError, match="class 1 of 1; class_map"):
        decoder("yolov10", class_map=[0])(rows((*LEFT, 0.9, 1)))


@pytest.mark.parametrize("export", EXPORTS)
def test_a_class_without_a_label_takes_no_place_among_the_candidates(export: str) -> None:
    """However sure the model is of it, as of a background."""
    labels = [-1, 1, 2]
    class_map = [labels[each] if each >= 0 else -1 for each in EXPORTS[export][1].get("class_map", range(CLASSES))]
    boxes = np.array([[0.1, 0.1, 0.3, 0.4], [0.4, 0.1, 0.6, 0.4], [0.6, 0.6, 0.9, 0.9]])
    found = Objects(boxes, np.array([0.9, 0.8, 0.7]), np.array([0, 0, 1]))
    decoded = decoder(export, class_map=class_map, max_candidates=2)(EXPORTS[export][2](found))
    assert decoded["classes"].tolist() == [[1]]
    np.testing.assert_allclose(decoded["scores"], [[0.7]], atol=1e-5)


@pytest.mark.parametrize(("name", "first"), [("coco90", 1), ("coco91", 0)])
def test_the_ids_of_coco_are_its_eighty_labels(name: str, first: int) -> None:
    """Person is 1, stop sign 13 follows fire hydrant 11, and toothbrush is 90."""
    coco = decoder_class("yolov10")({"class_map": name}, SPEC, 80)
    ids = np.array([1, 11, 12, 13, 90]) - first
    found = coco(rows(*((*LEFT, 0.9 - 0.1 * i, each) for i, each in enumerate(ids))))
    assert found["classes"].tolist() == [[0, 10, 11, 79]]


def test_unsure_boxes_are_dropped_and_the_others_bounded() -> None:
    many = [(*LEFT, 0.9, 0)] * 90 + [(*LEFT, 0.04, 0)] * 30
    assert decoder("yolov10")(rows(*many))["scores"].shape == (1, 90)
    assert decoder("yolov10", score_floor=0.0)(rows(*many))["scores"].shape == (1, MOST)
    assert decoder("yolov10", max_candidates=20)(rows(*many))["scores"].shape == (1, 20)


def test_fractions_need_no_scale() -> None:
    one = Objects(np.array([LEFT]), np.array([0.9]), np.array([1]))
    tensors = dict(yolov8(one))
    tensors["output0"] = tensors["output0"].copy()
    tensors["output0"][:, :4] /= np.array([SPEC.width, SPEC.height] * 2)[:, np.newaxis]
    np.testing.assert_allclose(decoder("yolov8", scale="fractions")(tensors)["boxes"][0, 0], LEFT, atol=1e-5)


def test_outputs_of_other_names_are_found_by_their_role() -> None:
    one = Objects(np.array([LEFT]), np.array([0.9]), np.array([1]))
    renamed = {{"pred_boxes": "b", "logits": "a"}[name]: each for name, each in EXPORTS["RT-DETR"][2](one).items()}
    assert decoder("RT-DETR", outputs={"logits": "a", "boxes": "b"})(renamed)["classes"].tolist() == [[1]]
    with pytest.raises(BackendError, match="no output 'c'; the model has b, a"):
        decoder("RT-DETR", outputs={"logits": "c", "boxes": "b"})(renamed)


def test_logits_are_taken_for_probabilities_by_nobody() -> None:
    one = Objects(np.array([LEFT]), np.array([0.9]), np.array([1]))
    tensors = {name: each * 9 for name, each in EXPORTS["SSD"][2](one).items()}
    with pytest.raises(BackendError, match=r"scores from .* to 8\.1; logits need sigmoid = true"):
        decoder("SSD")(tensors)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"no_such_option": 1}, "decoder_options: .*no_such_option"),
        ({"iou": 0}, "decoder_options: .*iou"),
        ({"max_candidates": 10**9}, "decoder_options: .*max_candidates"),
        ({"class_map": [0, 3]}, "class_map: expected indices from -1 to 2"),
        ({"class_map": "coco90"}, "class_map: expected indices from -1 to 2"),
        ({"outputs": {"boxen": "a"}}, r"outputs\.boxen: expected one of rows"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        decoder("yolov10", **options)


def test_every_installed_decoder_of_boxes_is_tested() -> None:
    assert {name for name, _, _ in EXPORTS.values()} == set(decoder_names()) - {"logits"}


def test_logits_are_passed_on() -> None:
    tensors = {"logits": np.zeros((2, 3), np.float32)}
    assert decoder_class("logits")({}, SPEC, 3)(tensors) is tensors
    several = {"a": np.zeros((2, 5), np.float32), "b": np.ones((2, 3), np.float32)}
    assert decoder_class("logits")({"output": "b"}, SPEC, 3)(several)["logits"] is several["b"]
    with pytest.raises(BackendError, match="no output 'logits'; the model has a, b"):
        decoder_class("logits")({}, SPEC, 3)(several)


@pytest.mark.parametrize("name", ["reg", "third"])
def test_centres_of_centernet_lie_where_their_offset_says(name: str) -> None:
    one = Objects(np.array([LEFT]), np.array([0.9]), np.array([1]))
    tensors = EXPORTS["CenterNet"][2](one)
    heatmap, sides = tensors["hm"], tensors["wh"]
    offset = np.full_like(sides, 0.5)
    names = ("hm", "wh", "reg") if name == "reg" else ("first", "second", "third")
    plain = decoder("CenterNet")(dict(zip(names, (heatmap, sides), strict=False)))["boxes"][0, 0]
    moved = decoder("CenterNet")(dict(zip(names, (heatmap, sides, offset), strict=True)))["boxes"][0, 0]
    cell = np.array([0.5 / heatmap.shape[3], 0.5 / heatmap.shape[2]] * 2)
    np.testing.assert_allclose(moved, plain + cell, atol=1e-6)


def test_classes_of_tensorflow_are_counted_from_the_first_that_is_stated() -> None:
    one = Objects(np.array([LEFT]), np.array([0.9]), np.array([1]))
    tensors = EXPORTS["TensorFlow's detections"][2](one)
    assert decoder_class("tf_detections")({"first_class": 1}, SPEC, CLASSES)(tensors)["classes"].tolist() == [[1]]

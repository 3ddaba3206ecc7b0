"""`hawkvision models add`: what is asked for, and that a stage computes what its owner's graph computes."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hawkvision.cascade.certification.profile_files import dump
from hawkvision.core.errors import ArtifactError, ConfigError, ManifestError
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.own.adding import Added, AddOrder, add_model
from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts
from hawkvision.models.manifest import artifact_path, load_labels, load_manifest
from hawkvision.tasks.class_scores import softmax
from hawkvision.tasks.registry import load_kind
from hawkvision.tasks.serving import OutputDecoder
from tests.hawkvision.cascade.synthetic import make_profile
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.own import small_detector
from tests.hawkvision.model_zoo.own.exports import (
    MEAN,
    STD,
    as_keras_takes,
    as_torch_takes,
    enter,
    save_keras_style,
    save_torch_style,
    served,
)
from tests.hawkvision.model_zoo.own.small_cnn import LABELS, SIDE, SmallCnn, shape_images
from tests.hawkvision.model_zoo.own.small_detector import save_yolo_style

TORCH = OwnerFacts(
    scale=1 / 255, mean=MEAN, std=STD, channel_order="rgb", fit="crop", resize=SIDE, interpolation="bilinear"
)
KERAS = OwnerFacts(scale=1 / 127.5, mean=[1], std=[1], channel_order="rgb", fit="stretch", interpolation="bilinear")


@pytest.fixture(scope="module")
def net() -> SmallCnn:
    return SmallCnn((4, 6), len(LABELS), seed=3)


def edited(path: Path, change: Callable[[Any], None]) -> Path:
    model = onnx.load(str(path))
    change(model.graph)
    onnx.save(model, str(path))
    return path


def bgr(pixels: Pixels) -> Pixels:
    return np.ascontiguousarray(pixels[..., ::-1])


def without_free_batch(graph: Any) -> None:
    """As an exporter that writes the batch into a Reshape."""
    node = next(node for node in graph.node if node.op_type == "Flatten")
    features = int(next(t for t in graph.initializer if t.name == "fc.weight").dims[1])
    graph.initializer.append(numpy_helper.from_array(np.array([1, features], np.int64), "shape"))
    node.CopyFrom(helper.make_node("Reshape", [node.input[0], "shape"], list(node.output)))


def with_bytes_in(graph: Any) -> None:
    graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    first = graph.node[0]
    graph.node.insert(0, helper.make_node("Cast", ["input"], ["wide"], to=TensorProto.FLOAT))
    next(node for node in graph.node if node.output == first.output).input[0] = "wide"


def with_probabilities(graph: Any) -> None:
    """Probabilities that no single activation makes."""
    graph.node[-1].output[0] = "scores"
    graph.node.append(helper.make_node("Exp", ["scores"], ["odds"]))
    graph.node.append(helper.make_node("ReduceSum", ["odds", "axis"], ["sum"], keepdims=1))
    graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    graph.node.append(helper.make_node("Div", ["odds", "sum"], ["output"]))


@pytest.mark.parametrize(
    ("facts", "owner", "change"),
    [
        (TORCH, as_torch_takes, None),
        (dataclasses.replace(TORCH, channel_order="bgr"), lambda pixels: as_torch_takes(bgr(pixels)), None),
        (TORCH, as_torch_takes, without_free_batch),
        (TORCH, as_torch_takes, with_probabilities),
        (
            OwnerFacts(channel_order="bgr", fit="stretch", interpolation="area"),
            lambda pixels: bgr(pixels).transpose(0, 3, 1, 2).astype(np.float32),
            with_bytes_in,
        ),
        (
            OwnerFacts(scale=1, mean=[0], std=[1], channel_order="rgb", fit="letterbox", interpolation="bicubic"),
            lambda pixels: pixels.transpose(0, 3, 1, 2).astype(np.float32),
            None,
        ),
    ],
    ids=["normalised", "bgr", "one image at a time", "probabilities", "bytes", "as they are"],
)
def test_a_stage_of_an_nchw_graph_computes_what_the_graph_computes(
    facts: OwnerFacts,
    owner: Callable[[Pixels], Any],
    change: Callable[[Any], None] | None,
    tmp_path: Path,
    net: SmallCnn,
) -> None:
    save_torch_style(net, tmp_path / "n.onnx", SIDE)
    if change is not None:
        edited(tmp_path / "n.onnx", change)
    added = enter(tmp_path / "n.onnx", facts)
    pixels, _ = shape_images(4, 5)
    np.testing.assert_allclose(softmax(served(tmp_path, "n", pixels)), softmax(net.logits(owner(pixels))), atol=1e-5)
    assert added.batch == (1 if change is without_free_batch else None)
    assert (added.variant.input.fit, added.variant.input.channel_order) == (facts.fit, facts.channel_order)


def test_the_softmax_of_a_keras_graph_is_left_out(tmp_path: Path, net: SmallCnn) -> None:
    save_keras_style(net, tmp_path / "k.onnx", SIDE)
    added = enter(tmp_path / "k.onnx", KERAS)
    pixels, _ = shape_images(4, 5)
    expected = net.logits(as_keras_takes(pixels).transpose(0, 3, 1, 2))
    np.testing.assert_allclose(served(tmp_path, "k", pixels), expected, rtol=1e-4, atol=1e-5)
    assert "Softmax" not in {node.op_type for node in onnx.load(str(added.folder / "weights" / "k.onnx")).graph.node}


def test_a_grey_network_sees_the_luminance(tmp_path: Path) -> None:
    net = SmallCnn((4, 6), len(LABELS), planes=1)
    save_torch_style(net, tmp_path / "g.onnx", SIDE)
    edited(tmp_path / "g.onnx", lambda graph: setattr(graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 1))
    facts = OwnerFacts(scale=1 / 255, mean=[0.3], std=[0.2], fit="stretch", interpolation="bilinear")
    enter(tmp_path / "g.onnx", facts)
    grey = np.repeat(shape_images(4, 5)[0][..., :1], 3, axis=3)
    taken = ((grey[..., 0][:, None] / 255 - 0.3) / 0.2).astype(np.float32)
    np.testing.assert_allclose(served(tmp_path, "g", grey), net.logits(taken), rtol=1e-4, atol=1e-4)


def test_all_missing_facts_are_asked_for_at_once_with_a_command_to_complete(tmp_path: Path, net: SmallCnn) -> None:
    path = tmp_path / "n.onnx"
    save_torch_style(net, path, SIDE)
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(LABELS))
    words = ["models", "add", str(path), "--task", "shapes", "--models-dir", str(tmp_path / "models")]
    words += ["--cache-dir", str(tmp_path / "cache")]
    refused = invoke(*words)
    assert refused.exit_code == 1
    message = refused.stderr
    asked = {"--labels", "--scale", "--mean", "--std", "--channel-order", "--fit", "--interpolation"}
    assert {line.split()[0] for line in message.splitlines() if line.startswith("  --")} == asked
    assert "float32 (any, 3, 16, 16) (NCHW)" in message
    assert not (tmp_path / "models").exists(), "nothing is written before everything is known"
    values = {
        "LABELS": str(labels), "SCALE": "1/255", "MEAN": "0.485,0.456,0.406", "STD": "0.229,0.224,0.225",
        "ORDER": "rgb", "FIT": "crop", "METHOD": "bilinear",
    }  # fmt: skip
    template = shlex.split(message.splitlines()[-1])
    assert template[0] == "hawkvision"
    completed = [values.get(word, word) for word in template[1:]]
    refused = invoke(*completed)
    assert refused.exit_code == 1
    assert "--resize" in refused.stderr, "a crop asks for one more"
    done = invoke(*completed, "--resize", str(SIDE))
    assert done.exit_code == 0, done.output
    assert load_labels(load_manifest("shapes", tmp_path / "models"), tmp_path / "models") == LABELS


def test_an_output_that_may_be_probabilities_is_asked_about(tmp_path: Path, net: SmallCnn) -> None:
    def squashed(graph: Any) -> None:
        graph.node[-1].output[0] = "scores"
        graph.node.append(helper.make_node("Sigmoid", ["scores"], ["low"]))
        graph.node.append(helper.make_node("Mul", ["low", "half"], ["output"]))
        graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))

    save_torch_style(net, tmp_path / "n.onnx", SIDE)
    edited(tmp_path / "n.onnx", squashed)
    with pytest.raises(ConfigError, match="--output-meaning"):
        enter(tmp_path / "n.onnx", TORCH)
    assert enter(tmp_path / "n.onnx", dataclasses.replace(TORCH, output_meaning="logits")).worst < 1e-4


def test_a_detector_is_read_by_its_decoder(tmp_path: Path) -> None:
    net = SmallCnn((4, 6), small_detector.ROWS * small_detector.CELLS**2, small_detector.SIDE)
    save_yolo_style(net, tmp_path / "d.onnx")
    (tmp_path / "labels.txt").write_text("\n".join(small_detector.LABELS))
    facts = OwnerFacts(scale=1 / 255, mean=[0], std=[1], channel_order="rgb", fit="letterbox", interpolation="bilinear")

    def add(**changed: Any) -> Added:
        order = AddOrder(
            path=tmp_path / "d.onnx",
            task="yard",
            labels=tmp_path / "labels.txt",
            kind="detection",
            facts=dataclasses.replace(facts, **changed),
        )
        return add_model(order, tmp_path / "models", tmp_path / "cache")

    with pytest.raises(ConfigError, match=r"--decoder +how boxes are read from the outputs: .*yolov8"):
        add()
    with pytest.raises(ConfigError, match=r"--decoder yolov5: .*the model gave rows of shape"):
        add(decoder="yolov5")
    with pytest.raises(ConfigError, match=r"beyond the image; .*scale=pixels"):
        add(decoder="yolov8", decoder_options={"scale": "fractions"})
    with pytest.raises(ManifestError, match=r"order.*; the options are .*order \(xyxy, yxyx, cxcywh, xywh\)"):
        add(decoder="yolov8", decoder_options={"order": "yxyx "})
    added = add(decoder="yolov8", decoder_options={"iou": 0.5})
    assert (added.manifest.kind, added.variant.decoder) == ("detection", "yolov8")
    assert load_manifest("yard", tmp_path / "models") == added.manifest
    assert added.worst < 1e-4


def test_models_of_a_task_make_a_cascade_by_their_cost(tmp_path: Path, net: SmallCnn) -> None:
    large = SmallCnn((48, 64), len(LABELS))
    save_torch_style(large, tmp_path / "large.onnx", SIDE)
    save_torch_style(net, tmp_path / "small.onnx", SIDE)
    cascade = enter(tmp_path / "large.onnx", TORCH).manifest.cascade
    assert (cascade.edge, cascade.dc) == (("large",), ("large",))
    added = enter(tmp_path / "small.onnx", OwnerFacts(), same_as="large")
    assert (added.manifest.cascade.edge, added.manifest.cascade.dc) == (("small",), ("large",))
    assert added.variant.input == added.manifest.variant("large").input
    cascade = enter(tmp_path / "small.onnx", TORCH, name="second", tier="dc").manifest.cascade
    assert cascade.edge == ("small",)
    assert cascade.dc == ("second", "large"), "the dearest is the reference"
    again = enter(tmp_path / "small.onnx", TORCH, name="second")
    assert again.replaced
    assert again.manifest.cascade == cascade


def test_a_reference_stage_that_the_profile_knows_to_be_worse_than_the_edge_stage_is_refused(
    tmp_path: Path, net: SmallCnn
) -> None:
    save_torch_style(SmallCnn((48, 64), len(LABELS)), tmp_path / "large.onnx", SIDE)
    save_torch_style(net, tmp_path / "small.onnx", SIDE)
    enter(tmp_path / "large.onnx", TORCH)
    manifest = enter(tmp_path / "small.onnx", TORCH).manifest
    profile, path = make_profile(), tmp_path / "models" / "shapes" / "profile.json"
    stages = tuple(msgspec.structs.replace(s, fingerprint=manifest.fingerprint(s.name)) for s in profile.stages)
    path.write_bytes(dump(msgspec.structs.replace(profile, task="shapes", stages=stages)))
    with pytest.raises(ManifestError, match=r"reference stage small is right on 7\d.*large, which is below it, on 9\d"):
        enter(tmp_path / "large.onnx", TORCH, tier="edge")
    assert load_manifest("shapes", tmp_path / "models") == manifest
    assert enter(tmp_path / "large.onnx", TORCH, tier="edge", allow_worse=True).manifest.best == "small"


def test_a_second_model_has_its_labels_in_an_order_of_its_own(tmp_path: Path, net: SmallCnn) -> None:
    """Its logits come in the task's order, bit for bit, from the decoder that both tiers run."""
    order = [3, 0, 4, 1, 2]
    other = SmallCnn((4, 6), len(LABELS), seed=3)
    other.weight, other.bias = other.weight[order], other.bias[order]
    save_torch_style(net, tmp_path / "first.onnx", SIDE)
    save_torch_style(other, tmp_path / "second.onnx", SIDE)
    enter(tmp_path / "first.onnx", TORCH)
    assert "assumed to be in the task's order" in enter(tmp_path / "second.onnx", TORCH, labels=None).labels
    added = enter(tmp_path / "second.onnx", TORCH, [LABELS[each] for each in order])
    manifest = load_manifest("shapes", tmp_path / "models")
    assert (manifest, manifest.classes) == (added.manifest, len(LABELS))
    pixels, _ = shape_images(3, 5)
    kind, found = load_kind(manifest, tmp_path / "models"), {}
    for name in ("first", "second"):
        decoder = OutputDecoder(manifest.variant(name), kind)
        found[name] = decoder({"logits": served(tmp_path, name, pixels)})
    np.testing.assert_array_equal(found["first"], found["second"])
    with pytest.raises(ConfigError, match="'disc' is in only one of both; the task has circle, cross"):
        enter(tmp_path / "second.onnx", TORCH, [*LABELS[1:], "disc"])


def test_what_was_added_is_built_again_from_the_tasks_folder(tmp_path: Path, net: SmallCnn) -> None:
    save_torch_style(net, tmp_path / "n.onnx", SIDE)
    enter(tmp_path / "n.onnx", TORCH)
    content = artifact_path(tmp_path / "cache", "shapes", "n").read_bytes()
    artifact_path(tmp_path / "cache", "shapes", "n").unlink()
    (built,) = build("shapes", models=tmp_path / "models", cache=tmp_path / "cache")
    assert built.path.read_bytes() == content


def test_an_input_beside_the_image_becomes_a_constant(tmp_path: Path, net: SmallCnn) -> None:
    def with_factor(graph: Any) -> None:
        graph.node[-1].output[0] = "scores"
        graph.node.append(helper.make_node("Mul", ["scores", "factor"], ["output"]))
        graph.input.append(helper.make_tensor_value_info("factor", TensorProto.FLOAT, [1]))

    save_torch_style(net, tmp_path / "n.onnx", SIDE)
    edited(tmp_path / "n.onnx", with_factor)
    with pytest.raises(ArtifactError, match=r"expected one input, found 'input' .*'factor'"):
        enter(tmp_path / "n.onnx", TORCH)
    enter(tmp_path / "n.onnx", TORCH, fixed={"factor": [2.0]})
    pixels, _ = shape_images(3, 5)
    np.testing.assert_allclose(
        served(tmp_path, "n", pixels), 2 * net.logits(as_torch_takes(pixels)), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"task": "imagenet"}, ConfigError, "'imagenet' comes with HawkVision"),
        ({"task": "My Pets"}, ConfigError, "--task: expected a name of lower-case"),
        ({"labels": ["a", "b", "a"]}, ConfigError, "line 3 is 'a', which line 1 is too"),
        ({"labels": ["a", "b", "c"]}, ConfigError, "gives 5 numbers an image; there are 3 labels"),
        ({"facts": dataclasses.replace(TORCH, size=(32, 32))}, ConfigError, "the graph takes 16x16 only"),
        ({"facts": dataclasses.replace(TORCH, resize=8)}, ConfigError, "--resize: expected at least 16"),
        ({"facts": dataclasses.replace(TORCH, std=[0.2, 0.0, 0.2])}, ConfigError, "--std: expected positive"),
        ({"facts": dataclasses.replace(TORCH, outputs=["boxes"])}, ConfigError, "no output 'boxes'"),
        ({"content": b"no model"}, ArtifactError, "not a valid ONNX model"),
    ],
)
def test_what_cannot_be_added_is_named(
    change: dict[str, Any], error: type[Exception], says: str, tmp_path: Path, net: SmallCnn, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "n.onnx"
    save_torch_style(net, path, SIDE)
    if "content" in change:
        path.write_bytes(change["content"])
    (tmp_path / "labels.txt").write_text("\n".join(change.get("labels", LABELS)))
    order = AddOrder(
        path=path, task=change.get("task", "shapes"), labels=tmp_path / "labels.txt", facts=change.get("facts", TORCH)
    )
    with pytest.raises(error, match=says):
        add_model(order, None, tmp_path / "cache")
    assert not (tmp_path / "data").exists()

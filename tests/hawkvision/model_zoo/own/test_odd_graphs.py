"""Unusual graphs of owners: exactly what they compute is served, or they are refused by what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hawkvision.core.errors import HawkVisionError
from hawkvision.model_zoo.own.adding import Added, AddOrder, add_model
from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts
from hawkvision.model_zoo.own.graphs.parity import sample_pixels
from hawkvision.model_zoo.own.task_folder import read_labels
from hawkvision.models.manifest import load_labels
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.class_scores import softmax
from tests.hawkvision.model_zoo.own.exports import as_torch_takes, enter, save_torch_style, served
from tests.hawkvision.model_zoo.own.small_cnn import LABELS, SIDE, Array, SmallCnn

FACTS = OwnerFacts(
    scale=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), channel_order="rgb", fit="stretch",
    interpolation="opencv_bilinear",
)  # fmt: skip
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("exported") / "n.onnx"
    save_torch_style(SmallCnn((4, 6), len(LABELS), seed=3), path, SIDE)
    return path.read_bytes()


def changed(exported: bytes, path: Path, change: Change) -> Path:
    model = onnx.load_from_string(exported)
    change(model)
    onnx.save(model, str(path))
    return path


def add(path: Path, labels: tuple[str, ...] = LABELS, **facts: Any) -> Added:
    return enter(path, replace(FACTS, **facts), labels)


def owners(path: Path, taken: Array, name: str | None = None) -> Array:
    session = ort.InferenceSession(str(path))
    names = None if name is None else [name]
    parts = [session.run(names, {"input": taken[i : i + 1]})[0] for i in range(len(taken))]
    return np.stack([np.asarray(each).reshape(-1) for each in parts])


def ends_in(*nodes: Any, kind: int = TensorProto.FLOAT, shape: tuple[Any, ...] = ("n", len(LABELS))) -> Change:
    """The graph, with nodes behind its logits, which are called `scores`; the last gives the output."""

    def change(model: Any) -> None:
        graph = model.graph
        graph.node[-1].output[0] = "scores"
        graph.node.extend(nodes)
        del graph.output[:]
        graph.output.append(helper.make_tensor_value_info(nodes[-1].output[0], kind, shape))

    return change


def constant(graph: Any, name: str, value: Any) -> None:
    graph.initializer.append(numpy_helper.from_array(np.array(value), name))


def quantised_inside(model: Any) -> None:
    """The input is rounded to steps of a quarter, where many pixels lie halfway."""
    constant(model.graph, "step", np.float32(0.25))
    constant(model.graph, "zero", np.uint8(128))
    model.graph.node[0].input[0] = "rounded"
    model.graph.node.insert(0, helper.make_node("QuantizeLinear", ["input", "step", "zero"], ["levels"]))
    model.graph.node.insert(1, helper.make_node("DequantizeLinear", ["levels", "step", "zero"], ["rounded"]))


def quantised_by_the_batch(model: Any) -> None:
    """Ranges are measured over all images together."""
    model.graph.node[0].input[0] = "rounded"
    levels = ["levels", "step", "zero"]
    model.graph.node.insert(0, helper.make_node("DynamicQuantizeLinear", ["input"], levels))
    model.graph.node.insert(1, helper.make_node("DequantizeLinear", levels, ["rounded"]))


@pytest.mark.parametrize(("change", "batch"), [(quantised_inside, None), (quantised_by_the_batch, 1)])
def test_a_quantised_graph_is_compared_on_the_numbers_that_it_gets(
    change: Change, batch: int | None, exported: bytes, tmp_path: Path
) -> None:
    path = changed(exported, tmp_path / "q.onnx", change)
    added = add(path)
    assert added.worst < 1e-5
    assert added.batch == batch
    assert added.variant.precision == "int8"
    pixels = sample_pixels(SIDE, SIDE)
    np.testing.assert_allclose(served(tmp_path, "q", pixels), owners(path, as_torch_takes(pixels)), atol=0.2)


def without_output_shape(model: Any) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


@pytest.mark.parametrize(
    "change",
    [
        without_output_shape,
        ends_in(helper.make_node("Squeeze", ["scores"], ["output"]), shape=()),
        ends_in(helper.make_node("LogSoftmax", ["scores"], ["output"], axis=1)),
    ],
    ids=["no shape", "squeezed", "log softmax"],
)
def test_an_output_of_any_shape_becomes_logits(change: Change, exported: bytes, tmp_path: Path) -> None:
    path = changed(exported, tmp_path / "n.onnx", change)
    pixels = sample_pixels(SIDE, SIDE)
    expected = softmax(owners(path, as_torch_takes(pixels)))
    add(path)
    np.testing.assert_allclose(softmax(served(tmp_path, "n", pixels)), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(), ("n",), ("n", "k")])
def test_one_logit_of_any_shape_is_that_of_the_second_label(
    shape: tuple[Any, ...], exported: bytes, tmp_path: Path
) -> None:
    def change(model: Any) -> None:
        ends_in(helper.make_node("Gather", ["scores", "which"], ["output"], axis=1), shape=shape)(model)
        constant(model.graph, "which", np.int64(2) if len(shape) < 2 else np.array([2], np.int64))

    path = changed(exported, tmp_path / "n.onnx", change)
    pixels = sample_pixels(SIDE, SIDE)
    logits = owners(path, as_torch_takes(pixels)).reshape(-1)
    add(path, ("other", "cat"))
    found = softmax(served(tmp_path, "n", pixels))
    np.testing.assert_allclose(found[:, 1], 1 / (1 + np.exp(-logits)), atol=1e-5)


def test_a_tensor_inside_the_graph_serves_as_output(exported: bytes, tmp_path: Path) -> None:
    last = helper.make_node("ArgMax", ["scores"], ["output"], axis=1, keepdims=0)
    path = changed(exported, tmp_path / "n.onnx", ends_in(last, kind=TensorProto.INT64, shape=("n",)))
    with pytest.raises(HawkVisionError, match=r"made by ArgMax: .*`--outputs scores` uses"):
        add(path)
    pixels = sample_pixels(SIDE, SIDE)
    add(path, outputs=("scores",))
    found = served(tmp_path, "n", pixels)
    np.testing.assert_array_equal(found.argmax(axis=1), owners(path, as_torch_takes(pixels)).reshape(-1))


def with_metadata(**values: str) -> Change:
    return lambda model: helper.set_model_props(model, values)


def of_any_size(model: Any) -> None:
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = "side"
    with_metadata(names=str(dict(enumerate(LABELS))), task="classify", imgsz=str([SIDE, SIDE]))(model)


CONFIG = {"architectures": ["ViTForImageClassification"], "id2label": {str(i): each for i, each in enumerate(LABELS)}}


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (of_any_size, None),
        (with_metadata(names=str(list(LABELS))), None),
        (with_metadata(), CONFIG),
        (with_metadata(), {**CONFIG, "problem_type": "multi_label_classification"}),
    ],
)
def test_labels_kind_and_size_are_those_that_the_export_states(
    change: Change, config: dict[str, Any] | None, exported: bytes, tmp_path: Path
) -> None:
    path = changed(exported, tmp_path / "n.onnx", change)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    added = enter(path, FACTS, None)
    assert load_labels(added.manifest, tmp_path / "models") == LABELS
    assert f"as in {'metadata of ' if config is None else ''}{tmp_path}" in added.labels
    assert added.manifest.kind == ("multi_label" if "problem_type" in (config or {}) else "classification")
    assert (added.variant.input.height, added.variant.input.width) == (SIDE, SIDE)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.yaml", f"train: images\nnames: {list(LABELS)}\n"),
        ("data.yml", "names:\n" + "".join(f"  {i}: {each}\n" for i, each in enumerate(LABELS))),
        ("labels.txt", "".join(f"{i}: {each}\n" for i, each in reversed(list(enumerate(LABELS))))),
    ],
)
def test_labels_are_read_from_the_files_that_trainers_write(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_labels(tmp_path / name) == LABELS


def of_qonnx(model: Any) -> None:
    model.graph.node[0].input[0] = "rounded"
    domain = "qonnx.custom_op.general"
    model.graph.node.insert(0, helper.make_node("Quant", ["input", "s", "z", "b"], ["rounded"], domain=domain))
    model.opset_import.append(helper.make_opsetid(domain, 1))


def as_map(model: Any) -> None:
    """As scikit-learn's converter ends a classifier."""
    graph = model.graph
    graph.node[-1].output[0] = "scores"
    graph.node.append(
        helper.make_node("ZipMap", ["scores"], ["output"], domain="ai.onnx.ml", classlabels_strings=list(LABELS))
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    number = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(number))


def of_four_channels(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4


def without_input_shape(model: Any) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def with_sorted_scores(model: Any) -> None:
    ends_in(helper.make_node("TopK", ["scores", "k"], ["output", "indices"], axis=1))(model)
    constant(model.graph, "k", np.array([len(LABELS)], np.int64))
    model.graph.output[0].name = "output"


def not_finite(model: Any) -> None:
    bias = next(each for each in model.graph.initializer if each.name == "fc.bias")
    bias.CopyFrom(numpy_helper.from_array(np.full(len(LABELS), np.nan, np.float32), "fc.bias"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_metadata(names="{0: 'a'}", task="segment"), "metadata of .* says that the model gives segmentation"),
        (
            ends_in(helper.make_node("Identity", ["pool1"], ["map"]), shape=("n", 6, 4, 4)),
            "each of 4x4 places, as of a seg",
        ),
        (of_qonnx, r"a QONNX graph \(Quant\); expected ONNX's own operators"),
        (as_map, r"'output' sequence .*: expected a tensor of numbers; ZipMap reads 'scores'"),
        (with_sorted_scores, "made by TopK: expected logits or probabilities"),
        (of_four_channels, "expected images of 1 or 3 channels"),
        (without_input_shape, "'input' states no shape"),
        (not_finite, "'output' gives numbers that are not finite"),
    ],
)
def test_a_graph_that_cannot_be_served_is_refused_by_what_it_is(
    change: Change, says: str, exported: bytes, tmp_path: Path
) -> None:
    path = changed(exported, tmp_path / "n.onnx", change)
    with pytest.raises(HawkVisionError, match=says):
        add(path)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("last", "meaning", "says"),
    [
        ("Softmax", "logits", "'output' is made by Softmax, so they are probabilities; leave the option out"),
        ("Identity", "probabilities", "'output' gives numbers from -.* to .*, which are no probabilities"),
    ],
)
def test_a_meaning_that_the_numbers_contradict_is_refused(
    last: str, meaning: Any, says: str, exported: bytes, tmp_path: Path
) -> None:
    path = changed(exported, tmp_path / "n.onnx", ends_in(helper.make_node(last, ["scores"], ["output"])))
    with pytest.raises(HawkVisionError, match=f"--output-meaning {meaning}: .*{says}"):
        add(path, output_meaning=meaning)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04" + b"\0" * 99, "a zip archive, such as a checkpoint of PyTorch"),
        (b"\x80\x02}q\x00.", "a Python pickle"),
        (b"\x1c\0\0\0TFL3" + b"\0" * 99, "TensorFlow Lite"),
        (b"\x89PNG\r\n\x1a\n", "an image"),
        (b"\x08\x08\x12", "cut off, or of another kind"),
    ],
)
def test_a_file_that_is_no_model_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "n.onnx").write_bytes(content)
    with pytest.raises(HawkVisionError, match=says):
        add(tmp_path / "n.onnx")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n\nb", "line 2 is empty"),
        ('["a", "b"]', "found JSON"),
        ("0\tcat\n1\tdog", "no line of text"),
        ("\u00e9t\u00e9\ne\u0301te\u0301", "line 2 is 'été', which line 1 is too"),
    ],
)
def test_labels_that_nobody_could_ask_for_are_refused(text: str, says: str, exported: bytes, tmp_path: Path) -> None:
    path = changed(exported, tmp_path / "n.onnx", lambda model: None)
    (tmp_path / "l.txt").write_text(text, encoding="utf-8")
    with pytest.raises(HawkVisionError, match=says):
        add_model(
            AddOrder(path=path, task="shapes", labels=tmp_path / "l.txt", facts=FACTS), tmp_path / "m", tmp_path / "c"
        )


def test_a_stage_that_cannot_be_written_whole_leaves_the_old_one(exported: bytes, tmp_path: Path) -> None:
    path = changed(exported, tmp_path / "n.onnx", lambda model: None)
    add(path)
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file != path}
    manifest = tmp_path / "models" / "shapes" / "manifest.toml"
    replaced = changed(exported, path, ends_in(helper.make_node("Neg", ["scores"], ["output"])))
    content = manifest.read_bytes()
    built = tmp_path / "cache" / "models" / "shapes" / "n.onnx"
    built.unlink()
    built.mkdir()  # so that it cannot be replaced by a file
    with pytest.raises(HawkVisionError, match="cannot write"):
        add(replaced)
    assert manifest.read_bytes() == content
    assert all(file.read_bytes() == before for file, before in kept.items() if file != built)

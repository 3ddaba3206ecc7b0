"""Half precision: nearly the model's logits, from a file of half the size, and a fingerprint of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS
from hawkvision.imaging.preprocessing import load_input
from hawkvision.inference.backend_registry import BackendKind, execution_of, open_backend
from hawkvision.inference.backends.half_precision import in_half_precision
from hawkvision.inference.backends.interface import Backend, OnnxPrecision
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend, execution_on
from hawkvision.model_zoo.building.build import emit_variant
from hawkvision.models.fingerprints import EXACT, parts_of
from hawkvision.models.manifest import InputSpec, load_manifest, models_dir
from tests.hawkvision.inference.backend_conformance import BackendConformance, random_images
from tests.hawkvision.inference.graphs import model, tiny_classifier
from tests.images import encoded

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
SPEC = InputSpec(height=16, width=12, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
BOUND = 2e-3
"""Share of the logits' range by which those of half precision may differ: four units of a float16's last place."""


def trained(name: str) -> bytes:
    """The model of a variant whose weights are committed."""
    manifest = load_manifest("cifar10", models_dir())
    variant = manifest.variant(name)
    weights = (models_dir() / "cifar10" / variant.source.file).read_bytes()  # type: ignore[union-attr]
    return emit_variant("cifar10", variant, models_dir(), weights)


class TestHalfPrecision(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: OnnxRuntimeBackend(tiny_classifier(), precision="fp16")


@pytest.mark.parametrize("name", ["tiny", "small", "large"])
def test_logits_of_trained_networks_are_those_of_float32_within_a_bound(name: str) -> None:
    data, spec = trained(name), load_manifest("cifar10", models_dir()).variant(name).input
    images = np.stack([load_input(encoded(seed=seed), spec, max_pixels=10**6)[0] for seed in range(32)])
    single, half = OnnxRuntimeBackend(data), OnnxRuntimeBackend(data, precision="fp16")
    wanted, found = single.infer(images)[LOGITS], half.infer(images)[LOGITS]
    assert found.dtype == np.float32
    assert 0.0 < float(np.abs(found - wanted).max()) <= BOUND * float(np.ptp(wanted))
    clear = np.diff(np.sort(wanted, axis=1)[:, -2:])[:, 0] > 2.0 * BOUND * np.ptp(wanted)
    assert (found.argmax(axis=1) == wanted.argmax(axis=1))[clear].all()
    assert clear.sum() >= 16


def test_all_that_follows_the_first_layer_is_float16_and_what_reads_pixels_is_not() -> None:
    data = trained("small")
    half = in_half_precision(data, "small")
    assert half == in_half_precision(data, "small")
    assert len(half) < 0.51 * len(data)
    graph = onnx.load_model_from_string(half).graph
    onnx.checker.check_model(half, full_check=True)
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert kinds.pop("image.mean") == TensorProto.FLOAT
    assert set(kinds.values()) == {TensorProto.FLOAT16}
    casts = [node for node in graph.node if node.op_type == "Cast"]
    assert [helper.get_node_attr_value(node, "to") for node in casts] == [
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.FLOAT,
    ]


def one_layer(weight: float, operator: str = "Relu") -> bytes:
    nodes = [
        helper.make_node("Cast", ["image"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["f"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w"], ["c"]),
        helper.make_node(operator, ["c"], ["r"], name="odd_one"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["logits"]),
    ]
    constants = {"w": np.full((2, 3, 1, 1), weight, np.float32)}
    return model(
        nodes, constants, ("image", TensorProto.UINT8, ["n", 8, 8, 3]), ("logits", TensorProto.FLOAT, ["n", 2])
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (one_layer(1e5), r"constant 'w' goes to 1e\+05; half precision holds 65504"),
        (one_layer(float("nan")), "constant 'w' goes to nan"),
        (one_layer(0.1, "Selu"), "'odd_one'.*Selu"),
        (trained("tiny_w8"), "half precision"),
        (b"\x08\x07", "no float32 layer"),
        (b"not a model", "model"),
    ],
)
def test_what_half_precision_cannot_hold_is_refused(data: bytes, says: str) -> None:
    OnnxRuntimeBackend(one_layer(0.1), precision="fp16").close()
    with pytest.raises(BackendError, match=says):
        OnnxRuntimeBackend(data, precision="fp16")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BackendError, match=r"package onnx.*\.\[gpu\]"):
        in_half_precision(b"", "it")


@pytest.mark.parametrize("kind", ["int8", "noop"])
def test_other_backends_have_no_half_precision(kind: BackendKind) -> None:
    with pytest.raises(BackendError, match=f"backend {kind} runs models as they are"):
        open_backend(kind, tiny_classifier(), SPEC, 7, precision="fp16")


def test_auto_runs_half_precision_in_onnx_runtime_and_says_so() -> None:
    backend = open_backend("auto", tiny_classifier(), SPEC, 7, precision="fp16")
    assert execution_of("auto", backend).startswith(f"onnxruntime:{CPU}:fp16:")
    wanted = OnnxRuntimeBackend(tiny_classifier()).infer(random_images(backend, 2))[LOGITS]
    assert not np.array_equal(backend.infer(random_images(backend, 2))[LOGITS], wanted)


def test_providers_and_precisions_have_fingerprints_of_their_own() -> None:
    """By the names and options that sessions report; only the CPU in the model's precision is certified as it is."""
    sessions: list[tuple[tuple[str, ...], dict[str, dict[str, str]], OnnxPrecision]] = [
        ((CPU,), {}, "fp16"),
        ((CUDA, CPU), {CUDA: {"use_tf32": "0"}}, "model"),
        ((CUDA, CPU), {CUDA: {"use_tf32": "1"}}, "model"),
        ((CUDA, CPU), {CUDA: {"use_tf32": "0"}}, "fp16"),
        ((CUDA, CPU), {CUDA: {"use_tf32": "1"}}, "fp16"),
        ((TENSORRT, CUDA, CPU), {TENSORRT: {"trt_fp16_enable": "0"}}, "model"),
        ((TENSORRT, CUDA, CPU), {TENSORRT: {"trt_fp16_enable": "True"}}, "model"),
        ((TENSORRT, CUDA, CPU), {TENSORRT: {"trt_int8_enable": "1", "trt_fp16_enable": "1"}}, "model"),
    ]
    stated = [str(execution_on(*session)) for session in sessions]
    assert len(set(stated)) == len(stated)
    assert not any(parts_of(f"models/{each}")[1] <= EXACT for each in stated)
    assert parts_of(f"models/{execution_on((CPU,), {}, 'model')}")[1] <= EXACT
    assert stated[4].startswith(f"onnxruntime:{CUDA},{CPU}:fp16,tf32:")

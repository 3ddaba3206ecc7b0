"""The networks trained here: their graphs compute what their description says."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import Logits, Pixels
from hawkvision.model_zoo.building.architectures import CONVNETS, EPSILON, F32, LUMINANCE, ConvNet, emit
from hawkvision.model_zoo.building.checkpoint import StateDict
from hawkvision.models.manifest import InputSpec
from hawkvision.system.onnx_runtime import ort
from tests.hawkvision.model_zoo.tiny_states import convnet_state

SIDE = 14  # halves to 7, 3 and 1, so that odd rows are left out twice
SPEC = InputSpec(height=SIDE, width=SIDE, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))


def state_of(name: str) -> StateDict:
    return convnet_state(CONVNETS[name], np.random.default_rng(3), SIDE, classes=4)


def images(count: int = 3) -> Pixels:
    return np.random.default_rng(1).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def run(name: str, state: StateDict, batch: Pixels) -> Logits:
    model = emit(name, state, SPEC, "test").SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    logits: Logits = session.run(["logits"], {"image": batch})[0]
    return logits


def by_definition(net: ConvNet, state: StateDict, batch: Pixels) -> F32:
    """The network in plain NumPy, normalisation not folded."""
    x = (batch - np.array(SPEC.mean)) / np.array(SPEC.std)
    x = ((x @ LUMINANCE)[..., None] if net.grey else x).transpose(0, 3, 1, 2)
    for index, layer in enumerate(net.layers):
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = sliding_window_view(padded, (3, 3), axis=(2, 3))
        made = np.einsum("ncyxij,ocij->noyx", windows, state[f"layers.{index}.conv.weight"])
        parts = ("weight", "bias", "running_mean", "running_var")
        scale, bias, mean, variance = (state[f"layers.{index}.norm.{p}"].reshape(-1, 1, 1) for p in parts)
        made = np.maximum((made - mean) / np.sqrt(variance + EPSILON) * scale + bias, 0)
        x = made + x if layer.residual else made
        if layer.pool:
            rows, columns = x.shape[2] // 2, x.shape[3] // 2
            x = x[:, :, : 2 * rows, : 2 * columns].reshape(*x.shape[:2], rows, 2, columns, 2).max(axis=(3, 5))
    features = x.mean(axis=(2, 3)) if net.head == "average" else x.reshape(len(x), -1)
    logits: F32 = features @ state["head.weight"].T + state["head.bias"]
    return logits


@pytest.mark.parametrize("name", list(CONVNETS))
def test_graph_computes_the_definition(name: str) -> None:
    state = state_of(name)
    expected = by_definition(CONVNETS[name], state, images())
    np.testing.assert_allclose(run(name, state, images()), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_sixteen_bit_weights_are_widened_exactly() -> None:
    narrow = {key: array.astype(np.float16) for key, array in state_of("convnet_small").items()}
    wide = {key: array.astype(np.float32) for key, array in narrow.items()}
    assert emit("convnet_small", narrow, SPEC, "test") == emit("convnet_small", wide, SPEC, "test")


@pytest.mark.parametrize(
    ("key", "shape", "says"),
    [
        ("layers.0.conv.weight", (16, 1, 3, 3), r"layers\.0\.conv\.weight: expected shape \(16, 3, 3, 3\)"),
        ("layers.2.norm.bias", (31,), r"layers\.2\.norm\.bias: expected shape \(32,\), found shape \(31,\)"),
        ("head.weight", (4, 33), r"head\.weight: expected shape \(4, 32\), found shape \(4, 33\)"),
        ("head.bias", (5,), r"head\.weight: expected shape \(5, 32\)"),
        ("head.bias", None, r"head\.bias: .*no such weight"),
        ("layers.1.norm.weight", None, r"layers\.1\.norm\.weight: .*no such weight"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(key: str, shape: tuple[int, ...] | None, says: str) -> None:
    state = state_of("convnet_tiny")
    del state[key]
    if shape is not None:
        state[key] = np.zeros(shape, np.float32)
    with pytest.raises(ArtifactError, match=f"file: {says}"):
        emit("convnet_tiny", state, SPEC, "file")

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.architectures import CONVNETS, EMITTERS, F32, GraphBuilder, emit, same_pads
from hawkvision.models.manifest import InputSpec
from hawkvision.system.onnx_runtime import ort
from tests.fuzz.examples import examples
from tests.hawkvision.model_zoo.tiny_states import random_state

SPEC = InputSpec(height=32, width=32, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))


def run(model: onnx.ModelProto, images: np.ndarray) -> F32:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits: F32 = session.run(["logits"], {"image": images})[0]
    return logits


def plain_conv(x: F32, kernel: F32, bias: F32, stride: int, pads: tuple[int, int, int, int]) -> F32:
    """Convolution of one image (channels, height, width) by its definition."""
    x = np.pad(x, ((0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    size = kernel.shape[2]
    rows, columns = ((n - size) // stride + 1 for n in x.shape[1:])
    out = np.empty((kernel.shape[0], rows, columns), np.float32)
    for r in range(rows):
        for c in range(columns):
            window = x[:, r * stride : r * stride + size, c * stride : c * stride + size]
            out[:, r, c] = (kernel * window).sum(axis=(1, 2, 3)) + bias
    return out


@given(
    side=st.integers(8, 11),
    size=st.sampled_from([1, 3, 5]),
    stride=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(125), deadline=None)
def test_graph_computes_the_plain_definition(side: int, size: int, stride: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kernel, bias = rng.normal(size=(4, 3, size, size)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    last, offset = rng.normal(size=(5, 4)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    image = rng.integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    pads = same_pads((side, side), size, stride)
    builder = GraphBuilder("tiny")
    x = builder.relu6(builder.conv(builder.pixels((1.0, 2.0, 3.0)), "conv", kernel, bias, stride, pads))
    builder.classifier(x, last, offset)
    found = run(builder.model(side, side, 5), image)
    for single, logits in zip(image, found, strict=True):
        pixels = single.transpose(2, 0, 1).astype(np.float32) - np.array([1, 2, 3], np.float32).reshape(3, 1, 1)
        maps = np.clip(plain_conv(pixels, kernel, bias, stride, pads), 0, 6)
        np.testing.assert_allclose(logits, last @ maps.mean(axis=(1, 2)) + offset, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", list(EMITTERS))
def test_every_architecture_takes_any_batch_and_is_emitted_alike_each_time(architecture: str) -> None:
    state = random_state(architecture)
    model = emit(architecture, state, SPEC, "test")
    assert model.SerializeToString() == emit(architecture, state, SPEC, "test").SerializeToString()
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    together = run(model, images)
    assert together.shape == (3, 10 if architecture in CONVNETS else 1000)
    np.testing.assert_allclose(together[1:2], run(model, images[1:2]), rtol=1e-3, atol=1e-4)


def test_bgr_weights_see_bgr() -> None:
    state = random_state("squeezenet1_1")
    rgb = emit("squeezenet1_1", state, SPEC, "test")
    mirrored = InputSpec(height=32, width=32, mean=SPEC.mean[::-1], std=SPEC.std[::-1], channel_order="bgr")
    state["conv1.0"] = state["conv1.0"][:, :, ::-1]
    images = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    np.testing.assert_allclose(run(emit("squeezenet1_1", state, mirrored, "test"), images), run(rgb, images), rtol=1e-4)


def test_missing_and_left_over_weights_and_unknown_architectures_are_named() -> None:
    with pytest.raises(ArtifactError, match="mobilenet_v2"):
        emit("resnet9000", {}, SPEC, "file")
    state = random_state("squeezenet1_1")
    with pytest.raises(ArtifactError, match="extra"):
        emit("squeezenet1_1", {**state, "extra": np.zeros(1, np.float32)}, SPEC, "file")
    del state["fire5/squeeze1x1.0"]
    with pytest.raises(ArtifactError, match=r"file: fire5/squeeze1x1\.0: .*no such weight"):
        emit("squeezenet1_1", state, SPEC, "file")

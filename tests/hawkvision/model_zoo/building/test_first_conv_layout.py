"""A first convolution that reads rows in blocks gives what it gives pixel by pixel, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from hawkvision.model_zoo.building.architectures import F32, GraphBuilder
from hawkvision.model_zoo.building.quantize import RowBlocks
from tests.hawkvision.model_zoo.building.test_quantize import logits_of

CHANNELS = 4


def attributes_of(kernel: tuple[int, int], pads: tuple[int, int, int, int], stride: int = 2) -> dict[str, Any]:
    return {"kernel_shape": list(kernel), "strides": [stride, stride], "pads": list(pads), "group": 1}


def first_layer(attributes: dict[str, Any], images: NDArray[np.uint8], rows: RowBlocks | None) -> F32:
    """What a convolution with whole weights gives for images (n, height, width, 3), flat; `rows`: read in blocks."""
    size = attributes["kernel_shape"]
    kernel = np.random.default_rng(5).integers(-127, 128, (CHANNELS, 3, *size)).astype(np.float32)
    builder = GraphBuilder("first layer")
    image = "image" if rows is None else rows.read(builder, "image")
    floats = builder.node("Cast", [image], "floats", to=TensorProto.FLOAT)
    planes = builder.node("Transpose", [floats], "planes", perm=[0, 3, 1, 2])
    weights = builder.constant("kernel", kernel if rows is None else rows.arranged(kernel))
    found = builder.node("Conv", [planes, weights], "found", **(attributes if rows is None else rows.convolution()))
    builder.node("Flatten", [found if rows is None else rows.write(builder, found, "apart")], "logits")
    top, left, bottom, right = attributes["pads"]
    height, width = images.shape[1:3]
    positions = ((height + top + bottom - size[0]) // 2 + 1) * ((width + left + right - size[1]) // 2 + 1)
    return logits_of(builder.model(height, width, CHANNELS * positions), images)


@given(
    blocks=st.integers(1, 6),
    height=st.integers(5, 12),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    seed=st.integers(0, 100),
)
def test_blocks_give_what_pixels_give(
    blocks: int, height: int, kernel: tuple[int, int], pads: tuple[int, int, int, int], seed: int
) -> None:
    attributes = attributes_of(kernel, pads)
    rows = RowBlocks.of(attributes, 4 * blocks)
    assume(rows is not None)
    images = np.random.default_rng(seed).integers(0, 256, (2, height, 4 * blocks, 3), dtype=np.uint8)
    assert np.array_equal(first_layer(attributes, images, rows), first_layer(attributes, images, None))


def test_what_does_not_divide_is_read_plainly() -> None:
    usual = attributes_of((3, 3), (0, 0, 1, 1))
    assert RowBlocks.of(usual, 224) is not None
    assert RowBlocks.of(usual, 226) is None
    assert RowBlocks.of(attributes_of((3, 3), (1, 1, 1, 1), stride=1), 224) is None
    assert RowBlocks.of(attributes_of((3, 3), (0, 0, 0, 0)), 224) is None
    assert RowBlocks.of({**usual, "group": 3}, 224) is None

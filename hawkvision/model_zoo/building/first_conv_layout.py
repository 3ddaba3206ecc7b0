"""The first convolution of a quantised graph, in a layout that fills the words of integer kernels.

    image (h, w, 3) ─ the same bytes ─► (h, w/4, 12) ──► convolution, 2c channels ──► (h/2, w/4, 2c) ─► (h/2, w/2, c)

The layer has the most positions and only three channels, which do not fill a word of four. Four neighbouring pixels of
a row have the bytes of one pixel with 12 channels, and two neighbouring outputs of c channels those of one with 2c.
Read so in place, a stride of 2 along the row becomes 1, and a kernel with additional zeros gives the same integers
(space-to-depth along one axis, on both sides, without moving bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from hawkvision.model_zoo.building.onnx_builders import GraphBuilder

ScalarT = TypeVar("ScalarT", bound=np.generic)

PIXELS: Final = 4
"""Pixels of a row that are read as one."""
OUTPUTS: Final = 2
"""Outputs of a row that are computed as one. With a stride of 2 they are as wide as the pixels."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The blocks in which one convolution reads its rows."""

    attributes: Mapping[str, Any]
    """Attributes of the convolution of pixels, by ONNX's names."""
    width: int
    """Width of the image."""

    @staticmethod
    def of(attributes: Mapping[str, Any], width: int) -> RowBlocks | None:
        """The blocks, or None if rows of `width` pixels or the outputs of the convolution do not divide into them."""
        _, left, _, right = attributes["pads"]
        outputs = (width + left + right - attributes["kernel_shape"][1]) // 2 + 1
        fits = attributes["strides"] == [2, 2] and attributes["group"] == 1 and outputs * 2 == width
        return RowBlocks(attributes, width) if fits and width % PIXELS == 0 else None

    def _columns(self) -> NDArray[np.intp]:
        """(outputs, taps): the pixel that each tap multiplies, counted from the first of the block."""
        taps = np.arange(self.attributes["kernel_shape"][1]) - self.attributes["pads"][1]
        columns: NDArray[np.intp] = 2 * np.arange(OUTPUTS)[:, None] + taps
        return columns

    def convolution(self) -> dict[str, Any]:
        """Attributes of the convolution over blocks."""
        blocks = self._columns() // PIXELS
        top, _, bottom, _ = self.attributes["pads"]
        height = self.attributes["kernel_shape"][0]
        return {
            **self.attributes,
            "kernel_shape": [height, int(np.ptp(blocks)) + 1],
            "strides": [2, 1],
            "pads": [top, -int(blocks.min()), bottom, int(blocks.max())],
        }

    def arranged(self, values: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """A kernel (c, channels, height, width) as (2c, 4 channels, height, blocks), a bias or scales (c,) as (2c,)."""
        if values.ndim == 1:
            return np.tile(values, OUTPUTS)
        c, channels, height, _ = values.shape
        columns = self._columns()
        blocks = columns // PIXELS
        spread = np.zeros((OUTPUTS, c, PIXELS, channels, height, int(np.ptp(blocks)) + 1), values.dtype)
        for (output, tap), column in np.ndenumerate(columns):
            spread[output, :, column % PIXELS, :, :, column // PIXELS - blocks.min()] = values[..., tap]
        return spread.reshape(OUTPUTS * c, PIXELS * channels, height, -1)

    def read(self, builder: GraphBuilder, image: str) -> str:
        """The image (n, height, width, 3) as blocks (n, height, width / 4, 12)."""
        shape = builder.constant(f"{image}.blocks.shape", np.array([0, 0, self.width // PIXELS, -1]))
        return builder.node("Reshape", [image, shape], f"{image}.blocks")

    def write(self, builder: GraphBuilder, blocks: str, output: str) -> str:
        """The result (n, 2c, h, width / 4) of the convolution as (n, c, h, width / 2)."""
        last = builder.node("Transpose", [blocks], f"{output}.rows", perm=[0, 2, 3, 1])
        shape = builder.constant(f"{output}.shape", np.array([0, 0, self.width // 2, -1]))
        apart = builder.node("Reshape", [last, shape], f"{output}.columns")
        return builder.node("Transpose", [apart], output, perm=[0, 3, 1, 2])

"""The nodes of an integer graph, and the checks of one node; `hawkvision.integer.ir` explains what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import CompileError

MAX_SIDE: Final = 512
MAX_CHANNELS: Final = 4096
MAX_KERNEL: Final = 64
MAX_WEIGHTS: Final = 1 << 22
"""Weights of a whole graph: 4 MB at 8 bits, ten times the block RAM of the largest supported device."""
KEPT_BITS: Final = 17
"""Bits of an accumulator before the multiplier: with a sign bit, one operand of an 18×18 multiplier."""
MULTIPLIER_BITS: Final = 9
MAX_ACCUMULATOR_BITS: Final = 32
WEIGHT_BITS: Final = (2, 8)
ACTIVATION_BITS: Final = (2, 8)

Weights = NDArray[np.int8]
"""(output channels, kernel rows, kernel columns, input channels)."""


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """The shape of activations between two nodes: maps of unsigned `bits`-bit values, in HWC order."""

    height: int
    width: int
    channels: int
    bits: int

    @property
    def elements(self) -> int:
        """Activations per image."""
        return self.height * self.width * self.channels

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.channels} of {self.bits} bits"


@dataclass(frozen=True, slots=True, eq=False)
class Conv:
    """A convolution of stride 1 with `pad` zeros on each side, and its bias."""

    name: str
    weights: Weights
    bias: NDArray[np.int32]
    """(output channels,)"""
    weight_bits: int
    """Two's complement without the most negative value."""
    pad: int = 0

    @property
    def channels(self) -> int:
        """Output channels."""
        return int(self.weights.shape[0])

    @property
    def kernel(self) -> int:
        """Side of the square kernel."""
        return int(self.weights.shape[1])

    def accumulator_range(self, activation_bits: int) -> tuple[int, int]:
        """The range of an accumulator and of its partial sums."""
        greatest = (1 << activation_bits) - 1
        flat = self.weights.reshape(self.channels, -1).astype(np.int64)
        bias = self.bias.astype(np.int64)
        up = np.where(flat > 0, flat, 0).sum(axis=1) * greatest
        down = np.where(flat < 0, flat, 0).sum(axis=1) * greatest
        return int(min(down.min(), (down + bias).min())), int(max(up.max(), (up + bias).max()))

    def accumulator_bits(self, activation_bits: int) -> int:
        """Bits of a two's complement register that never overflows."""
        low, high = self.accumulator_range(activation_bits)
        return max(int(-low - 1).bit_length() if low < 0 else 0, high.bit_length()) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Requantise:
    """ReLU, scaling and saturation of accumulators to unsigned `bits`-bit activations."""

    name: str
    multiplier: NDArray[np.int32]
    """(channels,), 1..2^MULTIPLIER_BITS − 1."""
    pre_shift: int
    shift: int
    """At least 1, so that the result is rounded."""
    bits: int = 8


@dataclass(frozen=True, slots=True)
class MaxPool:
    """The maximum of each 2x2; an odd last row or column is dropped."""

    name: str


Node = Conv | Requantise | MaxPool


@dataclass(frozen=True, slots=True, eq=False)
class ConvStage:
    """A convolution with its requantisation and pooling: one group of modules in hardware."""

    conv: Conv
    requantise: Requantise | None
    """None for the last stage, whose accumulators are the logits."""
    pool: MaxPool | None
    taken: ActivationShape
    convolved: ActivationShape
    """After convolution and requantisation."""
    given: ActivationShape
    """After pooling, if any."""

    @property
    def name(self) -> str:
        """The convolution's."""
        return self.conv.name

    @property
    def multiplications(self) -> int:
        """Multiply-accumulates per image, padding included."""
        return self.convolved.height * self.convolved.width * self.conv.weights.size


def check_conv(where: str, conv: Conv, stream: ActivationShape) -> None:
    """Refuse a convolution that breaks the rules, or does not fit its input; `where` names the graph.

    Raises:
        CompileError: naming the node.
    """
    at = f"{where}: {conv.name}"
    shape = conv.weights.shape
    if conv.weights.dtype != np.int8 or conv.weights.ndim != 4 or shape[1] != shape[2]:
        raise CompileError(f"{at}: weights: expected int8 (out, k, k, in), got {conv.weights.dtype} {shape}")
    if shape[3] != stream.channels:
        raise CompileError(f"{at}: it reads {shape[3]} channels, but is given {stream}")
    if not (1 <= shape[0] <= MAX_CHANNELS and 1 <= shape[1] <= MAX_KERNEL):
        raise CompileError(f"{at}: expected at most {MAX_CHANNELS} channels and kernels of {MAX_KERNEL}, got {shape}")
    if not 0 <= conv.pad < conv.kernel or conv.kernel > min(stream.height, stream.width) + 2 * conv.pad:
        raise CompileError(f"{at}: a kernel of {conv.kernel} with padding {conv.pad} does not fit {stream}")
    if conv.bias.dtype != np.int32 or conv.bias.shape != shape[:1]:
        raise CompileError(f"{at}: bias: expected int32 ({shape[0]},), got {conv.bias.dtype} {conv.bias.shape}")
    if not WEIGHT_BITS[0] <= conv.weight_bits <= WEIGHT_BITS[1]:
        raise CompileError(
            f"{at}: expected weights of {WEIGHT_BITS[0]} to {WEIGHT_BITS[1]} bits, got {conv.weight_bits}"
        )
    greatest = (1 << (conv.weight_bits - 1)) - 1
    if np.abs(conv.weights.astype(np.int16)).max() > greatest:
        raise CompileError(f"{at}: a weight is beyond ±{greatest}, which is what {conv.weight_bits} bits hold")
    if conv.accumulator_bits(stream.bits) > MAX_ACCUMULATOR_BITS:
        raise CompileError(f"{at}: the accumulator would need more than {MAX_ACCUMULATOR_BITS} bits")


def check_requantise(where: str, node: Requantise, conv: Conv) -> None:
    """Refuse a requantiser that breaks the rules, or does not fit its convolution.

    Raises:
        CompileError: naming the node.
    """
    at = f"{where}: {node.name}"
    if node.multiplier.dtype != np.int32 or node.multiplier.shape != (conv.channels,):
        raise CompileError(
            f"{at}: multiplier: expected int32 ({conv.channels},), got {node.multiplier.dtype} {node.multiplier.shape}"
        )
    if not (node.multiplier.min() >= 1 and node.multiplier.max() < 1 << MULTIPLIER_BITS):
        raise CompileError(f"{at}: multiplier: expected 1..{(1 << MULTIPLIER_BITS) - 1}")
    if not (0 <= node.pre_shift < MAX_ACCUMULATOR_BITS and 1 <= node.shift < KEPT_BITS + MULTIPLIER_BITS):
        raise CompileError(f"{at}: shifts out of range: {node.pre_shift} before, {node.shift} after the multiplier")
    if not ACTIVATION_BITS[0] <= node.bits <= ACTIVATION_BITS[1]:
        raise CompileError(
            f"{at}: expected activations of {ACTIVATION_BITS[0]} to {ACTIVATION_BITS[1]} bits, got {node.bits}"
        )

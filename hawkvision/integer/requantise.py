"""Turns real scales into a `Requantise` node: the nearest shifts and 9-bit multipliers.

A real accumulator `a · step` becomes `round(a · ratio)` with `ratio = step / step of the activations`. The hardware
computes `(a >> pre_shift) · multiplier >> shift`, so `multiplier = ratio · 2^(pre_shift + shift)`. `pre_shift` is the
smallest that keeps every accumulator that does not saturate within 17 bits; `shift` is the largest that keeps the
largest multiplier within 9 bits. So the channel with the largest ratio is off by at most 1/512, and one with an n times
smaller ratio by n/512. Half of what `pre_shift` drops is added to the bias, so that it rounds instead of truncating.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import CompileError
from hawkvision.integer.nodes import KEPT_BITS, MULTIPLIER_BITS, Conv, Requantise

WORST_ERROR: Final = 1 / 16
"""Largest accepted relative error of a channel's scale."""

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RealLayer:
    """A convolution with whole weights, and real biases and scales."""

    name: str
    weights: NDArray[np.int8]
    """(out, k, k, in)"""
    weight_bits: int
    steps: Reals
    """(out,): the value of one unit of each channel's weights."""
    bias: Reals
    """(out,)"""
    pad: int

    def whole(self, steps: Reals, at: str, rounding: int = 0) -> Conv:
        """The convolution with biases in `steps`, the value of one unit of each channel's sums, plus `rounding`.

        Raises:
            CompileError: if a bias is beyond 32 bits; `at` names the layer.
        """
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            units = np.round(self.bias / steps) + rounding
        # compared this way round because NaN is never less
        if not (np.abs(units) < 2.0**31).all():
            raise CompileError(f"{at}: a bias is beyond 32 bits in units of its sums")
        return Conv(self.name, self.weights, units.astype(np.int32), self.weight_bits, self.pad)


def rescaled(
    layer: RealLayer, input_step: float, input_bits: int, output_step: float, output_bits: int, where: str
) -> tuple[Conv, Requantise]:
    """A convolution with its requantiser, from real numbers.

    Args:
        layer: the convolution; the requantiser is named after it.
        input_step: the value of one unit of the activations that it reads.
        input_bits: bits of these.
        output_step: the value of one unit of the activations that it gives.
        output_bits: bits of these.
        where: names the model in errors.

    Raises:
        CompileError: if no shifts and multipliers are near enough, or a bias is beyond 32 bits.
    """
    at, steps = f"{where}: {layer.name}", layer.steps * input_step
    # A channel without weights has a constant sum; the largest step represents it exactly.
    empty = ~layer.weights.reshape(len(layer.weights), -1).any(axis=1)
    steps = np.where(empty, steps[~empty].max(initial=0.0) or output_step, steps)
    ratios = steps / output_step
    if not (np.isfinite(ratios) & (ratios > 0)).all():
        raise CompileError(f"{at}: the scales of its sums and activations are too far apart")
    pre_shift = _pre_shift(ratios, output_bits, layer.whole(steps, at).accumulator_range(input_bits)[1])
    multiplier, shift = _multipliers(ratios * 2.0**pre_shift, ratios, at)
    conv = layer.whole(steps, at, rounding=(1 << pre_shift) >> 1)
    return conv, Requantise(f"{layer.name}_requantise", multiplier, pre_shift, shift, output_bits)


def _pre_shift(ratios: Reals, output_bits: int, largest_sum: int) -> int:
    """The smallest shift that keeps every sum that does not saturate within 17 bits."""
    greatest = (1 << output_bits) - 1
    # The sum at which the last channel saturates; 17 bits need not reach beyond it, or beyond the largest sum.
    saturating = float((greatest + 0.5) / ratios.min()) * (1 + WORST_ERROR)
    needed = min(saturating, float(max(largest_sum, 0)))
    return max(0, int(needed).bit_length() - KEPT_BITS)


def _multipliers(scaled: Reals, ratios: Reals, at: str) -> tuple[NDArray[np.int32], int]:
    """The multipliers nearest to `scaled` times 2^shift, and the largest shift that they have room for."""
    limit = (1 << MULTIPLIER_BITS) - 1
    shift = min(int(np.floor(np.log2((limit + 0.5) / scaled.max()))), KEPT_BITS + MULTIPLIER_BITS - 1)
    if shift < 1:
        raise CompileError(
            f"{at}: one unit of its sums is {ratios.max():.3g} units of its activations; expected less than {limit / 2}"
        )
    exact = scaled * 2.0**shift
    multiplier = np.clip(np.round(exact), 1, limit)
    error = np.abs(multiplier / exact - 1)
    if error.max() > WORST_ERROR:
        raise CompileError(
            f"{at}: channel {int(error.argmax())} has a {exact.max() / exact.min():.0f} times smaller scale than the "
            f"greatest of this layer; multipliers of {MULTIPLIER_BITS} bits would be off by {error.max():.0%}"
        )
    return multiplier.astype(np.int32), shift

"""Turns real scales into a `Requantise` node: which shifts and 9-bit multipliers come nearest to them, harmlessly.

A real accumulator is `a · step`, and becomes `round(a · ratio)` with `ratio = step / step of the activations`. The
hardware has `(a >> pre_shift) · multiplier >> shift`, so that `multiplier = ratio · 2^(pre_shift + shift)`. `pre_shift`
is the least that keeps every accumulator which does not saturate anyway within 17 bits; `shift` is the greatest that
keeps the greatest multiplier within 9 bits. So the channel of the greatest ratio is off by at most 1/512 of it, one of
an n times smaller ratio by n/512. What `pre_shift` drops is rounded, not cut off, by half of it added to the bias.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.errors import CompileError
from hawkvision.integer.ir import KEPT_BITS, MULTIPLIER_BITS, Conv, Requantise

WORST_ERROR: Final = 1 / 16
"""Of a channel's scale: eight-bit activations of such a channel are off by 16 at most, one in sixteen."""

Reals = NDArray[np.float64]


def rescaled(
    name: str, weights: NDArray[np.int8], weight_bits: int, pad: int, bias: Reals, steps: Reals, input_bits: int,
    output_step: float, output_bits: int, where: str,
) -> tuple[Conv, Requantise]:  # fmt: skip
    """A convolution with its requantiser, from real numbers.

    Args:
        name: the convolution's; the requantiser is named after it.
        weights: (out, k, k, in), in steps.
        weight_bits: see `Conv`.
        pad: see `Conv`.
        bias: (out,), real.
        steps: (out,): what one unit of each channel's accumulator is worth.
        input_bits: of the activations that are read.
        output_step: what one unit of the activations that are made is worth.
        output_bits: theirs.
        where: names the model in errors.

    Raises:
        CompileError: if no shifts and multipliers come near enough, or a bias is beyond 32 bits.
    """
    at = f"{where}: {name}"
    # A channel without weights has a constant for its sum, which any step can tell: the greatest costs nothing.
    empty = ~weights.reshape(len(weights), -1).any(axis=1)
    steps = np.where(empty, steps[~empty].max(initial=0.0) or output_step, steps)
    ratios = steps / output_step
    if not (np.isfinite(ratios) & (ratios > 0)).all():
        raise CompileError(f"{at}: the scales of its sums and activations are too far apart")
    conv = Conv(name, weights, whole_bias(bias, steps, at), weight_bits, pad)
    greatest = (1 << output_bits) - 1
    # Where the last channel saturates; beyond it, and beyond the greatest sum there is, 17 bits need not reach.
    saturating = float((greatest + 0.5) / ratios.min()) * (1 + WORST_ERROR)
    needed = min(saturating, float(max(conv.accumulator_range(input_bits)[1], 0)))
    pre_shift = max(0, int(needed).bit_length() - KEPT_BITS)
    scaled = ratios * 2.0**pre_shift
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
    rounding = (1 << pre_shift) >> 1
    conv = Conv(name, weights, whole_bias(bias, steps, at, rounding), weight_bits, pad)
    return conv, Requantise(f"{name}_requantise", multiplier.astype(np.int32), pre_shift, shift, output_bits)


def whole_bias(bias: Reals, steps: Reals, at: str, rounding: int = 0) -> NDArray[np.int32]:
    """Biases in units of the accumulators, `rounding` added.

    Raises:
        CompileError: if one is beyond 32 bits.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        units = np.round(bias / steps) + rounding
    # Compared this way round, because NaN is never less.
    if not (np.abs(units) < 2.0**31).all():
        raise CompileError(f"{at}: a bias is beyond 32 bits in units of its sums")
    return units.astype(np.int32)

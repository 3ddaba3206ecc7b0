"""Post-training quantisation of a float chain to few bits, layer by layer, on unlabelled images.

Weights are rounded column by column, each error spread over the columns still to come by what the images correlate
(GPTQ, Frantar et al., arXiv 2210.17323). Steps are chosen by least squares, one per output channel, and one for the
last layer. Biases absorb the mean error that is left. Later layers see the activations of the quantised ones before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import CompileError
from hawkvision.core.types import Pixels
from hawkvision.integer.nodes import MULTIPLIER_BITS
from hawkvision.integer.reference import luminance
from hawkvision.model_zoo.own.integer_chain import FloatChain, FloatLayer, Reals
from hawkvision.model_zoo.own.qonnx_export import ACTIVATION_BITS, PIXEL_STEP, QuantisedLayer, QuantisedNet

Maps = NDArray[np.float64]
"""(n, channels, height, width)"""
CANDIDATES: Final = np.linspace(0.4, 1.0, 31)
"""Shares of a channel's greatest weight that are tried as its greatest representable one."""
REACHED: Final = 0.9995
"""Quantile of a layer's activations that its greatest integer stands for; the few above saturate."""
NARROWEST: Final = 1 / 24
"""Least step of a channel as a share of the layer's greatest: multipliers of 9 bits hold no smaller ones."""
DAMPING: Final = 0.01
"""Added to the diagonal of the correlations, as a share of its mean, so that they can be inverted."""
FEWEST_POSITIONS: Final = 8
"""Positions per weight of a channel that a fit needs."""
CHUNK: Final = 16
"""Images at a time, which bounds the memory of neighbourhoods."""
GREATEST: Final = 2**ACTIVATION_BITS - 1


def quantised_net(chain: FloatChain, pixels: Pixels, weight_bits: int) -> QuantisedNet:
    """The chain with integer weights of so many bits.

    Args:
        chain: the float network.
        pixels: images (n, side, side, 3) that steps and rounding are fitted to.
        weight_bits: of each weight, 2 to 8.

    Raises:
        CompileError: if the layers leave nothing, or the last does not cover what is left.
    """
    seen = luminance(pixels) if chain.planes == 1 else pixels
    exact = quantised = seen.astype(np.float64).transpose(0, 3, 1, 2) * PIXEL_STEP
    layers: list[QuantisedLayer] = []
    for index, layer in enumerate(chain.layers):
        given = PIXEL_STEP if index == 0 else float(layers[-1].activation_step or 0.0)
        scaled = layer.kernel / PIXEL_STEP if index == 0 else layer.kernel
        if exact.shape[2] + 2 * layer.pad < scaled.shape[2]:
            raise CompileError(f"{layer.name}: a kernel of {scaled.shape[2]} does not fit what is left")
        last = index == len(chain.layers) - 1
        made, exact, quantised = _layer(layer, scaled, exact, quantised, weight_bits, None if last else given)
        layers.append(made)
    if exact.shape[2:] != (1, 1):
        raise CompileError(f"{chain.layers[-1].name}: the last layer leaves {exact.shape[2:]} positions; expected one")
    return QuantisedNet(chain.side, weight_bits, tuple(layers), tuple(round(value) for value in chain.mean))


def _layer(
    layer: FloatLayer, kernel: Reals, exact: Maps, quantised: Maps, bits: int, given: float | None
) -> tuple[QuantisedLayer, Maps, Maps]:
    """A layer in integers, and what the float and the integer network give behind it.

    `given` is the step of the layer's inputs; None for the last layer, which gives logits.
    """
    greatest = 2 ** (bits - 1) - 1
    rows, side = kernel.reshape(len(kernel), -1), kernel.shape[2]
    wanted = _convolved(exact, rows, layer.bias, side, layer.pad)
    rows, bias, correlation = _fitted(rows, layer.bias, quantised, wanted, side, layer.pad)
    steps, step = _steps(rows, greatest, one=given is None), 0.0
    if given is not None:
        step = max(min(float(np.quantile(np.maximum(wanted, 0), REACHED)), layer.ceiling), 1e-6) / GREATEST
        steps = _representable(steps, step / given)
    whole = _rounded(rows, steps, correlation, greatest)
    found = _convolved(quantised, whole * steps[:, None], bias, side, layer.pad)
    correction = (wanted - found).mean(axis=(0, 2, 3))
    found = found + correction[None, :, None, None]
    weights = whole.reshape(kernel.shape).astype(np.int8)
    bias = (bias + correction).astype(np.float32)
    stated = (steps[:1] if given is None else steps).astype(np.float32)
    if given is None:
        return QuantisedLayer(weights, stated, bias, None), wanted, found
    wanted = np.clip(wanted, 0, layer.ceiling)
    found = np.clip(np.floor(found / step + 0.5), 0, GREATEST) * step
    if layer.pool:
        wanted, found = _pooled(wanted), _pooled(found)
    return QuantisedLayer(weights, stated, bias, step, layer.pool, layer.pad), wanted, found


def _fitted(rows: Reals, bias: Reals, quantised: Maps, wanted: Maps, side: int, pad: int) -> tuple[Reals, Reals, Reals]:
    """Weights and biases with which the quantised inputs give nearly what is wanted, and the inputs' correlation.

    This takes back what earlier layers were off by, and what padding with black in place of the mean changes. Where
    there are too few positions to fit to, weights and biases stay.
    """
    found = _convolved(quantised, rows, bias, side, pad)
    missing = (wanted - found).transpose(0, 2, 3, 1).reshape(-1, len(rows))
    size = rows.shape[1]
    square, cross, start = np.zeros((size + 1, size + 1)), np.zeros((size + 1, len(rows))), 0
    for block in _neighbourhoods(quantised, side, pad):
        inputs = np.column_stack([block, np.ones(len(block))])
        square += inputs.T @ inputs
        cross += inputs.T @ missing[start : start + len(block)]
        start += len(block)
    correlation: Reals = square[:-1, :-1]
    if len(missing) < FEWEST_POSITIONS * size:
        return rows, bias, correlation
    damping = np.full(size + 1, DAMPING * np.trace(correlation) / size / 10 + 1e-12)
    change = np.linalg.solve(square + np.diag(damping), cross)
    return rows + change[:-1].T, bias + change[-1], correlation


def _steps(rows: Reals, greatest: int, *, one: bool) -> Reals:
    """The step of each channel (out,) with the least squared error of its weights; `one` for all alike."""
    groups = rows.reshape(1, -1) if one else rows
    steps = np.array([_best_step(group, greatest) for group in groups])
    steps = np.maximum(steps, steps.max() * NARROWEST)
    return np.broadcast_to(steps, (len(rows),)).copy() if one else steps


def _representable(steps: Reals, unit: float) -> Reals:
    """The steps, enlarged to those that a multiplier of `MULTIPLIER_BITS` represents exactly.

    `unit` is the step of the layer's outputs in steps of its inputs.
    """
    limit = (1 << MULTIPLIER_BITS) - 1
    grid = unit / 2.0 ** np.floor(np.log2(limit * unit / steps.max()))
    exact: Reals = np.clip(np.ceil(steps / grid), 1, limit) * grid
    return exact


def _best_step(values: Reals, greatest: int) -> float:
    steps = CANDIDATES * max(float(np.abs(values).max()), 1e-9) / greatest
    found = np.clip(np.round(values[None] / steps[:, None]), -greatest, greatest) * steps[:, None]
    return float(steps[((found - values) ** 2).sum(axis=1).argmin()])


def _rounded(rows: Reals, steps: Reals, correlation: Reals, greatest: int) -> Reals:
    """Whole weights (out, in) that change the layer's sums least over inputs with this correlation (in, in)."""
    damped = correlation + np.eye(len(correlation)) * (DAMPING * np.trace(correlation) / len(correlation) + 1e-12)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, whole = rows.copy(), np.zeros_like(rows)
    for at in range(rows.shape[1]):
        whole[:, at] = np.clip(np.round(left[:, at] / steps), -greatest, greatest)
        error = (left[:, at] - whole[:, at] * steps) / upper[at, at]
        left[:, at + 1 :] -= error[:, None] * upper[at, at + 1 :]
    return whole


def _convolved(maps: Maps, rows: Reals, bias: Reals, kernel: int, pad: int) -> Maps:
    side = maps.shape[2] + 2 * pad - kernel + 1
    parts = [block @ rows.T + bias for block in _neighbourhoods(maps, kernel, pad)]
    return np.concatenate(parts).reshape(len(maps), side, side, len(rows)).transpose(0, 3, 1, 2)


def _neighbourhoods(maps: Maps, kernel: int, pad: int) -> Iterator[Reals]:
    """The inputs of each position (positions, channels * kernel * kernel), some images at a time."""
    for start in range(0, len(maps), CHUNK):
        padded = np.pad(maps[start : start + CHUNK], ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))
        yield windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, maps.shape[1] * kernel * kernel)


def _pooled(maps: Maps) -> Maps:
    n, channels, height, width = maps.shape
    even = maps[:, :, : height // 2 * 2, : width // 2 * 2]
    pooled: Maps = even.reshape(n, channels, height // 2, 2, width // 2, 2).max(axis=(3, 5))
    return pooled

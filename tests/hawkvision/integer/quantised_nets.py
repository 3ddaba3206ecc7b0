"""Quantised networks for tests: of random weights, whose activations are neither all zero nor all saturated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hawkvision.model_zoo.own.qonnx_export import PIXEL_STEP, QuantisedLayer, QuantisedNet


def random_net(
    seed: int = 0,
    *,
    side: int = 12,
    planes: int = 1,
    bits: int = 4,
    channels: tuple[int, ...] = (4, 6),
    classes: int = 5,
    spread: float = 3.0,
) -> QuantisedNet:
    """Convolutions of these channels, each pooled, and a head. Scales of a layer's channels differ up to `spread`."""
    rng = np.random.default_rng(seed)
    layers, inside, step, left = [], planes, PIXEL_STEP, side
    for width in channels:
        weights = _weights(rng, (width, inside, 3, 3), bits)
        weight_step = (rng.uniform(1.0, spread, width) * 0.01).astype(np.float32)
        reach = step * 255 * weight_step * np.sqrt((weights.astype(float) ** 2).sum(axis=(1, 2, 3)))
        bias = (rng.normal(size=width) * reach * 0.2).astype(np.float32)
        step = float(reach.mean()) / 255
        layers.append(QuantisedLayer(weights, weight_step, bias, step, pool=True))
        inside, left = width, left // 2
    weights = _weights(rng, (classes, inside, left, left), bits)
    layers.append(QuantisedLayer(weights, np.array([0.02], np.float32), rng.normal(size=classes).astype("f4"), None))
    fill = tuple(int(value) for value in rng.integers(0, 256, planes))
    return QuantisedNet(side, bits, tuple(layers), fill)


def _weights(rng: np.random.Generator, shape: tuple[int, int, int, int], bits: int) -> NDArray[np.int8]:
    greatest = (1 << (bits - 1)) - 1
    return rng.integers(-greatest, greatest + 1, shape).astype(np.int8)

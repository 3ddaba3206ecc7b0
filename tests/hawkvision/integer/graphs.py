"""Integer networks for tests: of random weights, with requantisers that keep activations lively."""

from __future__ import annotations

import numpy as np

from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import MULTIPLIER_BITS, ActivationShape, Conv, MaxPool, Node, Requantise


def random_graph(
    seed: int = 0,
    *,
    side: int = 8,
    planes: int = 1,
    channels: tuple[int, ...] = (4, 6),
    pools: tuple[int, ...] = (0, 1),
    classes: int = 5,
    weight_bits: int = 4,
    first_bits: int | None = None,
    kernel: int = 3,
    name: str = "random",
) -> IntegerGraph:
    """Convolutions of the given channels, pooled after those of the given numbers, then the head over all that is left.

    `first_bits`, if given, is the first convolution's `weight_bits`.
    """
    rng = np.random.default_rng(seed)
    nodes: list[Node] = []
    height, depth = side, planes
    for index, width in enumerate(channels):
        bits = first_bits if index == 0 and first_bits is not None else weight_bits
        conv = random_conv(rng, f"conv{index}", (width, kernel, kernel, depth), bits, pad=kernel // 2)
        nodes += [conv, lively(rng, f"requantise{index}", conv)]
        height += 2 * (kernel // 2) - kernel + 1
        if index in pools:
            nodes.append(MaxPool(f"pool{index}"))
            height //= 2
        depth = width
    nodes.append(random_conv(rng, "head", (classes, height, height, depth), weight_bits, pad=0))
    fill = tuple(int(value) for value in rng.integers(0, 256, planes))
    return IntegerGraph(name, ActivationShape(side, side, planes, 8), tuple(nodes), 0.01, fill)


def random_conv(
    rng: np.random.Generator, name: str, shape: tuple[int, int, int, int], weight_bits: int, pad: int
) -> Conv:
    """Weights over the whole range of `weight_bits`, biases about as large as the sums."""
    greatest = (1 << (weight_bits - 1)) - 1
    weights = rng.integers(-greatest, greatest + 1, shape).astype(np.int8)
    spread = int(greatest * 80 * np.sqrt(np.prod(shape[1:])))
    bias = rng.integers(-spread, spread + 1, shape[0]).astype(np.int32)
    return Conv(name, weights, bias, weight_bits, pad)


def lively(rng: np.random.Generator, name: str, conv: Conv) -> Requantise:
    """Scales such that some activations are zero, some saturate, and most lie between."""
    spread = float(np.sqrt((conv.weights.reshape(conv.channels, -1).astype(np.float64) ** 2).sum(axis=1)).max()) * 120
    greatest = conv.accumulator_range(8)[1]
    pre_shift = max(0, greatest.bit_length() - 17)
    ratio = 128 / max(spread, 1.0) * 2**pre_shift
    shift = max(1, min(25, int(np.floor(np.log2(((1 << MULTIPLIER_BITS) - 1) / (ratio * 1.5))))))
    multiplier = np.clip(np.round(ratio * rng.uniform(0.6, 1.5, conv.channels) * 2**shift), 1, 511).astype(np.int32)
    return Requantise(name, multiplier, pre_shift, shift)


def fashion_shape(seed: int = 0, weight_bits: int = 4) -> IntegerGraph:
    """The Fashion-MNIST stage's shape: 28x28, 16p 32p 32p, ten classes; random weights."""
    return random_graph(
        seed, side=28, channels=(16, 32, 32), pools=(0, 1, 2), classes=10, weight_bits=weight_bits, name="fashion_shape"
    )


def cifar_shape(seed: int = 0, weight_bits: int = 4) -> IntegerGraph:
    """The CIFAR-10 stage's shape: 32x32x3, 16p 32p 32p, ten classes; random weights."""
    return random_graph(
        seed,
        side=32,
        planes=3,
        channels=(16, 32, 32),
        pools=(0, 1, 2),
        classes=10,
        weight_bits=weight_bits,
        name="cifar_shape",
    )


def random_images(graph: IntegerGraph, n: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Uniform noise (n, height, width, channels)."""
    size = (n, graph.input.height, graph.input.width, graph.input.channels)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

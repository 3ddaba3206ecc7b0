"""A small convolutional network, trained with NumPy in seconds, and generated images of five shapes to train it on.

planes ─► [convolution 3x3, padding 1 ─► ReLU ─► maximum of 2x2] ... ─► linear layer ─► logits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Pixels

Array = NDArray[np.float32]
LABELS = ("circle", "cross", "ring", "square", "stripes")
SIDE = 16


def shape_images(n: int, seed: int, height: int = SIDE, width: int = SIDE) -> tuple[Pixels, NDArray[np.int64]]:
    """Images (n, height, width, 3) of one shape each on noise, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(LABELS), n)
    return np.stack([_shape(rng, int(label), height, width) for label in labels]), labels


def _shape(rng: np.random.Generator, label: int, height: int, width: int) -> Pixels:
    image: Pixels = rng.normal(70, 20, (height, width, 3)).clip(0, 255).astype(np.uint8)
    colour = tuple(int(each) for each in rng.integers(130, 256, 3))
    r = int(rng.integers(min(height, width) // 4, min(height, width) * 3 // 8))
    x, y = int(rng.integers(r + 1, width - r - 1)), int(rng.integers(r + 1, height - r - 1))
    match LABELS[label]:
        case "circle":
            cv2.circle(image, (x, y), r, colour, -1)
        case "cross":
            cv2.line(image, (x - r, y - r), (x + r, y + r), colour, 1)
            cv2.line(image, (x - r, y + r), (x + r, y - r), colour, 1)
        case "ring":
            cv2.circle(image, (x, y), r, colour, 1)
        case "square":
            cv2.rectangle(image, (x - r, y - r), (x + r, y + r), colour, -1)
        case _:
            for row in range(y - r, y + r + 1, 3):
                cv2.line(image, (x - r, row), (x + r, row), colour, 1)
    return image


def write_folder(root: Path, images: Pixels, labels: NDArray[np.int64], suffix: str = ".png") -> None:
    """The images as files in a folder per label."""
    for label in LABELS:
        (root / label).mkdir(parents=True, exist_ok=True)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        assert cv2.imwrite(str(root / LABELS[label] / f"{index:05d}{suffix}"), image[..., ::-1])


class SmallCnn:
    """The network, on planes (n, channels, side, side)."""

    def __init__(self, channels: Sequence[int], classes: int, side: int = SIDE, planes: int = 3, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kernels: list[Array] = []
        self.biases: list[Array] = []
        for out in channels:
            self.kernels.append(rng.normal(0, (2 / (9 * planes)) ** 0.5, (out, planes, 3, 3)).astype(np.float32))
            self.biases.append(np.zeros(out, np.float32))
            planes, side = out, side // 2
        features = planes * side * side
        self.weight: Array = rng.normal(0, (1 / features) ** 0.5, (classes, features)).astype(np.float32)
        self.bias: Array = np.zeros(classes, np.float32)

    def logits(self, x: Array) -> Array:
        """(n, classes)"""
        return self._forward(x)[0]

    def train(
        self,
        x: Array,
        targets: NDArray[Any],
        epochs: int,
        *,
        error: Callable[[Array, NDArray[Any]], Array] | None = None,
        batch: int = 50,
        rate: float = 5e-3,
    ) -> None:
        """By Adam; `error` is the gradient of the loss of some images by what the network gives for them."""
        parameters = [*self.kernels, *self.biases, self.weight, self.bias]
        moments = [(np.zeros_like(p), np.zeros_like(p)) for p in parameters]
        rng, step = np.random.default_rng(1), 0
        for _ in range(epochs):
            order = rng.permutation(len(x))
            for start in range(0, len(x), batch):
                chosen, step = order[start : start + batch], step + 1
                gradients = self._gradients(x[chosen], targets[chosen], error or _of_cross_entropy)
                for parameter, gradient, (first, second) in zip(parameters, gradients, moments, strict=True):
                    first += 0.1 * (gradient - first)
                    second += 0.001 * (gradient**2 - second)
                    scale = rate * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
                    parameter -= (scale * first / (np.sqrt(second) + 1e-8)).astype(np.float32)

    def _forward(self, x: Array) -> tuple[Array, list[tuple[Array, Array, Array]], Array]:
        kept = []
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            columns = _columns(x)
            made = columns @ kernel.reshape(len(kernel), -1).T + bias  # (n, h, w, out)
            active = np.maximum(made, 0)
            n, h, w, out = active.shape
            pooled = active.reshape(n, h // 2, 2, w // 2, 2, out).max(axis=(2, 4))
            kept.append((columns, active, pooled))
            x = pooled.transpose(0, 3, 1, 2)
        features = np.ascontiguousarray(x).reshape(len(x), -1)
        return features @ self.weight.T + self.bias, kept, features

    def _gradients(
        self, x: Array, targets: NDArray[Any], error_of: Callable[[Array, NDArray[Any]], Array]
    ) -> list[Array]:
        logits, kept, features = self._forward(x)
        error = error_of(logits, targets) / np.float32(len(x))
        weight, bias = error.T @ features, error.sum(axis=0)
        n, half, _, out = kept[-1][2].shape
        below: NDArray[Any] = (error @ self.weight).reshape(n, out, half, half).transpose(0, 2, 3, 1)
        kernels: list[Array] = []
        biases: list[Array] = []
        for (columns, active, pooled), kernel in zip(reversed(kept), reversed(self.kernels), strict=True):
            spread = np.repeat(np.repeat(below, 2, axis=1), 2, axis=2)
            largest = np.repeat(np.repeat(pooled, 2, axis=1), 2, axis=2)
            made = spread * ((active == largest) & (active > 0))
            flat = made.reshape(-1, made.shape[-1])
            kernels.append((flat.T @ columns.reshape(len(flat), -1)).reshape(kernel.shape))
            biases.append(flat.sum(axis=0))
            turned = kernel[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
            below = _columns(made.transpose(0, 3, 1, 2)) @ turned.reshape(len(turned), -1).T
        return [*reversed(kernels), *reversed(biases), weight, bias]


def _of_cross_entropy(logits: Array, labels: NDArray[Any]) -> Array:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    error: Array = shifted / shifted.sum(axis=1, keepdims=True)
    error[np.arange(len(logits)), labels] -= 1
    return error


def _columns(x: Array) -> Array:
    """The 3x3 neighbourhoods of planes (n, c, h, w) as (n, h, w, 9 c)."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    n, c, h, w = x.shape
    return np.ascontiguousarray(windows.transpose(0, 2, 3, 1, 4, 5)).reshape(n, h, w, c * 9)

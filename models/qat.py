"""Quantisation-aware training: a float network's weight file in, the same network in few bits out. Needs torch.

The forward pass computes what integer hardware will: pixels are the bytes themselves, zero where a kernel looks beyond
the border; batch normalisation and the input's mean and deviation are folded into the weights; weights are whole
multiples of a step per output channel (one step for the last layer, so that logits compare as integers), activations
of one step per layer. Rounding has no gradient and is passed through (Bengio et al., arXiv 1308.3432); the steps are
learnt with the weights (Esser et al., arXiv 1902.08153), by their logarithms, so that they stay positive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from hawkvision.core.types import Pixels
from hawkvision.integer import reference
from hawkvision.model_zoo.building.architectures import CONVNETS, EPSILON, F32, LUMINANCE, ConvNet, Weights
from hawkvision.model_zoo.building.checkpoint import parse_checkpoint
from hawkvision.model_zoo.own.qonnx_export import ACTIVATION_BITS, PIXEL_STEP, QuantisedLayer, QuantisedNet
from hawkvision.models.manifest import InputSpec

CALIBRATED_ON: Final = 1024
"""Training images that the activation steps start from."""
REACHED: Final = 0.9995
"""Quantile of a layer's activations that its greatest integer stands for at the start: the few above saturate."""
CANDIDATES: Final = np.linspace(0.4, 1.0, 31)
"""Shares of a channel's greatest weight that are tried as its greatest representable one at the start."""


class QuantisedTorchNet(nn.Module):
    """A `ConvNet` without residual layers and with a flattened head, in whole multiples of learnt steps."""

    def __init__(self, net: ConvNet, spec: InputSpec, classes: int, weight_bits: int) -> None:
        super().__init__()
        assert net.head == "flatten"
        assert not any(layer.residual for layer in net.layers)
        self.net = net
        self.greatest = 2 ** (weight_bits - 1) - 1
        channels, side = net.input_channels, spec.height
        self.kernels, self.biases = nn.ParameterList(), nn.ParameterList()
        self.weight_steps, self.activation_steps = nn.ParameterList(), nn.ParameterList()
        for layer in net.layers:
            self.kernels.append(torch.zeros(layer.channels, channels, 3, 3))
            self.biases.append(torch.zeros(layer.channels))
            self.weight_steps.append(torch.zeros(layer.channels, 1, 1, 1))
            self.activation_steps.append(torch.zeros(()))
            channels, side = layer.channels, side // 2 if layer.pool else side
        self.kernels.append(torch.zeros(classes, channels, side, side))
        self.biases.append(torch.zeros(classes))
        self.weight_steps.append(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of planes (n, input channels, side, side), which are bytes over 255."""
        for index, layer in enumerate(self.net.layers):
            made = functional.conv2d(x, self.weights(index), self.biases[index], padding=1)
            # Rounding never falls, so the maximum may as well be taken before it, which leaves a quarter to round.
            made = functional.max_pool2d(made, 2) if layer.pool else made
            x = _in_steps(made, self.activation_steps[index], 0, 2**ACTIVATION_BITS - 1)
        return functional.conv2d(x, self.weights(-1), self.biases[-1]).flatten(1)

    def weights(self, index: int) -> torch.Tensor:
        """A layer's kernel (out, in, rows, columns) in whole steps."""
        return _in_steps(self.kernels[index], self.weight_steps[index], -self.greatest, self.greatest)


def _in_steps(x: torch.Tensor, logarithm: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The nearest multiples of a step between `low` and `high` of it."""
    step = logarithm.exp()
    clipped = (x / step).clamp(low, high)
    return (clipped + (clipped.round() - clipped).detach()) * step


def planes(pixels: Pixels, net: ConvNet) -> torch.Tensor:
    """Planes (n, input channels, side, side), bytes over 255, of images (n, side, side, 3)."""
    seen = reference.luminance(pixels) if net.grey else pixels
    scaled = seen.astype(np.float32) * np.float32(PIXEL_STEP)
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))).to(memory_format=torch.channels_last)


def train_quantised(
    network: Any,
    weight_bits: int,
    start: bytes,
    spec: InputSpec,
    shown: Any,
    classes: int,
    run_epochs: Callable[..., None],
) -> QuantisedNet:
    """The integers and steps of `network`, trained from the weight file of the float network of its shape."""
    torch.manual_seed(network.seed)
    net = CONVNETS[network.architecture]
    model = QuantisedTorchNet(net, spec, classes, weight_bits).to(memory_format=torch.channels_last)
    _set_weights(model, start, spec, network.name)
    chosen = np.random.default_rng(network.seed).permutation(len(shown[0]))[:CALIBRATED_ON]
    _set_activation_steps(model, shown[0][chosen])
    # Adam, because steps and weights have gradients of very different sizes.
    optimiser = torch.optim.Adam(model.parameters(), lr=network.learning_rate)
    run_epochs(model, optimiser, lambda pixels: model(planes(pixels, net)), network, shown)
    return _quantised_net(model, spec)


def _quantised_net(model: QuantisedTorchNet, spec: InputSpec) -> QuantisedNet:
    layers = []
    with torch.no_grad():
        for index, bias in enumerate(model.biases):
            inner = index < len(model.net.layers)
            step = model.weight_steps[index].exp()
            layers.append(
                QuantisedLayer(
                    weights=(model.weights(index) / step).round().to(torch.int8).contiguous().numpy(),
                    weight_step=step.reshape(-1).numpy(),
                    bias=bias.numpy().copy(),
                    activation_step=float(model.activation_steps[index].exp()) if inner else None,
                    pool=inner and model.net.layers[index].pool,
                )
            )
    fill = [float(LUMINANCE @ np.array(spec.mean))] if model.net.grey else spec.mean
    weight_bits = (model.greatest + 1).bit_length()
    return QuantisedNet(spec.height, weight_bits, tuple(layers), tuple(round(value) for value in fill))


def _set_weights(model: QuantisedTorchNet, content: bytes, spec: InputSpec, where: str) -> None:
    """The float network's weights, normalisation folded in, and steps that represent them well."""
    weights = Weights(parse_checkpoint(content, "safetensors", where), where)
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    if model.net.grey:
        mean, std = (LUMINANCE @ mean)[None], (LUMINANCE @ std)[None]
    inner = len(model.net.layers)
    for index in range(inner):
        kernel, bias = weights.convolution(f"layers.{index}.conv", f"layers.{index}.norm", EPSILON)
        if index == 0:
            bias = bias - kernel.sum(axis=(2, 3)) @ (mean / std)
            kernel = kernel * (np.float32(255) / std)[None, :, None, None]
        _set_layer(model, index, kernel, bias)
    kernel = weights.take("head.weight", 2).reshape(model.kernels[-1].shape)
    _set_layer(model, inner, kernel, weights.take("head.bias", 1))
    weights.finish()


def _set_layer(model: QuantisedTorchNet, index: int, kernel: F32, bias: F32) -> None:
    with torch.no_grad():
        model.kernels[index].copy_(torch.from_numpy(kernel))
        model.biases[index].copy_(torch.from_numpy(bias))
        logarithm = model.weight_steps[index]
        rows = kernel.reshape(logarithm.numel(), -1)
        steps = np.array([_best_step(row, model.greatest) for row in rows], np.float32)
        logarithm.copy_(torch.from_numpy(np.log(steps)).reshape(logarithm.shape))


def _best_step(values: NDArray[np.float32], greatest: int) -> float:
    """The candidate with the least squared error."""
    steps = CANDIDATES * max(float(np.abs(values).max()), 1e-6) / greatest
    found = np.clip(np.round(values[None] / steps[:, None]), -greatest, greatest) * steps[:, None]
    return float(steps[((found - values) ** 2).sum(axis=1).argmin()])


def _set_activation_steps(model: QuantisedTorchNet, pixels: Pixels) -> None:
    """Steps whose largest integer only few activations of these images exceed."""
    x = planes(pixels, model.net)
    with torch.no_grad():
        for index, layer in enumerate(model.net.layers):
            x = functional.relu(functional.conv2d(x, model.weights(index), model.biases[index], padding=1))
            reached = max(float(np.quantile(x.numpy(), REACHED)), 1e-6)
            model.activation_steps[index].fill_(float(np.log(reached / (2**ACTIVATION_BITS - 1))))
            x = functional.max_pool2d(x, 2) if layer.pool else x

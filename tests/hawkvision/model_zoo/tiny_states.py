"""Random weights of the right names and shapes, for graphs that need not be right about anything."""

from __future__ import annotations

import numpy as np

from hawkvision.model_zoo.building.architectures import CONVNETS, ConvNet
from hawkvision.model_zoo.building.checkpoint import StateDict


def random_state(architecture: str) -> StateDict:
    """A seeded state dict for one of the zoo's architectures."""
    rng = np.random.default_rng(7)
    if architecture == "squeezenet1_1":
        return _squeezenet(rng)
    if architecture == "mobilenet_v2":
        return _mobilenet(rng)
    if architecture in CONVNETS:
        return convnet_state(CONVNETS[architecture], rng)
    return _efficientnet_lite(rng, {"0": 1.0, "1": 1.1, "2": 1.2}[architecture[-1]])


def convnet_state(net: ConvNet, rng: np.random.Generator, side: int = 32, classes: int = 10) -> StateDict:
    """Random weights as `models/train.py` writes them."""
    state: StateDict = {}
    inside = net.input_channels
    for index, layer in enumerate(net.layers):
        _conv(rng, state, f"layers.{index}.conv", f"layers.{index}.norm", layer.channels, inside, 3)
        del state[f"layers.{index}.norm.num_batches_tracked"]
        inside = layer.channels
    state["head.weight"] = (rng.normal(size=(classes, net.features(side, side))) * 0.05).astype(np.float32)
    state["head.bias"] = rng.normal(size=classes).astype(np.float32)
    return state


def _conv(
    rng: np.random.Generator, state: StateDict, conv: str, norm: str, out: int, inside: int, size: int = 1
) -> None:
    deviation = np.sqrt(2 / (inside * size * size))
    state[f"{conv}.weight"] = (rng.normal(size=(out, inside, size, size)) * deviation).astype(np.float32)
    for part in ("weight", "bias", "running_mean", "running_var"):
        low, high = {"weight": (0.8, 1.2), "running_var": (0.8, 1.2)}.get(part, (-0.1, 0.1))
        state[f"{norm}.{part}"] = rng.uniform(low, high, out).astype(np.float32)
    state[f"{norm}.num_batches_tracked"] = np.array(1, np.int64)


def _linear(rng: np.random.Generator, state: StateDict, name: str) -> None:
    state[f"{name}.weight"] = (rng.normal(size=(1000, 1280)) * 0.03).astype(np.float32)
    state[f"{name}.bias"] = rng.normal(size=1000).astype(np.float32)


def _mobilenet(rng: np.random.Generator) -> StateDict:
    state: StateDict = {}
    _conv(rng, state, "features.0.0", "features.0.1", 32, 3, 3)
    inside, index = 32, 0
    for widen, out, blocks in ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)):
        for _ in range(blocks):
            index += 1
            at, wide, layer = f"features.{index}.conv", inside * widen, 0
            if widen > 1:
                _conv(rng, state, f"{at}.0.0", f"{at}.0.1", wide, inside)
                layer = 1
            _conv(rng, state, f"{at}.{layer}.0", f"{at}.{layer}.1", wide, 1, 3)
            _conv(rng, state, f"{at}.{layer + 1}", f"{at}.{layer + 2}", out, wide)
            inside = out
    _conv(rng, state, "features.18.0", "features.18.1", 1280, 320)
    _linear(rng, state, "classifier.1")
    return state


def _efficientnet_lite(rng: np.random.Generator, depth: float) -> StateDict:
    state: StateDict = {}
    _conv(rng, state, "_conv_stem", "_bn0", 32, 3, 3)
    sizes, outs, depths = (3, 3, 5, 3, 5, 5, 3), (16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)
    inside, index = 32, 0
    for number, (size, out, blocks) in enumerate(zip(sizes, outs, depths, strict=True)):
        widen = 1 if number == 0 else 6
        for _ in range(blocks if number in (0, 6) else int(np.ceil(depth * blocks))):
            at, wide = f"_blocks.{index}", inside * widen
            if widen > 1:
                _conv(rng, state, f"{at}._expand_conv", f"{at}._bn0", wide, inside)
            _conv(rng, state, f"{at}._depthwise_conv", f"{at}._bn1", wide, 1, size)
            _conv(rng, state, f"{at}._project_conv", f"{at}._bn2", out, wide)
            inside, index = out, index + 1
    _conv(rng, state, "_conv_head", "_bn1", 1280, 320)
    _linear(rng, state, "_fc")
    return state


def _squeezenet(rng: np.random.Generator) -> StateDict:
    state: StateDict = {}

    def conv(name: str, size: int, inside: int, out: int) -> None:
        deviation = np.sqrt(2 / (inside * size * size))
        state[f"{name}.0"] = (rng.normal(size=(size, size, inside, out)) * deviation).astype(np.float32)
        state[f"{name}.1"] = rng.normal(size=out).astype(np.float32) * np.float32(0.1)

    conv("conv1", 3, 3, 64)
    inside = 64
    for index, squeeze in zip(range(2, 10), (16, 16, 32, 32, 48, 48, 64, 64), strict=True):
        conv(f"fire{index}/squeeze1x1", 1, inside, squeeze)
        conv(f"fire{index}/expand1x1", 1, squeeze, squeeze * 4)
        conv(f"fire{index}/expand3x3", 3, squeeze, squeeze * 4)
        inside = squeeze * 8
    conv("conv10", 1, 512, 1000)
    return state

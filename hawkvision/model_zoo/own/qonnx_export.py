"""A quantised network as QONNX (arXiv 2206.07527), the exchange format of quantised networks.

    pixels/255 → Quant → [Conv(Quant(weights), bias) → Relu → Quant → [MaxPool]] … → Flatten → Gemm(Quant(weights))

`Quant` has the domain `qonnx.custom_op.general` and the inputs value, scale, zero point and bits; weights are signed
and narrow (the most negative value is not used), activations unsigned. The same network always gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hawkvision.integer.qonnx_chain import FILL_KEY, QUANT_DOMAIN
from hawkvision.model_zoo.building.architectures import PRODUCER
from hawkvision.models.onnx_layers import IR_VERSION, OPSET

ACTIVATION_BITS: Final = 8
PIXEL_STEP: Final = 1 / 255
"""The scale of a pixel."""


@dataclass(frozen=True, slots=True)
class QuantisedLayer:
    """A convolution, with ReLU and rounding to unsigned activations unless it is the last."""

    weights: NDArray[np.int8]
    """(out, in, rows, columns), in steps."""
    weight_step: NDArray[np.float32]
    """(out,), or (1,) for one step of all channels."""
    bias: NDArray[np.float32]
    """(out,)"""
    activation_step: float | None
    """None for the last layer, which gives logits."""
    pool: bool = False
    pad: int = 1
    """Pixels of padding on each side, unless it is the last."""


@dataclass(frozen=True, slots=True)
class QuantisedNet:
    """A chain of them on a square image."""

    side: int
    weight_bits: int
    layers: tuple[QuantisedLayer, ...]
    """The last covers all that the one before it gives."""
    fill: tuple[int, ...]
    """Per input plane, the value of missing pixels."""


def write_qonnx(net: QuantisedNet, name: str) -> bytes:
    """The network as a QONNX file: `pixels` (1, planes, side, side), values of 0..1, to `logits` (1, classes).

    One image, because tools of this format expect fixed sizes.
    """
    writer = _Writer()
    x = writer.quant("pixels", "input", np.array(PIXEL_STEP), ACTIVATION_BITS, signed=False)
    *inner, last = net.layers
    for index, layer in enumerate(inner):
        at = f"conv{index}"
        kernel = writer.weights(at, layer, net.weight_bits)
        bias = writer.constant(f"{at}.bias", layer.bias)
        side = layer.weights.shape[2]
        x = writer.node(
            "Conv", [x, kernel, bias], at, kernel_shape=[side, side], pads=[layer.pad] * 4, strides=[1, 1]
        )  # fmt: skip
        assert layer.activation_step is not None
        x = writer.node("Relu", [x], f"{at}.relu")
        x = writer.quant(x, f"{at}.activation", np.array(layer.activation_step), ACTIVATION_BITS, signed=False)
        if layer.pool:
            x = writer.node("MaxPool", [x], f"{at}.pool", kernel_shape=[2, 2], strides=[2, 2])
    x = writer.node("Flatten", [x], "features", axis=1)
    kernel, bias = writer.weights("head", last, net.weight_bits), writer.constant("head.bias", last.bias)
    writer.node("Gemm", [x, kernel, bias], "head", "logits", transB=1)
    return writer.model(name, net)


class _Writer:
    """Collects nodes and constants in order; each method returns the name of what it adds."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: NDArray[Any]) -> str:
        array = np.ascontiguousarray(value, np.float32).reshape(value.shape)
        self._constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, inputs: list[str], name: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        """A node whose output has its name, unless another is given."""
        self._nodes.append(helper.make_node(op, inputs, [output or name], name=name, domain=domain, **attributes))
        return output or name

    def quant(self, x: str, name: str, scale: NDArray[Any], bits: int, *, signed: bool) -> str:
        facts = {"scale": scale, "zero_point": np.array(0), "bits": np.array(bits)}
        inputs = [self.constant(f"{name}.{fact}", value) for fact, value in facts.items()]
        return self.node(
            "Quant", [x, *inputs], f"{name}.quantised", domain=QUANT_DOMAIN,
            signed=int(signed), narrow=int(signed), rounding_mode="ROUND",
        )  # fmt: skip

    def weights(self, at: str, layer: QuantisedLayer, bits: int) -> str:
        """The kernel as float multiples of its step, which `Quant` turns back into just these multiples."""
        values = layer.weights.astype(np.float32) * layer.weight_step.reshape(-1, 1, 1, 1)
        if layer.activation_step is None:
            flat = self.constant(f"{at}.weight", values.reshape(len(values), -1))
            return self.quant(flat, f"{at}.weight", layer.weight_step.reshape(()), bits, signed=True)
        steps = layer.weight_step.reshape(-1, 1, 1, 1)
        return self.quant(self.constant(f"{at}.weight", values), f"{at}.weight", steps, bits, signed=True)

    def model(self, name: str, net: QuantisedNet) -> bytes:
        planes, classes = net.layers[0].weights.shape[1], len(net.layers[-1].bias)
        graph = helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1, planes, net.side, net.side])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, classes])],
            self._constants,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(QUANT_DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=PRODUCER)
        helper.set_model_props(model, {FILL_KEY: ",".join(map(str, net.fill))})
        onnx.checker.check_model(model)
        data: bytes = model.SerializeToString(deterministic=True)
        return data

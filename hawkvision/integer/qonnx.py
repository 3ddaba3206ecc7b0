"""Reads quantised networks in QONNX (arXiv 2206.07527) into integer graphs.

Accepted is a chain, as `models/train.py` and Brevitas write it:

    input → Quant(8 bits) → { Conv | Gemm | MatMul → [Add] } → [Relu] → [MaxPool] → Quant → [MaxPool] → … → output

with Flatten or Reshape before a matrix product. Weights come from a `Quant` (signed, zero point 0, one scale or one per
output channel), activations too (unsigned, zero point 0, one scale). The input's `Quant` gives the value of one unit of
a pixel. The last layer has one scale, so that its sums are comparable. Anything else is refused by name.

The integer graph rounds halves up instead of to even, and its scales are 9-bit multipliers
(`hawkvision.integer.requantise`), so logits agree with the float network closely, not exactly.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from hawkvision.core.errors import CompileError
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import MAX_KERNEL, WEIGHT_BITS, ActivationShape, Conv, MaxPool, Node
from hawkvision.integer.qonnx_chain import QonnxChain, Quant, described
from hawkvision.integer.requantise import RealLayer, Reals, rescaled

MAX_BYTES: Final = 24 << 20
"""Bytes of a file: `MAX_WEIGHTS` in float32 and some more."""

_PLAIN_CONV: Final = {"strides": [1, 1], "dilations": [1, 1], "group": 1, "auto_pad": b"NOTSET"}
_PLAIN_POOL: Final = {
    "strides": [2, 2], "dilations": [1, 1], "pads": [0, 0, 0, 0], "ceil_mode": 0, "storage_order": 0,
    "auto_pad": b"NOTSET",
}  # fmt: skip
_PLAIN_GEMM: Final = {"alpha": 1.0, "beta": 1.0, "transA": 0}


def read_qonnx(content: bytes, where: str) -> IntegerGraph:
    """The integer graph of a QONNX file; `where` names it in errors.

    Raises:
        CompileError: if it is no QONNX file, or has an unsupported part; the message names the node and what is
        expected.
    """
    if len(content) > MAX_BYTES:
        raise CompileError(f"{where}: more than {MAX_BYTES} bytes")
    try:
        return _QonnxReader(QonnxChain(onnx.load_from_string(content), where)).graph()
    except (DecodeError, UnicodeDecodeError) as error:
        raise CompileError(f"{where}: no ONNX file: {error}") from None


class _QonnxReader:
    """Walks the chain once from input to output."""

    def __init__(self, chain: QonnxChain) -> None:
        self._chain = chain

    def graph(self) -> IntegerGraph:
        """The whole network."""
        chain = self._chain
        planes, height, width = chain.input_shape()
        pixels = stream = ActivationShape(height, width, planes, 8)
        step = self._pixel_step()
        nodes: list[Node] = []
        while True:
            layer = self._layer(stream)
            made = self._stream_after(layer, stream)
            chain.take("Relu")
            pool = self._pool()
            quant = chain.take("Quant")
            if quant is None:
                head, scale = self._last(layer, step, made, pool)
                return IntegerGraph(
                    chain.unique_name(chain.model_name), pixels, (*nodes, head), scale, chain.fill(planes)
                )
            facts = chain.activation_quant(quant)
            wanted = float(facts.scale.reshape(()))
            nodes += rescaled(layer, step, stream.bits, wanted, facts.bits, chain.where)
            made = ActivationShape(made.height, made.width, made.channels, facts.bits)
            if pool is not None or self._pool() is not None:
                nodes.append(MaxPool(f"{layer.name}_pool"))
                made = ActivationShape(made.height // 2, made.width // 2, made.channels, made.bits)
            stream, step = made, wanted

    def _pixel_step(self) -> float:
        """The value of one unit of a pixel."""
        quant = self._chain.take("Quant")
        if quant is None:
            raise self._chain.unexpected("a Quant that says what one unit of a pixel is worth")
        facts = self._chain.activation_quant(quant)
        if facts.bits != 8:
            raise self._chain.refusal(quant, f"expected pixels of 8 bits, got {facts.bits}")
        return float(facts.scale.reshape(()))

    def _last(
        self, layer: RealLayer, step: float, made: ActivationShape, pool: onnx.NodeProto | None
    ) -> tuple[Conv, float]:
        """The layer at the end of the chain, and the value of one unit of its sums."""
        if pool is not None:
            raise self._chain.refusal(pool, "a MaxPool of logits is not taken")
        self._take_flatten(made)
        if not self._chain.ended:
            raise self._chain.unexpected("Relu, MaxPool or Quant")
        return self._head(layer, step)

    def _layer(self, stream: ActivationShape) -> RealLayer:
        if node := self._chain.take("Conv"):
            return self._conv(node)
        self._take_flatten(stream)
        node = self._chain.take("Gemm", "MatMul")
        if node is None:
            raise self._chain.unexpected("Conv, or Gemm or MatMul of all that is left")
        return self._dense(node, stream)

    def _conv(self, node: onnx.NodeProto) -> RealLayer:
        how = self._chain.attributes(node, _PLAIN_CONV, free=("kernel_shape", "pads"))
        weights, facts, steps = self._weights(node, 4, turned=False)
        pads = how.get("pads", [0, 0, 0, 0])
        if not isinstance(pads, list) or len(pads) != 4 or len(set(pads)) != 1 or pads[0] not in range(MAX_KERNEL):
            raise self._chain.refusal(node, f"pads: expected four equal ones, 0 to {MAX_KERNEL - 1}, got {pads}")
        if how.get("kernel_shape", list(weights.shape[2:])) != list(weights.shape[2:]):
            raise self._chain.refusal(node, f"kernel_shape: its weights are {weights.shape}, got {how['kernel_shape']}")
        kernel = np.ascontiguousarray(weights.transpose(0, 2, 3, 1))
        return RealLayer(
            self._chain.unique_name(described(node)),
            kernel,
            facts.bits,
            steps,
            self._bias(node, len(kernel)),
            int(pads[0]),
        )

    def _dense(self, node: onnx.NodeProto, stream: ActivationShape) -> RealLayer:
        """A matrix product over all of `stream`, as a convolution."""
        gemm = node.op_type == "Gemm"
        how = self._chain.attributes(node, _PLAIN_GEMM if gemm else {}, free=("transB",) if gemm else ())
        weights, facts, steps = self._weights(node, 2, turned=not (gemm and how.get("transB", 0)))
        if weights.shape[1] != stream.elements:
            raise self._chain.refusal(node, f"it reads {weights.shape[1]} features, but is given {stream}")
        planes = weights.reshape(len(weights), stream.channels, stream.height, stream.width)
        kernel = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        return RealLayer(
            self._chain.unique_name(described(node)), kernel, facts.bits, steps, self._bias(node, len(kernel)), 0
        )

    def _weights(self, node: onnx.NodeProto, dimensions: int, *, turned: bool) -> tuple[NDArray[np.int8], Quant, Reals]:
        """Whole weights, their `Quant`, and the scale of each output channel."""
        quant = self._chain.made_by(node.input[1]) if len(node.input) > 1 else None
        if quant is None or quant.op_type != "Quant":
            raise self._chain.refusal(node, "expected weights out of a Quant")
        facts = self._chain.quant(quant)
        if not facts.signed or not WEIGHT_BITS[0] <= facts.bits <= WEIGHT_BITS[1]:
            raise self._chain.refusal(quant, f"expected signed weights of {WEIGHT_BITS[0]} to {WEIGHT_BITS[1]} bits")
        values = self._chain.tensor(quant.input[0], quant)
        if values.ndim != dimensions or not values.size:
            raise self._chain.refusal(quant, f"expected weights of {dimensions} dimensions, got shape {values.shape}")
        whole, steps = self._chain.in_steps(values, facts.scale, quant)
        if turned:
            whole, steps = whole.T, steps.T
        steps = steps.reshape(len(steps), -1)
        if (steps != steps[:, :1]).any():
            raise self._chain.refusal(quant, "expected one scale, or one for each output channel")
        limit = 1 << (facts.bits - 1)
        return np.clip(whole, -limit, limit - 1).astype(np.int8), facts, steps[:, 0]

    def _bias(self, node: onnx.NodeProto, channels: int) -> Reals:
        """Real biases: the third input, plus what an Add behind the node adds."""
        found = np.zeros(channels)
        if len(node.input) > 2 and node.input[2]:
            found = found + self._bias_of(node.input[2], node, channels)
        before = node.output[0]
        if add := self._chain.take("Add"):
            others = [name for name in add.input if name != before]
            if len(add.input) != 2 or len(others) != 1:
                raise self._chain.refusal(add, "expected a constant to be added")
            found = found + self._bias_of(others[0], add, channels)
        return found

    def _bias_of(self, name: str, node: onnx.NodeProto, channels: int) -> Reals:
        quant = self._chain.made_by(name)
        if quant is not None and quant.op_type == "Quant":
            whole, steps = self._chain.in_steps(
                self._chain.tensor(quant.input[0], quant), self._chain.quant(quant).scale, quant
            )
            values: Reals = whole * steps
        else:
            values = self._chain.tensor(name, node)
        if values.size != channels:
            raise self._chain.refusal(node, f"bias: expected {channels} values, got shape {values.shape}")
        return values.reshape(-1)

    def _head(self, layer: RealLayer, step: float) -> tuple[Conv, float]:
        """The last layer, and the value of one unit of its sums."""
        at, steps = f"{self._chain.where}: {layer.name}", layer.steps * step
        if (steps != steps[0]).any():
            raise CompileError(f"{at}: the last layer gives logits, which need one scale; it has one for each channel")
        return layer.whole(steps, at), float(steps[0])

    def _pool(self) -> onnx.NodeProto | None:
        node = self._chain.take("MaxPool")
        if node is not None:
            how = self._chain.attributes(node, _PLAIN_POOL, free=("kernel_shape",))
            if how.get("kernel_shape") != [2, 2] or how.get("strides") != [2, 2]:
                raise self._chain.refusal(node, "expected kernels of 2x2 with strides of 2")
        return node

    def _take_flatten(self, stream: ActivationShape) -> None:
        if node := self._chain.take("Flatten"):
            if self._chain.attributes(node, {}, free=("axis",)).get("axis", 1) not in (1, -3):
                raise self._chain.refusal(node, "axis: expected 1")
        elif node := self._chain.take("Reshape"):
            self._chain.attributes(node, {"allowzero": 0})
            shape = self._chain.tensor(node.input[1] if len(node.input) > 1 else "", node).tolist()
            if len(shape) != 2 or shape[0] not in (-1, 0, 1) or shape[1] not in (-1, stream.elements):
                raise self._chain.refusal(node, f"expected all of an image in one row, got {shape}")

    def _stream_after(self, layer: RealLayer, stream: ActivationShape) -> ActivationShape:
        kernel = layer.weights.shape
        height = stream.height + 2 * layer.pad - kernel[1] + 1
        width = stream.width + 2 * layer.pad - kernel[2] + 1
        if kernel[3] != stream.channels or min(height, width) < 1:
            raise CompileError(f"{self._chain.where}: {layer.name}: weights of {kernel} do not fit {stream}")
        return ActivationShape(height, width, kernel[0], 8)

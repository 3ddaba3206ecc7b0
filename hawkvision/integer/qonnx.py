"""Reads quantised networks in QONNX (arXiv 2206.07527) into integer graphs: the compiler's front door.

What is taken is a chain, as `hawkvision models train` and Brevitas write it:

    input → Quant(8 bits) → { Conv | Gemm | MatMul → [Add] } → [Relu] → [MaxPool] → Quant → [MaxPool] → … → output

with Flatten or Reshape before a matrix product. Weights come out of a `Quant` (signed, zero point 0, one scale or one
per output channel), activations too (unsigned, zero point 0, one scale). The input's `Quant` says what one unit of a
pixel is worth. The last layer has one scale, so that its sums compare. Everything else is refused by name.

The integer graph rounds where float arithmetic does, but halves up instead of to even, and its scales are multipliers
of nine bits (`hawkvision.integer.requantise`): logits agree closely, not exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hawkvision.errors import CompileError
from hawkvision.integer.ir import (
    ACTIVATION_BITS,
    MAX_KERNEL,
    MAX_WEIGHTS,
    WEIGHT_BITS,
    ActivationShape,
    Conv,
    IntegerGraph,
    MaxPool,
    Node,
)
from hawkvision.integer.requantise import Reals, rescaled, whole_bias

QUANT_DOMAIN: Final = "qonnx.custom_op.general"
FILL_KEY: Final = "hawkvision.fill"
"""Metadata: per input plane, what stands for pixels that did not arrive, as `r,g,b`; `MID_GREY` if there is none."""
MID_GREY: Final = 128
MAX_BYTES: Final = 24 << 20
"""Of a file: `MAX_WEIGHTS` as float32 and some more."""
MAX_NODES: Final = 4096

_PLAIN_CONV: Final = {"strides": [1, 1], "dilations": [1, 1], "group": 1, "auto_pad": b"NOTSET"}
_PLAIN_POOL: Final = {
    "strides": [2, 2], "dilations": [1, 1], "pads": [0, 0, 0, 0], "ceil_mode": 0, "storage_order": 0,
    "auto_pad": b"NOTSET",
}  # fmt: skip
_PLAIN_GEMM: Final = {"alpha": 1.0, "beta": 1.0, "transA": 0}
_TO_NEAREST: Final = (b"ROUND", b"HALF_EVEN", b"HALF_UP")
_TENSORS: Final = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32)


def read_qonnx(content: bytes, where: str) -> IntegerGraph:
    """The integer graph of a QONNX file; `where` names it in errors.

    Raises:
        CompileError: if it is no such file, or has a part that is not taken, naming the node and what is expected.
    """
    if len(content) > MAX_BYTES:
        raise CompileError(f"{where}: more than {MAX_BYTES} bytes")
    try:
        return _QonnxReader(onnx.load_from_string(content), where).graph()
    except (DecodeError, UnicodeDecodeError) as error:
        raise CompileError(f"{where}: no ONNX file: {error}") from None


@dataclass(frozen=True, slots=True)
class _Quant:
    """A `Quant` node's constants."""

    scale: Reals
    bits: int
    signed: bool


@dataclass(frozen=True, slots=True)
class _QonnxLayer:
    """A convolution in whole numbers, but for its scales."""

    name: str
    weights: NDArray[np.int8]
    weight_bits: int
    steps: Reals
    """(out,): of the weights."""
    bias: Reals
    pad: int


class _QonnxReader:
    """Walks the chain once, from the input to the output."""

    def __init__(self, model: onnx.ModelProto, where: str) -> None:
        self._where = where
        self._proto = model.graph
        if len(model.graph.node) > MAX_NODES:
            raise CompileError(f"{where}: {len(model.graph.node)} nodes; expected at most {MAX_NODES}")
        if any(isinstance(text, bytes) for text in _texts(model)):
            raise CompileError(f"{where}: a name in it is no UTF-8")
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._made = {name: node for node in model.graph.node for name in node.output}
        self._properties = {entry.key: entry.value for entry in model.metadata_props}
        self._chain = self._find_chain()
        self._taken = 0
        self._names: set[str] = set()

    def graph(self) -> IntegerGraph:
        """The whole network."""
        shape = self._input_shape()
        quant = self._take("Quant")
        if quant is None:
            raise self._unexpected("a Quant that says what one unit of a pixel is worth")
        facts = self._activation_quant(quant)
        if facts.bits != 8:
            raise self._refusal(quant, f"expected pixels of 8 bits, got {facts.bits}")
        pixels = stream = ActivationShape(shape[1], shape[2], shape[0], 8)
        step = float(facts.scale.reshape(()))
        nodes: list[Node] = []
        while True:
            layer = self._layer(stream)
            made = self._stream_after(layer, stream)
            self._take("Relu")
            pool = self._pool()
            quant = self._take("Quant")
            if quant is None:
                if pool is not None:
                    raise self._refusal(pool, "a MaxPool of logits is not taken")
                self._take_flatten(made)
                if self._taken < len(self._chain):
                    raise self._unexpected("Relu, MaxPool or Quant")
                head, scale = self._head(layer, step)
                return IntegerGraph(
                    self._name(self._proto.name or "model"), pixels, (*nodes, head), scale, self._fill(shape[0])
                )
            facts = self._activation_quant(quant)
            wanted = float(facts.scale.reshape(()))
            conv, requantise = rescaled(
                layer.name, layer.weights, layer.weight_bits, layer.pad, layer.bias, layer.steps * step, stream.bits,
                wanted, facts.bits, self._where,
            )  # fmt: skip
            nodes += [conv, requantise]
            made = ActivationShape(made.height, made.width, made.channels, facts.bits)
            if pool is None:
                pool = self._pool()
            if pool is not None:
                nodes.append(MaxPool(f"{layer.name}_pool"))
                made = ActivationShape(made.height // 2, made.width // 2, made.channels, made.bits)
            stream, step = made, wanted

    # The chain.

    def _find_chain(self) -> list[onnx.NodeProto]:
        """The nodes between input and output, each reading what the one before it gives."""
        inputs = [value for value in self._proto.input if value.name not in self._constants]
        if len(inputs) != 1 or len(self._proto.output) != 1:
            raise CompileError(
                f"{self._where}: expected one input and one output, got {len(inputs)} and {len(self._proto.output)}"
            )
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self._proto.node:
            for name in set(node.input):
                readers.setdefault(name, []).append(node)
        chain: list[onnx.NodeProto] = []
        at = inputs[0].name
        while at != self._proto.output[0].name:
            found = readers.get(at, [])
            if len(found) != 1 or len(chain) >= len(self._proto.node):
                raise CompileError(
                    f"{self._where}: {at!r} is read by {len(found)} nodes; expected a chain from input to output"
                )
            (node,) = found
            if len(node.output) != 1 or not node.input or (node.input[0] != at and node.op_type != "Add"):
                raise self._refusal(node, f"expected one output, and {at!r} as the first input")
            chain.append(node)
            at = node.output[0]
        return chain

    def _take(self, *operators: str) -> onnx.NodeProto | None:
        """The next node of the chain, if it is one of these operators."""
        if self._taken == len(self._chain):
            return None
        node = self._chain[self._taken]
        if node.op_type not in operators or node.domain not in ("", "ai.onnx", QUANT_DOMAIN):
            return None
        self._taken += 1
        return node

    def _unexpected(self, expected: str) -> CompileError:
        if self._taken == len(self._chain):
            return CompileError(f"{self._where}: the chain ends here; expected {expected}")
        node = self._chain[self._taken]
        return self._refusal(node, f"expected {expected} here")

    def _refusal(self, node: onnx.NodeProto, why: str) -> CompileError:
        return CompileError(f"{self._where}: {node.op_type} {_told(node)}: {why}")

    # Layers.

    def _layer(self, stream: ActivationShape) -> _QonnxLayer:
        if node := self._take("Conv"):
            return self._conv(node)
        self._take_flatten(stream)
        node = self._take("Gemm", "MatMul")
        if node is None:
            raise self._unexpected("Conv, or Gemm or MatMul of all that is left")
        return self._dense(node, stream)

    def _conv(self, node: onnx.NodeProto) -> _QonnxLayer:
        how = self._attributes(node, _PLAIN_CONV, free=("kernel_shape", "pads"))
        weights, facts, steps = self._weights(node, 4, turned=False)
        pads = how.get("pads", [0, 0, 0, 0])
        if not isinstance(pads, list) or len(pads) != 4 or len(set(pads)) != 1 or pads[0] not in range(MAX_KERNEL):
            raise self._refusal(node, f"pads: expected four equal ones, 0 to {MAX_KERNEL - 1}, got {pads}")
        if how.get("kernel_shape", list(weights.shape[2:])) != list(weights.shape[2:]):
            raise self._refusal(node, f"kernel_shape: its weights are {weights.shape}, got {how['kernel_shape']}")
        kernel = np.ascontiguousarray(weights.transpose(0, 2, 3, 1))
        return _QonnxLayer(
            self._name(_told(node)), kernel, facts.bits, steps, self._bias(node, len(kernel)), int(pads[0])
        )

    def _dense(self, node: onnx.NodeProto, stream: ActivationShape) -> _QonnxLayer:
        """A matrix product over all that `stream` carries, as a convolution."""
        gemm = node.op_type == "Gemm"
        how = self._attributes(node, _PLAIN_GEMM if gemm else {}, free=("transB",) if gemm else ())
        weights, facts, steps = self._weights(node, 2, turned=not (gemm and how.get("transB", 0)))
        if weights.shape[1] != stream.elements:
            raise self._refusal(node, f"it reads {weights.shape[1]} features, but is given {stream}")
        planes = weights.reshape(len(weights), stream.channels, stream.height, stream.width)
        kernel = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        return _QonnxLayer(self._name(_told(node)), kernel, facts.bits, steps, self._bias(node, len(kernel)), 0)

    def _weights(
        self, node: onnx.NodeProto, dimensions: int, *, turned: bool
    ) -> tuple[NDArray[np.int8], _Quant, Reals]:
        """Whole weights, their `Quant`, and the step of each output channel."""
        quant = self._made.get(node.input[1]) if len(node.input) > 1 else None
        if quant is None or quant.op_type != "Quant":
            raise self._refusal(node, "expected weights out of a Quant")
        facts = self._quant(quant)
        if not facts.signed or not WEIGHT_BITS[0] <= facts.bits <= WEIGHT_BITS[1]:
            raise self._refusal(quant, f"expected signed weights of {WEIGHT_BITS[0]} to {WEIGHT_BITS[1]} bits")
        values = self._tensor(quant.input[0], quant)
        if values.ndim != dimensions or not values.size:
            raise self._refusal(quant, f"expected weights of {dimensions} dimensions, got shape {values.shape}")
        whole, steps = self._in_steps(values, facts.scale, quant)
        if turned:
            whole, steps = whole.T, steps.T
        steps = steps.reshape(len(steps), -1)
        if (steps != steps[:, :1]).any():
            raise self._refusal(quant, "expected one scale, or one for each output channel")
        limit = 1 << (facts.bits - 1)
        return np.clip(whole, -limit, limit - 1).astype(np.int8), facts, steps[:, 0]

    def _bias(self, node: onnx.NodeProto, channels: int) -> Reals:
        """Real biases: the third input, or what an Add behind the node adds."""
        found = np.zeros(channels)
        if len(node.input) > 2 and node.input[2]:
            found = found + self._bias_of(node.input[2], node, channels)
        before = node.output[0]
        if add := self._take("Add"):
            others = [name for name in add.input if name != before]
            if len(add.input) != 2 or len(others) != 1:
                raise self._refusal(add, "expected a constant to be added")
            found = found + self._bias_of(others[0], add, channels)
        return found

    def _bias_of(self, name: str, node: onnx.NodeProto, channels: int) -> Reals:
        quant = self._made.get(name)
        if quant is not None and quant.op_type == "Quant":
            whole, steps = self._in_steps(self._tensor(quant.input[0], quant), self._quant(quant).scale, quant)
            values: Reals = whole * steps
        else:
            values = self._tensor(name, node)
        if values.size != channels:
            raise self._refusal(node, f"bias: expected {channels} values, got shape {values.shape}")
        return values.reshape(-1)

    def _head(self, layer: _QonnxLayer, step: float) -> tuple[Conv, float]:
        """The last layer, and what one unit of its sums is worth."""
        at, steps = f"{self._where}: {layer.name}", layer.steps * step
        if (steps != steps[0]).any():
            raise CompileError(f"{at}: the last layer gives logits, which need one scale; it has one for each channel")
        bias = whole_bias(layer.bias, steps, at)
        return Conv(layer.name, layer.weights, bias, layer.weight_bits, layer.pad), float(steps[0])

    def _pool(self) -> onnx.NodeProto | None:
        node = self._take("MaxPool")
        if node is not None:
            how = self._attributes(node, _PLAIN_POOL, free=("kernel_shape",))
            if how.get("kernel_shape") != [2, 2] or how.get("strides") != [2, 2]:
                raise self._refusal(node, "expected kernels of 2x2 with strides of 2")
        return node

    def _take_flatten(self, stream: ActivationShape) -> None:
        if node := self._take("Flatten"):
            if self._attributes(node, {}, free=("axis",)).get("axis", 1) not in (1, -3):
                raise self._refusal(node, "axis: expected 1")
        elif node := self._take("Reshape"):
            self._attributes(node, {"allowzero": 0})
            shape = self._tensor(node.input[1] if len(node.input) > 1 else "", node).tolist()
            if len(shape) != 2 or shape[0] not in (-1, 0, 1) or shape[1] not in (-1, stream.elements):
                raise self._refusal(node, f"expected all of an image in one row, got {shape}")

    def _stream_after(self, layer: _QonnxLayer, stream: ActivationShape) -> ActivationShape:
        kernel = layer.weights.shape
        height = stream.height + 2 * layer.pad - kernel[1] + 1
        width = stream.width + 2 * layer.pad - kernel[2] + 1
        if kernel[3] != stream.channels or min(height, width) < 1:
            raise CompileError(f"{self._where}: {layer.name}: weights of {kernel} do not fit {stream}")
        return ActivationShape(height, width, kernel[0], 8)

    # Constants.

    def _activation_quant(self, node: onnx.NodeProto) -> _Quant:
        facts = self._quant(node)
        low, high = ACTIVATION_BITS
        if facts.signed or facts.scale.size != 1 or not low <= facts.bits <= high:
            raise self._refusal(node, f"expected unsigned activations of {low} to {high} bits with one scale")
        return facts

    def _quant(self, node: onnx.NodeProto) -> _Quant:
        how = self._attributes(node, {}, free=("signed", "narrow", "rounding_mode"))
        if node.domain != QUANT_DOMAIN or len(node.input) != 4:
            raise self._refusal(node, f"expected domain {QUANT_DOMAIN} and four inputs")
        scale, zero, bits = (self._tensor(name, node) for name in node.input[1:])
        if not (scale.size and np.isfinite(scale).all() and (scale > 0).all()):
            raise self._refusal(node, "expected positive scales")
        if zero.any():
            raise self._refusal(node, "expected a zero point of 0")
        if bits.size != 1 or bits.reshape(()) != np.round(bits.reshape(())) or not 1 <= bits.reshape(()) <= 64:
            raise self._refusal(node, "expected a whole number of bits")
        signed, narrow = how.get("signed", 1), how.get("narrow", 0)
        if how.get("rounding_mode", b"ROUND") not in _TO_NEAREST:
            raise self._refusal(node, f"rounding_mode: expected ROUND, got {how['rounding_mode']!r}")
        if narrow and not signed:
            raise self._refusal(node, "unsigned numbers cannot be narrow")
        return _Quant(scale, int(bits.reshape(())), bool(signed))

    def _in_steps(self, values: Reals, scale: Reals, node: onnx.NodeProto) -> tuple[Reals, Reals]:
        """`values` as whole numbers of steps, and the steps, both of the same shape."""
        try:
            steps = np.broadcast_to(scale, values.shape)
        except ValueError:
            raise self._refusal(node, f"scales of shape {scale.shape} do not fit {values.shape}") from None
        if not np.isfinite(values).all():
            raise self._refusal(node, "a value is not finite")
        with np.errstate(over="ignore"):
            return np.round(values / steps), steps

    def _tensor(self, name: str, node: onnx.NodeProto) -> Reals:
        """A constant as float64."""
        tensor = self._constants.get(name)
        if tensor is None and (maker := self._made.get(name)) is not None and maker.op_type == "Constant":
            tensor = next((entry.t for entry in maker.attribute if entry.name == "value"), None)
        if tensor is None:
            raise self._refusal(node, f"expected {name!r} to be a constant")
        if tensor.data_type not in _TENSORS or tensor.data_location == TensorProto.EXTERNAL:
            raise self._refusal(node, f"{name!r}: expected float or int values inside the file")
        sizes = [int(size) for size in tensor.dims]
        if min(sizes, default=1) < 0 or int(np.prod(sizes, dtype=object)) > MAX_WEIGHTS:
            raise self._refusal(node, f"{name!r}: expected at most {MAX_WEIGHTS} values, got shape {sizes}")
        try:
            return np.asarray(numpy_helper.to_array(tensor), np.float64)
        except (ValueError, TypeError) as error:
            raise self._refusal(node, f"{name!r}: damaged: {error}") from None

    def _attributes(self, node: onnx.NodeProto, plain: Mapping[str, Any], free: tuple[str, ...] = ()) -> dict[str, Any]:
        """A node's attributes: those of `plain` have these values, those of `free` any, and there are no others."""
        found: dict[str, Any] = {}
        for entry in node.attribute:
            try:
                value = helper.get_attribute_value(entry)
            except ValueError as error:
                raise self._refusal(node, f"{entry.name}: {error}") from None
            known = entry.name in plain or entry.name in free
            if not known or not isinstance(value, int | float | bytes | list):
                raise self._refusal(node, f"{entry.name}: not taken")
            if entry.name in plain and value != plain[entry.name]:
                raise self._refusal(node, f"{entry.name}: expected {plain[entry.name]!r}, got {value!r}")
            found[entry.name] = value
        return found

    # The rest.

    def _input_shape(self) -> tuple[int, int, int]:
        """(planes, height, width)."""
        (value,) = (value for value in self._proto.input if value.name not in self._constants)
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if len(sizes) != 4 or min(sizes[1:]) < 1:
            raise CompileError(f"{self._where}: {value.name}: expected (n, planes, height, width), got {sizes}")
        return sizes[1], sizes[2], sizes[3]

    def _fill(self, planes: int) -> tuple[int, ...]:
        text = self._properties.get(FILL_KEY, ",".join([str(MID_GREY)] * planes))
        if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", text):
            raise CompileError(
                f"{self._where}: {FILL_KEY}: expected a value per plane, as in 125,123,114; got {text!r}"
            )
        return tuple(int(value) for value in text.split(","))

    def _name(self, told: str) -> str:
        """A name that hardware languages and file systems take as well; distinct ones."""
        plain = re.sub(r"[^A-Za-z0-9_]+", "_", told).strip("_")[:48] or "layer"
        plain = plain if plain[0].isalpha() else f"n{plain}"
        name, count = plain, 1
        while name in self._names:
            count += 1
            name = f"{plain}_{count}"
        self._names.add(name)
        return name


def _texts(model: onnx.ModelProto) -> Iterator[str | bytes]:
    """All names that are looked at: what is no UTF-8 comes as bytes."""
    graph = model.graph
    yield graph.name
    for named in (*graph.initializer, *graph.input, *graph.output):
        yield named.name
    for entry in model.metadata_props:
        yield from (entry.key, entry.value)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def _told(node: onnx.NodeProto) -> str:
    return str(node.name or (node.output[0] if node.output else node.op_type))

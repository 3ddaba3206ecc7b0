"""A QONNX file as a chain of nodes with their constants, read one by one; what is unsupported is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hawkvision.core.errors import CompileError
from hawkvision.integer.nodes import ACTIVATION_BITS, MAX_WEIGHTS
from hawkvision.integer.requantise import Reals

QUANT_DOMAIN: Final = "qonnx.custom_op.general"
FILL_KEY: Final = "hawkvision.fill"
"""Metadata key: per input plane, the value of missing pixels, as `r,g,b`; default `MID_GREY`."""
MID_GREY: Final = 128
MAX_NODES: Final = 4096
_TO_NEAREST: Final = (b"ROUND", b"HALF_EVEN", b"HALF_UP")
_TENSORS: Final = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32)


@dataclass(frozen=True, slots=True)
class Quant:
    """Constants of a `Quant` node."""

    scale: Reals
    bits: int
    signed: bool


class QonnxChain:
    """The nodes between a model's one input and one output, and what is needed to read them.

    Args:
        model: the file.
        where: names it in errors.

    Raises:
        CompileError: if the nodes form no chain, or there are too many.
    """

    def __init__(self, model: onnx.ModelProto, where: str) -> None:
        self.where = where
        self._proto = model.graph
        self.model_name = str(model.graph.name or "model")
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

    @property
    def ended(self) -> bool:
        """Whether every node has been taken."""
        return self._taken == len(self._chain)

    def made_by(self, name: str) -> onnx.NodeProto | None:
        """The node that gives a value."""
        return self._made.get(name)

    def _find_chain(self) -> list[onnx.NodeProto]:
        """The nodes between input and output, each reading the output of the one before."""
        inputs = [value for value in self._proto.input if value.name not in self._constants]
        if len(inputs) != 1 or len(self._proto.output) != 1:
            raise CompileError(
                f"{self.where}: expected one input and one output, got {len(inputs)} and {len(self._proto.output)}"
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
                    f"{self.where}: {at!r} is read by {len(found)} nodes; expected a chain from input to output"
                )
            (node,) = found
            if len(node.output) != 1 or not node.input or (node.input[0] != at and node.op_type != "Add"):
                raise self.refusal(node, f"expected one output, and {at!r} as the first input")
            chain.append(node)
            at = node.output[0]
        return chain

    def take(self, *operators: str) -> onnx.NodeProto | None:
        """The next node of the chain, if it is one of these operators."""
        if self.ended:
            return None
        node = self._chain[self._taken]
        if node.op_type not in operators or node.domain not in ("", "ai.onnx", QUANT_DOMAIN):
            return None
        self._taken += 1
        return node

    def unexpected(self, expected: str) -> CompileError:
        """The error for a chain that goes on otherwise."""
        if self.ended:
            return CompileError(f"{self.where}: the chain ends here; expected {expected}")
        node = self._chain[self._taken]
        return self.refusal(node, f"expected {expected} here")

    def refusal(self, node: onnx.NodeProto, why: str) -> CompileError:
        """The error for a node that is not supported."""
        return CompileError(f"{self.where}: {node.op_type} {described(node)}: {why}")

    def activation_quant(self, node: onnx.NodeProto) -> Quant:
        """The constants of a `Quant` of activations."""
        facts = self.quant(node)
        low, high = ACTIVATION_BITS
        if facts.signed or facts.scale.size != 1 or not low <= facts.bits <= high:
            raise self.refusal(node, f"expected unsigned activations of {low} to {high} bits with one scale")
        return facts

    def quant(self, node: onnx.NodeProto) -> Quant:
        """The constants of a `Quant`."""
        how = self.attributes(node, {}, free=("signed", "narrow", "rounding_mode"))
        if node.domain != QUANT_DOMAIN or len(node.input) != 4:
            raise self.refusal(node, f"expected domain {QUANT_DOMAIN} and four inputs")
        scale, zero, bits = (self.tensor(name, node) for name in node.input[1:])
        if not (scale.size and np.isfinite(scale).all() and (scale > 0).all()):
            raise self.refusal(node, "expected positive scales")
        if zero.any():
            raise self.refusal(node, "expected a zero point of 0")
        if bits.size != 1 or bits.reshape(()) != np.round(bits.reshape(())) or not 1 <= bits.reshape(()) <= 64:
            raise self.refusal(node, "expected a whole number of bits")
        signed, narrow = how.get("signed", 1), how.get("narrow", 0)
        if how.get("rounding_mode", b"ROUND") not in _TO_NEAREST:
            raise self.refusal(node, f"rounding_mode: expected ROUND, got {how['rounding_mode']!r}")
        if narrow and not signed:
            raise self.refusal(node, "unsigned numbers cannot be narrow")
        return Quant(scale, int(bits.reshape(())), bool(signed))

    def in_steps(self, values: Reals, scale: Reals, node: onnx.NodeProto) -> tuple[Reals, Reals]:
        """`values` as whole multiples of the scale, and the scale, both of the same shape."""
        try:
            steps = np.broadcast_to(scale, values.shape)
        except ValueError:
            raise self.refusal(node, f"scales of shape {scale.shape} do not fit {values.shape}") from None
        if not np.isfinite(values).all():
            raise self.refusal(node, "a value is not finite")
        with np.errstate(over="ignore"):
            return np.round(values / steps), steps

    def tensor(self, name: str, node: onnx.NodeProto) -> Reals:
        """A constant as float64."""
        tensor = self._constants.get(name)
        if tensor is None and (maker := self._made.get(name)) is not None and maker.op_type == "Constant":
            tensor = next((entry.t for entry in maker.attribute if entry.name == "value"), None)
        if tensor is None:
            raise self.refusal(node, f"expected {name!r} to be a constant")
        if tensor.data_type not in _TENSORS or tensor.data_location == TensorProto.EXTERNAL:
            raise self.refusal(node, f"{name!r}: expected float or int values inside the file")
        sizes = [int(size) for size in tensor.dims]
        if min(sizes, default=1) < 0 or int(np.prod(sizes, dtype=object)) > MAX_WEIGHTS:
            raise self.refusal(node, f"{name!r}: expected at most {MAX_WEIGHTS} values, got shape {sizes}")
        try:
            return np.asarray(numpy_helper.to_array(tensor), np.float64)
        except (ValueError, TypeError) as error:
            raise self.refusal(node, f"{name!r}: damaged: {error}") from None

    def attributes(self, node: onnx.NodeProto, plain: Mapping[str, Any], free: tuple[str, ...] = ()) -> dict[str, Any]:
        """A node's attributes: `plain` must have these values, `free` may have any, and no others are allowed."""
        found: dict[str, Any] = {}
        for entry in node.attribute:
            try:
                value = helper.get_attribute_value(entry)
            except ValueError as error:
                raise self.refusal(node, f"{entry.name}: {error}") from None
            known = entry.name in plain or entry.name in free
            if not known or not isinstance(value, int | float | bytes | list):
                raise self.refusal(node, f"{entry.name}: not taken")
            if entry.name in plain and value != plain[entry.name]:
                raise self.refusal(node, f"{entry.name}: expected {plain[entry.name]!r}, got {value!r}")
            found[entry.name] = value
        return found

    def input_shape(self) -> tuple[int, int, int]:
        """(planes, height, width)."""
        (value,) = (value for value in self._proto.input if value.name not in self._constants)
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if len(sizes) != 4 or min(sizes[1:]) < 1:
            raise CompileError(f"{self.where}: {value.name}: expected (n, planes, height, width), got {sizes}")
        return sizes[1], sizes[2], sizes[3]

    def fill(self, planes: int) -> tuple[int, ...]:
        """The value of missing pixels, per input plane."""
        text = self._properties.get(FILL_KEY, ",".join([str(MID_GREY)] * planes))
        if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", text):
            raise CompileError(f"{self.where}: {FILL_KEY}: expected a value per plane, as in 125,123,114; got {text!r}")
        return tuple(int(value) for value in text.split(","))

    def unique_name(self, wanted: str) -> str:
        """A unique name that hardware languages and file systems accept."""
        plain = re.sub(r"[^A-Za-z0-9_]+", "_", wanted).strip("_")[:48] or "layer"
        plain = plain if plain[0].isalpha() else f"n{plain}"
        name, count = plain, 1
        while name in self._names:
            count += 1
            name = f"{plain}_{count}"
        self._names.add(name)
        return name


def _texts(model: onnx.ModelProto) -> Iterator[str | bytes]:
    """All names that are read; names that are no UTF-8 come as bytes."""
    graph = model.graph
    yield graph.name
    for named in (*graph.initializer, *graph.input, *graph.output):
        yield named.name
    for entry in model.metadata_props:
        yield from (entry.key, entry.value)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def described(node: onnx.NodeProto) -> str:
    """The name of a node in errors."""
    return str(node.name or (node.output[0] if node.output else node.op_type))

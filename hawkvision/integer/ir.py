"""The integer graph: a network as a chain of typed nodes, checked when it is created.

Everything is exact integers; `hawkvision.integer.reference` defines a graph's results. A graph is a chain

    Conv → Requantise → [MaxPool] → Conv → Requantise → [MaxPool] → … → Conv

whose first node reads uint8 pixels and whose last gives the logits as plain accumulators. A fully connected layer is a
convolution whose kernel covers its input. Activations are unsigned, because `Requantise` is also the ReLU.

    accumulator  a = bias + Σ weight · activation            signed, `Conv.accumulator_bits` wide
    requantised  u = clip(a >> pre_shift, 0, 2^17 − 1)       17 bits, so that one 18×18 multiplier suffices
                 y = min((u · multiplier + 2^(shift−1)) >> shift, 2^bits − 1)

Values are ordered by row, column and channel (HWC), as pixels come from a decoder.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from hawkvision.core.errors import CompileError
from hawkvision.integer.nodes import (
    MAX_SIDE,
    MAX_WEIGHTS,
    ActivationShape,
    Conv,
    ConvStage,
    MaxPool,
    Node,
    Requantise,
    check_conv,
    check_requantise,
)

FORMAT: Final = 1


@dataclass(frozen=True, eq=False)
class IntegerGraph:
    """A checked integer network.

    Raises:
        CompileError: naming the node, if a value, type or order breaks the rules at the top of this file.
    """

    name: str
    input: ActivationShape
    nodes: tuple[Node, ...]
    logit_scale: float
    """The value of one unit of the integer logits, before softmax."""
    fill: tuple[int, ...]
    """Per input channel: the value of missing pixels in the first row."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_stages", tuple(_stages(self)))

    @property
    def stages(self) -> tuple[ConvStage, ...]:
        """The chain, grouped into stages."""
        found: tuple[ConvStage, ...] = self._stages  # type: ignore[attr-defined]
        return found

    @property
    def classes(self) -> int:
        """Logits per image."""
        return self.stages[-1].conv.channels

    @property
    def multiplications(self) -> int:
        """Multiply-accumulates per image."""
        return sum(stage.multiplications for stage in self.stages)

    @property
    def sha256(self) -> str:
        """SHA-256 of everything that determines the logits; a device must be built from the same."""
        return hashlib.sha256(to_bytes(self)).hexdigest()


def _stages(graph: IntegerGraph) -> Iterator[ConvStage]:
    """The chain in stages, checked."""
    _check_input(graph)
    if len({node.name for node in graph.nodes}) != len(graph.nodes):
        raise CompileError(f"{graph.name}: nodes must have distinct names, got {[node.name for node in graph.nodes]}")
    nodes, stream, weights = deque(graph.nodes), graph.input, 0
    while True:
        stage = _stage(graph.name, nodes, stream)
        weights += stage.conv.weights.size
        if weights > MAX_WEIGHTS:
            raise CompileError(f"{graph.name}: more than {MAX_WEIGHTS} weights")
        yield stage
        if stage.requantise is None:
            return
        stream = stage.given


def _stage(graph: str, nodes: deque[Node], stream: ActivationShape) -> ConvStage:
    """Take the next stage from the front of `nodes`."""
    if not nodes:
        raise CompileError(f"{graph}: the last node must be a convolution that gives logits")
    conv = nodes.popleft()
    if not isinstance(conv, Conv):
        raise CompileError(f"{graph}: {conv.name}: expected a convolution here, found {type(conv).__name__}")
    check_conv(graph, conv, stream)
    side = 2 * conv.pad - conv.kernel + 1
    height, width = stream.height + side, stream.width + side
    if not nodes:
        if (height, width) != (1, 1):
            raise CompileError(
                f"{graph}: {conv.name}: the last convolution must cover its whole input {stream}, "
                f"but leaves {height}x{width} positions"
            )
        logits = ActivationShape(1, 1, conv.channels, conv.accumulator_bits(stream.bits))
        return ConvStage(conv, None, None, stream, logits, logits)
    requantise = nodes.popleft()
    if not isinstance(requantise, Requantise):
        raise CompileError(f"{graph}: {requantise.name}: a convolution must be requantised before it")
    check_requantise(graph, requantise, conv)
    made = given = ActivationShape(height, width, conv.channels, requantise.bits)
    pool = nodes[0] if nodes and isinstance(nodes[0], MaxPool) else None
    if pool is not None:
        nodes.popleft()
        given = ActivationShape(made.height // 2, made.width // 2, made.channels, made.bits)
        if not given.elements:
            raise CompileError(f"{graph}: {pool.name}: nothing is left of {made}")
    return ConvStage(conv, requantise, pool, stream, made, given)


def _check_input(graph: IntegerGraph) -> None:
    stream = graph.input
    if not (1 <= stream.height <= MAX_SIDE and 1 <= stream.width <= MAX_SIDE and stream.channels in (1, 3)):
        raise CompileError(f"{graph.name}: expected 1 or 3 planes of at most {MAX_SIDE} pixels a side, got {stream}")
    if stream.bits != 8:
        raise CompileError(f"{graph.name}: expected pixels of 8 bits, got {stream.bits}")
    if len(graph.fill) != stream.channels or not all(0 <= value <= 255 for value in graph.fill):
        raise CompileError(f"{graph.name}: fill: expected {stream.channels} values of 0..255, got {graph.fill}")
    if not (np.isfinite(graph.logit_scale) and graph.logit_scale > 0):
        raise CompileError(f"{graph.name}: logit_scale: expected a positive number, got {graph.logit_scale}")


# Serialisation, for model files and for the digest that devices compare.


class _GraphStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=False):
    pass


class _ConvStruct(_GraphStruct, frozen=True, tag_field="kind", tag="conv"):
    name: str
    shape: tuple[int, int, int, int]
    weights: bytes
    """int8, C order."""
    bias: tuple[int, ...]
    weight_bits: int
    pad: int


class _RequantiseStruct(_GraphStruct, frozen=True, tag_field="kind", tag="requantise"):
    name: str
    multiplier: tuple[int, ...]
    pre_shift: int
    shift: int
    bits: int


class _MaxPoolStruct(_GraphStruct, frozen=True, tag_field="kind", tag="maxpool"):
    name: str


class _GraphFile(_GraphStruct, frozen=True):
    format: Literal[1]
    name: str
    input: tuple[int, int, int, int]
    nodes: Annotated[tuple[_ConvStruct | _RequantiseStruct | _MaxPoolStruct, ...], Meta(max_length=1024)]
    logit_scale: float
    fill: tuple[int, ...]


def to_bytes(graph: IntegerGraph) -> bytes:
    """A graph as MessagePack; always the same bytes for the same graph."""
    nodes: list[_ConvStruct | _RequantiseStruct | _MaxPoolStruct] = []
    for node in graph.nodes:
        match node:
            case Conv():
                shape = tuple(int(n) for n in node.weights.shape)
                assert len(shape) == 4
                weights = np.ascontiguousarray(node.weights).tobytes()
                nodes.append(
                    _ConvStruct(node.name, shape, weights, tuple(node.bias.tolist()), node.weight_bits, node.pad)
                )
            case Requantise():
                multiplier = tuple(node.multiplier.tolist())
                nodes.append(_RequantiseStruct(node.name, multiplier, node.pre_shift, node.shift, node.bits))
            case MaxPool():
                nodes.append(_MaxPoolStruct(node.name))
    at = graph.input
    size = (at.height, at.width, at.channels, at.bits)
    return msgspec.msgpack.encode(_GraphFile(FORMAT, graph.name, size, tuple(nodes), graph.logit_scale, graph.fill))


def from_bytes(content: bytes, where: str) -> IntegerGraph:
    """A graph from the bytes of `to_bytes`; `where` names them in errors.

    Raises:
        CompileError: if they are no valid graph.
    """
    try:
        read = msgspec.msgpack.decode(content, type=_GraphFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CompileError(f"{where}: not an integer graph: {error}") from None
    nodes: list[Node] = []
    for node in read.nodes:
        try:
            nodes.append(_node(node))
        except (OverflowError, ValueError) as error:
            raise CompileError(f"{where}: {node.name}: {error}") from None
    return IntegerGraph(read.name, ActivationShape(*read.input), tuple(nodes), read.logit_scale, read.fill)


def _node(node: _ConvStruct | _RequantiseStruct | _MaxPoolStruct) -> Node:
    match node:
        case _ConvStruct():
            weights = np.frombuffer(node.weights, np.int8).reshape(node.shape)
            bias = np.array(node.bias, np.int32)
            return Conv(node.name, weights, bias, node.weight_bits, node.pad)
        case _RequantiseStruct():
            return Requantise(node.name, np.array(node.multiplier, np.int32), node.pre_shift, node.shift, node.bits)
        case _MaxPoolStruct():
            return MaxPool(node.name)

"""The compiler's intermediate representation: an integer network as a chain of typed nodes, checked when it is made.

Everything behind this point is exact integers: `hawkvision.integer.reference` says what a graph means, the RTL does the
same, and no scale, zero point or rounding mode is left to interpretation. A graph is one chain

    Conv → Requantise → [MaxPool] → Conv → Requantise → [MaxPool] → … → Conv

of which the first reads uint8 pixels and the last gives the logits as plain accumulators; a fully connected layer is a
convolution whose kernel is as large as its input. Activations are unsigned, because `Requantise` is also the ReLU.

    accumulator  a = bias + Σ weight · activation            signed, `Conv.accumulator_bits` wide
    requantised  u = clip(a >> pre_shift, 0, 2^17 − 1)       17 bits, so that one 18×18 multiplier suffices
                 y = min((u · multiplier + 2^(shift−1)) >> shift, 2^bits − 1)

Streams are in the order row, column, channel (HWC), as pixels come from a decoder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.errors import CompileError

MAX_SIDE: Final = 512
MAX_CHANNELS: Final = 4096
MAX_KERNEL: Final = 64
MAX_WEIGHTS: Final = 1 << 22
"""Of a whole graph: 4 MB at 8 bits, ten times what block RAM of the largest supported device holds."""
KEPT_BITS: Final = 17
"""Of an accumulator before the multiplier: with a sign bit, one operand of an 18×18 multiplier."""
MULTIPLIER_BITS: Final = 9
MAX_ACCUMULATOR_BITS: Final = 32
WEIGHT_BITS: Final = (2, 8)
ACTIVATION_BITS: Final = (2, 8)
FORMAT: Final = 1

Weights = NDArray[np.int8]
"""(output channels, kernel rows, kernel columns, input channels)."""


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """What flows between two nodes: maps of unsigned `bits`-bit activations, in HWC order."""

    height: int
    width: int
    channels: int
    bits: int

    @property
    def elements(self) -> int:
        """Activations of one image."""
        return self.height * self.width * self.channels

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.channels} of {self.bits} bits"


@dataclass(frozen=True, slots=True, eq=False)
class Conv:
    """A convolution of stride 1, `pad` zeros on each side, with its bias."""

    name: str
    weights: Weights
    bias: NDArray[np.int32]
    """(output channels,)"""
    weight_bits: int
    """Two's complement; the most negative value is not used."""
    pad: int = 0

    @property
    def channels(self) -> int:
        """Output channels."""
        return int(self.weights.shape[0])

    @property
    def kernel(self) -> int:
        """Rows, and columns, of the kernel."""
        return int(self.weights.shape[1])

    def accumulator_range(self, activation_bits: int) -> tuple[int, int]:
        """The least and the greatest value that an accumulator, or a part of its sum, can take."""
        greatest = (1 << activation_bits) - 1
        flat = self.weights.reshape(self.channels, -1).astype(np.int64)
        bias = self.bias.astype(np.int64)
        up = np.where(flat > 0, flat, 0).sum(axis=1) * greatest
        down = np.where(flat < 0, flat, 0).sum(axis=1) * greatest
        return int(min(down.min(), (down + bias).min())), int(max(up.max(), (up + bias).max()))

    def accumulator_bits(self, activation_bits: int) -> int:
        """Width of a two's complement register that never overflows."""
        low, high = self.accumulator_range(activation_bits)
        return max(int(-low - 1).bit_length() if low < 0 else 0, high.bit_length()) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Requantise:
    """ReLU, scaling and saturation of accumulators to unsigned `bits`-bit activations."""

    name: str
    multiplier: NDArray[np.int32]
    """(channels,), 1..2^MULTIPLIER_BITS − 1."""
    pre_shift: int
    shift: int
    """At least 1, so that there is something to round."""
    bits: int = 8


@dataclass(frozen=True, slots=True)
class MaxPool:
    """The maximum of each 2x2; an odd last row or column is left out."""

    name: str


Node = Conv | Requantise | MaxPool


@dataclass(frozen=True, slots=True, eq=False)
class ConvStage:
    """A convolution with what belongs to it: what becomes one group of modules in hardware."""

    conv: Conv
    requantise: Requantise | None
    """None for the last, whose accumulators are the logits."""
    pool: MaxPool | None
    taken: ActivationShape
    convolved: ActivationShape
    """After the convolution and, but for the last stage, requantisation."""
    given: ActivationShape
    """After pooling, if there is any."""

    @property
    def name(self) -> str:
        """The convolution's."""
        return self.conv.name

    @property
    def multiplications(self) -> int:
        """Multiply-accumulates per image, those with padding included."""
        return self.convolved.height * self.convolved.width * self.conv.weights.size


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
    """What one unit of the integer logits is worth, before softmax."""
    fill: tuple[int, ...]
    """Per input channel, what stands for pixels of the first row that did not arrive."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_stages", tuple(_stages(self)))

    @property
    def stages(self) -> tuple[ConvStage, ...]:
        """The chain, grouped."""
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
        """Of everything that decides the logits: what a device must have been built from."""
        return hashlib.sha256(to_bytes(self)).hexdigest()


def _stages(graph: IntegerGraph) -> list[ConvStage]:
    stream = graph.input
    _check_input(graph)
    nodes = list(graph.nodes)
    if len({node.name for node in nodes}) != len(nodes):
        raise CompileError(f"{graph.name}: nodes must have distinct names, got {[node.name for node in nodes]}")
    stages: list[ConvStage] = []
    while nodes:
        conv = nodes.pop(0)
        if not isinstance(conv, Conv):
            raise CompileError(f"{graph.name}: {conv.name}: expected a convolution here, found {type(conv).__name__}")
        _check_conv(graph.name, conv, stream)
        side = 2 * conv.pad - conv.kernel + 1
        requantise = nodes.pop(0) if nodes else None
        if requantise is None:
            bits = conv.accumulator_bits(stream.bits)
            made = ActivationShape(stream.height + side, stream.width + side, conv.channels, bits)
            if (made.height, made.width) != (1, 1):
                raise CompileError(
                    f"{graph.name}: {conv.name}: the last convolution must cover its whole input {stream}, "
                    f"but leaves {made.height}x{made.width} positions"
                )
            stages.append(ConvStage(conv, None, None, stream, made, made))
            break
        if not isinstance(requantise, Requantise):
            raise CompileError(f"{graph.name}: {requantise.name}: a convolution must be requantised before it")
        _check_requantise(graph.name, requantise, conv)
        made = ActivationShape(stream.height + side, stream.width + side, conv.channels, requantise.bits)
        pool, given = (nodes[0] if nodes else None), made
        if not isinstance(pool, MaxPool):
            pool = None
        else:
            nodes.pop(0)
            given = ActivationShape(made.height // 2, made.width // 2, made.channels, made.bits)
            if not given.elements:
                raise CompileError(f"{graph.name}: {pool.name}: nothing is left of {made}")
        stages.append(ConvStage(conv, requantise, pool, stream, made, given))
        stream = given
    if not stages or stages[-1].requantise is not None:
        raise CompileError(f"{graph.name}: the last node must be a convolution that gives logits")
    if sum(stage.conv.weights.size for stage in stages) > MAX_WEIGHTS:
        raise CompileError(f"{graph.name}: more than {MAX_WEIGHTS} weights")
    return stages


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


def _check_conv(where: str, conv: Conv, stream: ActivationShape) -> None:
    at = f"{where}: {conv.name}"
    shape = conv.weights.shape
    if conv.weights.dtype != np.int8 or conv.weights.ndim != 4 or shape[1] != shape[2]:
        raise CompileError(f"{at}: weights: expected int8 (out, k, k, in), got {conv.weights.dtype} {shape}")
    if shape[3] != stream.channels:
        raise CompileError(f"{at}: it reads {shape[3]} channels, but is given {stream}")
    if not (1 <= shape[0] <= MAX_CHANNELS and 1 <= shape[1] <= MAX_KERNEL):
        raise CompileError(f"{at}: expected at most {MAX_CHANNELS} channels and kernels of {MAX_KERNEL}, got {shape}")
    if not 0 <= conv.pad < conv.kernel or conv.kernel > min(stream.height, stream.width) + 2 * conv.pad:
        raise CompileError(f"{at}: a kernel of {conv.kernel} with padding {conv.pad} does not fit {stream}")
    if conv.bias.dtype != np.int32 or conv.bias.shape != shape[:1]:
        raise CompileError(f"{at}: bias: expected int32 ({shape[0]},), got {conv.bias.dtype} {conv.bias.shape}")
    if not WEIGHT_BITS[0] <= conv.weight_bits <= WEIGHT_BITS[1]:
        raise CompileError(
            f"{at}: expected weights of {WEIGHT_BITS[0]} to {WEIGHT_BITS[1]} bits, got {conv.weight_bits}"
        )
    greatest = (1 << (conv.weight_bits - 1)) - 1
    if np.abs(conv.weights.astype(np.int16)).max() > greatest:
        raise CompileError(f"{at}: a weight is beyond ±{greatest}, which is what {conv.weight_bits} bits hold")
    if conv.accumulator_bits(stream.bits) > MAX_ACCUMULATOR_BITS:
        raise CompileError(f"{at}: the accumulator would need more than {MAX_ACCUMULATOR_BITS} bits")


def _check_requantise(where: str, node: Requantise, conv: Conv) -> None:
    at = f"{where}: {node.name}"
    if node.multiplier.dtype != np.int32 or node.multiplier.shape != (conv.channels,):
        raise CompileError(
            f"{at}: multiplier: expected int32 ({conv.channels},), got {node.multiplier.dtype} {node.multiplier.shape}"
        )
    if not (node.multiplier.min() >= 1 and node.multiplier.max() < 1 << MULTIPLIER_BITS):
        raise CompileError(f"{at}: multiplier: expected 1..{(1 << MULTIPLIER_BITS) - 1}")
    if not (0 <= node.pre_shift < MAX_ACCUMULATOR_BITS and 1 <= node.shift < KEPT_BITS + MULTIPLIER_BITS):
        raise CompileError(f"{at}: shifts out of range: {node.pre_shift} before, {node.shift} after the multiplier")
    if not ACTIVATION_BITS[0] <= node.bits <= ACTIVATION_BITS[1]:
        raise CompileError(
            f"{at}: expected activations of {ACTIVATION_BITS[0]} to {ACTIVATION_BITS[1]} bits, got {node.bits}"
        )


# As bytes: what lies in a model file's metadata, and what a device is told apart by.


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
    """A graph as MessagePack: always the same bytes for the same graph."""
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
    """What `to_bytes` has written; `where` names it in errors.

    Raises:
        CompileError: if it is something else, or no valid graph.
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

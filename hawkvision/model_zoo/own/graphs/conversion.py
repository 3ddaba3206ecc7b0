"""Rewrites a graph to the serving contract: `image`, uint8 RGB (n, height, width, 3), to tensors of which the first
axis is n.

The owner's normalisation, layout and channel order become the first nodes. Where the graph begins with a convolution,
the scale and the order of channels become part of its weights. The mean stays a node: padding is zero after it. An
activation behind the logits is removed, because temperatures and ensembles need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, compose, helper, numpy_helper

from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import LOGITS
from hawkvision.integer.reference import LUMINANCE
from hawkvision.model_zoo.own.graphs.graph_facts import GraphFacts, final_activation
from hawkvision.model_zoo.own.graphs.owner_facts import Preparation

IMAGE: Final = "image"
PREFIX: Final = "model/"
"""Before every name of the owner's graph, so that the nodes added here never clash with them."""
PRODUCER: Final = "hawkvision.own"
_TO_NCHW: Final = [0, 3, 1, 2]
_GREY: Final = np.array(LUMINANCE, np.float32) / 256


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Which outputs are kept, and whether the only one becomes logits."""

    names: tuple[str, ...]
    logits: int | None
    """Number of labels, if the output gives one logit or probability for each."""
    probabilities: bool = False
    """Whether the output gives probabilities that no activation at the graph's end makes."""
    single: bool = False
    """Whether the output is one number: the logit or probability of the second of two labels."""


def converted(
    model: onnx.ModelProto, graph: GraphFacts, wanted: Preparation, outputs: OutputPlan, batch: int | None
) -> onnx.ModelProto:
    """The graph by the serving contract; `batch` fixes the number of images.

    Raises:
        ArtifactError: if the result is no valid model.
    """
    inner = compose.add_prefix(model, PREFIX)
    del inner.graph.value_info[:]
    _leave_out_activation(inner, outputs)
    _add_head(inner, outputs)
    _add_input(inner, graph, wanted, batch)
    _prune(inner.graph)
    inner.producer_name = PRODUCER
    del inner.metadata_props[:]
    try:
        onnx.checker.check_model(inner)
    except onnx.checker.ValidationError as error:
        raise ArtifactError(f"the converted graph is not valid: {str(error).splitlines()[0]}") from None
    return inner


def prepared(pixels: NDArray[np.uint8], graph: GraphFacts, wanted: Preparation) -> NDArray[Any]:
    """Images (n, height, width, 3) as the owner's own graph takes them."""
    spec = wanted.spec
    planes: NDArray[np.float64] = pixels.astype(np.float64)
    if wanted.channels == 1:
        planes = (planes @ _GREY.astype(np.float64))[..., np.newaxis]
    elif spec.channel_order == "bgr":
        planes = planes[..., ::-1]
    if wanted.normalised:
        planes = (planes - np.array(spec.mean[: wanted.channels])) / np.array(spec.std[: wanted.channels])
    if wanted.layout == "nchw":
        planes = planes.transpose(_TO_NCHW)
    return np.ascontiguousarray(planes.astype(graph.type))


# ------------------------------------------------------------------------------------------------------- the output


def _leave_out_activation(model: onnx.ModelProto, outputs: OutputPlan) -> None:
    """Let the only output be what its final activation reads."""
    if outputs.logits is None:
        return
    name = PREFIX + outputs.names[0]
    node = final_activation(model, name)
    if node is not None:
        _redirect(model.graph, name, node.input[0])


def _redirect(graph: onnx.GraphProto, name: str, source: str) -> None:
    """Let `name` be made from `source` alone."""
    maker = next(node for node in graph.node if name in node.output)
    graph.node.remove(maker)
    graph.node.append(helper.make_node("Identity", [source], [name], name="hawkvision.bare"))


def _add_head(model: onnx.ModelProto, outputs: OutputPlan) -> None:
    graph = model.graph
    kept = {value.name: value for value in graph.output}
    del graph.output[:]
    if outputs.logits is None:
        for name in outputs.names:
            graph.node.append(helper.make_node("Identity", [PREFIX + name], [name], name=f"hawkvision.{name}"))
            value = onnx.ValueInfoProto()
            value.CopyFrom(kept[PREFIX + name])
            value.name = name
            graph.output.append(value)
        return
    sizes = kept[PREFIX + outputs.names[0]].type.tensor_type.shape.dim
    x = _node(graph, "Cast", [PREFIX + outputs.names[0]], "hawkvision.float", to=TensorProto.FLOAT)
    numbers = 1 if outputs.single else outputs.logits
    if len(sizes) != 2 or sizes[1].dim_value != numbers:
        rows = _constant(graph, "hawkvision.row", np.array([-1, numbers], np.int64))
        x = _node(graph, "Reshape", [x, rows], "hawkvision.rows")
    if outputs.probabilities:
        x = _logits_of_one(graph, x) if outputs.single else _log(graph, x, "hawkvision.log")
    if outputs.single:  # the one logit of two classes is that of the second against the first
        zero = _constant(graph, "hawkvision.nought", np.zeros((), np.float32))
        x = _node(graph, "Concat", [_node(graph, "Mul", [x, zero], "hawkvision.first"), x], "hawkvision.two", axis=1)
    _node(graph, "Identity", [x], LOGITS)
    graph.output.append(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["n", outputs.logits]))


def _log(graph: onnx.GraphProto, x: str, name: str) -> str:
    """Logits that give the probabilities: their logarithms, with zero as float32's smallest normal number."""
    tiny = _constant(graph, f"{name}.tiny", np.array(np.finfo(np.float32).tiny, np.float32))
    return _node(graph, "Log", [_node(graph, "Max", [x, tiny], f"{name}.positive")], name)


def _logits_of_one(graph: onnx.GraphProto, x: str) -> str:
    one = _constant(graph, "hawkvision.one", np.ones((), np.float32))
    other = _node(graph, "Sub", [one, x], "hawkvision.other")
    return _node(graph, "Sub", [_log(graph, x, "hawkvision.log"), _log(graph, other, "hawkvision.log_other")],
                 "hawkvision.odds")  # fmt: skip


# -------------------------------------------------------------------------------------------------------- the input


def _add_input(model: onnx.ModelProto, graph: GraphFacts, wanted: Preparation, batch: int | None) -> None:
    proto, spec = model.graph, wanted.spec
    del proto.input[:]
    size = ["n" if batch is None else batch, spec.height, spec.width, 3]
    proto.input.append(helper.make_tensor_value_info(IMAGE, TensorProto.UINT8, size))
    behind = list(proto.node)
    del proto.node[:]
    entry = _Entry(proto, graph, wanted, behind)
    entry.write()
    proto.node.extend(behind)


class _Entry:
    """The nodes between `image` and what the owner's graph takes."""

    def __init__(
        self, proto: onnx.GraphProto, graph: GraphFacts, wanted: Preparation, behind: Sequence[onnx.NodeProto]
    ) -> None:
        self._proto = proto
        self._graph = graph
        self._wanted = wanted
        self._behind = behind
        self._name = PREFIX + graph.input

    def write(self) -> None:
        """Add them to the graph."""
        spec, wanted, proto = self._wanted.spec, self._wanted, self._proto
        x, planes = IMAGE, wanted.layout == "nchw"
        folds = self._fold()
        if wanted.normalised or wanted.channels == 1:
            x = _node(proto, "Cast", [x], "hawkvision.pixels", to=TensorProto.FLOAT)
        if planes:
            x = _node(proto, "Transpose", [x], "hawkvision.planes", perm=_TO_NCHW)
        mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
        if folds:
            mean = mean[::-1] if spec.channel_order == "bgr" else mean
        else:
            x = self._ordered(x, 1 if planes else 3)
            mean, std = mean[: wanted.channels], std[: wanted.channels]
        if wanted.normalised and mean.any():
            x = _node(proto, "Sub", [x, self._per_channel("mean", mean)], "hawkvision.centred")
        if wanted.normalised and not folds and (std != 1).any():
            x = _node(proto, "Mul", [x, self._per_channel("factor", (1 / std).astype(np.float32))], "hawkvision.scaled")
        if self._graph.type == "float16" or (self._graph.type == "uint8" and wanted.channels == 1):
            kinds = {"float16": TensorProto.FLOAT16, "uint8": TensorProto.UINT8}
            x = _node(proto, "Cast", [x], "hawkvision.typed", to=kinds[self._graph.type])
        _node(proto, "Identity", [x], self._name)

    def _ordered(self, x: str, axis: int) -> str:
        """The channels as the graph takes them."""
        proto = self._proto
        if self._wanted.channels == 1:
            if axis == 3:
                return _node(
                    proto,
                    "MatMul",
                    [x, _constant(proto, "hawkvision.luminance", _GREY.reshape(3, 1))],
                    "hawkvision.grey",
                )
            kernel = _constant(proto, "hawkvision.luminance", _GREY.reshape(1, 3, 1, 1))
            return _node(proto, "Conv", [x, kernel], "hawkvision.grey", kernel_shape=[1, 1])
        if self._wanted.spec.channel_order == "rgb":
            return x
        reverse = _constant(proto, "hawkvision.reverse", np.array([2, 1, 0], np.int64))
        return _node(proto, "Gather", [x, reverse], "hawkvision.reversed", axis=axis)

    def _per_channel(self, name: str, values: NDArray[np.float32]) -> str:
        shape = (1, -1, 1, 1) if self._wanted.layout == "nchw" else (1, 1, 1, -1)
        return _constant(self._proto, f"hawkvision.{name}", values.reshape(shape))

    def _fold(self) -> bool:
        """Take scale and order of channels into the first convolution. Returns whether that could be done."""
        first = self._first_convolution()
        if first is None or not self._wanted.normalised or self._graph.quantised:
            return False
        kernel = next(tensor for tensor in self._proto.initializer if tensor.name == first.input[1])
        kernel.CopyFrom(numpy_helper.from_array(for_pixels(numpy_helper.to_array(kernel), self._wanted), kernel.name))
        return True

    def _first_convolution(self) -> onnx.NodeProto | None:
        """The convolution that alone reads the input, behind a change of layout at most, with weights of its own."""
        at, planes = self._name, self._wanted.layout == "nchw"
        uses = [name for node in self._behind for name in node.input]
        while uses.count(at) == 1 and at not in {value.name for value in self._proto.output}:
            node = next(node for node in self._behind if at in node.input)
            if node.op_type == "Transpose" and not planes:
                planes = list(onnx.helper.get_node_attr_value(node, "perm")) == _TO_NCHW
            elif node.op_type == "Conv" and planes and node.input[0] == at:
                weights = {t.name for t in self._proto.initializer if t.data_type == TensorProto.FLOAT}
                groups = next((a.i for a in node.attribute if a.name == "group"), 1)
                fits = groups == 1 and node.input[1] in weights and uses.count(node.input[1]) == 1
                return node if fits else None
            elif node.op_type != "Identity":
                return None
            at = node.output[0]
        return None


def for_pixels(kernel: NDArray[np.float32], wanted: Preparation) -> NDArray[np.float32]:
    """A first kernel (out, channels, height, width) for RGB pixels less the mean, in place of normalised planes."""
    std = np.array(wanted.spec.std[: wanted.channels], np.float32).reshape(1, -1, 1, 1)
    scaled = (kernel / std).astype(np.float32)
    if wanted.channels == 1:
        scaled = (scaled * _GREY.reshape(1, 3, 1, 1)).astype(np.float32)
    elif wanted.spec.channel_order == "bgr":
        scaled = scaled[:, ::-1]
    return np.ascontiguousarray(scaled)


def _prune(graph: onnx.GraphProto) -> None:
    """Leave out nodes and constants that no output needs."""
    needed = {value.name for value in graph.output}
    nodes, kept = list(graph.node), set[int]()
    while found := {at for at, node in enumerate(nodes) if at not in kept and needed & set(node.output)}:
        kept |= found
        needed |= {name for at in found for name in (*nodes[at].input, *_outer(nodes[at]))}
    copies = [_copied(nodes[at]) for at in sorted(kept)]
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:]
    graph.node.extend(copies)
    copied = [_copied(tensor) for tensor in constants]
    del graph.initializer[:]
    graph.initializer.extend(copied)


def _outer(node: onnx.NodeProto) -> set[str]:
    """Every name that the subgraphs of a node (of loops and branches) read."""
    found: set[str] = set()
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs]:
            for inner in graph.node:
                found |= set(inner.input) | _outer(inner)
            found |= {value.name for value in graph.output}
    return found


def _copied(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _node(graph: onnx.GraphProto, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
    graph.node.append(helper.make_node(op, inputs, [output], name=output, **attributes))
    return output


def _constant(graph: onnx.GraphProto, name: str, value: NDArray[Any]) -> str:
    if all(tensor.name != name for tensor in graph.initializer):
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
    return name

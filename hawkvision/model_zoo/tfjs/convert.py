"""TensorFlow.js graph models to ONNX.

TensorFlow keeps images as (n, height, width, channels), ONNX's convolutions want (n, channels, height, width). Shapes
are known while converting, except for the number of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.tfjs.context import Context
from hawkvision.model_zoo.tfjs.graph import Node, TfjsGraph
from hawkvision.model_zoo.tfjs.operations import CONVOLUTIONS, OPERATIONS
from hawkvision.model_zoo.tfjs.values import Tensor
from hawkvision.models.onnx_layers import GraphBuilder


def convert(
    graph: TfjsGraph,
    builder: GraphBuilder,
    names: Sequence[str],
    feeds: Mapping[str, Tensor],
    divisor: Sequence[float],
    where: str,
) -> list[Tensor]:
    """Write what the named nodes need to an ONNX graph.

    Args:
        graph: the model.
        builder: the ONNX graph, in which the fed tensors are already.
        names: of the nodes that are asked for.
        feeds: tensors that stand for nodes of the model.
        divisor: by which the channels of fed images are still to be divided.
        where: names the model in errors.

    Returns:
        The tensors of the named nodes, in TensorFlow's order of axes.

    Raises:
        ArtifactError: for an operation that is not known, or used in a way that is not.
    """
    context = Context(graph, builder, feeds, divisor, where)
    order = _needed(graph, context, names, where)
    context.use(i for node in order for i in node.inputs)
    context.use(names)
    for node in order:
        _convert(context, node)
    return [context.channels_last(name) for name in names]


def _convert(context: Context, node: Node) -> None:
    operation = OPERATIONS.get(node.op)
    if operation is None:
        raise context.error(node, f"the converter does not know it; it knows {', '.join(sorted(OPERATIONS))}")
    if (context.divisor != 1.0).any() and operation not in CONVOLUTIONS and not context.feeds.isdisjoint(node.inputs):
        raise context.error(node, "images that are still to be divided are fed to convolutions only")
    try:
        context.set(node.name, operation(context, node))
    except (ValueError, IndexError, TypeError, ArithmeticError) as error:
        raise context.error(node, f"its inputs do not fit: {error}") from None


def _needed(graph: TfjsGraph, context: Context, names: Sequence[str], where: str) -> list[Node]:
    """The nodes to convert, inputs first."""
    done: dict[str, Node] = {}
    entered: set[str] = set()
    stack = [(name, False) for name in reversed(names)]
    while stack:
        name, finished = stack.pop()
        if finished:
            done[name] = graph.nodes[name]
        elif not context.known(name) and name not in done:
            if name not in graph.nodes:
                raise ArtifactError(f"{where}: there is no node {name!r}")
            if name in entered:
                raise ArtifactError(f"{where}: node {name!r} depends on itself")
            entered.add(name)
            stack.append((name, True))
            stack += [(i, False) for i in reversed(graph.nodes[name].inputs)]
    return list(done.values())

"""TensorFlow.js graph models to ONNX.

TensorFlow keeps images as (n, height, width, channels), ONNX's convolutions want (n, channels, height, width). Shapes
are known while converting, except for the number of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.tfjs.graph import Node, TfjsGraph
from hawkvision.model_zoo.tfjs.operations import BATCH, CONVOLUTIONS, OPERATIONS, Context, Tensor
from hawkvision.models.manifest import InputSpec
from hawkvision.models.onnx_layers import F32, GraphBuilder, rgb_mean


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


# The detectors that are built from TensorFlow.js models: where each graph is cut, and its boxes in plain operations.
#
# Both are cut behind their heads. What follows in the originals is written for one image; here it is written anew for
# any number.

_UNUSED_COCO_IDS: Final = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
"""COCO numbers its classes from 1 to 90, and has 80."""
_COCO_IDS: Final = tuple(i for i in range(1, 91) if i not in _UNUSED_COCO_IDS)
_SSD_INPUT: Final = "Preprocessor/sub"
_SSD_ANCHORS: Final = "Postprocessor/ExpandDims"
_SSD_SCALES: Final = (
    "ConstantFolding/Postprocessor/Decode/div_recip",
    "ConstantFolding/Postprocessor/Decode/div_2_recip",
)
_CENTERNET_PEAKS: Final = 100
_CENTERNET_STRIDE: Final = 4


def _converted(
    graph: TfjsGraph, builder: GraphBuilder, feed: str, names: Sequence[str], spec: InputSpec, where: str
) -> list[Tensor]:
    """The named nodes, with images that are normalised as the manifest says in place of the node `feed`."""
    pixels = Tensor(builder.pixels(rgb_mean(spec)), (BATCH, spec.height, spec.width, 3), planar=True)
    return convert(graph, builder, names, {feed: pixels}, spec.std, where)


def ssdlite_mobilenet_v2(graph: TfjsGraph, spec: InputSpec, where: str) -> onnx.ModelProto:
    """SSDLite-MobileNetV2 of TensorFlow's Object Detection API.

    Gives `boxes` (n, anchors, 4): left, top, right, bottom as fractions of the input, and `scores` (n, anchors, 80).
    """
    builder = GraphBuilder("ssdlite_mobilenet_v2")
    encodings, logits = _converted(graph, builder, _SSD_INPUT, ["Squeeze", "concat_1"], spec, where)
    anchors = graph.weights.get(_SSD_ANCHORS)
    count = encodings.shape[1]
    if anchors is None or anchors.shape != (1, count, 4):
        raise ArtifactError(f"{where}: {_SSD_ANCHORS!r}: expected anchors of shape (1, {count}, 4)")
    _ssd_boxes(builder, encodings.name, anchors[0], _ssd_scales(graph, where))
    ids = builder.constant("scores.ids", np.array(_COCO_IDS, np.int64))
    builder.node("Sigmoid", [builder.node("Gather", [logits.name, ids], "scores.logits", axis=2)], "scores")
    outputs = {"boxes": (count, 4), "scores": (count, len(_COCO_IDS))}
    return builder.model_of(spec.height, spec.width, outputs)


def ssdlite_float_from() -> tuple[str, ...]:
    """Where its int8 form becomes float: at the last layers of the box heads, and behind those of the class heads.

    An eighth of a pixel matters to a box, and these layers have 65,000 of 4.5 million weights.
    """
    heads = [f"BoxPredictor_{i}" for i in range(6)]
    boxes = [f"{head}/BoxEncodingPredictor/BiasAdd" for head in heads]
    return (*boxes, *(f"{head}/ClassPredictor/BiasAdd.last" for head in heads))


def _ssd_scales(graph: TfjsGraph, where: str) -> tuple[float, float]:
    """Scales of the centres and of the sizes of encoded boxes."""
    found = [graph.weights.get(name) for name in _SSD_SCALES]
    for name, scale in zip(_SSD_SCALES, found, strict=True):
        if scale is None or scale.shape != ():
            raise ArtifactError(f"{where}: {name!r}: expected a number")
    centre, size = (float(scale) for scale in found if scale is not None)
    return centre, size


def _ssd_boxes(builder: GraphBuilder, encodings: str, anchors: F32, scales: tuple[float, float]) -> None:
    """Boxes of encodings (n, anchors, 4): offset of the centre (y, x) in anchor sizes, and logarithm of (height, width)
    in anchor sizes, both divided by their scale (arXiv 1512.02325, section 2.2).
    """
    top_left, bottom_right = anchors[:, :2], anchors[:, 2:]
    sizes = bottom_right - top_left
    middle = builder.constant("anchor.centres", top_left + sizes * np.float32(0.5))
    moved = builder.constant("anchor.steps", sizes * np.float32(scales[0]))
    half = builder.constant("anchor.halves", sizes * np.float32(0.5))
    stretch = builder.constant("anchor.stretch", np.array(scales[1], np.float32))
    axis, start, between, end = (builder.constant(f"last.{i}", np.array([i], np.int64)) for i in (-1, 0, 2, 4))
    offsets = builder.node("Slice", [encodings, start, between, axis], "box.offsets")
    logarithms = builder.node("Slice", [encodings, between, end, axis], "box.logarithms")
    centres = builder.node("Add", [builder.node("Mul", [offsets, moved], "box.steps"), middle], "box.centres")
    grown = builder.node("Exp", [builder.node("Mul", [logarithms, stretch], "box.scaled")], "box.grown")
    halves = builder.node("Mul", [grown, half], "box.halves")
    corners = [builder.node(op, [centres, halves], f"box.{op}") for op in ("Sub", "Add")]
    rows = builder.node("Concat", corners, "box.rows", axis=-1)
    order = builder.constant("box.order", np.array([1, 0, 3, 2], np.int64))
    builder.node("Gather", [rows, order], "boxes", axis=2)


def centernet(graph: TfjsGraph, spec: InputSpec, where: str) -> onnx.ModelProto:
    """CenterNet with a MobileNetV3 body.

    Gives `boxes` (n, 100, 4): left, top, right, bottom in pixels of the input, `scores` (n, 100) and `labels` (n, 100),
    best first.
    """
    builder = GraphBuilder("centernet")
    heads = ["tower_0/keypoints", "tower_0/wh"]
    heat, sizes = _converted(graph, builder, "tower_0/images", heads, spec, where)
    _, _, width, classes = heat.shape
    count = builder.constant("peaks.count", np.array([_CENTERNET_PEAKS], np.int64))
    builder.many("TopK", [_peaks(builder, heat), count], ["scores", "peaks.index"], axis=1)
    classes_, width_ = (builder.constant(f"number.{n}", np.array(n, np.int64)) for n in (classes, width))
    place = builder.node("Div", ["peaks.index", classes_], "peaks.place")
    label = builder.node("Mod", ["peaks.index", classes_], "peaks.class")
    row = builder.node("Div", [place, width_], "peaks.row")
    column = builder.node("Mod", [place, width_], "peaks.column")
    _centernet_boxes(builder, sizes, place, (column, row))
    builder.node("Cast", [label], "labels", to=TensorProto.FLOAT)
    k = _CENTERNET_PEAKS
    return builder.model_of(spec.height, spec.width, {"boxes": (k, 4), "scores": (k,), "labels": (k,)})


def _peaks(builder: GraphBuilder, heat: Tensor) -> str:
    """Scores (n, positions * classes), with 0 where a neighbour has a higher one (arXiv 1904.07850, section 3)."""
    _, height, width, classes = heat.shape
    planes = builder.node("Transpose", [heat.name], "heat.planes", perm=[0, 3, 1, 2])
    highest = builder.node("MaxPool", [planes], "heat.highest", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1])
    equal = builder.node("Equal", [planes, highest], "heat.equal")
    zero = builder.constant("heat.zero", np.array(0, np.float32))
    kept = builder.node("Where", [equal, planes, zero], "heat.peaks")
    last = builder.node("Transpose", [kept], "heat.last", perm=[0, 2, 3, 1])
    flat = builder.constant("heat.flat", np.array([0, height * width * classes], np.int64))
    return builder.node("Reshape", [last, flat], "peaks.all")


def _centernet_boxes(builder: GraphBuilder, sizes: Tensor, place: str, at: tuple[str, str]) -> None:
    """`boxes` (n, 100, 4) from distances (n, height, width, 4) of a position to its box's four sides."""
    _, height, width, _ = sizes.shape
    flat = builder.constant("sizes.flat", np.array([0, height * width, 4], np.int64))
    distances = builder.node("Reshape", [sizes.name, flat], "sizes.all")
    four = builder.constant("sizes.four", np.array([1, 1, 4], np.int64))
    index = builder.node("Tile", [_column(builder, place), four], "sizes.index")
    found = builder.node("GatherElements", [distances, index], "sizes.found", axis=1)
    sign = builder.constant("sizes.sign", np.array([-1, -1, 1, 1], np.float32))
    signed = builder.node("Mul", [found, sign], "sizes.signed")
    x, y = (_column(builder, _float(builder, each)) for each in at)
    points = builder.node("Concat", [x, y, x, y], "sizes.points", axis=-1)
    stride = builder.constant("sizes.stride", np.array(_CENTERNET_STRIDE, np.float32))
    builder.node("Add", [builder.node("Mul", [points, stride], "sizes.pixels"), signed], "boxes")


def _float(builder: GraphBuilder, name: str) -> str:
    return builder.node("Cast", [name], f"{name}.float", to=TensorProto.FLOAT)


def _column(builder: GraphBuilder, name: str) -> str:
    """(n, 100) as (n, 100, 1)."""
    last = builder.constant("last.axis", np.array([-1], np.int64))
    return builder.node("Unsqueeze", [name, last], f"{name}.column")

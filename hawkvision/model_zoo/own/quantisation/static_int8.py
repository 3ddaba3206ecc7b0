"""Static int8 quantisation of any graph by the serving contract, in ONNX's QDQ form, by ONNX Runtime's own quantiser.

Activations are uint8, weights int8 per output channel. Weights have 7 bits, so that pairs of products never saturate
on processors before VNNI: a certified stage gives the same answers on each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.own.graphs.conversion import IMAGE
from hawkvision.system.onnx_runtime import ort, quantiser

LEAST_OPSET: Final = 13
"""The first with one scale per channel."""
OPERATORS: Final = (
    "Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Relu",
    "Clip", "LeakyRelu", "Resize",
)  # fmt: skip
"""Operators that are quantised. The arithmetic that decodes boxes, and what forms probabilities, stay float."""


class _CalibrationImages:
    """Images one by one, as the quantiser reads them."""

    def __init__(self, images: Iterable[Pixels]) -> None:
        self._images: Iterator[Pixels] = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        """The next image as the model's input."""
        image = next(self._images, None)
        return None if image is None else {IMAGE: np.ascontiguousarray(image[np.newaxis])}


def int8_model(
    model: bytes, images: Iterable[Pixels], keep_float: Sequence[str], where: str, *, averaged: bool
) -> tuple[bytes, list[str]]:
    """The quantised model, and the nodes that were kept in float.

    Args:
        model: by the serving contract.
        images: inputs (height, width, 3) that the ranges of activations are measured on.
        keep_float: patterns of the names of nodes, as in `*box*`.
        where: names the model in errors.
        averaged: whether a range is the mean over images of each one's extremes, not their extremes: narrower, so that
            one unusual image does not widen it for all.

    Raises:
        ArtifactError: if a pattern fits no node, nothing is left to quantise, or the runtime cannot quantise the model.
    """
    tool = quantiser()
    with tempfile.TemporaryDirectory(prefix="hawkvision-") as folder:
        folded = Path(folder) / "folded.onnx"
        _fold(_modern(model, where), folded, where)
        graph = _named(folded)
        kept = kept_nodes(graph, keep_float, where)
        if not any(node.op_type in OPERATORS and node.name not in kept for node in graph.node):
            raise ArtifactError(
                f"{where}: nothing is left to quantise; the graph has no layer of {', '.join(OPERATORS)}"
            )
        made = Path(folder) / "int8.onnx"
        try:
            tool.quantize_static(
                str(folded),
                str(made),
                _CalibrationImages(images),
                quant_format=tool.QuantFormat.QDQ,
                op_types_to_quantize=list(OPERATORS),
                per_channel=True,
                reduce_range=True,
                activation_type=tool.QuantType.QUInt8,
                weight_type=tool.QuantType.QInt8,
                nodes_to_exclude=kept,
                extra_options={"CalibMovingAverage": averaged},
            )
        except Exception as error:  # the quantiser raises whatever its parts raise
            raise ArtifactError(
                f"{where}: ONNX Runtime cannot quantise the model: {str(error).splitlines()[0]}"
            ) from error
        done = onnx.load(str(made))
        del done.metadata_props[:]
        content: bytes = done.SerializeToString(deterministic=True)
        return content, kept


def kept_nodes(graph: onnx.GraphProto, patterns: Sequence[str], where: str) -> list[str]:
    """The nodes whose names, or whose outputs', fit a pattern.

    Raises:
        ArtifactError: if a pattern fits none.
    """
    found: list[str] = []
    for pattern in patterns:
        fitting = [
            node.name for node in graph.node if any(fnmatchcase(name, pattern) for name in (node.name, *node.output))
        ]
        if not fitting:
            some = ", ".join(node.name for node in graph.node if node.op_type in OPERATORS)
            raise ArtifactError(f"{where}: --keep-float {pattern!r} fits no node; there are {some[:600]}")
        found += fitting
    return list(dict.fromkeys(found))


def _modern(model: bytes, where: str) -> onnx.ModelProto:
    read = onnx.load_from_string(model)
    version = max(each.version for each in read.opset_import if each.domain in ("", "ai.onnx"))
    if version >= LEAST_OPSET:
        return read
    try:
        return onnx.version_converter.convert_version(read, LEAST_OPSET)
    except Exception as error:  # its errors derive from nothing narrower
        raise ArtifactError(f"{where}: opset {version} cannot be raised to {LEAST_OPSET}: {error}") from error


def _fold(model: onnx.ModelProto, path: Path, where: str) -> None:
    """Write the model with constants and batch normalisations folded, which a quantised layer cannot do later."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # see above
        raise ArtifactError(f"{where}: ONNX Runtime cannot load the model: {error}") from error


def _named(path: Path) -> onnx.GraphProto:
    """The graph in a file, with a name for every node, which the quantiser needs to leave one out."""
    model = onnx.load(str(path))
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")  # or the quantiser warns
    onnx.save(model, str(path))
    return model.graph

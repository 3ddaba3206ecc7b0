"""Reads the integer graph that a built model file carries in its metadata.

It uses ONNX Runtime, which every node has, not the onnx package.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Final

from hawkvision.core.errors import CompileError
from hawkvision.integer.ir import IntegerGraph, from_bytes
from hawkvision.system.graph_limits import one_run
from hawkvision.system.onnx_runtime import ort

GRAPH_KEY: Final = "hawkvision.fpga.graph"
"""Metadata key of the graph: `hawkvision.integer.ir.to_bytes` in base64."""


def graph_of(model: Path | bytes) -> IntegerGraph:
    """The integer graph of a model that `hawkvision.integer.onnx_writer` wrote, given as a file or its bytes.

    Raises:
        CompileError: if the model cannot be read, or carries no graph.
    """
    where = "model" if isinstance(model, bytes) else str(model)
    text = _metadata(model, where).get(GRAPH_KEY)
    if text is None:
        raise CompileError(f"{where}: carries no integer graph; expected a quantised variant such as tiny_w4")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CompileError(f"{where}: {GRAPH_KEY}: {error}") from None
    return from_bytes(content, where)


def _metadata(model: Path | bytes, where: str) -> dict[str, str]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # the model is read, not run
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        content = model if isinstance(model, bytes) else model.read_bytes()
        with one_run(where):
            session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        found: dict[str, str] = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # noqa: BLE001 - the runtime's own exceptions derive from nothing narrower
        raise CompileError(f"{where}: cannot read the model: {error}") from None
    return found

"""Reads an owner's ONNX file, and says what else a file is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from hawkvision.core.errors import ArtifactError

MAX_BYTES: Final = 2**31 - 1
"""Of a model with its weights: what one ONNX file can hold."""
_EXPORT: Final = "export it with `torch.onnx.export`"
_OTHERS: Final[Sequence[tuple[int, bytes, str]]] = (
    (0, b"PK\x03\x04", f"a zip archive, such as a checkpoint of PyTorch or Keras; {_EXPORT} or tf2onnx"),
    (0, b"\x80", f"a Python pickle, such as an old checkpoint of PyTorch; {_EXPORT}"),
    (0, b"\x89HDF", "HDF5, as Keras writes; convert it with tf2onnx"),
    (4, b"TFL3", "TensorFlow Lite; convert it with `python -m tf2onnx.convert --tflite FILE`"),
    (0, b"\x89PNG", "an image"),
    (0, b"\xff\xd8\xff", "an image"),
    (0, b"version https://git-lfs", "a pointer of Git LFS; fetch the file with `git lfs pull`"),
    (0, b"<", "a web page or XML"),
)
"""Files that are taken for models: place and bytes of their marks."""


def read_model(path: Path, fixed: Mapping[str, Sequence[float]], inner: Sequence[str] = ()) -> onnx.ModelProto:
    """An ONNX file with its external weights.

    Args:
        path: of the file.
        fixed: inputs that become constants of these values.
        inner: tensors that become outputs if they are none.

    Raises:
        ArtifactError: if it cannot be read, or is no valid model below 2 GB.
    """
    where = str(path)
    try:
        head = _head(path)
        model = onnx.load(where)
        _complete_shapes(model, where)
        onnx.checker.check_model(model)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot read the model: {error.strerror or error}") from None
    except (DecodeError, onnx.checker.ValidationError, ValueError) as error:
        raise ArtifactError(f"{path}: not a valid ONNX model: {_reason(head, error)}") from None
    if model.ByteSize() > MAX_BYTES:
        raise ArtifactError(f"{path}: {model.ByteSize()} bytes; expected at most {MAX_BYTES}")
    for name, values in fixed.items():
        _fix(model.graph, name, values, where)
    for name in inner:
        _expose(model, name, where)
    return _without_weights_as_inputs(model)


def dims(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    """The lengths of a tensor's axes; None for those that are not fixed."""
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None for size in sizes)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise ArtifactError(f"{path}: not a valid ONNX model: the file is empty")
    return head


def _reason(head: bytes, error: Exception) -> str:
    found = next((what for at, mark, what in _OTHERS if head[at:].startswith(mark)), None)
    if found is not None:
        return f"it is {found}"
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    cut_off = "; the file is cut off, or of another kind" if isinstance(error, DecodeError) else ""
    return f"{said}{cut_off}"


def _complete_shapes(model: onnx.ModelProto, where: str) -> None:
    """Infer the shapes of outputs that state none.

    Raises:
        ArtifactError: naming an input or output whose shape is not known.
    """
    bare = [value for value in model.graph.output if _shapeless(value)]
    if bare:
        inferred = {value.name: value for value in _inferred(model).output}
        for value in bare:
            value.CopyFrom(inferred[value.name])
    for value in (*model.graph.input, *model.graph.output):
        if _shapeless(value):
            raise ArtifactError(
                f"{where}: {value.name!r} states no shape; expected one, of which lengths may be free: export the "
                "model again, or state it with `onnx.tools.update_model_dims`"
            )


def _shapeless(value: onnx.ValueInfoProto) -> bool:
    return value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.HasField("shape")


def _inferred(model: onnx.ModelProto) -> onnx.GraphProto:
    try:
        return onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # noqa: BLE001 - its errors derive from nothing narrower; then nothing is known
        return model.graph


def _expose(model: onnx.ModelProto, name: str, where: str) -> None:
    """Make an inner tensor an output."""
    if any(value.name == name for value in model.graph.output):
        return
    if not any(name in node.output for node in model.graph.node):
        return  # the caller lists what there is
    known = next((value for value in _inferred(model).value_info if value.name == name), None)
    if known is None or _shapeless(known):
        raise ArtifactError(f"{where}: the shape of {name!r} inside the graph is not known; make it an output")
    model.graph.output.append(known)


def _fix(graph: onnx.GraphProto, name: str, values: Sequence[float], where: str) -> None:
    found = next((each for each in graph.input if each.name == name), None)
    if found is None:
        raise ArtifactError(f"{where}: no input {name!r} to set; there are {', '.join(i.name for i in graph.input)}")
    sizes = [1 if size is None else size for size in dims(found)]
    if len(values) != int(np.prod(sizes)):
        raise ArtifactError(f"{where}: input {name!r}: expected {int(np.prod(sizes))} values, got {len(values)}")
    kind: Any = helper.tensor_dtype_to_np_dtype(found.type.tensor_type.elem_type)
    graph.initializer.append(numpy_helper.from_array(np.array(values, kind).reshape(sizes), name))
    graph.input.remove(found)


def _without_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Old exporters list weights as inputs with defaults; runtimes then do not take them for constants."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in [each for each in model.graph.input if each.name in weights]:
        model.graph.input.remove(value)
    model.ir_version = max(model.ir_version, 8)
    return model

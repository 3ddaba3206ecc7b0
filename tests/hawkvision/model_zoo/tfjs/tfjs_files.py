"""TensorFlow.js graph models written for tests, and what TensorFlow computes with them, in NumPy."""

from __future__ import annotations

import base64
import io
import json
import math
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def integers(*values: int) -> dict[str, Any]:
    return {"list": {"i": [str(v) for v in values]}}


def text(value: str, old: bool = False) -> dict[str, Any]:
    return {"s": list(value.encode()) if old else base64.b64encode(value.encode()).decode()}


def texts(*values: str) -> dict[str, Any]:
    return {"list": {"s": [text(v)["s"] for v in values]}}


def conv_attributes(stride: int = 1, padding: str = "SAME", old: bool = False) -> dict[str, Any]:
    return {"strides": integers(1, stride, stride, 1), "dilations": integers(1, 1, 1, 1), "padding": text(padding, old)}


def node(name: str, op: str, *inputs: str, **attributes: Any) -> dict[str, Any]:
    return {"name": name, "op": op, "input": list(inputs), "attr": attributes}


def model_files(
    nodes: Sequence[Mapping[str, Any]], weights: Mapping[str, Array], half: bool = False, shards: int = 2
) -> dict[str, bytes]:
    """A `model.json` and its shards by file name; floats are stored in 16 bits if `half`."""
    entries, data = [], b""
    for name, array in weights.items():
        stored = np.float16 if half and array.dtype == np.float32 else array.dtype
        entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
        if stored != array.dtype:
            entry["quantization"] = {"dtype": "float16"}
        entries.append(entry)
        data += array.astype(stored).tobytes()
    size = max(1, math.ceil(len(data) / shards))
    files = {f"group1-shard{i + 1}of{shards}": data[i * size : (i + 1) * size] for i in range(shards)}
    constants = [{"name": name, "op": "Const", "attr": {}} for name in weights]
    model = {
        "modelTopology": {"node": [*constants, *nodes]},
        "weightsManifest": [{"paths": list(files), "weights": entries}],
    }
    return {"model.json": json.dumps(model).encode(), **files}


def package(files: Mapping[str, bytes], folder: str = "package/models") -> bytes:
    """An archive as `npm pack` writes it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def reference(nodes: Sequence[Mapping[str, Any]], values: Mapping[str, Array]) -> dict[str, Array]:
    """All values of a graph, in TensorFlow's order of axes, from its weights and inputs."""
    known = {name: np.asarray(value, np.float64 if value.dtype.kind == "f" else None) for name, value in values.items()}
    for each in nodes:
        known[each["name"]] = _result(each, [known[name] for name in each["input"]])
    return known


def _result(node: Mapping[str, Any], x: list[Array]) -> Array:
    match node["op"]:
        case "Conv2D" | "DepthwiseConv2dNative" | "_FusedConv2D" | "FusedDepthwiseConv2dNative":
            return _fused(node, _convolved(node, x[0], x[1]), x[2:])
        case "FusedBatchNorm":
            return np.asarray((x[0] - x[3]) / np.sqrt(x[4] + node["attr"]["epsilon"]["f"]) * x[1] + x[2])
        case "BiasAdd" | "Add" | "AddV2" | "AddN":
            return x[0] + x[1]
        case "Mul":
            return x[0] * x[1]
        case "Relu" | "Relu6" | "Sigmoid":
            return _activated(node["op"], x[0])
        case "Mean":
            return np.asarray(x[0].mean(axis=(1, 2), keepdims=True))
        case "ResizeBilinear":
            return _resized(x[0], *x[1].tolist())
        case "ConcatV2":
            return np.concatenate(x[:-1], axis=int(x[-1]))
        case "Reshape":
            return x[0].reshape(x[1].tolist())
        case "Squeeze":
            return x[0].squeeze(tuple(int(i) for i in node["attr"]["squeeze_dims"]["list"]["i"]))
        case "Shape":
            return np.array(x[0].shape)
        case "StridedSlice":
            return np.asarray(x[0][int(x[1][0])])
        case "Pack":
            return np.stack(x)
        case "Identity":
            return x[0]
    raise AssertionError(node["op"])


def _activated(op: str, x: Array) -> Array:
    if op == "Sigmoid":
        return np.asarray(1 / (1 + np.exp(-x)))
    return np.asarray(np.clip(x, 0, 6 if op == "Relu6" else None))


def _fused(node: Mapping[str, Any], made: Array, rest: list[Array]) -> Array:
    for raw in node["attr"].get("fused_ops", {"list": {"s": []}})["list"]["s"]:
        fused = base64.b64decode(raw).decode()
        made = made + rest[0] if fused == "BiasAdd" else _activated(fused, made)
    return made


def _convolved(node: Mapping[str, Any], image: Array, kernel: Array) -> Array:
    stride, size = int(node["attr"]["strides"]["list"]["i"][1]), kernel.shape[0]
    raw = node["attr"]["padding"]["s"]
    if (bytes(raw) if isinstance(raw, list) else base64.b64decode(raw)) == b"SAME":
        totals = [max((math.ceil(n / stride) - 1) * stride + size - n, 0) for n in image.shape[1:3]]
        image = np.pad(image, ((0, 0), *((t // 2, t - t // 2) for t in totals), (0, 0)))
    height, width = ((n - size) // stride + 1 for n in image.shape[1:3])
    made: Array = np.zeros(())
    for i, j in np.ndindex(size, size):
        taken = image[:, i : i + height * stride : stride, j : j + width * stride : stride]
        taken = taken[:, :height, :width]
        made = made + (taken * kernel[i, j, :, 0] if "Depthwise" in node["op"] else taken @ kernel[i, j])
    return made


def _resized(image: Array, height: int, width: int) -> Array:
    for axis, target in ((1, height), (2, width)):
        at = np.arange(target) * (image.shape[axis] / target)
        low = np.floor(at).astype(int)
        high = np.minimum(low + 1, image.shape[axis] - 1)
        share = (at - low).reshape((-1, 1, 1) if axis == 1 else (-1, 1))
        image = image.take(low, axis) * (1 - share) + image.take(high, axis) * share
    return image

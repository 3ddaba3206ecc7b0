"""What the bench of GPUs takes to a machine without HawkVision: operators, weights, images, and the CPU's logits."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
from numpy.typing import NDArray

from hawkvision.core.types import LOGITS
from hawkvision.imaging.preprocessing import load_input
from hawkvision.inference.backends.execution_providers import processor_of
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import InputSpec, Manifest, cache_dir, load_labels, load_manifest, models_dir
from hawkvision.models.sample_images import photographs

LARGEST_PACK = 60_000_000


def pack(path: Path, models: Sequence[str], images: Mapping[str, Path], count: int, operators: Collection[str]) -> int:
    """Write the file for the other machine; its size in bytes.

    Args:
        path: of the file.
        models: as TASK:VARIANT.
        images: data sets, by task.
        count: images per model.
        operators: that the other machine knows.

    Raises:
        SystemExit: if it would be larger than `LARGEST_PACK`, or a model has another operator.
    """
    arrays: dict[str, NDArray[Any]] = {}
    graphs: dict[str, Any] = {}
    for model in models:
        task, _, name = model.partition(":")
        manifest = load_manifest(task, models_dir())
        graphs[model] = _packed(manifest, name, images.get(task), count, arrays)
        unknown = sorted({node["op"] for node in graphs[model]["nodes"]} - set(operators))
        if unknown:
            raise SystemExit(f"{model}: this bench does not know the operators {', '.join(unknown)}")
    facts = {"models": graphs, "cpu": processor_of(), "packed": time.strftime("%Y-%m-%d")}
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # of its second parameter's name
    size = path.stat().st_size
    if size > LARGEST_PACK:
        path.unlink()
        raise SystemExit(f"the pack has {size} bytes; expected {LARGEST_PACK} at most: take fewer models or --count")
    return size


def _packed(manifest: Manifest, name: str, images: Path | None, count: int, arrays: dict[str, NDArray[Any]]) -> Any:
    """A model's operators; its weights, images and logits go into `arrays`."""
    variant, model = manifest.variant(name), f"{manifest.task}:{name}"
    data = load_variant(cache_dir(), manifest.task, variant)
    pixels = _pixels(manifest, variant.input, images, count)
    backend = OnnxRuntimeBackend(data)
    logits = np.concatenate([backend.infer(pixels[i : i + 8])[LOGITS] for i in range(0, len(pixels), 8)])
    backend.close()
    arrays |= {f"{model}/images": pixels, f"{model}/logits": logits}
    graph = onnx.load_model_from_string(data).graph
    for tensor in graph.initializer:
        arrays[f"{model}/weights/{tensor.name}"] = onnx.numpy_helper.to_array(tensor)
    nodes = [
        {
            "op": node.op_type,
            "inputs": list(node.input),
            "output": node.output[0],
            "attributes": {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
        }
        for node in graph.node
    ]
    return {"nodes": nodes, "input": graph.input[0].name, "output": graph.output[0].name, "sha256": variant.sha256}


def _pixels(manifest: Manifest, spec: InputSpec, images: Path | None, count: int) -> NDArray[np.uint8]:
    """Inputs (n, height, width, 3): of the first images of a data set, else of random parts of sample photographs."""
    draw = np.random.default_rng(0)
    if images is not None:
        found = read_images(images, load_labels(manifest, models_dir()))
        chosen = np.sort(draw.choice(len(found), min(count, len(found)), replace=False))
        bodies = [found.bodies[int(index)] for index in chosen]
    else:
        bodies = []
        for index in range(count):
            whole = cv2.imread(str(photographs()[index % len(photographs())]))
            assert whole is not None
            side = int(draw.integers(100, min(whole.shape[:2])))
            top, left = (int(draw.integers(0, length - side + 1)) for length in whole.shape[:2])
            bodies.append(cv2.imencode(".png", whole[top : top + side, left : left + side])[1].tobytes())
    return np.stack([load_input(body, spec, max_pixels=10**8)[0] for body in bodies])

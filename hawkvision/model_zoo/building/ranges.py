"""Activation ranges: measured once on images, committed beside the manifest, read by every build of an int8 graph.

A range is the mean over images of each image's minimum and maximum, so that one unusual image does not widen it for
all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper

from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.building.quantize import quantised_tensors
from hawkvision.models.manifest import Sha256, Variant
from hawkvision.system.files import write_atomic
from hawkvision.system.onnx_runtime import ort


class Ranges(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `models/<task>/ranges/<architecture>.json`: tensor → [low, high], and the source of the ranges."""

    format: int
    architecture: str
    weights_sha256: Sha256
    data_sha256: Sha256
    images: int
    seed: int
    ranges: dict[str, tuple[float, float]]


def ranges_path(models: Path, task: str, architecture: str) -> Path:
    """The file with an architecture's ranges."""
    return models / task / "ranges" / f"{architecture}.json"


def load_ranges(models: Path, task: str, variant: Variant) -> Ranges:
    """The committed ranges of a variant's architecture.

    Raises:
        ArtifactError: if they are missing, malformed, or were measured with other weights.
    """
    path = ranges_path(models, task, variant.architecture)
    try:
        ranges = msgspec.json.decode(path.read_bytes(), type=Ranges)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: activation ranges are missing; {variant.name!r} cannot be quantised") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    if ranges.format != 1 or ranges.weights_sha256 != variant.source.sha256:
        raise ArtifactError(f"{path}: measured with weights {ranges.weights_sha256}, expected {variant.source.sha256}")
    return ranges


def save_ranges(models: Path, task: str, ranges: Ranges) -> None:
    """Write ranges to their file, one tensor a line."""
    text = msgspec.json.format(msgspec.json.encode(ranges), indent=1)
    write_atomic(ranges_path(models, task, ranges.architecture), text + b"\n")


def measure_ranges(
    model: onnx.ModelProto, images: Iterable[Pixels], float_from: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """The ranges of a float graph's activations over images (height, width, 3) of its input size.

    `float_from` names tensors from which on the quantised graph stays float (`quantise_model`).

    Raises:
        ArtifactError: if there are no images.
    """
    names = list(quantised_tensors(model, float_from))
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = ort.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    totals = np.zeros((len(names), 2))
    count = 0
    for image in images:
        for i, values in enumerate(session.run(names, {"image": image[None]})):
            totals[i] += values.min(), values.max()
        count += 1
    if not count:
        raise ArtifactError("no images to measure activation ranges on")
    # Six significant digits keep the file readable and are 400 times finer than a quantisation step.
    means = [[float(f"{value:.6g}") for value in row] for row in totals / count]
    return {name: (low, high) for name, (low, high) in zip(names, means, strict=True)}

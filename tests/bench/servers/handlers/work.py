"""What every server of the comparison does to one image: decode, crop, scale, infer, pick the class.

This file alone is imported by the peers, inside environments of their own, so it needs nothing of HawkVision: only
NumPy, OpenCV, simplejpeg, Pillow and ONNX Runtime, which the harness installs there in the versions that it runs with.
Images are prepared in one of two ways, its handlers:

- `same`: the very steps of the edge node for RGB JPEGs (reduced decoding of large ones included), so that what differs
  between servers is the serving. No user of those servers would have it without writing it.
- `documented`: with Pillow, as the servers' own examples do (the table in `loadgen/README.md` names them), so that
  what differs is all that a user gets who follows the documentation.

Both feed the same ONNX file with the same options of ONNX Runtime, and in a loop by themselves are the ceilings.

The harness tells a server what to do in its environment, because frameworks that import a file by themselves pass no
arguments on: `HAWKVISION_PEER_{PORT,HANDLER,MODEL,INPUT}`.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import cv2
import numpy as np
import simplejpeg
from PIL import Image

# As hawkvision.system.library_environment, which is not installed here.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

PREFIX: Final = "HAWKVISION_PEER_"
OVERSAMPLING: Final = 2
"""A JPEG is decoded at 1/2, 1/4 or 1/8 where that leaves at least twice the model's input, as on the edge node."""
INTERPOLATION: Final = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC, "area": cv2.INTER_AREA}
RESAMPLING: Final = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
}
SCALES: Final = (8, 4, 2)
KEPT: Final = {-1: 1_000_000_000, -3: 32 << 20}
"""For mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (its most)."""

Classify: TypeAlias = Callable[[bytes], int]
"""From a JPEG to the index of its class."""
Prepare: TypeAlias = Callable[[bytes], Any]
"""From a JPEG to the model's input, uint8 RGB of (height, width, 3)."""


def port() -> int:
    """Where the harness wants this server to listen, on loopback."""
    return int(os.environ[f"{PREFIX}PORT"])


def classifier() -> Classify:
    """The work that the harness asks of this server."""
    return load(os.environ[f"{PREFIX}MODEL"], HANDLERS[os.environ[f"{PREFIX}HANDLER"]](os.environ[f"{PREFIX}INPUT"]))


def load(model: str, prepare: Prepare) -> Classify:
    """The whole loop on an ONNX file of one uint8 NHWC input."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    session: Any = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    given, wanted = session.get_inputs()[0].name, session.get_outputs()[0].name

    def classify(jpeg: bytes) -> int:
        return int(session.run([wanted], {given: prepare(jpeg)[None]})[0].argmax())

    return classify


def same(spec: str) -> Prepare:
    """The edge node's preparation; `spec` is JSON: height, width, interpolation, crop_fraction."""
    cv2.setNumThreads(1)
    fields = json.loads(spec)
    height, width, fraction = int(fields["height"]), int(fields["width"]), float(fields["crop_fraction"])
    interpolation = INTERPOLATION[fields["interpolation"]]
    least = math.ceil(OVERSAMPLING * max(height, width) / fraction)

    def prepare(jpeg: bytes) -> Any:
        declared_height, declared_width, _, _ = simplejpeg.decode_jpeg_header(jpeg)
        shorter = min(declared_height, declared_width)
        factor = next((f for f in SCALES if math.ceil(shorter / f) >= least), 1)
        pixels = simplejpeg.decode_jpeg(
            jpeg,
            "RGB",
            min_height=math.ceil(declared_height / factor),
            min_width=math.ceil(declared_width / factor),
            min_factor=float(factor),
        )
        return _crop(pixels, height, width, fraction, interpolation)

    return prepare


def documented(spec: str) -> Prepare:
    """The examples' preparation, with the edge node's crop fraction, size and interpolation; `spec` as for `same`.

    As they do: the JPEG is decoded in full, converted to RGB, resized until it covers the input over the crop fraction
    (torchvision's `Resize` and `CenterCrop`, which call Pillow for this) and cut out in the middle. They then scale to
    floats, normalise and transpose; this model takes bytes as they are, so the peers are spared those steps.
    """
    _keep_memory()
    fields = json.loads(spec)
    height, width, fraction = int(fields["height"]), int(fields["width"]), float(fields["crop_fraction"])
    resampling = RESAMPLING[fields["interpolation"]]

    def prepare(jpeg: bytes) -> Any:
        image = Image.open(io.BytesIO(jpeg)).convert("RGB")
        scale = min(image.width / width, image.height / height) * fraction
        covering = max(width, round(image.width / scale)), max(height, round(image.height / scale))
        resized = image.resize(covering, resampling)
        left, top = (resized.width - width) // 2, (resized.height - height) // 2
        return np.asarray(resized.crop((left, top, left + width, top + height)))

    return prepare


def _keep_memory() -> None:
    """Let glibc keep what this process frees.

    It otherwise may return Pillow's blocks, of up to 16 MB, after every image and get them anew: 2368 page faults
    for each of 1280x960 in a fresh process, fewer or none in another. The examples leave that to chance; here all
    servers and the bare loop are at their best.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in KEPT.items():
            mallopt(parameter, value)


HANDLERS: Final[dict[str, Callable[[str], Prepare]]] = {"same": same, "documented": documented}


def _crop(pixels: Any, height: int, width: int, fraction: float, interpolation: int) -> Any:
    """The centred part of the input's aspect, scaled; averaging where it shrinks by more than two."""
    scale = min(pixels.shape[0] / height, pixels.shape[1] / width) * fraction
    crop_height = min(pixels.shape[0], max(1, round(height * scale)))
    crop_width = min(pixels.shape[1], max(1, round(width * scale)))
    top, left = (pixels.shape[0] - crop_height) // 2, (pixels.shape[1] - crop_width) // 2
    crop = pixels[top : top + crop_height, left : left + crop_width]
    if crop.shape[:2] == (height, width):
        return np.ascontiguousarray(crop)
    return cv2.resize(crop, (width, height), interpolation=cv2.INTER_AREA if scale > 2 else interpolation)

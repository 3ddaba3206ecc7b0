"""Checks that our kernels give the same outputs as ONNX Runtime for a model on this machine.

Certificates are measured with ONNX Runtime, so this is checked before a model serves with our kernels: once per model,
kernel, plan, execution, version of ONNX Runtime and processor. The result is stored in the cache.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.core.errors import ArtifactError, ConfigError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.interface import Backend
from hawkvision.native.library import cpuinfo, digest, library
from hawkvision.system.build_cache import build_cache_dir
from hawkvision.system.files import write_atomic

log = logging.getLogger("hawkvision.inference")

KEPT: Final = 1024
"""Results kept in the cache, one byte each."""


def agrees(model: Path | bytes, backend: Backend, way: str) -> bool:
    """Whether `backend` gives every output of the test images as ONNX Runtime does, bit for bit.

    A match is stored in the cache for this `way` of running the model (`Int8Backend.way`).

    Raises:
        BackendError: if ONNX Runtime cannot run the model, or there is no kernel.
    """
    data = model if isinstance(model, bytes) else model.read_bytes()
    model_sha256 = hashlib.sha256(data).hexdigest()
    facts = (digest(library()), _planner_digest(), way, _runtime_version(), cpuinfo("model name"), model_sha256)
    name = f"{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:32]}.same"
    with suppress(OSError, ConfigError):  # the folder of the cache cannot be read, or does not exist
        if (build_cache_dir() / name).is_file():
            return True
    from hawkvision.inference.backends.onnxruntime_backend import (
        OnnxRuntimeBackend,  # memory that a node may not have
    )

    reference = OnnxRuntimeBackend(data)
    try:
        same = all(_equal(reference.infer(p), backend.infer(p)) for p in _images(reference.input_shape))
    finally:
        reference.close()
    if same:
        try:
            write_atomic(build_cache_dir() / name, b"\n")
            _tidy(build_cache_dir())
        except (ArtifactError, ConfigError) as error:
            log.info("int8: checked again at each start, because the result cannot be stored: %s", error.message)
    return same


def _equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _tidy(folder: Path) -> None:
    """Remove all but the newest results."""
    with suppress(OSError):
        for result in sorted(folder.glob("*.same"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            result.unlink(missing_ok=True)


def _images(shape: tuple[int, int, int]) -> Iterator[Pixels]:
    """Noise, fine and coarse, a ramp, and nothing: (1, height, width, 3) each."""
    draw = np.random.default_rng(0)
    height, width, planes = shape
    for size in (1, 4, 32):
        rows, columns = -(-height // size), -(-width // size)
        coarse = draw.integers(0, 256, (rows, columns, planes), dtype=np.uint8)
        yield np.ascontiguousarray(coarse.repeat(size, 0).repeat(size, 1)[None, :height, :width])
    ramp = np.linspace(0, 255, height * width * planes).astype(np.uint8)
    yield ramp.reshape(1, height, width, planes)
    yield np.zeros((1, height, width, planes), np.uint8)


def _planner_digest() -> str:
    """A hash of this folder's code, because versions with the same kernel may plan networks differently."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _runtime_version() -> str:
    """ONNX Runtime's version; the runtime is not loaded if its package has the usual name."""
    try:
        return metadata.version("onnxruntime")
    except metadata.PackageNotFoundError:
        from hawkvision.system.onnx_runtime import ort

        return str(ort.__version__)

"""Computes an integer graph fast on the CPU, with the same bits as `hawkvision.integer.reference`.

`integer_kernel.cpp` is compiled once per machine by the system's C++ compiler. Without a compiler, NumPy computes the
same in single precision, which is exact below 2^24, and a warning says so. Each kernel is checked against the reference
when it is created.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, CompileError
from hawkvision.core.types import Pixels
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import Conv, ConvStage
from hawkvision.system.native_build import LibraryRecipe, open_library

log = logging.getLogger("hawkvision.fpga")

SOURCE: Final = Path(__file__).with_name("integer_kernel.cpp")
FLAGS: Final = ("-std=c++17", "-O3", "-fno-exceptions", "-fno-rtti", "-fPIC", "-shared", "-Wno-psabi")
EXACT_BELOW: Final = 1 << 24
"""Integers below it are exact in single precision."""

KernelKind: TypeAlias = Literal["compiled", "numpy"]


class IntegerKernel:
    """Computes a graph's logits. May be called from several threads at once.

    Args:
        graph: the network.
        kind: the kernel to use; None takes compiled code if possible, else NumPy.

    Raises:
        CompileError: if `kind` is "compiled" and the code cannot be compiled. BackendError: if the kernel's logits
        differ from the reference's, or another user may have written the cached code.
    """

    def __init__(self, graph: IntegerGraph, kind: KernelKind | None = None) -> None:
        self._graph = graph
        self.kind: KernelKind = "numpy" if kind == "numpy" else "compiled"
        self._run: Callable[[Pixels], NDArray[np.int32]]
        if kind != "numpy":
            try:
                self._run = _CompiledKernel(graph, _library())
            except CompileError as error:
                if kind == "compiled":
                    raise
                log.warning("fpga-ref: %s; NumPy takes its place: the same logits, many times slower", error)
                self.kind = "numpy"
        if self.kind == "numpy":
            self._run = _NumpyKernel(graph)
        self._check()
        log.info("fpga-ref: %s kernel for %s", self.kind, graph.name)

    def logits(self, images: Pixels) -> NDArray[np.int32]:
        """Logits (n, classes) of images (n, height, width, planes), in RGB or in the planes of the input stream.

        Raises:
            BackendError: if shapes or types do not fit.
        """
        at = self._graph.input
        fits = images.shape[1:] in ((at.height, at.width, at.channels), (at.height, at.width, 3))
        if images.ndim != 4 or not fits or images.dtype != np.uint8:
            raise BackendError(f"expected images of {at}, got {images.dtype} of shape {images.shape}")
        return self._run(np.ascontiguousarray(images))

    def _check(self) -> None:
        at = self._graph.input
        images = np.random.default_rng(0).integers(0, 256, (2, at.height, at.width, at.channels), dtype=np.uint8)
        if not np.array_equal(self.logits(images), reference.logits(self._graph, images)):
            raise BackendError(f"{self._graph.name}: the {self.kind} kernel gives other logits than the reference")


class _KernelLayer(ctypes.Structure):
    """`Layer` in `integer_kernel.cpp`."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kernel", "pad", "height", "width", "channels")),
        *((name, ctypes.c_int32) for name in ("made_height", "made_width", "made_channels", "pool")),
        *((name, ctypes.c_int32) for name in ("pre_shift", "shift", "limit")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias", "multiplier")),
    ]


class _KernelNetwork(ctypes.Structure):
    """`Network` in `integer_kernel.cpp`."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("layers", ctypes.POINTER(_KernelLayer)),
    ]


class _CompiledKernel:
    """A graph laid out for `integer_kernel.cpp`."""

    def __init__(self, graph: IntegerGraph, library: ctypes.CDLL) -> None:
        self._call = library.hv_logits
        self._lanes = int(library.hv_lanes())
        self._kept: list[NDArray[Any]] = []  # what the pointers point to
        layers = [self._layer(stage) for stage in graph.stages]
        self._layers = (_KernelLayer * len(layers))(*layers)
        self._network = _KernelNetwork(len(layers), ctypes.cast(self._layers, ctypes.POINTER(_KernelLayer)))
        self._reference = ctypes.byref(self._network)
        self._classes = graph.classes

    def __call__(self, images: Pixels) -> NDArray[np.int32]:
        logits = np.empty((len(images), self._classes), np.int32)
        if self._call(self._reference, images.ctypes.data, images.shape[3], len(images), logits.ctypes.data):
            raise BackendError("fpga-ref: out of memory")
        return logits

    def _layer(self, stage: ConvStage) -> _KernelLayer:
        conv, requantise = stage.conv, stage.requantise
        multiplier = np.ones(conv.channels, np.int32) if requantise is None else requantise.multiplier
        return _KernelLayer(
            conv.kernel,
            conv.pad,
            stage.taken.height,
            stage.taken.width,
            stage.taken.channels,
            stage.convolved.height,
            stage.convolved.width,
            conv.channels,
            stage.pool is not None,
            0 if requantise is None else requantise.pre_shift,
            1 if requantise is None else requantise.shift,
            0 if requantise is None else (1 << requantise.bits) - 1,
            self._keep(_weight_vectors(conv, self._lanes)),
            self._keep(_whole_vectors(conv.bias, self._lanes)),
            self._keep(_whole_vectors(multiplier, self._lanes)),
        )

    def _keep(self, values: NDArray[Any]) -> int:
        self._kept.append(values)
        return values.ctypes.data


def _whole_vectors(values: NDArray[np.int32], lanes: int) -> NDArray[np.int32]:
    return np.pad(values, (0, -len(values) % lanes))


def _weight_vectors(conv: Conv, lanes: int) -> NDArray[np.int8]:
    """Weights as (vectors, kernel rows, groups, lanes, 4), as drawn at the top of `integer_kernel.cpp`."""
    rows = conv.weights.reshape(conv.channels, conv.kernel, -1)
    rows = np.pad(rows, ((0, -conv.channels % lanes), (0, 0), (0, -rows.shape[2] % 4)))
    grouped = rows.reshape(-1, lanes, conv.kernel, rows.shape[2] // 4, 4)
    return np.ascontiguousarray(grouped.transpose(0, 2, 3, 1, 4))


def _library() -> ctypes.CDLL:
    """The compiled kernel for this processor, from the cache or built now.

    Raises:
        CompileError: if there is no working compiler, or no place for the result.
        BackendError: if another user may have written the cached code.
    """
    recipe = LibraryRecipe(
        name="kernel",
        language="C++",
        source=SOURCE,
        included=(),
        flags=(*FLAGS, "-march=native" if platform.machine() in ("x86_64", "i686") else "-mcpu=native"),
        machine=_processor(),
    )
    library = open_library(recipe)
    library.hv_logits.restype = ctypes.c_int32
    library.hv_logits.argtypes = [
        ctypes.POINTER(_KernelNetwork),
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


@functools.cache
def _processor() -> str:
    """The processor that native code is for; code must not be loaded on another one."""
    kinds = ("flags", "Features", "model name", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    described = sorted({line for line in lines if line.split("\t")[0].strip() in kinds})
    return "\n".join([platform.machine(), *described])


class _NumpyKernel:
    """The reference with one matrix product per convolution, in the shortest exact floating point."""

    def __init__(self, graph: IntegerGraph) -> None:
        self._graph = graph
        self._factors = [_factor(stage) for stage in graph.stages]

    def __call__(self, images: Pixels) -> NDArray[np.int32]:
        graph = self._graph
        maps: NDArray[Any] = images if images.shape[3] == graph.input.channels else reference.planes(graph, images)
        for stage, factor in zip(graph.stages, self._factors, strict=True):
            sums = _product(stage.conv, factor, maps)
            if stage.requantise is None:
                return sums.reshape(len(sums), -1)
            # The maximum is taken first, as in the compiled kernel: requantisation never decreases.
            if stage.pool is not None:
                sums = _pooled(sums)
            maps = reference.requantise(stage.requantise, sums.astype(np.int64))
        raise AssertionError("a graph ends with a stage that is not requantised")


def _factor(stage: ConvStage) -> NDArray[Any]:
    """Weights (kernel · kernel · channels, outputs)."""
    low, high = stage.conv.accumulator_range(stage.taken.bits)
    exact = np.float32 if max(-low, high) < EXACT_BELOW else np.float64
    return np.ascontiguousarray(stage.conv.weights.reshape(stage.conv.channels, -1).T.astype(exact))


def _product(conv: Conv, factor: NDArray[Any], maps: NDArray[Any]) -> NDArray[np.int32]:
    pad, kernel = conv.pad, conv.kernel
    padded = np.pad(maps.astype(factor.dtype), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(1, 2))
    n, height, width = windows.shape[:3]
    columns = windows.transpose(0, 1, 2, 4, 5, 3).reshape(n * height * width, -1)
    sums: NDArray[np.int32] = (columns @ factor).astype(np.int32) + conv.bias
    return sums.reshape(n, height, width, conv.channels)


def _pooled(sums: NDArray[np.int32]) -> NDArray[np.int32]:
    height, width = sums.shape[1] // 2 * 2, sums.shape[2] // 2 * 2
    even = sums[:, :height, :width]
    wide = np.maximum(even[:, ::2], even[:, 1::2])
    pooled: NDArray[np.int32] = np.maximum(wide[:, :, ::2], wide[:, :, 1::2])
    return pooled

"""The integer network as something that can serve: the bits of `hawkvision.integer.reference`, hundreds of times as
fast.

`integer_kernel.cpp` is compiled once for this machine's processor, by whatever C++ compiler the system has. Where there
is none, NumPy does the same in single precision, whose products and sums are exact below 2^24; a warning says so, and
`how` and the log say which of the two it is. Either is held against `hawkvision.integer.reference` when it is made.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fpga.simulation.build_cache import mark_used, tidy
from hawkvision.compiled import Recipe, open_library
from hawkvision.errors import BackendError, CompileError
from hawkvision.integer import reference
from hawkvision.integer.ir import Conv, ConvStage, IntegerGraph
from hawkvision.integer.reference import Mask
from hawkvision.manifest import cache_dir
from hawkvision.types import Pixels

log = logging.getLogger("hawkvision.fpga")

SOURCE: Final = Path(__file__).with_name("integer_kernel.cpp")
FLAGS: Final = ("-std=c++17", "-O3", "-fno-exceptions", "-fno-rtti", "-fPIC", "-shared", "-Wno-psabi")
EXACT_BELOW: Final = 1 << 24
"""Integers that single precision holds."""

KernelKind: TypeAlias = Literal["compiled", "numpy"]


class IntegerKernel:
    """A graph's logits, by compiled code or NumPy. May be called from several threads at once.

    Args:
        graph: the network.
        folder: where compiled code is kept; None takes `fpga` in the cache folder.
        how: which one to use; None takes compiled code if it can be had.
        native: whether code may use all that this very processor can do; else any of its kind runs it, more slowly.

    Raises: CompileError: if `how` is "compiled" and it cannot be had. BackendError: if it gives other logits than
        `hawkvision.integer.reference`: a defect of the compiler, or ours. Or if another user may have written the
        compiled code that is kept.
    """

    def __init__(
        self, graph: IntegerGraph, folder: Path | None = None, kind: KernelKind | None = None, *, native: bool = True
    ) -> None:
        self._graph = graph
        self._run: _CompiledKernel | _NumpyKernel
        self.kind: KernelKind = "numpy"
        if kind == "numpy":
            self._run = _NumpyKernel(graph)
        else:
            try:
                self._run, self.kind = (
                    _CompiledKernel(graph, _library(folder or cache_dir() / "fpga", native)),
                    "compiled",
                )
            except CompileError as error:
                if kind == "compiled":
                    raise
                log.warning("fpga-ref: %s; NumPy takes its place: the same logits, many times slower", error)
                self._run = _NumpyKernel(graph)
        self._check()
        log.info("fpga-ref: %s kernel for %s", self.kind, graph.name)

    def logits(self, images: Pixels, mask: Mask | None = None) -> NDArray[np.int32]:
        """Logits (n, classes) of images (n, height, width, planes), RGB or what the input stream carries.

        Where `mask` (n, height, width) says that a pixel did not arrive, `hawkvision.integer.reference.filled` says
        what is there.

        Raises:
            BackendError: if the arrays are others.
        """
        at = self._graph.input
        fits = images.shape[1:] in ((at.height, at.width, at.channels), (at.height, at.width, 3))
        if images.ndim != 4 or not fits or images.dtype != np.uint8:
            raise BackendError(f"expected images of {at}, got {images.dtype} of shape {images.shape}")
        if mask is not None and (mask.shape != images.shape[:3] or mask.dtype != np.bool_):
            raise BackendError(f"mask: expected bool of {images.shape[:3]}, got {mask.dtype} of {mask.shape}")
        return self._run(np.ascontiguousarray(images), None if mask is None else np.ascontiguousarray(mask))

    def _check(self) -> None:
        graph, draw = self._graph, np.random.default_rng(0)
        size = (2, graph.input.height, graph.input.width)
        images = draw.integers(0, 256, (*size, graph.input.channels), dtype=np.uint8)
        mask = draw.random(size) < 0.9
        expected = reference.logits(graph, reference.filled(graph, images, mask))
        if not np.array_equal(self.logits(images, mask), expected):
            raise BackendError(f"{graph.name}: the {self.kind} kernel gives other logits than the reference")


class _KernelLayer(ctypes.Structure):
    """As `Layer` in `integer_kernel.cpp`."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                "kernel",
                "pad",
                "height",
                "width",
                "channels",
                "made_height",
                "made_width",
                "made_channels",
                "pool",
                "pre_shift",
                "shift",
                "limit",
            )
        ),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("multiplier", ctypes.c_void_p),
    ]


class _KernelNetwork(ctypes.Structure):
    """As `Network` in `integer_kernel.cpp`."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("layers", ctypes.POINTER(_KernelLayer)),
        ("fill", ctypes.c_uint8 * 4),
    ]


class _CompiledKernel:
    """A graph laid out for `integer_kernel.cpp`."""

    def __init__(self, graph: IntegerGraph, library: ctypes.CDLL) -> None:
        self._call = library.hv_logits
        self._lanes = int(library.hv_lanes())
        self._kept: list[NDArray[Any]] = []  # what the pointers point to
        layers = [self._layer(stage) for stage in graph.stages]
        self._layers = (_KernelLayer * len(layers))(*layers)
        fill = (ctypes.c_uint8 * 4)(*graph.fill)
        self._network = _KernelNetwork(len(layers), ctypes.cast(self._layers, ctypes.POINTER(_KernelLayer)), fill)
        self._reference = ctypes.byref(self._network)
        self._classes = graph.classes

    def __call__(self, images: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        logits = np.empty((len(images), self._classes), np.int32)
        if self._call(
            self._reference,
            images.ctypes.data,
            images.shape[3],
            None if mask is None else mask.ctypes.data,
            len(images),
            logits.ctypes.data,
        ):
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
            self._keep(_laid_out(conv, self._lanes)),
            self._keep(_whole_vectors(conv.bias, self._lanes)),
            self._keep(_whole_vectors(multiplier, self._lanes)),
        )

    def _keep(self, values: NDArray[Any]) -> int:
        self._kept.append(values)
        return values.ctypes.data


def _whole_vectors(values: NDArray[np.int32], lanes: int) -> NDArray[np.int32]:
    return np.pad(values, (0, -len(values) % lanes))


def _laid_out(conv: Conv, lanes: int) -> NDArray[np.int8]:
    """(vectors, kernel rows, groups, lanes, 4), as drawn at the top of `integer_kernel.cpp`."""
    rows = conv.weights.reshape(conv.channels, conv.kernel, -1)
    rows = np.pad(rows, ((0, -conv.channels % lanes), (0, 0), (0, -rows.shape[2] % 4)))
    grouped = rows.reshape(-1, lanes, conv.kernel, rows.shape[2] // 4, 4)
    return np.ascontiguousarray(grouped.transpose(0, 2, 3, 1, 4))


def _library(folder: Path, native: bool) -> ctypes.CDLL:
    """`integer_kernel.cpp` for this processor, or its kind, compiled if that has not been done.

    Raises:
        CompileError: if there is no compiler that can, or nowhere to put the result.
        BackendError: if another user may have written what is there.
    """
    recipe = Recipe(
        name="kernel",
        language="C++",
        source=SOURCE,
        included=(),
        flags=(*FLAGS, *((_native(),) if native else ())),
        machine=_processor(),
    )
    library = open_library(recipe, folder, make_room=tidy)
    mark_used(Path(library._name))
    library.hv_logits.restype = ctypes.c_int32
    library.hv_logits.argtypes = [
        ctypes.POINTER(_KernelNetwork),
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


def _native() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "i686") else "-mcpu=native"


@functools.cache
def _processor() -> str:
    """What `native` stands for: a cache that moves to another machine must not crash there."""
    kinds = ("flags", "Features", "model name", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    told = sorted({line for line in lines if line.split("\t")[0].strip() in kinds})
    return "\n".join([platform.machine(), *told])


class _NumpyKernel:
    """`hawkvision.integer.reference` with one matrix product per convolution, in the shortest floating point that is
    exact.
    """

    def __init__(self, graph: IntegerGraph) -> None:
        self._graph = graph
        self._factors = [_factor(stage) for stage in graph.stages]

    def __call__(self, images: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        graph = self._graph
        taken = images if images.shape[3] == graph.input.channels else reference.planes(graph, images)
        maps: NDArray[Any] = taken if mask is None else reference.filled(graph, taken, mask)
        for stage, factor in zip(graph.stages, self._factors, strict=True):
            sums = _product(stage.conv, factor, maps)
            if stage.requantise is None:
                return sums.reshape(len(sums), -1)
            # As in the compiled kernel: the maximum first, for requantisation never decreases.
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

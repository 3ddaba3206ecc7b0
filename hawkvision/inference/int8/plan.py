"""Lays out a network in memory, and divides its work into stages, and these into units."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.inference.int8.graph import Int8Layer, Int8Network, Int8Tensor, Kind, Sizes, Weighted

KINDS: Final[tuple[Kind, ...]] = ("pad", "convolution", "depthwise", "add", "mean", "dense")
"""In the order of `Kind`."""
VECTOR: Final = 16
"""Channels in one vector of sums."""
MOST_VECTORS: Final = 4
"""Vectors of sums at one position that are computed together."""
MOST_STAGE_LAYERS: Final = 8
"""Most layers of a stage."""
ALIGNMENT: Final = 64
"""Bytes of a vector."""


GROUP: Final = 64
"""Channels of a depthwise window that are computed together; biases and scales are padded to a multiple of it."""
TALL: Final = 28
"""Rows from which on a stage is divided by rows. Smaller layers have more weights than activations."""
TALL_SHARED: Final = 14
"""The same if threads share the work, so that none waits for the results of others."""
STRIP_BYTES: Final = 160 << 10
"""Most bytes between the layers of a strip, so that they fit the second-level cache together with the weights."""
RING_BYTES: Final = 24 << 10
"""Most bytes between a convolution by tiles and its windows for more than two rows of windows: half of a first-level
cache."""
TILE_QUADS: Final = 16
"""Most rows of a tile."""
LEAST_TILE_QUADS: Final = 4
"""With at most so many quads, a layer is faster without tiles."""


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int32) for name in names]


class CTensor(ctypes.Structure):
    """`Tensor` in `program.h`."""

    _fields_ = [
        *_integers("height", "width", "channels", "top", "left", "bottom", "right", "zero", "item", "result"),
        ("offset", ctypes.c_int64),
    ]


class CLayer(ctypes.Structure):
    """`Layer` in `program.h`."""

    _fields_ = [
        *_integers("kind", "taken", "other", "out", "kernel_height", "kernel_width", "row_stride", "column_stride"),
        *_integers("pad_top", "pad_left", "vectors", "fold", "zero", "tile", "paired"),
        ("ratio", ctypes.c_float),
        ("other_ratio", ctypes.c_float),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    ]


class CStage(ctypes.Structure):
    """`Stage` in `program.h`."""

    _fields_ = _integers("first", "count", "by_channels", "size", "units")


class CProgram(ctypes.Structure):
    """`Program` in `program.h`."""

    _fields_ = [
        *_integers("tensors", "layers", "stages"),
        ("tensor", ctypes.POINTER(CTensor)),
        ("layer", ctypes.POINTER(CLayer)),
        ("stage", ctypes.POINTER(CStage)),
        ("arena", ctypes.c_int64),
        ("scratch", ctypes.c_int64),
        ("ring", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class Program:
    """The argument of `network_open`, and the arrays that it points to."""

    struct: CProgram
    kept: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Border:
    """Padding around a tensor: rows above and below, columns left and right."""

    top: int = 0
    left: int = 0
    bottom: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class _PlannedStage:
    """Layers that are computed together, by rows of the last one's output or by channels."""

    first: int
    count: int
    by_channels: bool


def plan(network: Int8Network, tiles: bool, threads: int) -> Program:
    """The plan of a network for the given number of threads, with or without tiles (`amx.h`)."""
    borders = _borders(network)
    stages = _stages(network, TALL_SHARED if threads > 1 else TALL)
    sizes = [_unit(network, borders, stage) for stage in stages]
    offsets, arena = _arrange(network, borders, stages)
    tensors = (CTensor * len(network.tensors))()
    for c, tensor, border, offset in zip(tensors, network.tensors, borders, offsets, strict=True):
        c.height, c.width, c.channels = tensor.sizes
        c.top, c.left, c.bottom, c.right = border.top, border.left, border.bottom, border.right
        c.zero, c.item, c.result, c.offset = tensor.zero, tensor.item, -1, offset
    for number, result in enumerate(network.results):
        tensors[result.tensor].result = number
    layers = (CLayer * len(network.layers))()
    packed: list[NDArray[Any]] = []
    pointers: list[tuple[CLayer, str]] = []
    for stage, size in zip(stages, sizes, strict=True):
        for number in range(stage.first, stage.first + stage.count):
            layer = network.layers[number]
            if tiles and isinstance(layer, Weighted) and layer.kind == "convolution":
                layers[number].tile = _tile(layer)
            if number + 1 < stage.first + stage.count and _pairs(network, number):
                layers[number].paired = _rows_together(network, borders, number, layers[number].tile > 0)
            vectors = size if stage.by_channels else _even_vectors(_vectors(network, layer))
            _describe(layers[number], network, layer, MOST_VECTORS if layers[number].paired else vectors)
            if isinstance(layer, Weighted):
                packed += _packed(network, layer, layers[number].vectors)
                pointers += [(layers[number], name) for name in ("weights", "bias", "scale")]
    held = _together(packed)
    for (c_layer, name), array in zip(pointers, held, strict=True):
        setattr(c_layer, name, array.ctypes.data)
    ring = _rounded(
        max((_ring_bytes(network, borders, n, c.paired) for n, c in enumerate(layers) if c.paired), default=0)
    )
    scratch = ring + max(_scratch(network, borders, stage, size) for stage, size in zip(stages, sizes, strict=True))
    c_stages = (CStage * len(stages))()
    for c_stage, stage, size in zip(c_stages, stages, sizes, strict=True):
        last = network.layers[stage.first + stage.count - 1]
        whole = _vectors(network, last) if stage.by_channels else network.tensors[last.out].sizes[0]
        c_stage.first, c_stage.count, c_stage.by_channels = stage.first, stage.count, stage.by_channels
        c_stage.size, c_stage.units = size, -(-whole // size)
    struct = CProgram(len(tensors), len(layers), len(stages), tensors, layers, c_stages, arena, scratch, ring)
    return Program(struct, (tensors, layers, c_stages, *held))


def _window(layer: Int8Layer) -> tuple[int, int]:
    """(height, width) of the inputs of one output value."""
    return (layer.weights.shape[1], layer.weights.shape[2]) if isinstance(layer, Weighted) else (1, 1)


def _vectors(network: Int8Network, layer: Int8Layer) -> int:
    """Vectors of all channels that a layer computes."""
    fold = layer.fold if isinstance(layer, Weighted) else 1
    return -(-network.tensors[layer.out].sizes[2] * fold // VECTOR)


def _even_vectors(vectors: int) -> int:
    """Vectors to compute together, so that the last group has nearly as many."""
    return -(-vectors // -(-vectors // MOST_VECTORS))


def _borders(network: Int8Network) -> list[_Border]:
    """The padding of each tensor: the most that any of its readers needs."""
    borders = [_Border()] * len(network.tensors)
    for layer in network.layers:
        if not isinstance(layer, Weighted):
            continue
        (height, width, _), (rows, columns) = network.tensors[layer.inputs[0]].sizes, _window(layer)
        made_rows, made_columns = network.tensors[layer.out].sizes[0], network.tensors[layer.out].sizes[1] // layer.fold
        at = borders[layer.inputs[0]]
        borders[layer.inputs[0]] = _Border(
            max(at.top, layer.pads[0]),
            max(at.left, layer.pads[1]),
            max(at.bottom, (made_rows - 1) * layer.strides[0] - layer.pads[0] + rows - height),
            max(at.right, (made_columns - 1) * layer.strides[1] - layer.pads[1] + columns - width),
        )
    return borders


def _stages(network: Int8Network, tall: int) -> list[_PlannedStage]:
    """Layers that are computed together, in order.

    In tall images, a stage is a block of inverted residuals: expansion, depthwise window, projection and addition
    (Sandler et al., "MobileNetV2", 2018). In others it is layers that need only their own channels of the layer before.
    """
    readers = [0] * len(network.tensors)
    for result in network.results:
        readers[result.tensor] += 1
    for layer in network.layers:
        for taken in layer.inputs:
            readers[taken] += layer.kind != "pad"
    stages: list[_PlannedStage] = []
    layers, end = network.layers, 0
    while end < len(layers):
        first, end = end, end + 1
        by_channels = network.tensors[layers[first].out].sizes[0] < tall and layers[first].kind != "pad"
        joins = _joins_channels if by_channels else _joins_rows
        while end < len(layers) and end - first < MOST_STAGE_LAYERS:
            before, layer = layers[end - 1], layers[end]
            if layer.inputs[0] != before.out or readers[before.out] != 1 or not joins(before, layer):
                break
            end += 1
        stages.append(_PlannedStage(first, end - first, by_channels))
    return stages


def _joins_channels(before: Int8Layer, layer: Int8Layer) -> bool:
    folds = isinstance(before, Weighted) and before.fold > 1
    return layer.kind in ("depthwise", "add", "mean") and not folds


def _joins_rows(before: Int8Layer, layer: Int8Layer) -> bool:
    return layer.kind in ("depthwise", "add") or (layer.kind == "convolution" and before.kind in ("pad", "depthwise"))


def _unit(network: Int8Network, borders: Sequence[_Border], stage: _PlannedStage) -> int:
    """Rows, or vectors of channels, of a stage's output that one thread computes at a time."""
    layers = network.layers[stage.first : stage.first + stage.count]
    if stage.by_channels:
        vectors = _vectors(network, layers[-1])
        if any(layer.kind == "depthwise" for layer in layers):
            return MOST_VECTORS
        return min((4, 3, 2), key=lambda size: _larger_half(vectors, size))
    height = network.tensors[layers[-1].out].sizes[0]
    size = height
    while size > 1 and _scratch(network, borders, stage, size) > STRIP_BYTES:
        size -= 1
    units = -(-height // size)
    return -(-height // (units + units % 2))


def _larger_half(vectors: int, size: int) -> int:
    """The most vectors that one of two threads computes if they claim `size` vectors at a time."""
    units = -(-vectors // size)
    return min(vectors, -(-units // 2) * size)


def _scratch(network: Int8Network, borders: Sequence[_Border], stage: _PlannedStage, size: int) -> int:
    """Bytes between the layers of a strip of `size` rows of the last layer, without rings."""
    if stage.by_channels:
        return 0
    rows, total = size, 0
    for number in range(stage.first + stage.count - 1, stage.first, -1):
        layer, before = network.layers[number], network.layers[number - 1]
        down = layer.strides[0] if isinstance(layer, Weighted) else 1
        rows = (rows - 1) * down + _window(layer)[0]
        if not _pairs(network, number - 1):
            total += _rounded(rows * _pitch(network.tensors[before.out].sizes, borders[before.out]))
    return total


def _pairs(network: Int8Network, number: int) -> bool:
    """Whether a ring of rows, instead of the whole tensor, lies between that layer of a stage and the next."""
    before, layer = network.layers[number], network.layers[number + 1]
    if not isinstance(before, Weighted) or before.kind != "convolution" or layer.kind != "depthwise":
        return False
    return before.fold == 1 or network.tensors[before.out].sizes[2] <= GROUP


def _ring_bytes(network: Int8Network, borders: Sequence[_Border], number: int, rows: int) -> int:
    """Bytes between that layer and `rows` rows of the next one's windows, of channels that are computed together."""
    taken, window = network.layers[number].out, network.layers[number + 1]
    assert isinstance(window, Weighted)
    height, width, channels = network.tensors[taken].sizes
    row = _pitch((height, width, min(channels, GROUP)), borders[taken])
    return (_window(window)[0] + (rows - 1) * window.strides[0]) * row


def _rows_together(network: Int8Network, borders: Sequence[_Border], number: int, by_tiles: bool) -> int:
    """Rows of windows that are computed together: two, or with tiles as many as fit the cache."""
    height = network.tensors[network.layers[number + 1].out].sizes[0]
    rows = 2
    while by_tiles and rows < height and _ring_bytes(network, borders, number, rows + 2) <= RING_BYTES:
        rows += 2
    return rows


def _pitch(sizes: Sizes, border: _Border) -> int:
    """Bytes from one row to the next."""
    return (border.left + sizes[1] + border.right) * sizes[2]


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _arrange(
    network: Int8Network, borders: Sequence[_Border], stages: Sequence[_PlannedStage]
) -> tuple[list[int], int]:
    """The offset of each whole tensor in the arena, or -1 of tensors that are never whole and of results that nothing
    reads; and the arena's size.

    Tensors that are never needed at once may share a place, if their padding is the same, which is filled in only once.
    """
    stage_of = [number for number, stage in enumerate(stages) for _ in range(stage.count)]
    last_read = [-1] * len(network.tensors)
    for layer, stage in zip(network.layers, stage_of, strict=True):
        for taken in layer.inputs:
            last_read[taken] = stage
    given = {result.tensor for result in network.results if last_read[result.tensor] < 0}
    for result in network.results:
        last_read[result.tensor] = len(stages)
    offsets, arena = [-1] * len(network.tensors), 0
    places: dict[tuple[Sizes, _Border, int], dict[int, int]] = {}
    for number, layer in enumerate(network.layers):
        now = stage_of[number]
        last = number == stages[now].first + stages[now].count - 1
        whole = last or (stages[now].by_channels and not _pairs(network, number))
        if layer.out in given or not whole:
            continue
        tensor, border = network.tensors[layer.out], borders[layer.out]
        alike = places.setdefault((tensor.sizes, border, tensor.zero), {})
        offset = next((place for place, until in alike.items() if until < now), None)
        if offset is None:
            offset = arena
            rows = border.top + tensor.sizes[0] + border.bottom
            arena += _rounded(rows * _pitch(tensor.sizes, border))
        alike[offset] = max(last_read[layer.out], now)
        offsets[layer.out] = offset
    return offsets, arena


def _describe(c: CLayer, network: Int8Network, layer: Int8Layer, vectors: int) -> None:
    """Fill in the structure of a layer, except for its weights."""
    taken: list[Int8Tensor] = [network.tensors[number] for number in layer.inputs]
    out = network.tensors[layer.out]
    c.kind, c.taken, c.other, c.out = KINDS.index(layer.kind), layer.inputs[0], layer.inputs[-1], layer.out
    c.kernel_height, c.kernel_width = _window(layer)
    c.row_stride = c.column_stride = c.fold = 1
    c.vectors, c.zero = vectors, out.zero
    if isinstance(layer, Weighted):
        (c.row_stride, c.column_stride), (c.pad_top, c.pad_left), c.fold = layer.strides, layer.pads, layer.fold
    elif layer.kind == "add":
        c.ratio, c.other_ratio = taken[0].scale / out.scale, taken[1].scale / out.scale
    elif layer.kind == "mean":
        c.ratio = taken[0].scale / (out.scale * np.float32(taken[0].sizes[0] * taken[0].sizes[1]))


def _tile(layer: Weighted) -> int:
    """Quads of a row of a window that one tile takes: as many as fit, in equal parts. 0 if vectors are faster.

    Some numbers of quads, such as 17 (68 channels), have no equal parts that are large enough. Our cascades have none.
    """
    quads = layer.weights.shape[2] * layer.weights.shape[3] // 4
    parts = next(parts for parts in range(-(-quads // TILE_QUADS), quads + 1) if quads % parts == 0)
    return quads // parts if quads // parts >= LEAST_TILE_QUADS else 0


def _packed(network: Int8Network, layer: Weighted, vectors: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """A layer's weights, biases and scales in the kernel's order."""
    taken, out = network.tensors[layer.inputs[0]], network.tensors[layer.out]
    flat = layer.weights.reshape(len(layer.weights), -1)
    bias = _padded(layer.bias - np.int32(taken.zero) * flat.sum(1, dtype=np.int32))
    scale = taken.scale * layer.weight_scale
    if layer.kind != "dense":
        scale = scale / out.scale  # in ONNX Runtime's order of operations
    if layer.kind == "depthwise":
        return _depthwise_weights(layer.weights, layer.strides[0]), _in_lanes(bias), _in_lanes(_padded(scale))
    return _product_weights(flat, vectors), bias, _padded(scale)


# Weights in the order in which the kernel reads them (`layers.h`)


def _together(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Copies in one block of memory, each aligned to the size of a vector."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] - -array.nbytes // ALIGNMENT * ALIGNMENT)
    # Pages of its own, which begin at such a multiple.
    memory = np.frombuffer(mmap.mmap(-1, max(1, starts[-1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    held = [
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]
    for copy, array in zip(held, arrays, strict=True):
        copy[...] = array
    return held


def _padded(values: NDArray[Any]) -> NDArray[Any]:
    """(channels,), padded with zeros to whole groups."""
    return np.pad(values, (0, -len(values) % GROUP))


def _product_weights(weights: NDArray[np.int8], vectors: int) -> NDArray[np.int8]:
    """(made, taken) in groups of `vectors` vectors: for each four bytes taken, 16 channels x 4 bytes of each vector."""
    made, taken = weights.shape
    whole = np.pad(weights, ((0, -made % VECTOR), (0, 0))).reshape(-1, VECTOR, taken // 4, 4)
    groups = [whole[first : first + vectors].transpose(2, 0, 1, 3).ravel() for first in range(0, len(whole), vectors)]
    return np.concatenate(groups)


def _in_lanes(values: NDArray[Any]) -> NDArray[Any]:
    """(channels,) in the order of interleaved bytes: of each 64, every fourth group of four."""
    return np.ascontiguousarray(values.reshape(-1, 4, 4, 4).transpose(0, 2, 1, 3)).ravel()


def _depthwise_weights(weights: NDArray[np.int8], stride: int) -> NDArray[np.int8]:
    """(channels, size, size) in groups of 64 channels, for two rows of outputs.

    The rows of inputs of both outputs come in groups of four, which are the four bytes of a channel. A row that one of
    the outputs does not read has the weight zero there.
    """
    channels, size, _ = weights.shape
    groups = -(-(size + stride) // 4)
    rows = np.zeros((2, groups * 4, size, channels + -channels % GROUP), np.int8)
    for made in range(2):
        rows[made, made * stride : made * stride + size, :, :channels] = weights.transpose(1, 2, 0)
    # made, group of rows, row, column, 64 channels, lane of 128 bits, vector, channel of four
    lanes = rows.reshape(2, groups, 4, size, -1, 4, 4, 4)
    return np.ascontiguousarray(lanes.transpose(4, 0, 1, 3, 6, 5, 7, 2)).ravel()

"""Weight files of other frameworks, read into NumPy arrays without running anything they contain.

Three formats, those of the weights that are built here: torch's stream of pickles (before 1.6), a pickled dictionary
of lists of NumPy arrays, and safetensors. Pickles go through `PickleMachine`, which cannot call code. Arrays of pickles
are read-only views of the file's bytes; a tensor with gaps or overlaps in its storage is refused, so no array is larger
than the file (safetensors' own reader ensures both).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.safe_unpickler import Built, PickleMachine, PickleRefused, Symbol

StateDict: TypeAlias = dict[str, NDArray[Any]]
Format: TypeAlias = Literal["torch", "numpy_pickle", "safetensors"]

_STREAM_MAGIC = 0x1950A86A20F9469CFC6C  # torch/serialization.py, MAGIC_NUMBER
_STREAM_PROTOCOL = 1001

_STORAGES: dict[str, np.dtype[Any]] = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}
_ARRAY_KINDS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})
_ORDERED_DICT = Symbol("collections", "OrderedDict")
_REBUILD_TENSOR = Symbol("torch._utils", "_rebuild_tensor_v2")
_RECONSTRUCT = frozenset(
    {Symbol("numpy.core.multiarray", "_reconstruct"), Symbol("numpy._core.multiarray", "_reconstruct")}
)
_NDARRAY = Symbol("numpy", "ndarray")
_DTYPE = Symbol("numpy", "dtype")


@dataclass(frozen=True, slots=True)
class _Storage:
    """A named run of equal numbers, somewhere else in the file."""

    key: str
    dtype: np.dtype[Any]
    numel: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A piece of a storage without gaps; `order` lists the axes from slowest to fastest."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]


def parse_checkpoint(data: bytes, kind: Format, where: str) -> StateDict:
    """The arrays of a weight file by name; `where` names it in errors.

    A torch file must hold a state dict (name → tensor); a NumPy pickle a dictionary of lists, whose entries are named
    `<key>.<position>`; safetensors name their arrays themselves.

    Raises:
        ArtifactError: naming what in it is missing, malformed or refused.
    """
    try:
        if kind == "numpy_pickle":
            return _read_numpy_pickle(data)
        if kind == "safetensors":
            return _read_safetensors(data)
        return _read_stream(data)
    except PickleRefused as error:
        raise ArtifactError(f"{where}: refused as a {kind} weight file: {error}") from None


def _read_safetensors(data: bytes) -> StateDict:
    try:
        state = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:  # KeyError: a type that NumPy lacks, as BF16
        raise PickleRefused(f"{type(error).__name__}: {error}") from None
    if not state:
        raise PickleRefused("it holds no arrays")
    return state


def _read_stream(data: bytes) -> StateDict:
    """Five pickles (magic, protocol, platform, state dict, storage keys), then each storage: int64 count, numbers."""
    position = 0

    def load() -> Any:
        nonlocal position
        machine = PickleMachine(data, position, _call_torch, _persistent_torch)
        value = machine.load()
        position = machine.position
        return value

    if load() != _STREAM_MAGIC or load() != _STREAM_PROTOCOL:
        raise PickleRefused("it does not begin as torch's stream of pickles")
    platform = load()
    if type(platform) is not dict or platform.get("little_endian") is not True:
        raise PickleRefused("the platform record does not say little-endian")
    tensors = _tensors(load())
    known = {t.storage.key: t.storage for t in tensors.values()}
    keys = load()
    if type(keys) is not list:
        raise PickleRefused(f"the storage keys are a {type(keys).__name__}, expected a list")
    storages: dict[str, bytes] = {}
    for key in keys:
        if type(key) is not str or key not in known:
            raise PickleRefused("a storage key that no tensor uses")
        if position + 8 > len(data):
            raise PickleRefused(f"storage {key} is cut off at byte {position}")
        (numel,) = struct.unpack_from("<q", data, position)
        size = known[key].numel * known[key].dtype.itemsize
        if numel != known[key].numel or position + 8 + size > len(data):
            raise PickleRefused(f"storage {key} is cut off or has {numel} numbers, expected {known[key].numel}")
        storages[key] = data[position + 8 : position + 8 + size]
        position += 8 + size
    return _resolve(tensors, storages)


def _resolve(tensors: Mapping[str, _Tensor], storages: Mapping[str, bytes]) -> StateDict:
    state: StateDict = {}
    for name, tensor in tensors.items():
        raw = storages.get(tensor.storage.key)
        dtype = tensor.storage.dtype
        if raw is None or len(raw) != tensor.storage.numel * dtype.itemsize:
            raise PickleRefused(f"the storage of {name!r} is missing or of the wrong size")
        count = math.prod(tensor.shape)
        flat = np.frombuffer(raw, dtype, count, tensor.offset * dtype.itemsize) if count else np.empty(0, dtype)
        stored = flat.reshape([tensor.shape[axis] for axis in tensor.order])
        state[name] = stored.transpose(np.argsort(tensor.order)) if tensor.order else stored
    return state


def _tensors(value: Any) -> dict[str, _Tensor]:
    if type(value) is not dict or not value:
        raise PickleRefused(f"expected a dictionary of tensors, found a {type(value).__name__}")
    for name, tensor in value.items():
        if type(tensor) is not _Tensor:
            raise PickleRefused(f"{name!r} is a {type(tensor).__name__}, expected a tensor")
    return value


def _persistent_torch(pid: Any) -> _Storage:
    """("storage", type, key, device, numel, None)"""
    if type(pid) is not tuple or len(pid) != 6 or pid[0] != "storage" or pid[5] is not None:
        raise PickleRefused("a persistent id that is not a whole storage")
    kind, key, numel = pid[1], pid[2], pid[4]
    if type(kind) is not Symbol or kind.module != "torch" or kind.name not in _STORAGES:
        raise PickleRefused(f"a storage of type {kind if type(kind) is Symbol else type(kind).__name__}")
    if type(key) is not str or type(numel) is not int or not 0 <= numel < 1 << 40:
        raise PickleRefused("a storage with a malformed key or length")
    return _Storage(key, _STORAGES[kind.name], numel)


def _call_torch(symbol: Symbol, args: tuple[Any, ...]) -> Any:
    if symbol == _ORDERED_DICT and args == ():
        return {}
    if symbol == _REBUILD_TENSOR and len(args) == 6 and type(args[0]) is _Storage:
        return _dense(args[0], args[1], args[2], args[3])
    raise PickleRefused(f"a call of {symbol}, which is not among those that a state dict needs")


def _dense(storage: _Storage, offset: Any, shape: Any, strides: Any) -> _Tensor:
    """A tensor whose elements lie without gaps or overlap, in any order of axes.

    Converted weights are often transposed (EfficientNet-Lite's come from TensorFlow), so C order is not required.
    """
    shape = _shape(shape)
    if type(offset) is not int or offset < 0 or offset + math.prod(shape) > storage.numel:
        raise PickleRefused("a tensor that reaches outside its storage")
    if type(strides) is not tuple or len(strides) != len(shape) or any(type(s) is not int for s in strides):
        raise PickleRefused("a tensor with malformed strides")
    # The stride of an axis of length one is never used, and torch writes anything there: such axes go last.
    order = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] == 1, -strides[axis], axis)))
    step = 1
    for axis in reversed(order):
        if shape[axis] > 1 and strides[axis] != step:
            raise PickleRefused("a tensor with gaps or overlaps in its storage")
        step *= shape[axis]
    return _Tensor(storage, offset, shape, order)


def _shape(value: Any) -> tuple[int, ...]:
    """At most 8 dimensions; the product is checked against the storage by the caller."""
    if type(value) is not tuple or len(value) > 8 or not all(type(n) is int and 0 <= n < 1 << 40 for n in value):
        raise PickleRefused("a malformed shape")
    return value


def _read_numpy_pickle(data: bytes) -> StateDict:
    value = PickleMachine(data, 0, _call_numpy).load()
    if type(value) is not dict or not value:
        raise PickleRefused(f"expected a dictionary of lists of arrays, found a {type(value).__name__}")
    state: StateDict = {}
    for key, arrays in value.items():
        if type(arrays) is not list:
            raise PickleRefused(f"{key!r} is a {type(arrays).__name__}, expected a list of arrays")
        for i, array in enumerate(arrays):
            state[f"{key}.{i}"] = _array(array, f"{key}.{i}")
    return state


def _call_numpy(symbol: Symbol, args: tuple[Any, ...]) -> Any:
    if symbol in _RECONSTRUCT and len(args) == 3 and args[0] == _NDARRAY:
        return Built(_NDARRAY, ())
    if symbol == _DTYPE and args and type(args[0]) is str and args[0] in _ARRAY_KINDS:
        return Built(_DTYPE, (args[0],))
    raise PickleRefused(f"a call of {symbol}, which is not among those that plain arrays need")


def _array(built: Any, name: str) -> NDArray[Any]:
    """An array from its pickled state (version, shape, dtype, in Fortran order, bytes); see numpy's `__setstate__`."""
    if type(built) is not Built or built.symbol != _NDARRAY or type(built.state) is not tuple or len(built.state) != 5:
        raise PickleRefused(f"{name!r} is not an array")
    _, shape, kind, fortran, raw = built.state
    shape = _shape(shape)
    if type(kind) is not Built or kind.symbol != _DTYPE or type(kind.state) is not tuple or type(raw) is not bytes:
        raise PickleRefused(f"{name!r} is not an array of plain numbers")
    if len(kind.state) < 2 or kind.state[1] not in ("<", "|"):
        raise PickleRefused(f"{name!r} is not little-endian")
    dtype = np.dtype(kind.args[0]).newbyteorder("<")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise PickleRefused(f"{name!r} has {len(raw)} bytes, which do not fit its shape {shape}")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran is True else "C")

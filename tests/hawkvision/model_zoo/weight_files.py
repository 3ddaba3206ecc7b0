"""Small weight files in torch's format, written opcode by opcode, so that no framework is needed to test reading."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(number(v) for v in values) + b"t"


def symbol(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def tensor(
    key: str, numel: int, shape: Sequence[int], strides: Sequence[int], offset: int = 0, kind: str = "FloatStorage"
) -> bytes:
    """A call of torch's `_rebuild_tensor_v2` on a persistent storage."""
    storage = b"(" + text("storage") + symbol("torch", kind) + text(key) + text("cpu") + number(numel) + b"NtQ"
    hooks = symbol("collections", "OrderedDict") + b")R"
    args = storage + number(offset) + numbers(shape) + numbers(strides) + b"\x89" + hooks
    return symbol("torch._utils", "_rebuild_tensor_v2") + b"(" + args + b"tR"


def state_pickle(items: Mapping[str, bytes]) -> bytes:
    """An ordered dictionary of pickled values."""
    body = b"".join(text(name) + value for name, value in items.items())
    return b"\x80\x02" + symbol("collections", "OrderedDict") + b")R(" + body + b"u."


def c_strides(shape: Sequence[int]) -> list[int]:
    return [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]


def state_of(arrays: Mapping[str, F32]) -> bytes:
    return state_pickle({k: tensor(k, a.size, a.shape, c_strides(a.shape)) for k, a in arrays.items()})


def stream(pickled: bytes, storages: Mapping[str, F32]) -> bytes:
    """torch's format before 1.6."""
    head = b"".join(
        pickle.dumps(value, protocol=2)
        for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True})
    )
    tail = b"".join(struct.pack("<q", a.size) + a.astype("<f4").tobytes() for a in storages.values())
    return head + pickled + pickle.dumps(list(storages), protocol=2) + tail

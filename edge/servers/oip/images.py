"""The input of an inference request: its images, in base64 or as binary tensors."""

from __future__ import annotations

import binascii
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from hawkvision.core.errors import BadField

Data: TypeAlias = list[str | list[str]]

INPUT: Final = "image"
MAX_IMAGES: Final = 32
"""Images in one request: an eighth of the node's queue, so that no request fills it."""
LENGTH: Final = struct.Struct("<I")
"""Before each element of a binary tensor of type BYTES."""
SHARED_MEMORY: Final = "shared_memory_region"
NO_SHARED_MEMORY: Final = "this server shares no memory with its callers; send and receive the data in the body"


class InputTensor(msgspec.Struct, frozen=True):
    """One entry of `inputs`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Data | None = None


def given(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters that are not null."""
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def images_of(tensor: InputTensor, behind: memoryview) -> tuple[bytes, ...]:
    """The encoded images of an input; `behind` are the bytes behind the JSON.

    Raises:
        BadField: naming the part of the input that is malformed, or contradicts the data.
    """
    where = f"inputs[0] ({INPUT})"
    if tensor.datatype != "BYTES":
        raise BadField(f"{where}.datatype: expected 'BYTES', encoded images; got {tensor.datatype[:40]!r}")
    shape = tensor.shape
    if len(shape) not in (1, 2) or shape[1:] not in ([], [1]) or not 1 <= shape[0] <= MAX_IMAGES:
        raise BadField(f"{where}.shape: expected [N] or [N,1] with N from 1 to {MAX_IMAGES}; got {str(shape)[:60]}")
    parameters = given(tensor.parameters)
    if SHARED_MEMORY in parameters:
        raise BadField(f"{where}.parameters.{SHARED_MEMORY}: {NO_SHARED_MEMORY}")
    size = parameters.get("binary_data_size")
    if (size is None) == (tensor.data is None):
        raise BadField(f"{where}: expected either `data` or the parameter `binary_data_size`")
    if tensor.data is not None:
        if len(behind):
            raise BadField(f"body: {len(behind)} bytes behind the JSON belong to no input")
        return _from_json(where, shape, tensor.data)
    if type(size) is not int or size != len(behind):
        raise BadField(
            f"{where}.parameters.binary_data_size: {str(size)[:40]}, but {len(behind)} bytes are behind the JSON"
        )
    return _elements(where, shape[0], behind)


def _elements(where: str, count: int, data: memoryview) -> tuple[bytes, ...]:
    """Split `data` into `count` elements of type BYTES."""
    found: list[bytes] = []
    at = 0
    for number in range(count):
        if at + LENGTH.size > len(data):
            raise BadField(f"{where}: the data end at byte {at}, before element {number} of {count}")
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length > len(data) - at:
            raise BadField(f"{where}: element {number} has {length} bytes, but only {len(data) - at} are left")
        found.append(bytes(data[at : at + length]))
        at += length
    if at != len(data):
        raise BadField(f"{where}: {len(data) - at} bytes are left behind the last of {count} elements")
    return tuple(found)


def _from_json(where: str, shape: Sequence[int], data: Data) -> tuple[bytes, ...]:
    """The elements of `data`, which is flat or nested like the shape."""
    texts: list[str] = []
    for entry in data:
        texts += [entry] if isinstance(entry, str) else entry
    if len(data) != shape[0] or len(texts) != shape[0]:
        raise BadField(f"{where}.data: expected {shape[0]} elements, as the shape says; got {len(texts)}")
    return tuple(_from_base64(f"{where}.data[{number}]", text) for number, text in enumerate(texts))


def _from_base64(where: str, text: str) -> bytes:
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except ValueError:
        raise BadField(f"{where}: expected an image in base64; send other bytes as binary data") from None

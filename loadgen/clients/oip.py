"""Client of a server of the Open Inference Protocol v2, over HTTP with the binary tensor extension.

    POST /v2/models/{task}/infer
    Inference-Header-Content-Length: <length of the JSON>

    {"inputs": [{"name": "image", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": n + 4}}],
     "parameters": {"max_accuracy_drop": 0.01, "binary_data_output": true}}<n, uint32 little-endian><the image>

It reads four forms of answer, the first that it finds: an output `index`; a BYTES output in Triton's classification
form (`confidence:index[:label]`) or with the index; an integer output of one element, whatever its name; logits (FP16,
FP32 or FP64; JSON may write some as integers); the largest counts. Of kinds whose predictions are no single class it
asks for the output `prediction`, which has their JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import msgspec
import numpy as np

from hawkvision.core.types import AccuracyStatus, Prediction
from hawkvision.tasks.kind import TaskKind
from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.clients.connections import ConnectionPool, HttpReply
from loadgen.clients.http import WARM, exchange, refusal_of
from loadgen.workload.judging import read_prediction
from loadgen.workload.record import UNANSWERED

MAX_ELEMENTS: Final = 100_000
"""Of one output: far above the classes of any cascade."""
JSON_LENGTH: Final = b"inference-header-content-length"
_DTYPES: Final = {
    "FP32": "<f4", "FP64": "<f8", "FP16": "<f2",
    "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
}  # fmt: skip
_INTEGERS: Final = frozenset(name for name in _DTYPES if "INT" in name)
_FLOATS: Final = frozenset(name for name in _DTYPES if name.startswith("FP"))
_TEXTS: Final = frozenset({"on_miss", "quality", "stream", "task"})
"""Fields whose values are strings; all others are numbers."""

Value: TypeAlias = str | int | float | bool
Tensor: TypeAlias = tuple[str, str, Sequence[Any]]
"""Name, datatype, and the elements in a row, at least one."""


class OipClient:
    """An `Asker` of `/v2/models/{task}/infer`."""

    def __init__(self, connections: ConnectionPool, limit: int, task: str, kind: TaskKind[Any] | None = None) -> None:
        self._connections = connections
        self._limit = limit
        self._path = f"/v2/models/{quote(task, safe='')}/infer"
        self._kind = None if kind is None or "index" in kind.wire_tensors else kind
        self._parameters: dict[tuple[tuple[str, str], ...], bytes] = {}

    async def open(self) -> None:
        """See `Asker`."""
        await self._connections.open(min(WARM, self._limit))

    async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> ClientReply:
        """See `Asker`."""
        key = tuple(fields.items())
        parameters = self._parameters.get(key)
        if parameters is None:
            parameters = self._parameters[key] = msgspec.json.encode(as_parameters(fields))
        header = request_json(parameters, len(image), prediction=self._kind is not None)
        head = self._connections.head(
            "POST", self._path, f"Content-Type: application/octet-stream\r\n"
            f"Inference-Header-Content-Length: {len(header)}\r\n",
        )  # fmt: skip
        body = b"%s%s%s" % (header, struct.pack("<I", len(image)), image)
        reply = await exchange(self._connections, head, body, times)
        return reply if isinstance(reply, ClientReply) else read_reply(reply, len(body), self._kind)

    async def close(self) -> None:
        """See `Asker`."""
        await self._connections.close()


def as_parameters(fields: Mapping[str, str]) -> dict[str, Value]:
    """The fields as request parameters: numbers, and the wish for binary outputs."""
    found: dict[str, Value] = {}
    for name, value in fields.items():
        found[name] = value if name in _TEXTS else float(value)
    return {**found, "binary_data_output": True}


def request_json(parameters: bytes, image_bytes: int, *, prediction: bool = False) -> bytes:
    """The JSON that goes before the tensor; it asks for the output `prediction`, or for all that there are."""
    outputs = b'"outputs":[{"name":"prediction"}],' if prediction else b""
    return (
        b'{"inputs":[{"name":"image","shape":[1,1],"datatype":"BYTES","parameters":{"binary_data_size":%d}}],'
        b'%s"parameters":%s}' % (image_bytes + 4, outputs, parameters)
    )


class _OutputTensor(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Value] = {}
    data: Any = None


class _InferReply(msgspec.Struct, frozen=True):
    outputs: tuple[_OutputTensor, ...]
    parameters: dict[str, Value] = {}
    model_name: str = ""


_REPLY: Final = msgspec.json.Decoder(_InferReply)


def read_reply(reply: HttpReply, sent_bytes: int, kind: TaskKind[Any] | None = None) -> ClientReply:
    """What a reply says; one that cannot be read says `bad_reply` and counts as none."""
    if reply.status != 200:
        return refusal_of(reply, sent_bytes)
    try:
        decoded, tensors = _tensors(reply)
        prediction = _prediction(tensors, kind)
        index, confidence = (None, None) if prediction is not None else _answer(tensors)
    except (ValueError, TypeError, OverflowError, msgspec.DecodeError, struct.error):  # whatever JSON may hold
        return ClientReply(UNANSWERED, "bad_reply", sent_bytes=sent_bytes)
    said = decoded.parameters
    status, fraction, drop = said.get("status"), said.get("received_fraction"), said.get("max_drop")
    return ClientReply(
        status=200,
        index=index,
        confidence=confidence,
        tier=str(said.get("tier", "")),
        model=str(said.get("model", said.get("variant", decoded.model_name))),
        escalated=said.get("escalated") is True,
        degraded=said.get("degraded") is True,
        guarantee=AccuracyStatus(status) if status in tuple(AccuracyStatus) else None,
        max_drop=float(drop) if isinstance(drop, int | float) else None,
        received_fraction=float(fraction) if isinstance(fraction, int | float) else 1.0,
        sent_bytes=sent_bytes,
        prediction=prediction,
    )


def _tensors(reply: HttpReply) -> tuple[_InferReply, list[Tensor]]:
    """The JSON part, and each output that holds anything.

    Raises:
        ValueError, msgspec.DecodeError, struct.error: if the reply breaks the protocol.
    """
    split = int(reply.headers.get(JSON_LENGTH, b"%d" % len(reply.body)))
    if not 0 <= split <= len(reply.body):
        raise ValueError(split)
    decoded = _REPLY.decode(reply.body[:split])
    rest = memoryview(reply.body)[split:]
    tensors: list[Tensor] = []
    for output in decoded.outputs:
        size = output.parameters.get("binary_data_size")
        if size is None:
            elements: Sequence[Any] = _flat(output.data)
        elif not isinstance(size, int) or not 0 <= size <= len(rest):
            raise ValueError(size)
        else:
            elements = _elements(output.datatype, bytes(rest[:size]))
            rest = rest[size:]
        if elements:
            tensors.append((output.name, output.datatype, elements))
    return decoded, tensors


def _elements(datatype: str, raw: bytes) -> Sequence[Any]:
    if datatype != "BYTES":
        if datatype not in _DTYPES:
            raise ValueError(datatype)
        elements: list[Any] = np.frombuffer(raw, _DTYPES[datatype]).tolist()
        return elements
    found: list[bytes] = []
    at = 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        if at + 4 + length > len(raw):
            raise ValueError(length)
        found.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def _flat(data: Any) -> list[Any]:
    """JSON data may be nested as its shape is."""
    if not isinstance(data, list):
        raise ValueError(data)
    flat: list[Any] = data
    while flat and isinstance(flat[0], list):
        flat = [each for row in flat for each in (row if isinstance(row, list) else [row])]
    if len(flat) > MAX_ELEMENTS:
        raise ValueError(len(flat))
    return flat


def _prediction(tensors: Sequence[Tensor], kind: TaskKind[Any] | None) -> Prediction | None:
    """The output `prediction`, if it is one of this kind."""
    text = next((elements[0] for name, _, elements in tensors if name == "prediction"), None)
    if isinstance(text, str):
        text = text.encode()
    return read_prediction(kind, text) if isinstance(text, bytes) else None


def _answer(tensors: Sequence[Tensor]) -> tuple[int, float | None]:
    """The class and how sure the server is of it, from whichever outputs there are.

    Raises:
        ValueError: if none tells the class.
    """
    confidence = next((_number(elements[0]) for name, _, elements in tensors if name == "confidence"), None)
    for name, _, elements in tensors:
        if name == "index":
            return int(elements[0]), confidence
    for _, _, (first, *_) in tensors:
        if isinstance(first, bytes | str):
            text = first.decode() if isinstance(first, bytes) else first
            sure, colon, rest = text.partition(":")
            if colon:
                return int(rest.partition(":")[0]), float(sure)
            if text.isascii() and text.isdigit():
                return int(text), confidence
    for _, datatype, elements in tensors:
        if datatype in _INTEGERS and len(elements) == 1 and isinstance(elements[0], int):
            return elements[0], confidence
    for name, datatype, elements in tensors:
        if datatype in _FLOATS and name != "confidence" and all(_is_number(one) for one in elements):
            return int(np.argmax(np.array(elements, np.float64))), confidence
    raise ValueError("no output tells the class")


def _number(element: Any) -> float | None:
    return float(element) if _is_number(element) else None


def _is_number(element: Any) -> bool:
    return isinstance(element, int | float)

"""Decodes request bodies of the Open Inference Protocol v2.

The model's name is the task. A request has one input, `image`, of type BYTES and shape [N] or [N,1]: N encoded
images. Targets are request `parameters`, with the names of the fields of `/v1/infer`. A body is JSON, or with Triton's
binary tensor extension JSON followed by raw tensors:

    Inference-Header-Content-Length: 222                    bytes of JSON; absent: all is JSON; 0: one raw image
    {"id": "r1", "inputs": [{"name": "image", "shape": [1, 1], "datatype": "BYTES",
      "parameters": {"binary_data_size": 16}}], "parameters": {"binary_data_output": true, "max_accuracy_drop": 0.01}}
    0C 00 00 00 | FF D8 FF …                                each element: uint32 length, little-endian, and its bytes

In JSON an image is base64. The outputs are the tensors of the task's kind (`TaskKind.wire_tensors`), and if it is named
`prediction`: the fields that `/v1/infer` answers, as JSON. A kind without tensors has only that.

Unknown parameters are ignored, as KServe and Triton do; the response lists their names in `ignored_parameters`, which
reveals a misspelt target. Optional members may be null. Sources: Open Inference Protocol, `inference_rest.md`; Triton's
protocol extensions `binary_data`, `classification`, `parameters` and `schedule_policy`.
"""

from __future__ import annotations

import binascii
import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from edge.servers.shared.request_fields import FIELDS, MAX_TOP_K, Source, parse_request
from hawkvision.core.errors import MALFORMED, BadField
from hawkvision.core.types import RequestFields
from hawkvision.tasks.kind import TaskKind, TensorSpec

Data: TypeAlias = list[str | list[str]]

INPUT: Final = "image"
MAX_IMAGES: Final = 32
"""Images in one request: an eighth of the node's queue, so that no request fills it."""
LENGTH: Final = struct.Struct("<I")
"""Before each element of a binary tensor of type BYTES."""
SHARED_MEMORY: Final = "shared_memory_region"
NO_SHARED_MEMORY: Final = "this server shares no memory with its callers; send and receive the data in the body"
PREDICTION: Final = "prediction"
"""The output that every kind has: JSON of each image, as BYTES."""
MAX_ID_LENGTH: Final = 1024
MAX_JSON_VALUES: Final = 10_000
"""Values in a request's JSON, counted by its commas before parsing: 32 images and their parameters need about a
hundred. Base64 has no commas, and 10 MiB of small values would take some 500 MB once parsed."""
_IGNORED: Final = frozenset({"priority", "sequence_start", "sequence_end"})
"""Parameters of `tritonclient` that have no effect: the queue is ordered by deadline."""
_REQUESTS_OWN: Final = frozenset({"binary_data_output", "timeout", "sequence_id", *_IGNORED, *FIELDS})
"""Known parameters of a request."""


class InputTensor(msgspec.Struct, frozen=True):
    """One entry of `inputs`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Data | None = None


class WantedOutput(msgspec.Struct, frozen=True):
    """One entry of a request's `outputs`."""

    name: str
    parameters: dict[str, Any] | None = None


class InferHead(msgspec.Struct, frozen=True):
    """The JSON part of a request."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[WantedOutput] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One requested output."""

    name: str
    binary: bool
    classes: int | None = None
    """Of an output that is `ranked`: return so many "confidence:index:label" per image (Triton's classification
    extension)."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """The images, the request for each of them, and the format of the response."""

    id: str
    images: tuple[bytes, ...]
    request: RequestFields
    outputs: tuple[Output, ...]
    ignored: tuple[str, ...] = ()
    """Names of unknown parameters, each once."""


_decode_head = msgspec.json.Decoder(InferHead).decode


@functools.cache
def outputs_of(kind: type[TaskKind[Any]]) -> Mapping[str, TensorSpec]:
    """The outputs of tasks of a kind."""
    return {**kind.wire_tensors, PREDICTION: TensorSpec("BYTES", (-1,))}


def parse_infer(
    task: str, kind: type[TaskKind[Any]], body: bytes, json_bytes: str | None, elsewhere: Sequence[Source] = ()
) -> InferRequest:
    """Decode the body of a request.

    Args:
        task: the model's name in the path.
        kind: of the task.
        body: uncompressed.
        json_bytes: the header `Inference-Header-Content-Length`, if there is one.
        elsewhere: fields in query and headers.

    Raises:
        BadField: naming the part that is malformed, missing, unknown or contradictory.
    """
    path: Source = ("path", "task", task)
    split = json_length(json_bytes, len(body))
    if split == 0:
        return InferRequest("", (body,), parse_request([path, *elsewhere]), _all_outputs(kind, binary=False))
    head = _read_head(body[:split])
    name = head.id or ""
    if len(name) > MAX_ID_LENGTH:
        raise BadField(f"id: expected at most {MAX_ID_LENGTH} characters, got {len(name)}")
    if len(head.inputs) != 1 or head.inputs[0].name != INPUT:
        names = ", ".join(repr(tensor.name[:40]) for tensor in head.inputs[:4]) or "none"
        raise BadField(f"inputs: expected one input, {INPUT!r}; got {names}")
    (tensor,) = head.inputs
    parameters = given(head.parameters)
    images = images_of(tensor, memoryview(body)[split:])
    outputs = _outputs(kind, head.outputs, parameters)
    sources = _sources(parameters)
    most = max((output.classes or 0 for output in outputs), default=0)
    if most and "top_k" not in parameters:
        sources.append(("outputs", "top_k", str(most)))
    ignored = [key for key in parameters if key not in _REQUESTS_OWN]
    ignored += [key for key in given(tensor.parameters) if key != "binary_data_size"]
    ignored += [key for wanted in head.outputs or () for key in given(wanted.parameters) if key not in _OUTPUTS_OWN]
    asked = parse_request([path, *elsewhere, *sources])
    return InferRequest(name, images, asked, outputs, tuple(dict.fromkeys(ignored)))


def json_length(header: str | None, available: int) -> int:
    """Length of the JSON at the start of a body of `available` bytes, from `Inference-Header-Content-Length`.

    Raises:
        BadField: if the header is not a number in that range.
    """
    if header is None:
        return max(1, available)
    if not (header.isascii() and header.isdigit() and len(header) <= 12 and int(header) <= available):
        raise BadField(
            f"Inference-Header-Content-Length: expected 0 to {available}, the bytes of the body; got {header[:40]!r}"
        )
    return int(header)


def _read_head(data: bytes) -> InferHead:
    if data.count(b",") >= MAX_JSON_VALUES:
        raise BadField(
            f"body: the JSON has more than {MAX_JSON_VALUES} values; send images encoded, in base64 or as binary data"
        )
    try:
        return _decode_head(data)
    except RecursionError:
        raise BadField("body: the JSON is nested too deeply") from None
    except MALFORMED as error:
        raise BadField(f"body: not an inference request in JSON: {error}{_advice(data, str(error))}") from None


def _advice(data: bytes, problem: str) -> str:
    """What callers who send an image, or pixels, should do."""
    if not data.lstrip().startswith((b"{", b"[")):
        return "; to send one image as it is, set Inference-Header-Content-Length: 0"
    return "; images are sent encoded, as BYTES: in base64, or as binary data" if ".data" in problem else ""


# ------------------------------------------------------------------------------------------------------- images


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


# ------------------------------------------------------------------------------------------------- what is asked


def _sources(parameters: Mapping[str, Any]) -> list[Source]:
    """The fields in a request's parameters.

    Two parameters of `tritonclient` stand in for fields that are missing: `timeout` (microseconds) for `deadline_ms`,
    and `sequence_id` for `stream`.
    """
    sources: list[Source] = []
    for name, value in parameters.items():
        where = f"parameters.{name[:40]}"
        if name in _IGNORED or name not in _REQUESTS_OWN:
            continue
        if name == "binary_data_output":
            _flag(where, value)
        elif name == "timeout":
            if type(value) is not int or not 0 <= value < 1 << 53:
                raise BadField(f"{where}: expected microseconds, a whole number; got {_shown(value)}")
            if value and "deadline_ms" not in parameters:
                sources.append(("parameters.timeout, in ms", "deadline_ms", f"{value / 1000:g}"))
        elif name == "sequence_id":
            if isinstance(value, bool) or not (isinstance(value, str) or _is_int64(value)):
                raise BadField(f"{where}: expected a whole number or a string; got {_shown(value)}")
            if value and "stream" not in parameters:
                sources.append((where, "stream", str(value)))
        elif isinstance(value, bool) or not isinstance(value, int | float | str):
            raise BadField(f"{where}: expected a number or a string, got {_shown(value)}")
        else:
            sources.append(("parameters", name, value if isinstance(value, str) else _decimal(where, value)))
    return sources


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63


def _shown(value: object) -> str:
    """A JSON value in an error message: of bounded length, without its nested values."""
    match value:
        case str():
            return repr(value[:40])
        case int() if abs(value) >= 1 << 64:
            return "a number out of range"
        case dict() | list():
            return "an object" if isinstance(value, dict) else "a list"
        case _:
            return repr(value)


def _decimal(where: str, value: float) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise BadField(f"{where}: the number is out of range")
    return repr(int(value) if float(value).is_integer() else value)


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadField(f"{where}: expected true or false, got {_shown(value)}")
    return value


def _all_outputs(kind: type[TaskKind[Any]], *, binary: bool) -> tuple[Output, ...]:
    return tuple(Output(name, binary) for name in kind.wire_tensors or (PREDICTION,))


def _outputs(
    kind: type[TaskKind[Any]], listed: Sequence[WantedOutput] | None, parameters: Mapping[str, Any]
) -> tuple[Output, ...]:
    """The requested outputs, in that order; if none is named, all tensors of the kind."""
    binary = _flag("parameters.binary_data_output", parameters.get("binary_data_output", False))
    if not listed:
        return _all_outputs(kind, binary=binary)
    known = outputs_of(kind)
    if len(listed) > len(known):
        raise BadField(f"outputs: expected each of {', '.join(known)} at most once; got {len(listed)} entries")
    found: dict[str, Output] = {}
    for number, wanted in enumerate(listed):
        where = f"outputs[{number}]"
        if wanted.name not in known or wanted.name in found:
            raise BadField(f"{where}.name: expected each of {', '.join(known)} at most once; got {wanted.name[:40]!r}")
        found[wanted.name] = _output(where, wanted, known, binary=binary)
    return tuple(found.values())


_OUTPUTS_OWN: Final = frozenset({"binary_data", "classification", SHARED_MEMORY})


def _output(where: str, wanted: WantedOutput, known: Mapping[str, TensorSpec], *, binary: bool) -> Output:
    classes: int | None = None
    for name, value in given(wanted.parameters).items():
        parameter = f"{where}.parameters.{name[:40]}"
        if name == "binary_data":
            binary = _flag(parameter, value)
        elif name == "classification":
            if not known[wanted.name].ranked:
                ranked = " or ".join(repr(each) for each, spec in known.items() if spec.ranked)
                where_listed = f"classes are listed in the output {ranked}" if ranked else "this task lists no classes"
                raise BadField(f"{parameter}: {where_listed}")
            if type(value) is not int or not 0 <= value <= MAX_TOP_K:
                raise BadField(f"{parameter}: expected 1 to {MAX_TOP_K} classes, got {_shown(value)}")
            classes = value or None
        elif name == SHARED_MEMORY:  # otherwise the caller would read stale memory
            raise BadField(f"{parameter}: {NO_SHARED_MEMORY}")
    return Output(wanted.name, binary, classes)

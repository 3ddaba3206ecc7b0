"""Open Inference Protocol v2 as bytes: what a request's body asks, and an answer's body. No sockets.

The model's place holds the task. A request has one input, `image`, of type BYTES and shape [N] or [N,1]: N encoded
images. Targets are request `parameters`, by the names of `/v1/classify`. Bodies are JSON, or with Triton's binary
tensor extension JSON and raw tensors behind it:

    Inference-Header-Content-Length: 222                    bytes of JSON; absent: all is JSON; 0: all is one image
    {"id": "r1", "inputs": [{"name": "image", "shape": [1, 1], "datatype": "BYTES",
      "parameters": {"binary_data_size": 16}}], "parameters": {"binary_data_output": true, "max_accuracy_drop": 0.01}}
    0C 00 00 00 | FF D8 FF …                                each element: uint32 length, little-endian, and its bytes

In JSON an image is base64, for JSON cannot carry other bytes. Parameters that are neither ours nor the protocol's mean
nothing here, as with KServe and Triton: the response lists their names in `ignored_parameters`, so that a misspelt
target can be seen. Optional members may be null. Sources: Open Inference Protocol, `inference_rest.md`;
Triton's protocol extensions `binary_data`, `classification`, `parameters` and `schedule_policy`.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from edge.servers.request_fields import FIELDS, MAX_TOP_K, Source, parse_request
from hawkvision.core.errors import MALFORMED, BadField
from hawkvision.core.types import AccuracyStatus, Answer, ClassifyRequest
from hawkvision.core.version import __version__

Value: TypeAlias = str | bool | int | float
"""What a parameter may be."""
Data: TypeAlias = list[str | list[str]]

INPUT: Final = "image"
MODEL_VERSION: Final = "1"
"""A task has one; which variant answered is told with each answer."""
OUTPUTS: Final = {"label": "BYTES", "index": "INT64", "confidence": "FP32"}
"""What can be asked for, and of what type; each has one element per image."""
MAX_IMAGES: Final = 32
"""Images in one request: an eighth of the places that a node has for those that wait, so that none takes them all."""
MAX_ID_LENGTH: Final = 1024
MAX_JSON_VALUES: Final = 10_000
"""Values in a request's JSON, counted by its commas before it is parsed: 32 images and their parameters are some
hundred. Base64 has no commas, and 10 MiB of small values would take some 500 MB."""
MAX_SAID_IGNORED: Final = 256
"""Characters of `ignored_parameters`."""
EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)

_LENGTH: Final = struct.Struct("<I")
_IGNORED: Final = frozenset({"priority", "sequence_start", "sequence_end"})
"""Parameters that `tritonclient` has arguments for, and that need nothing here: earliest deadlines go first anyway."""
_REQUESTS_OWN: Final = frozenset({"binary_data_output", "timeout", "sequence_id", *_IGNORED, *FIELDS})
"""Parameters of a request that mean something here."""
_SHARED_MEMORY: Final = "shared_memory_region"
NO_SHARED_MEMORY: Final = "this server has no shared memory with its callers; send and take the data in the body"


class _Tensor(msgspec.Struct, frozen=True):
    """One entry of `inputs`, as it is written."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Data | None = None


class _Wanted(msgspec.Struct, frozen=True):
    """One entry of a request's `outputs`, as it is written."""

    name: str
    parameters: dict[str, Any] | None = None


class _Head(msgspec.Struct, frozen=True):
    """The JSON part of a request, as it is written."""

    inputs: list[_Tensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Wanted] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One output that was asked for."""

    name: str
    binary: bool
    classes: int | None = None
    """Of `confidence`: so many "confidence:index:label" per image instead (Triton's classification extension)."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Images, what is asked of each of them, and how the answers are to be written."""

    id: str
    images: tuple[bytes, ...]
    request: ClassifyRequest
    outputs: tuple[Output, ...]
    ignored: tuple[str, ...] = ()
    """Names of parameters that mean nothing here, each once."""


_decode_head = msgspec.json.Decoder(_Head).decode
_encode = msgspec.json.encode


def parse_infer(task: str, body: bytes, json_bytes: str | None, elsewhere: Sequence[Source] = ()) -> InferRequest:
    """The request in a body.

    Args:
        task: the model's name in the path.
        body: uncompressed.
        json_bytes: the header `Inference-Header-Content-Length`, if there is one.
        elsewhere: fields that were written in query and headers.

    Raises:
        BadField: naming the part that is malformed, missing, unknown or contradictory.
    """
    path: Source = ("path", "task", task)
    split = json_length(json_bytes, len(body))
    if split == 0:
        return InferRequest("", (body,), parse_request([path, *elsewhere]), _all_outputs(binary=False))
    head = _read_head(body[:split])
    name = head.id or ""
    if len(name) > MAX_ID_LENGTH:
        raise BadField(f"id: expected at most {MAX_ID_LENGTH} characters, got {len(name)}")
    if len(head.inputs) != 1 or head.inputs[0].name != INPUT:
        given = ", ".join(repr(tensor.name[:40]) for tensor in head.inputs[:4]) or "none"
        raise BadField(f"inputs: expected one input, {INPUT!r}; got {given}")
    (tensor,) = head.inputs
    parameters = _given(head.parameters)
    images = _images(tensor, memoryview(body)[split:])
    outputs = _outputs(head.outputs, parameters)
    sources = _sources(parameters)
    most = max((output.classes or 0 for output in outputs), default=0)
    if most and "top_k" not in parameters:
        sources.append(("outputs", "top_k", str(most)))
    ignored = [key for key in parameters if key not in _REQUESTS_OWN]
    ignored += [key for key in _given(tensor.parameters) if key != "binary_data_size"]
    ignored += [key for wanted in head.outputs or () for key in _given(wanted.parameters) if key not in _OUTPUTS_OWN]
    asked = parse_request([path, *elsewhere, *sources])
    return InferRequest(name, images, asked, outputs, tuple(dict.fromkeys(ignored)))


def _given(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those that are not null."""
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def json_length(header: str | None, available: int) -> int:
    """Bytes of JSON at the front of a body of `available` bytes, as the header `Inference-Header-Content-Length` says.

    Raises:
        BadField: if it is no such number.
    """
    if header is None:
        return max(1, available)
    if not (header.isascii() and header.isdigit() and len(header) <= 12 and int(header) <= available):
        raise BadField(
            f"Inference-Header-Content-Length: expected 0 to {available}, the bytes of the body; got {header[:40]!r}"
        )
    return int(header)


def _read_head(data: bytes) -> _Head:
    if data.count(b",") >= MAX_JSON_VALUES:
        raise BadField(
            f"body: the JSON has more than {MAX_JSON_VALUES} values; send images encoded, in base64 or as binary data"
        )
    try:
        return _decode_head(data)
    except RecursionError:
        raise BadField("body: the JSON is nested too deeply") from None
    except MALFORMED as error:
        raise BadField(f"body: not an inference request in JSON: {error}") from None


# ------------------------------------------------------------------------------------------------------ the input


def _images(tensor: _Tensor, behind: memoryview) -> tuple[bytes, ...]:
    where = f"inputs[0] ({INPUT})"
    if tensor.datatype != "BYTES":
        raise BadField(f"{where}.datatype: expected 'BYTES', encoded images; got {tensor.datatype[:40]!r}")
    shape = tensor.shape
    if len(shape) not in (1, 2) or shape[1:] not in ([], [1]) or not 1 <= shape[0] <= MAX_IMAGES:
        raise BadField(f"{where}.shape: expected [N] or [N,1] with N from 1 to {MAX_IMAGES}; got {str(shape)[:60]}")
    parameters = _given(tensor.parameters)
    if _SHARED_MEMORY in parameters:
        raise BadField(f"{where}.parameters.{_SHARED_MEMORY}: {NO_SHARED_MEMORY}")
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
    """`count` elements of type BYTES that fill `data`."""
    found: list[bytes] = []
    at = 0
    for number in range(count):
        if at + _LENGTH.size > len(data):
            raise BadField(f"{where}: the data end at byte {at}, before element {number} of {count}")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise BadField(f"{where}: element {number} has {length} bytes, but only {len(data) - at} are left")
        found.append(bytes(data[at : at + length]))
        at += length
    if at != len(data):
        raise BadField(f"{where}: {len(data) - at} bytes are left behind the last of {count} elements")
    return tuple(found)


def _from_json(where: str, shape: Sequence[int], data: Data) -> tuple[bytes, ...]:
    """The elements of `data`, flat or nested as the shape is."""
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
    """A request's parameters as fields.

    Of `tritonclient`'s own, `timeout` (microseconds) is a deadline where none is given in `deadline_ms`, and
    `sequence_id` names the stream where `stream` does not; the others need nothing here.
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
    """A value of JSON for an error, whatever it is: of bounded length, and without looking deep into it."""
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


def _all_outputs(*, binary: bool) -> tuple[Output, ...]:
    return tuple(Output(name, binary) for name in OUTPUTS)


def _outputs(listed: Sequence[_Wanted] | None, parameters: Mapping[str, Any]) -> tuple[Output, ...]:
    """The outputs asked for, in that order; all of them where none is named."""
    binary = _flag("parameters.binary_data_output", parameters.get("binary_data_output", False))
    if not listed:
        return _all_outputs(binary=binary)
    if len(listed) > len(OUTPUTS):
        raise BadField(f"outputs: expected each of {', '.join(OUTPUTS)} at most once; got {len(listed)} entries")
    found: dict[str, Output] = {}
    for number, wanted in enumerate(listed):
        where = f"outputs[{number}]"
        if wanted.name not in OUTPUTS or wanted.name in found:
            raise BadField(
                f"{where}.name: expected each of {', '.join(OUTPUTS)} at most once; got {wanted.name[:40]!r}"
            )
        found[wanted.name] = _output(where, wanted, binary=binary)
    return tuple(found.values())


_OUTPUTS_OWN: Final = frozenset({"binary_data", "classification", _SHARED_MEMORY})


def _output(where: str, wanted: _Wanted, *, binary: bool) -> Output:
    classes: int | None = None
    for name, value in _given(wanted.parameters).items():
        said = f"{where}.parameters.{name[:40]}"
        if name == "binary_data":
            binary = _flag(said, value)
        elif name == "classification":
            if wanted.name != "confidence":
                raise BadField(f"{said}: classes are listed in the output 'confidence'")
            if type(value) is not int or not 0 <= value <= MAX_TOP_K:
                raise BadField(f"{said}: expected 1 to {MAX_TOP_K} classes, got {_shown(value)}")
            classes = value or None
        elif name == _SHARED_MEMORY:  # a caller who looks there would find what was there before
            raise BadField(f"{said}: {NO_SHARED_MEMORY}")
    return Output(wanted.name, binary, classes)


# ----------------------------------------------------------------------------------------------------- the answer


def encode_answers(asked: InferRequest, answers: Sequence[Answer]) -> tuple[bytes, int | None]:
    """The response's body, and the length of its JSON if binary tensors follow."""
    tensors: list[dict[str, object]] = []
    behind: list[bytes] = []
    for output in asked.outputs:
        tensor, raw = _tensor(output, answers)
        tensors.append(tensor)
        if raw is not None:
            behind.append(raw)
    said: dict[str, object] = {"model_name": answers[0].task, "model_version": MODEL_VERSION}
    if asked.id:
        said["id"] = asked.id
    parameters = describe(answers)
    if asked.ignored:
        parameters["ignored_parameters"] = ",".join(asked.ignored)[:MAX_SAID_IGNORED]
    text = _encode({**said, "parameters": parameters, "outputs": tensors})
    return (text, None) if not behind else (b"".join((text, *behind)), len(text))


def _tensor(output: Output, answers: Sequence[Answer]) -> tuple[dict[str, object], bytes | None]:
    """An output's entry, and its data if they are sent in binary."""
    datatype, shape = OUTPUTS[output.name], [len(answers)]
    values: list[str] | list[int] | list[float]
    match output.name:
        case "label":
            values = [answer.label for answer in answers]
        case "index":
            values = [answer.index for answer in answers]
        case _ if output.classes is not None:
            listed = [answer.top_k[: output.classes] for answer in answers]
            datatype, shape = "BYTES", [len(answers), min(map(len, listed))]
            values = [f"{p.confidence:.6f}:{p.index}:{p.label}" for top in listed for p in top[: shape[1]]]
        case _:
            values = [answer.confidence for answer in answers]
    tensor: dict[str, object] = {"name": output.name, "datatype": datatype, "shape": shape}
    if not output.binary:
        return {**tensor, "data": values}, None
    raw = _packed(datatype, values)
    return {**tensor, "parameters": {"binary_data_size": len(raw)}}, raw


def _packed(datatype: str, values: Sequence[str] | Sequence[int] | Sequence[float]) -> bytes:
    if datatype == "BYTES":
        elements = [str(value).encode() for value in values]
        return b"".join(_LENGTH.pack(len(element)) + element for element in elements)
    return struct.pack(f"<{len(values)}{'q' if datatype == 'INT64' else 'f'}", *values)


_WEAKEST_FIRST: Final = (AccuracyStatus.SUSPENDED, AccuracyStatus.BEST_EFFORT, AccuracyStatus.CERTIFIED)


def describe(answers: Sequence[Answer]) -> dict[str, Value]:
    """How the answers were found, as response parameters.

    Of several images, `variant`, `tier` and `reason` list each image's where they differ, separated by commas; a
    flag is true if it is of any; and numbers and the guarantee are those of the worst.
    """
    guarantees = [answer.accuracy for answer in answers]
    weakest = min(guarantees, key=lambda guarantee: _WEAKEST_FIRST.index(guarantee.status))
    said: dict[str, Value] = {
        "variant": _each([answer.model for answer in answers]),
        "tier": _each([answer.tier.value for answer in answers]),
        "escalated": any(answer.escalated for answer in answers),
        "degraded": any(answer.degraded for answer in answers),
        "received_fraction": min(answer.received_fraction for answer in answers),
        "status": weakest.status.value,
        "basis": weakest.basis.value,
        "total_ms": round(max(answer.timing_ms.total for answer in answers), 3),
    }
    reasons = ["" if answer.reason is None else answer.reason.value for answer in answers]
    if any(reasons):
        said["reason"] = _each(reasons)
    if all(guarantee.max_drop is not None for guarantee in guarantees):
        said["max_drop"] = max(guarantee.max_drop or 0.0 for guarantee in guarantees)
    if weakest.delta is not None and weakest.n is not None:
        said["delta"], said["n"] = weakest.delta, weakest.n
    if answers[0].deadline_met is not None:
        said["deadline_met"] = all(answer.deadline_met for answer in answers)
    return said


def _each(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ",".join(values)


# ------------------------------------------------------------------------------------------------------- metadata


def server_metadata() -> dict[str, object]:
    """`GET /v2`."""
    return {"name": "hawkvision", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(task: str) -> dict[str, object]:
    """`GET /v2/models/{task}`; -1 is a free size."""
    return {
        "name": task,
        "versions": [MODEL_VERSION],
        "platform": "hawkvision",
        "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in OUTPUTS.items()],
    }


def model_config(task: str) -> dict[str, object]:
    """`GET /v2/models/{task}/config`: the same in the words of Triton's model configuration, for its tools."""
    types = {"BYTES": "TYPE_STRING", "INT64": "TYPE_INT64", "FP32": "TYPE_FP32"}
    return {
        "name": task,
        "platform": "hawkvision",
        "backend": "hawkvision",
        "max_batch_size": 0,
        "input": [{"name": INPUT, "data_type": types["BYTES"], "dims": [-1]}],
        "output": [{"name": name, "data_type": types[datatype], "dims": [-1]} for name, datatype in OUTPUTS.items()],
    }

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

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from edge.servers.oip.images import INPUT, NO_SHARED_MEMORY, SHARED_MEMORY, InputTensor, given, images_of
from edge.servers.shared.request_fields import FIELDS, MAX_TOP_K, Source, parse_request
from hawkvision.core.errors import MALFORMED, BadField
from hawkvision.core.types import ClassifyRequest
from hawkvision.tasks.kind import TaskKind, TensorSpec

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
    request: ClassifyRequest
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

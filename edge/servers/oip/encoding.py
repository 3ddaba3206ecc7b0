"""Encodes responses of the Open Inference Protocol v2: answers and metadata."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from edge.servers.oip.decoding import INPUT, LENGTH, PREDICTION, InferRequest, Output, outputs_of
from hawkvision import __version__
from hawkvision.core.types import AccuracyStatus, Answer, target_fields
from hawkvision.tasks.kind import TaskKind, WireTensor

Value: TypeAlias = str | bool | int | float
"""Types of a parameter's value."""
MODEL_VERSION: Final = "1"
"""Every task has this version only; each answer names the variant that ran."""
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


_encode = msgspec.json.encode


def encode_answers(asked: InferRequest, kind: TaskKind[Any], answers: Sequence[Answer]) -> tuple[bytes, int | None]:
    """Encode a response; gives its body, and the length of its JSON if binary tensors follow."""
    ranked = next((output.classes for output in asked.outputs if output.classes is not None), None)
    found = dict(kind.tensors([answer.prediction for answer in answers], ranked))
    if any(output.name == PREDICTION for output in asked.outputs):
        texts = [_encode(answer.prediction.to_json()).decode() for answer in answers]
        found[PREDICTION] = WireTensor((len(answers),), texts)
    tensors: list[dict[str, object]] = []
    behind: list[bytes] = []
    for output in asked.outputs:
        tensor, raw = _tensor(output, kind, found[output.name])
        tensors.append(tensor)
        if raw is not None:
            behind.append(raw)
    described: dict[str, object] = {"model_name": answers[0].task, "model_version": MODEL_VERSION}
    if asked.id:
        described["id"] = asked.id
    parameters = describe(answers)
    if asked.ignored:
        parameters["ignored_parameters"] = ",".join(asked.ignored)[:MAX_SAID_IGNORED]
    text = _encode({**described, "parameters": parameters, "outputs": tensors})
    return (text, None) if not behind else (b"".join((text, *behind)), len(text))


def _tensor(output: Output, kind: TaskKind[Any], found: WireTensor) -> tuple[dict[str, object], bytes | None]:
    """The entry of an output, and its data if they are binary."""
    datatype = "BYTES" if output.classes is not None else outputs_of(type(kind))[output.name].datatype
    tensor: dict[str, object] = {"name": output.name, "datatype": datatype, "shape": list(found.shape)}
    if not output.binary:
        return {**tensor, "data": found.values}, None
    raw = _packed(datatype, found.values)
    return {**tensor, "parameters": {"binary_data_size": len(raw)}}, raw


def _packed(datatype: str, values: Sequence[str] | Sequence[int] | Sequence[float]) -> bytes:
    if datatype == "BYTES":
        elements = [str(value).encode() for value in values]
        return b"".join(LENGTH.pack(len(element)) + element for element in elements)
    return struct.pack(f"<{len(values)}{'q' if datatype == 'INT64' else 'f'}", *values)


_WEAKEST_FIRST: Final = (AccuracyStatus.SUSPENDED, AccuracyStatus.BEST_EFFORT, AccuracyStatus.CERTIFIED)


def describe(answers: Sequence[Answer]) -> dict[str, Value]:
    """The response parameters: which stage and tier answered, and the accuracy block of `/v1/infer`.

    With several images, `variant`, `tier` and `reason` list the value of each image if they differ, separated by
    commas. A flag is true if it is true of any image. Numbers and the guarantee are those of the worst image.
    """
    guarantees = [answer.accuracy for answer in answers]
    weakest = min(guarantees, key=lambda guarantee: _WEAKEST_FIRST.index(guarantee.status))
    described: dict[str, Value] = {
        "variant": _each([answer.model for answer in answers]),
        "tier": _each([answer.tier.value for answer in answers]),
        "escalated": any(answer.escalated for answer in answers),
        "degraded": any(answer.degraded for answer in answers),
        "received_fraction": min(answer.received_fraction for answer in answers),
        "target": ",".join(f"{name}={value}" for name, value in target_fields(weakest.target).items()),
        "status": weakest.status.value,
        "total_ms": round(max(answer.timing_ms.total for answer in answers), 3),
    }
    if weakest.status_reason is not None:
        described["status_reason"] = weakest.status_reason.value
    reasons = ["" if answer.reason is None else answer.reason.value for answer in answers]
    if any(reasons):
        described["reason"] = _each(reasons)
    for bound in ("max_drop", "watched_max_drop", "max_disagreement"):
        bounds = [value for each in guarantees if (value := getattr(each, bound)) is not None]
        if len(bounds) == len(guarantees):
            described[bound] = max(bounds)
    evidence = weakest.to_json()
    described |= {
        name: evidence[name] for name in ("basis", "delta", "n", "labels", "from", "to") if evidence[name] is not None
    }
    if answers[0].deadline_met is not None:
        described["deadline_met"] = all(answer.deadline_met for answer in answers)
    return described


def _each(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ",".join(values)


# ------------------------------------------------------------------------------------------------------- metadata


def server_metadata() -> dict[str, object]:
    """`GET /v2`."""
    return {"name": "hawkvision", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(task: str, kind: type[TaskKind[Any]]) -> dict[str, object]:
    """`GET /v2/models/{task}`; -1 stands for any size."""
    outputs = outputs_of(kind).items()
    return {
        "name": task,
        "versions": [MODEL_VERSION],
        "platform": "hawkvision",
        "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": name, "datatype": spec.datatype, "shape": list(spec.shape)} for name, spec in outputs],
    }


def model_config(task: str, kind: type[TaskKind[Any]]) -> dict[str, object]:
    """`GET /v2/models/{task}/config`: the metadata as Triton's model configuration."""
    outputs = outputs_of(kind).items()
    types = {"BYTES": "TYPE_STRING", "INT64": "TYPE_INT64", "FP32": "TYPE_FP32"}
    return {
        "name": task,
        "platform": "hawkvision",
        "backend": "hawkvision",
        "max_batch_size": 0,
        "input": [{"name": INPUT, "data_type": types["BYTES"], "dims": [-1]}],
        "output": [{"name": n, "data_type": types[spec.datatype], "dims": list(spec.shape)} for n, spec in outputs],
    }

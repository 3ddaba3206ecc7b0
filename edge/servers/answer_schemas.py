"""JSON schemas and examples of answers, per kind of task, for the description of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    Basis,
    MaxAccuracyDrop,
    Tier,
    Timing,
)
from hawkvision.tasks.kind import TaskKind

BASES: Final = [basis.value for basis in Basis]
STATUSES: Final = [status.value for status in AccuracyStatus]
FRACTION: Final = {"type": "number", "minimum": 0, "maximum": 1}
MILLIS: Final = {"type": "number", "minimum": 0}
REFERENCES: Final = "#/components/schemas/{name}"

Kinds = Mapping[str, type[TaskKind[Any]]]
"""Kinds of tasks, by name."""


def json_object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The schema of an object with these properties."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value that may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def answer_schemas(kinds: Kinds) -> dict[str, Any]:
    """The components that describe the answers of these kinds: `Answer` for any, and one per kind."""
    types = [kind.prediction.json_type() for kind in kinds.values()]
    references, components = msgspec.json.schema_components(types, ref_template=REFERENCES)
    of_kinds = {
        schema_name(kind): _answer(components.pop(reference["$ref"].rpartition("/")[2])["properties"])
        for kind, reference in zip(kinds.values(), references, strict=True)
    }
    anything = {"anyOf": [{"$ref": REFERENCES.format(name=name)} for name in of_kinds]}
    return {"Answer": anything, **of_kinds, **components}


def schema_name(kind: type[TaskKind[Any]]) -> str:
    """The name of the component that describes answers of a kind."""
    return f"{kind.prediction.__name__}Answer"


def _answer(prediction: dict[str, Any]) -> dict[str, Any]:
    accuracy = {
        "target": {"type": "object", "description": "The target, as the field that stated it."},
        "max_drop": nullable(FRACTION | {"description": "Accuracy below the reference stage's, at most."}),
        "max_disagreement": FRACTION
        | {
            "description": "Mean disagreement with the reference stage, at most. In place of `max_drop` where "
            "certificates were made without labels and agreement bounds no accuracy drop; else absent."
        },
        "status": {
            "type": "string",
            "enum": STATUSES,
            "description": "Whether `max_drop` is certified, or for a `quality` `max_disagreement`.",
        },
        "basis": {"type": "string", "enum": BASES, "description": "What the status rests on."},
        "delta": nullable(FRACTION | {"description": "Probability that the certificate is wrong, at most."}),
        "n": nullable({"type": "integer", "description": "Images that the certificate was tested on."}),
    }
    return json_object(
        {
            "id": {"type": "string"},
            "task": {"type": "string"},
            **prediction,
            "model": {"type": "string"},
            "tier": {"type": "string", "enum": [tier.value for tier in Tier]},
            "escalated": {"type": "boolean"},
            # `audit` is a label of the escalation metric only: audits run after the answer.
            "reason": nullable({"type": "string", "enum": ["low_confidence", "target", "edge_busy"]}),
            "degraded": {"type": "boolean"},
            "received_fraction": FRACTION,
            "accuracy": json_object(accuracy, ("max_disagreement",)),
            "deadline_met": nullable({"type": "boolean"}),
            "timing_ms": json_object(dict.fromkeys(("decode", "queue", "infer", "uplink", "dc", "total"), MILLIS)),
        }
    )


def example_answer(kind: type[TaskKind[Any]]) -> dict[str, Any] | None:
    """An example of an answer, of a task of one's own; None if the kind has none."""
    prediction = kind.prediction.example()
    if prediction is None:
        return None
    return Answer(
        id="85d35cb338cb14a3bb89b4948633cb8e",
        task="mine",
        prediction=prediction,
        model="small_int8",
        tier=Tier.EDGE,
        accuracy=AccuracyGuarantee(MaxAccuracyDrop(0.05), AccuracyStatus.CERTIFIED, Basis.LABELLED, 0.05, 0.05, 410),
        deadline_met=True,
        timing_ms=Timing(decode=3.1, queue=0.1, infer=8.4, total=11.9),
    ).to_json()

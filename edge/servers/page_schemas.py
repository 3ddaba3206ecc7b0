"""JSON schemas of a node's pages: tasks, targets, transports, and DeepStack's predictions."""

from __future__ import annotations

from typing import Any

from edge.servers.answer_schemas import BASES, FRACTION, MILLIS, STATUSES, json_object, nullable


def page_schemas() -> dict[str, Any]:
    """The components that describe the pages."""
    return {"Tasks": _tasks(), "Targets": _targets(), "Transports": _transports(), "Predictions": _predictions()}


def _tasks() -> dict[str, Any]:
    text, number = {"type": "string"}, {"type": "integer"}
    task = {
        "task": text,
        "kind": nullable(text | {"description": "What its answers are; null if its manifest cannot be read."}),
        "status": {"type": "string", "enum": ["ready", "failed"]},
        "reason": text | {"description": "Why it cannot be served."},
        "labels": number | {"description": "How many there are."},
        "edge": text | {"description": "The edge stage."},
        "best": text | {"description": "The reference stage."},
        "max_queue": number | {"description": "Images that may wait."},
        "memory_bytes": nullable(number | {"description": "For bodies and decoding."}),
        "targets": text | {"description": "Where its targets are."},
    }
    optional = ("reason", "labels", "edge", "best", "max_queue", "memory_bytes", "targets")
    return json_object({"tasks": {"type": "array", "items": json_object(task, optional)}})


def _predictions() -> dict[str, Any]:
    pixels = {"type": "integer"}
    found = {"label": {"type": "string"}, "confidence": FRACTION}
    found |= dict.fromkeys(("x_min", "y_min", "x_max", "y_max"), pixels)
    seconds = {"type": "number", "description": "Seconds."}
    listed = {"type": "array", "items": json_object(found)}
    return json_object({"success": {"type": "boolean"}, "duration": seconds, "predictions": listed})


def _targets() -> dict[str, Any]:
    accuracy = {"value": FRACTION, "n": {"type": "integer"}, "low": FRACTION, "high": FRACTION}
    stage = json_object({"variant": {"type": "string"}, "accuracy": json_object(accuracy)})
    text, flag = {"type": "string"}, {"type": "boolean"}
    target = {
        "target": {"type": "object", "description": "The fields that ask for it."},
        "max_drop": nullable(FRACTION),
        "max_disagreement": FRACTION,
        "min_accuracy": nullable(FRACTION),
        "status": {"type": "string", "enum": STATUSES},
        "suspended": flag | {"description": "In the node's own stream; other streams have their own."},
        "basis": {"type": "string", "enum": BASES},
        "delta": nullable(FRACTION),
        "n": nullable({"type": "integer"}),
        "escalation": FRACTION | {"description": "Share that leaves the edge, in traffic as certified."},
        "to_best": FRACTION | {"description": "Share that the reference stage answers."},
        "intermediate": nullable(text),
        "expected_latency_ms": nullable(MILLIS),
    }
    certificates = {
        "basis": {"type": "string", "enum": BASES},
        "n": {"type": "integer"},
        "as_of": nullable(text | {"format": "date"}),
        "data": nullable(json_object({"name": text, "sha256": text})),
    }
    datacenter = {
        "url": text,
        "up": flag,
        "transport": {"type": "string", "enum": ["tcp", "datagram"], "description": "What images go over now."},
        "loss": nullable(FRACTION | {"description": "Share of datagrams lost; null while it is not measured."}),
        "rtt_ms": nullable(MILLIS | {"description": "Of datagrams, without the datacenter's work."}),
    }
    return json_object(
        {
            "task": text,
            "policy": text | {"description": "Who decides: `hawkvision`, or a baseline that it is compared with."},
            "edge": stage,
            "best": stage,
            "datacenter": nullable(json_object(datacenter)),
            "certificates_valid": flag,
            "certificates": json_object(certificates),
            "maximum_min_accuracy": FRACTION,
            "targets": {"type": "array", "items": json_object(target, ("max_disagreement",))},
        }
    )


def _transports() -> dict[str, Any]:
    text, number = {"type": "string"}, {"type": "integer"}
    datagram = {
        "port": number | {"description": "UDP, at the host of this document."},
        "certificate": text | {"description": "PEM; the first is what the server must show, bit for bit."},
        "name": text | {"description": "To ask for in the handshake."},
        "version": number | {"description": "Of the wire format, `hawkvision/transport/WIRE.md`."},
    }
    return json_object({"datagram": nullable(json_object(datagram))})

"""The description of the API for tools: `/openapi.json`. `edge.servers.api_page` makes a page of it."""

from __future__ import annotations

from typing import Any, Final

from edge.servers.answer_schemas import (
    BASES,
    FRACTION,
    MILLIS,
    REFERENCES,
    STATUSES,
    Kinds,
    answer_schemas,
    example_answer,
    json_object,
    nullable,
    schema_name,
)
from edge.servers.deepstack import MIN_CONFIDENCE, MOST
from edge.servers.oip.decoding import INPUT, MAX_IMAGES, PREDICTION
from edge.servers.shared.request_fields import FIELDS
from hawkvision.core.version import __version__
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import (
    CLASSIFY_PATH,
    DEEPSTACK_PATH,
    DETECT_PATH,
    INFER_PATH,
    KIND_OF_FORM,
    installed_kinds,
)

ERRORS: Final = {
    "400": "Not an image, or an unknown, malformed or contradictory field",
    "401": "Missing or wrong key",
    "403": "The key may not do this",
    "404": "No such path or task; the message lists the tasks",
    "405": "The path does not take this method",
    "408": "Headers did not arrive in time, or the body arrived more slowly than 500 bytes a second",
    "413": "Too many bytes or too many pixels",
    "414": "The URL is longer than 16 KiB",
    "415": "A format that is not read here",
    "422": "The cascade cannot reach the target; `maximum` says what it can",
    "429": "A bounded queue is full; see Retry-After",
    "431": "The headers are larger than 64 KiB",
    "500": "A defect; the node's log says more",
    "503": "Loading, shutting down, out of connections or without its FPGA; see Retry-After",
    "504": "The deadline passed, with on_miss=fail, or the image takes longer to decode than is left",
}


def _schemas(kinds: Kinds) -> dict[str, Any]:
    error = {"error": {"type": "string"}, "code": {"type": "string"}, "maximum": {"type": "number"}}
    return {
        **answer_schemas(kinds),
        "Tasks": _tasks(),
        "Targets": _targets(),
        "Transports": _transports(),
        "Predictions": _predictions(),
        "Error": json_object(error, optional=("maximum",)),
    }


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


def document(kinds: Kinds | None = None) -> dict[str, Any]:
    """The OpenAPI 3.1 document; `kinds` are those of the answers, by default all that are installed."""
    kinds = installed_kinds() if kinds is None else kinds
    errors = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, text in ERRORS.items()
    }

    def get(summary: str, operation: str, media: str = "application/json", schema: str = "") -> dict[str, Any]:
        described = {"$ref": f"#/components/schemas/{schema}"} if schema else {}
        ok = {"description": summary, "content": {media: {"schema": described}}}
        refused = {status: errors[status] for status in ("400", "401", "403", "404", "503")}
        return {"get": {"summary": summary, "operationId": operation, "responses": {"200": ok, **refused}}}

    def of_task(methods: dict[str, Any], where: str = "path") -> dict[str, Any]:
        task = {"name": "task", "in": where, "required": where == "path", "schema": dict(FIELDS["task"].schema)}
        return {"parameters": [task], **methods}

    return {
        "openapi": "3.1.0",
        "info": {
            "title": "HawkVision edge node",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Say what the answer must be worth and when you need it; the node picks the model.",
        },
        "servers": [{"url": "/"}],
        "paths": {
            INFER_PATH: {"post": _images(errors, "Answer an image to a target, by a task of any kind", "infer")},
            **{
                path: {"post": _images(errors, summary, path.rpartition("/")[2], kinds[KIND_OF_FORM[path]])}
                for path, summary in TYPED.items()
                if KIND_OF_FORM[path] in kinds
            },
            DEEPSTACK_PATH: {"post": _deepstack(errors)},
            "/v1/tasks": get("The tasks and their kinds", "tasks", schema="Tasks"),
            "/v1/targets": of_task(
                get("What can be asked for, and what it costs", "targets", schema="Targets"), "query"
            ),
            "/v1/transport": get("Where images may be sent as datagrams", "transport", schema="Transports"),
            "/healthz": get("The process is alive", "healthz"),
            "/readyz": of_task(get("Models are loaded and warm", "readyz"), "query"),
            "/v2/health/live": get("The process is alive (Open Inference Protocol)", "live"),
            "/v2/health/ready": get("Models are loaded and warm (Open Inference Protocol)", "ready"),
            "/v2": get("Name, version and extensions (Open Inference Protocol)", "server"),
            "/v2/models/{task}": of_task(get("Inputs and outputs (Open Inference Protocol)", "model")),
            "/v2/models/{task}/ready": of_task(get("The task is served (Open Inference Protocol)", "modelReady")),
            "/v2/models/{task}/stats": of_task(get("Requests and where their time went (Triton)", "modelStatistics")),
            "/v2/repository/index": {
                "post": get("What is loaded (Triton)", "repositoryIndex")["get"],
            },
            "/v2/models/{task}/infer": of_task({"post": _infer(errors)}),
            "/metrics": get("Metrics for Prometheus", "metrics", "text/plain"),
        },
        "components": {
            "schemas": _schemas(kinds),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


TYPED: Final = {CLASSIFY_PATH: "Classify an image to a target", DETECT_PATH: "Find objects in an image, to a target"}


def _images(
    errors: dict[str, Any], summary: str, operation: str, kind: type[TaskKind[Any]] | None = None
) -> dict[str, Any]:
    """A path that takes one image: the fields as query parameters, the image as the body or in a form with them.

    Its answers are of `kind`, or of any.
    """
    answer: dict[str, Any] = {
        "schema": {"$ref": REFERENCES.format(name="Answer" if kind is None else schema_name(kind))}
    }
    if kind is not None and (example := example_answer(kind)) is not None:
        answer["example"] = example
    parameters = [
        {"name": f.name, "in": "query", "required": False, "description": f.description, "schema": dict(f.schema)}
        for f in FIELDS.values()
    ]
    binary = {"schema": {"type": "string", "format": "binary"}}
    form = {
        "schema": {
            "type": "object",
            "required": ["image"],
            "properties": {
                "image": {"type": "string", "format": "binary"},
                **{f.name: {**f.schema, "description": f.description} for f in FIELDS.values()},
            },
        }
    }
    return {
        "summary": summary,
        "description": "Every field may also be sent as a header `X-HawkVision-<Field-Name>` or a multipart field.",
        "operationId": operation,
        "parameters": parameters,
        "requestBody": {
            "required": True,
            "content": {
                "image/jpeg": binary,
                "image/png": binary,
                "image/webp": binary,
                "application/octet-stream": binary,
                "multipart/form-data": form,
            },
        },
        "responses": {
            "200": {
                "description": "The answer",
                "content": {"application/json": answer},
            },
            **errors,
        },
    }


def _deepstack(errors: dict[str, Any]) -> dict[str, Any]:
    """Detection in DeepStack's form."""
    text = {"type": "string"}
    form = {
        "image": text | {"format": "binary"},
        "min_confidence": FRACTION | {"default": MIN_CONFIDENCE, "description": "Leave out less confident objects."},
        "api_key": text | {"description": "The key, if there is no header Authorization."},
    }
    schema = {"$ref": REFERENCES.format(name="Predictions")}
    return {
        "summary": "Find objects in an image (DeepStack)",
        "description": f"The {MOST} surest objects, or `top_k` of the query, in pixels; Frigate's detector "
        "`deepstack` calls this. The query takes the fields of /v1/infer.",
        "operationId": "deepstackDetection",
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data": {"schema": json_object(form, ("min_confidence", "api_key"))}},
        },
        "responses": {
            "200": {"description": "The objects", "content": {"application/json": {"schema": schema}}},
            **errors,
        },
    }


def _infer(errors: dict[str, Any]) -> dict[str, Any]:
    """Inference by the Open Inference Protocol, whose specification has the schemas."""
    media = {"application/json": {"schema": {"type": "object"}}, "application/octet-stream": {"schema": {}}}
    return {
        "summary": "Answer images to a target (Open Inference Protocol)",
        "description": (
            f"One input `{INPUT}`, BYTES of [N] or [N,1] with N up to {MAX_IMAGES}: encoded images, in binary, or "
            "in base64 where the data are JSON. The fields of /v1/infer are request parameters. Outputs: the tensors "
            f"that /v2/models/{{task}} lists, and `{PREDICTION}`, the fields of /v1/infer as JSON. The response's "
            "parameters say which stage and tier answered and what is guaranteed "
            "(`max_drop`, `status`, `basis`, `delta`, `n`); `ignored_parameters` lists unknown request parameters."
        ),
        "operationId": "modelInfer",
        "requestBody": {"required": True, "content": media},
        "responses": {"200": {"description": "The answers", "content": media}, **errors},
    }

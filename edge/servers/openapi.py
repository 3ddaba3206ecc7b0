"""The description of the API for tools: `/openapi.json`. `edge.servers.api_page` makes a page of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from edge.servers.answer_schemas import (
    FRACTION,
    REFERENCES,
    Kinds,
    answer_schemas,
    example_answer,
    json_object,
    schema_name,
)
from edge.servers.deepstack import MIN_CONFIDENCE, MOST
from edge.servers.oip.decoding import PREDICTION
from edge.servers.oip.images import INPUT, MAX_IMAGES
from edge.servers.page_schemas import page_schemas
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
    return {**answer_schemas(kinds), **page_schemas(), "Error": json_object(error, optional=("maximum",))}


def document(kinds: Kinds | None = None) -> dict[str, Any]:
    """The OpenAPI 3.1 document; `kinds` are those of the answers, by default all that are installed."""
    kinds = installed_kinds() if kinds is None else kinds
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "HawkVision edge node",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Say what the answer must be worth and when you need it; the node picks the model.",
        },
        "servers": [{"url": "/"}],
        "paths": {**_image_paths(kinds), **_PAGES},
        "components": {
            "schemas": _schemas(kinds),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _error_replies(statuses: Iterable[str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": REFERENCES.format(name="Error")}}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}


def _get(summary: str, operation: str, media: str = "application/json", schema: str = "") -> dict[str, Any]:
    """The operation that reads a page."""
    described = {"$ref": REFERENCES.format(name=schema)} if schema else {}
    ok = {"description": summary, "content": {media: {"schema": described}}}
    refused = _error_replies(("400", "401", "403", "404", "503"))
    return {"get": {"summary": summary, "operationId": operation, "responses": {"200": ok, **refused}}}


def _of_task(methods: dict[str, Any], where: str = "path") -> dict[str, Any]:
    task = {"name": "task", "in": where, "required": where == "path", "schema": dict(FIELDS["task"].schema)}
    return {"parameters": [task], **methods}


def _image_paths(kinds: Kinds) -> dict[str, Any]:
    """The paths that take images."""
    errors = _error_replies(ERRORS)
    return {
        INFER_PATH: {"post": _images(errors, "Answer an image to a target, by a task of any kind", "infer")},
        **{
            path: {"post": _images(errors, summary, path.rpartition("/")[2], kinds[KIND_OF_FORM[path]])}
            for path, summary in TYPED.items()
            if KIND_OF_FORM[path] in kinds
        },
        DEEPSTACK_PATH: {"post": _deepstack(errors)},
        "/v2/models/{task}/infer": _of_task({"post": _infer(errors)}),
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


_PAGES: Final = {
    "/v1/tasks": _get("The tasks and their kinds", "tasks", schema="Tasks"),
    "/v1/targets": _of_task(_get("What can be asked for, and what it costs", "targets", schema="Targets"), "query"),
    "/v1/transport": _get("Where images may be sent as datagrams", "transport", schema="Transports"),
    "/healthz": _get("The process is alive", "healthz"),
    "/readyz": _of_task(_get("Models are loaded and warm", "readyz"), "query"),
    "/v2/health/live": _get("The process is alive (Open Inference Protocol)", "live"),
    "/v2/health/ready": _get("Models are loaded and warm (Open Inference Protocol)", "ready"),
    "/v2": _get("Name, version and extensions (Open Inference Protocol)", "server"),
    "/v2/models/{task}": _of_task(_get("Inputs and outputs (Open Inference Protocol)", "model")),
    "/v2/models/{task}/ready": _of_task(_get("The task is served (Open Inference Protocol)", "modelReady")),
    "/v2/models/{task}/stats": _of_task(_get("Requests and where their time went (Triton)", "modelStatistics")),
    "/v2/repository/index": {"post": _get("What is loaded (Triton)", "repositoryIndex")["get"]},
    "/metrics": _get("Metrics for Prometheus", "metrics", "text/plain"),
}
"""The paths without images."""

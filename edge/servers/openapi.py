"""The description of the API: `/openapi.json`, which Swagger UI shows at `/docs`.

Schemas are those of the types that the node reads and writes. Swagger UI is part of the package, because an edge node
has no internet to fetch it from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from edge.servers import deepstack, review_routes, status_routes
from edge.servers.comparison import Comparison
from edge.servers.oip.decoding import INPUT, MAX_IMAGES, PREDICTION, InferHead
from edge.servers.shared.request_fields import FIELDS
from edge.serving.targets_listing import Targets
from edge.serving.tasks import Tasks
from hawkvision.core import __version__
from hawkvision.core.answer_json import AnswerFields
from hawkvision.core.escalation_api import COMPARE_PATH, TRANSPORT_PATH, Transports
from hawkvision.core.types import AccuracyGuarantee, AccuracyStatus, Answer, Basis, MaxAccuracyDrop, Tier, Timing
from hawkvision.servers.keys import OPEN_PATHS
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import (
    CLASSIFY_PATH,
    DEEPSTACK_CUSTOM,
    DEEPSTACK_PATH,
    DETECT_PATH,
    INFER_PATH,
    KIND_OF_FORM,
    installed_kinds,
)

SWAGGER_UI: Final = Path(__file__).with_name("swagger_ui")
"""The page of `/docs` and the files that it loads from there."""
DOCS_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
"""Keys are typed into this page, so it loads nothing from elsewhere and cannot be framed."""

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
_ERROR: Final = {
    "description": "Why a request was refused.",
    "type": "object",
    "properties": {
        "error": {"type": "string", "description": "What was wrong, expected and where."},
        "code": {"type": "string", "description": "The kind of error."},
        "maximum": {"type": "number", "description": "The highest target that can be reached; with 422 only."},
    },
    "required": ["error", "code"],
}
_PAGES: Final = (
    ("/v1/tasks", "The tasks and their kinds", "tasks", Tasks),
    ("/v1/targets", "What can be asked for, and what it costs", "targets", Targets),
    (TRANSPORT_PATH, "Where images may be sent as datagrams", "transport", Transports),
    ("/healthz", "The process is alive", "healthz", None),
    ("/readyz", "Models are loaded and warm", "readyz", None),
    ("/v1/status/ping", "The process is alive (DeepStack)", "ping", None),
    ("/v2/health/live", "The process is alive (Open Inference Protocol)", "live", None),
    ("/v2/health/ready", "Models are loaded and warm (Open Inference Protocol)", "ready", None),
    ("/v2", "Name, version and extensions (Open Inference Protocol)", "server", None),
    ("/v2/models/{task}", "Inputs and outputs (Open Inference Protocol)", "model", None),
    ("/v2/models/{task}/ready", "The task is served (Open Inference Protocol)", "modelReady", None),
    ("/v2/models/{task}/stats", "Requests and where their time went (Triton)", "modelStatistics", None),
    ("/metrics", "Metrics for Prometheus", "metrics", None),
)
"""Paths that are only read: summary, operation and type of the answer."""
_OPERATIONS: Final = (*status_routes.OPERATIONS, *review_routes.OPERATIONS)
_JSON: Final = "application/json"

Kinds = Mapping[str, type[TaskKind[Any]]]
"""Kinds of tasks, by name."""


def document(kinds: Kinds | None = None, *, keys: bool = True) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    Args:
        kinds: of the answers; by default all that are installed.
        keys: whether the node asks for a key.
    """
    kinds = installed_kinds() if kinds is None else kinds
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "HawkVision edge node",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Say what the answer must be worth and when you need it; the node picks the model.",
        },
        "servers": [{"url": "/"}],
        "paths": _image_paths(kinds) | _page_paths() | _declared_paths(),
        "components": {"schemas": _schemas(kinds)},
    }
    if keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
        for path in OPEN_PATHS & described["paths"].keys():
            described["paths"][path]["get"]["security"] = []
    return described


_EXAMPLE_GUARANTEE: Final = AccuracyGuarantee(
    MaxAccuracyDrop(0.05), AccuracyStatus.CERTIFIED, Basis.SITE, max_drop=0.05, watched_max_drop=0.11, delta=0.05,
    n=410, labels=64, since=datetime(2026, 11, 2, 7, tzinfo=UTC), until=datetime(2026, 11, 20, 17, tzinfo=UTC),
)  # fmt: skip


def schema_name(kind: type[TaskKind[Any]]) -> str:
    """The name of the schema of a kind's answers; `Answer` is that of any."""
    return f"{kind.prediction.__name__}Answer"


def example_answer(kind: type[TaskKind[Any]]) -> dict[str, Any] | None:
    """An answer to show; None if the kind has no example."""
    prediction = kind.prediction.example()
    if prediction is None:
        return None
    return Answer(
        id="85d35cb338cb14a3bb89b4948633cb8e",
        task="mine",
        prediction=prediction,
        model="small_int8",
        tier=Tier.EDGE,
        accuracy=_EXAMPLE_GUARANTEE,
        deadline_met=True,
        timing_ms=Timing(decode=3.1, queue=0.1, infer=8.4, total=11.9),
    ).to_json()


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas(kinds: Kinds) -> dict[str, Any]:
    predictions = [kind.prediction.json_type() for kind in kinds.values()]
    pages = [page for *_, page in _PAGES if page is not None]
    types = [AnswerFields, Comparison, deepstack.Predictions, InferHead, *pages, *predictions]
    types += [each for *_, body, answer in _OPERATIONS for each in (body, answer) if each is not None]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    answers: dict[str, Any] = {
        schema_name(kind): {"allOf": [_reference(AnswerFields.__name__), _reference(prediction.__name__)]}
        for kind, prediction in zip(kinds.values(), predictions, strict=True)
    }
    return {"Answer": {"anyOf": [_reference(name) for name in answers]}, **answers, **components, "Error": _ERROR}


def _operation(
    summary: str, operation: str, answer: dict[str, Any], errors: Iterable[str] = ERRORS, **further: Any
) -> dict[str, Any]:
    """An operation with this `content` of its answer."""
    refusal = {_JSON: {"schema": _reference("Error")}}
    refused = {status: {"description": ERRORS[status], "content": refusal} for status in errors}
    responses = {"200": {"description": summary, "content": answer}, **refused}
    tag = "Images" if "requestBody" in further else "Node"
    return {"summary": summary, "operationId": operation, "tags": [tag], **further, "responses": responses}


def _parameter(name: str, where: str = "query") -> dict[str, Any]:
    field = FIELDS[name]
    required = {"required": True} if where == "path" else {}
    return {"name": name, "in": where, **required, "description": field.description, "schema": dict(field.schema)}


def _page_paths() -> dict[str, Any]:
    """The paths that take no image."""
    paths: dict[str, Any] = {}
    for path, summary, operation, answer in _PAGES:
        schema = {} if answer is None else _reference(answer.__name__)
        content = {"text/plain" if path == "/metrics" else _JSON: {"schema": schema}}
        paths[path] = {"get": _operation(summary, operation, content, ("400", "401", "403", "404", "503"))}
        if "{task}" in path:
            paths[path]["parameters"] = [_parameter("task", "path")]
        elif path in ("/v1/targets", "/readyz"):
            paths[path]["parameters"] = [_parameter("task")]
    listed: dict[str, Any] = {"schema": _reference(Tasks.__name__)}
    for path, summary, operation, returned in (
        ("/v1/tasks/{task}/load", "Load the models of a task, also after a failure", "load", listed),
        (
            "/v1/tasks/{task}/unload",
            "Unload them after their last use, until a request asks for them",
            "unload",
            listed,
        ),
        ("/v2/repository/models/{task}/load", "Load the models of a task (Triton)", "repositoryLoad", {}),
        ("/v2/repository/models/{task}/unload", "Unload the models of a task (Triton)", "repositoryUnload", {}),
        ("/v2/repository/index", "What is loaded (Triton)", "repositoryIndex", {}),
        (f"{DEEPSTACK_CUSTOM}list", "The detection tasks (DeepStack)", "deepstackList", {}),
    ):
        paths[path] = {"post": _operation(summary, operation, {_JSON: returned}, ("400", "401", "403", "404", "503"))}
        if "{task}" in path:
            paths[path]["parameters"] = [_parameter("task", "path")]
    return paths


def _declared_paths() -> dict[str, Any]:
    """The paths of the live view and of review."""
    paths: dict[str, Any] = {}
    for method, path, summary, operation, query, body, answer in _OPERATIONS:
        content = {"image/*": {}} if answer is None else {_JSON: {"schema": _reference(answer.__name__)}}
        further: dict[str, Any] = {}
        if query is not None:
            (fields,) = msgspec.json.schema_components([query])[1].values()
            further["parameters"] = [
                {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
                for name, schema in ((name, _given(schema)) for name, schema in fields["properties"].items())
            ]
        if query is status_routes.StatusQuery:
            content[status_routes.LINES] = content[_JSON]
        if body is not None:
            further["requestBody"] = {"required": True, "content": {_JSON: {"schema": _reference(body.__name__)}}}
        described = _operation(summary, operation, content, ("400", "401", "403", "404", "429", "503"), **further)
        tag = "Node" if path.startswith(status_routes.STATUS_PATH) else "Review"
        paths.setdefault(path, {})[method] = described | {"tags": [tag]}
        if "{id}" in path:
            digits = "{16}" if path.startswith(review_routes.REVIEW_PATH) else "{32}"
            item = {"type": "string", "pattern": f"^[0-9a-f]{digits}$"}
            paths[path]["parameters"] = [
                {"name": "id", "in": "path", "required": True, "description": "Of the image.", "schema": item}
            ]
    return paths


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that is given: a query has no null."""
    return {**schema["anyOf"][0], "description": schema["description"]} if "anyOf" in schema else schema


def _image_paths(kinds: Kinds) -> dict[str, Any]:
    """The paths that take images."""
    typed = {CLASSIFY_PATH: "Classify an image to a target", DETECT_PATH: "Find objects in an image, to a target"}
    paths = {INFER_PATH: {"post": _images("Answer an image to a target, by a task of any kind", "infer")}}
    for path, summary in typed.items():
        if (kind := kinds.get(KIND_OF_FORM[path])) is not None:
            paths[path] = {"post": _images(summary, path.rpartition("/")[2], kind)}
    infer = {"post": _infer(), "parameters": [_parameter("task", "path")]}
    raw = {"schema": {"type": "string", "format": "binary"}}
    paths[COMPARE_PATH] = {
        "post": _operation(
            "What both stages answer to an image that is no traffic, to certify a folder with",
            "compare",
            {_JSON: {"schema": _reference(Comparison.__name__)}},
            parameters=[_parameter("task")],
            requestBody={"required": True, "content": {"application/octet-stream": raw}},
        )
    }
    custom = {"post": _deepstack("deepstackCustom"), "parameters": [_parameter("task", "path")]}
    paths[DEEPSTACK_PATH] = {"post": _deepstack("deepstackDetection")}
    return {**paths, f"{DEEPSTACK_CUSTOM}{{task}}": custom, "/v2/models/{task}/infer": infer}


def _form(**fields: dict[str, Any]) -> dict[str, Any]:
    """The schema of a form with an image and these optional fields."""
    image = {"type": "string", "format": "binary"}
    return {"schema": {"type": "object", "required": ["image"], "properties": {"image": image, **fields}}}


def _images(summary: str, operation: str, kind: type[TaskKind[Any]] | None = None) -> dict[str, Any]:
    """A path that takes one image; its answers are of `kind`, or of any."""
    answer: dict[str, Any] = {"schema": _reference("Answer" if kind is None else schema_name(kind))}
    if kind is not None and (example := example_answer(kind)) is not None:
        answer["example"] = example
    raw = {"schema": {"type": "string", "format": "binary"}}
    media = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
    return _operation(
        summary,
        operation,
        {_JSON: answer},
        description="Every field may also be sent as a header `X-HawkVision-<Field-Name>` or a multipart field.",
        parameters=[_parameter(name) for name in FIELDS],
        requestBody={"required": True, "content": {"multipart/form-data": _form(), **dict.fromkeys(media, raw)}},
    )


def _deepstack(operation: str) -> dict[str, Any]:
    confidence = {"type": "number", "minimum": 0, "maximum": 1, "default": deepstack.MIN_CONFIDENCE}
    form = _form(
        min_confidence=confidence | {"description": "Leave out less confident objects."},
        api_key={"type": "string", "description": "The key, if there is no header Authorization."},
    )
    return _operation(
        "Find objects in an image (DeepStack)",
        operation,
        {_JSON: {"schema": _reference(deepstack.Predictions.__name__)}},
        description=f"The {deepstack.MOST} surest objects, or `top_k` of the query, in pixels; Frigate's detector "
        "`deepstack` calls this. The query takes the fields of /v1/infer.",
        requestBody={"required": True, "content": {"multipart/form-data": form}},
    )


def _infer() -> dict[str, Any]:
    binary: dict[str, Any] = {"application/octet-stream": {}}
    return _operation(
        "Answer images to a target (Open Inference Protocol)",
        "modelInfer",
        {_JSON: {"schema": {"type": "object"}}, **binary},
        description=(
            f"One input `{INPUT}`, BYTES of [N] or [N,1] with N up to {MAX_IMAGES}: encoded images, in binary, or "
            "in base64 where the data are JSON. The fields of /v1/infer are request parameters. Outputs: the tensors "
            f"that /v2/models/{{task}} lists, and `{PREDICTION}`, the fields of /v1/infer as JSON. The response's "
            "parameters say which stage and tier answered and what is guaranteed (`max_drop`, `status`, "
            "`status_reason`, `basis`, `delta`, `n`); `ignored_parameters` lists unknown request parameters."
        ),
        requestBody={"required": True, "content": {_JSON: {"schema": _reference(InferHead.__name__)}, **binary}},
    )

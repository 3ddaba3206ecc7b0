"""The description of the API: `/openapi.json` for tools and `/docs` for people, both from one table.

The page is plain HTML without scripts, because an edge node has no internet to fetch a viewer from.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from edge.servers.oip.decoding import INPUT, MAX_IMAGES, OUTPUTS
from edge.servers.shared.request_fields import FIELDS, TARGET_FIELDS
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    Basis,
    LabelledClass,
    MaxAccuracyDrop,
    Tier,
    Timing,
)
from hawkvision.core.version import __version__
from hawkvision.tasks.classification import Classification

_BASES: Final = [basis.value for basis in Basis]
_STATUSES: Final = [status.value for status in AccuracyStatus]
_ERRORS: Final = {
    "400": "Not an image, or an unknown, malformed or contradictory field",
    "401": "Missing or wrong key",
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

_FRACTION: Final = {"type": "number", "minimum": 0, "maximum": 1}
_MILLIS: Final = {"type": "number", "minimum": 0}


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _schemas() -> dict[str, Any]:
    prediction = {"label": {"type": "string"}, "index": {"type": "integer"}, "confidence": _FRACTION}
    accuracy = {
        "target": {"type": "object", "description": "The target, as the field that stated it."},
        "max_drop": _nullable(_FRACTION | {"description": "Accuracy below the reference stage's, at most."}),
        "status": {"type": "string", "enum": _STATUSES, "description": "Whether `max_drop` is certified."},
        "basis": {"type": "string", "enum": _BASES, "description": "What the status rests on."},
        "delta": _nullable(_FRACTION | {"description": "Probability that the certificate is wrong, at most."}),
        "n": _nullable({"type": "integer", "description": "Images that the certificate was tested on."}),
    }
    answer = {
        "id": {"type": "string"},
        "task": {"type": "string"},
        **prediction,
        "top_k": {"type": "array", "items": _object(prediction)},
        "model": {"type": "string"},
        "tier": {"type": "string", "enum": [tier.value for tier in Tier]},
        "escalated": {"type": "boolean"},
        # `audit` is a label of the escalation metric only: audits run after the answer.
        "reason": _nullable({"type": "string", "enum": ["low_confidence", "target", "edge_busy"]}),
        "degraded": {"type": "boolean"},
        "received_fraction": _FRACTION,
        "accuracy": _object(accuracy),
        "deadline_met": _nullable({"type": "boolean"}),
        "timing_ms": _object(dict.fromkeys(("decode", "queue", "infer", "uplink", "dc", "total"), _MILLIS)),
    }
    error = {"error": {"type": "string"}, "code": {"type": "string"}, "maximum": {"type": "number"}}
    return {
        "Answer": _object(answer),
        "Targets": _targets(),
        "Transports": _transports(),
        "Error": _object(error, optional=("maximum",)),
    }


def _targets() -> dict[str, Any]:
    accuracy = {"value": _FRACTION, "n": {"type": "integer"}, "low": _FRACTION, "high": _FRACTION}
    stage = _object({"variant": {"type": "string"}, "accuracy": _object(accuracy)})
    text, flag = {"type": "string"}, {"type": "boolean"}
    target = {
        "target": {"type": "object", "description": "The fields that ask for it."},
        "max_drop": _nullable(_FRACTION),
        "min_accuracy": _nullable(_FRACTION),
        "status": {"type": "string", "enum": _STATUSES},
        "suspended": flag | {"description": "In the node's own stream; other streams have their own."},
        "basis": {"type": "string", "enum": _BASES},
        "delta": _nullable(_FRACTION),
        "n": _nullable({"type": "integer"}),
        "escalation": _FRACTION | {"description": "Share that leaves the edge, in traffic as certified."},
        "to_best": _FRACTION | {"description": "Share that the reference stage answers."},
        "intermediate": _nullable(text),
        "expected_latency_ms": _nullable(_MILLIS),
    }
    certificates = {
        "basis": {"type": "string", "enum": _BASES},
        "n": {"type": "integer"},
        "as_of": _nullable(text | {"format": "date"}),
        "data": _nullable(_object({"name": text, "sha256": text})),
    }
    datacenter = {
        "url": text,
        "up": flag,
        "transport": {"type": "string", "enum": ["tcp", "datagram"], "description": "What images go over now."},
        "loss": _nullable(_FRACTION | {"description": "Share of datagrams lost; null while it is not measured."}),
        "rtt_ms": _nullable(_MILLIS | {"description": "Of datagrams, without the datacenter's work."}),
    }
    return _object(
        {
            "task": text,
            "policy": text | {"description": "Who decides: `hawkvision`, or a baseline that it is compared with."},
            "edge": stage,
            "best": stage,
            "datacenter": _nullable(_object(datacenter)),
            "certificates_valid": flag,
            "certificates": _object(certificates),
            "maximum_min_accuracy": _FRACTION,
            "targets": {"type": "array", "items": _object(target)},
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
    return _object({"datagram": _nullable(_object(datagram))})


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    errors = {
        status: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, text in _ERRORS.items()
    }

    def get(summary: str, operation: str, media: str = "application/json", schema: str = "") -> dict[str, Any]:
        described = {"$ref": f"#/components/schemas/{schema}"} if schema else {}
        ok = {"description": summary, "content": {media: {"schema": described}}}
        return {"get": {"summary": summary, "operationId": operation, "responses": {"200": ok}}}

    def of_task(methods: dict[str, Any]) -> dict[str, Any]:
        task = {"name": "task", "in": "path", "required": True, "schema": {"type": "string"}}
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
            "/v1/infer": {"post": _images(errors, "Answer an image to a target", "infer")},
            "/v1/classify": {"post": _images(errors, "Classify an image to a target", "classify")},
            "/v1/targets": get("What can be asked for, and what it costs", "targets", schema="Targets"),
            "/v1/transport": get("Where images may be sent as datagrams", "transport", schema="Transports"),
            "/healthz": get("The process is alive", "healthz"),
            "/readyz": get("Models are loaded and warm", "readyz"),
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
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _images(errors: dict[str, Any], summary: str, operation: str) -> dict[str, Any]:
    """A path that takes one image: the fields as query parameters, the image as the body or in a form with them."""
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
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/Answer"},
                        "example": example_answer(),
                    }
                },
            },
            **errors,
        },
    }


def _infer(errors: dict[str, Any]) -> dict[str, Any]:
    """Inference by the Open Inference Protocol, whose specification has the schemas."""
    media = {"application/json": {"schema": {"type": "object"}}, "application/octet-stream": {"schema": {}}}
    return {
        "summary": "Classify images to a target (Open Inference Protocol)",
        "description": (
            f"One input `{INPUT}`, BYTES of [N] or [N,1] with N up to {MAX_IMAGES}: encoded images, in binary, or "
            "in base64 where the data are JSON. The fields of /v1/infer are request parameters. Outputs: "
            f"{', '.join(OUTPUTS)}. The response's parameters say which stage and tier answered and what is guaranteed "
            "(`max_drop`, `status`, `basis`, `delta`, `n`); `ignored_parameters` lists unknown request parameters."
        ),
        "operationId": "modelInfer",
        "requestBody": {"required": True, "content": media},
        "responses": {"200": {"description": "The answers", "content": media}, **errors},
    }


_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.4rem;text-align:left;"
    "vertical-align:top}code,pre{background:#f4f4f4;border-radius:4px;padding:.1rem .3rem}"
    "pre{padding:1rem;overflow:auto}"
)


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    """The rows of a table, whose cells are HTML."""
    return "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def allowed(schema: Mapping[str, Any]) -> str:
    """The values that a schema allows, in words."""
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema["type"] == "string":
        longest = schema.get("maxLength")
        return "text" if longest is None else f"text, at most {longest} characters"
    noun = "whole number" if schema["type"] == "integer" else "number"
    low = f"from {schema['minimum']}" if "minimum" in schema else ""
    low = f"above {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else low
    high = f"to {schema['maximum']:,g}" if "maximum" in schema else ""
    return " ".join(word for word in (noun, low, high) if word)


def _form() -> str:
    """A form that sends an image; every field has a value, because browsers send empty ones too."""
    quality, top_k = FIELDS["quality"], FIELDS["top_k"]
    default = quality.schema["default"]
    choices = "".join(
        f"<option{' selected' if choice == default else ''}>{html.escape(choice)}</option>"
        for choice in quality.schema["enum"]
    )
    return (
        "<form method=post action=/v1/classify enctype=multipart/form-data>"
        "<p><label>Image <input type=file name=image accept='image/jpeg,image/png,image/webp' required></label></p>"
        f"<p><label>quality <select name=quality>{choices}</select></label> "
        f"<label>top_k <input type=number name=top_k value={top_k.schema['default']} "
        f"min={top_k.schema['minimum']} max={top_k.schema['maximum']}></label> "
        "<button>Classify</button></p></form>"
    )


def page(address: str) -> str:
    """The documentation as one HTML page.

    Args:
        address: this node's URL, as the reader's browser knows it.
    """
    described = document()
    classify = described["paths"]["/v1/classify"]["post"]
    fields = _rows(
        (
            _code(f.name),
            html.escape(allowed(f.schema)),
            _code(str(f.schema["default"])) if "default" in f.schema else "",
            html.escape(f.description),
        )
        for f in FIELDS.values()
    )
    paths = _rows(
        (
            _code(next(m for m in methods if m != "parameters").upper()),
            _code(path),
            html.escape(next(m["summary"] for m in methods.values() if "summary" in m)),
        )
        for path, methods in described["paths"].items()
    )
    errors = _rows((_code(status), html.escape(text)) for status, text in _ERRORS.items())
    curl = f"curl --data-binary @cat.jpg {shlex.quote(address + '/v1/classify?max_accuracy_drop=0.01&deadline_ms=200')}"
    python = (
        f"from hawkvision import Client\n\nwith Client({address!r}) as client:\n"
        '    answer = client.classify("cat.jpg", max_accuracy_drop=0.01, deadline_ms=200)\n'
        "    print(answer.label, answer.accuracy.status)"
    )
    example = json.dumps(example_answer(), indent=2, ensure_ascii=False)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>HawkVision</title><style>{_STYLE}</style>"
        f"<h1>HawkVision edge node {html.escape(__version__)}</h1>"
        f"<p>{html.escape(described['info']['description'])} This node: {_code(address)}</p>"
        f"<pre>{html.escape(curl)}</pre><pre>{html.escape(python)}</pre>"
        f"<h2>Try it</h2>{_form()}<p>Where the node asks for a key, send it as "
        f"{_code('Authorization: Bearer KEY')}, which a form cannot do.</p>"
        f"<h2>Paths</h2><table>{paths}</table>"
        f"<h2><code>POST /v1/infer</code>, <code>POST /v1/classify</code></h2>"
        f"<p>The body is the image: JPEG, PNG or WebP, raw or as <code>image</code> in a multipart form. "
        f"{html.escape(classify['description'])} "
        f"At most one of {', '.join(map(_code, TARGET_FIELDS))}.</p>"
        f"<table><tr><th>Field</th><th>Allowed</th><th>Default</th><th>Meaning</th></tr>{fields}</table>"
        f"<h2>Answer</h2><pre>{html.escape(example)}</pre>"
        f"<h2>Errors</h2><p>Always <code>{{&quot;error&quot;: …, &quot;code&quot;: …}}</code>.</p>"
        f"<table>{errors}</table><p>Machine-readable: <a href=/openapi.json>/openapi.json</a></p>"
    )


def example_answer() -> dict[str, Any]:
    """An example of an answer."""
    return Answer(
        id="85d35cb338cb14a3bb89b4948633cb8e",
        task="imagenet",
        prediction=Classification((LabelledClass("Egyptian cat", 285, 0.612), LabelledClass("tiger cat", 282, 0.238))),
        model="efficientnet_lite0_int8",
        tier=Tier.EDGE,
        accuracy=AccuracyGuarantee(MaxAccuracyDrop(0.01), AccuracyStatus.CERTIFIED, Basis.LABELLED, 0.01, 0.05, 410),
        deadline_met=True,
        timing_ms=Timing(decode=3.1, queue=0.1, infer=8.4, total=11.9),
    ).to_json()

"""The description of the API for people: `/docs`.

The page is plain HTML without scripts, because an edge node has no internet to fetch a viewer from.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from edge.servers.answer_schemas import Kinds, example_answer
from edge.servers.openapi import ERRORS, TYPED, document
from edge.servers.shared.request_fields import FIELDS, TARGET_FIELDS
from hawkvision.core.version import __version__
from hawkvision.tasks.registry import INFER_PATH, form_of, installed_kinds

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


def _form(tasks: Mapping[str, str]) -> str:
    """A form that sends an image; every field has a value, because browsers send empty ones too."""
    quality, top_k = FIELDS["quality"], FIELDS["top_k"]
    default = quality.schema["default"]
    choices = "".join(
        f"<option{' selected' if choice == default else ''}>{html.escape(choice)}</option>"
        for choice in quality.schema["enum"]
    )
    return (
        "<form method=post action=/v1/infer enctype=multipart/form-data>"
        "<p><label>Image <input type=file name=image accept='image/jpeg,image/png,image/webp' required></label></p>"
        f"<p>{_choice_of(tasks)}<label>quality <select name=quality>{choices}</select></label> "
        f"<label>top_k <input type=number name=top_k value={top_k.schema['default']} "
        f"min={top_k.schema['minimum']} max={top_k.schema['maximum']}></label> "
        "<button>Send</button></p></form>"
    )


def _choice_of(tasks: Mapping[str, str]) -> str:
    """The choice between several tasks."""
    if len(tasks) < 2:
        return ""
    choices = "".join(f"<option>{html.escape(task)}</option>" for task in tasks)
    return f"<label>task <select name=task>{choices}</select></label> "


def _calls(address: str, tasks: Mapping[str, str]) -> str:
    """A call of each task from a shell, and one of the first from Python."""
    shown = ""
    for task, kind in tasks.items():
        asked = urlencode({"task": task, "max_accuracy_drop": 0.05, "deadline_ms": 200})
        curl = f"curl --data-binary @cat.jpg {shlex.quote(f'{address}{form_of(kind)}?{asked}')}"
        shown += f"<pre>{html.escape(curl)}</pre>"
    method = form_of(next(iter(tasks.values()), None)).rpartition("/")[2]
    python = (
        f"from hawkvision import Client\n\nwith Client({address!r}) as client:\n"
        f'    answer = client.{method}("cat.jpg", max_accuracy_drop=0.05, deadline_ms=200)\n'
        "    print(answer.prediction.summary(), answer.accuracy.status)"
    )
    return f"{shown}<pre>{html.escape(python)}</pre>"


def page(address: str, tasks: Mapping[str, str], kinds: Kinds | None = None) -> str:
    """The documentation as one HTML page.

    Args:
        address: this node's URL, as the reader's browser knows it.
        tasks: that it serves, with the names of their kinds, the default first; empty while they are loading.
        kinds: see `document`.
    """
    kinds = installed_kinds() if kinds is None else kinds
    described = document(kinds)
    images = described["paths"][INFER_PATH]["post"]
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
    errors = _rows((_code(status), html.escape(text)) for status, text in ERRORS.items())
    examples = "".join(
        f"<h3>{html.escape(name)}</h3><pre>{html.escape(json.dumps(found, indent=2, ensure_ascii=False))}</pre>"
        for name, kind in kinds.items()
        if (found := example_answer(kind)) is not None
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>HawkVision</title><style>{_STYLE}</style>"
        f"<h1>HawkVision edge node {html.escape(__version__)}</h1>"
        f"<p>{html.escape(described['info']['description'])} This node: {_code(address)}</p>"
        f"{_calls(address, tasks)}<h2>Try it</h2>{_form(tasks)}<p>Where the node asks for a key, send it as "
        f"{_code('Authorization: Bearer KEY')}, which a form cannot do.</p>"
        f"<h2>Paths</h2><table>{paths}</table>"
        f"<h2>{', '.join(_code(f'POST {path}') for path in (INFER_PATH, *TYPED))}</h2>"
        f"<p>The body is the image: JPEG, PNG or WebP, raw or as <code>image</code> in a multipart form. "
        f"{html.escape(images['description'])} "
        f"At most one of {', '.join(map(_code, TARGET_FIELDS))}.</p>"
        f"<table><tr><th>Field</th><th>Allowed</th><th>Default</th><th>Meaning</th></tr>{fields}</table>"
        f"<h2>Answer, by kind of task</h2>{examples}"
        f"<h2>Errors</h2><p>Always <code>{{&quot;error&quot;: …, &quot;code&quot;: …}}</code>.</p>"
        f"<table>{errors}</table><p>Machine-readable: <a href=/openapi.json>/openapi.json</a></p>"
    )

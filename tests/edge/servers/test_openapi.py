"""The description of the API: it is valid, complete, and true of what a node answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from edge.servers import openapi
from edge.servers.openapi import ERRORS
from hawkvision.core import errors
from hawkvision.core.errors import HawkVisionError, RequestError, ServiceError
from hawkvision.servers.keys import OPEN_PATHS
from tests.edge.conftest import Caller

DOCUMENT: Final = json.loads(json.dumps(openapi.document()))
NEVER_LEAVE_A_NODE: Final = {"unreachable", "bad_reply"}
"""Codes of errors that arise in clients."""
FILES: Final = ("page.css", "page.js", "swagger-ui.css", "swagger-ui-bundle.js")
FOREIGN: Final = {"InferHead", "InputTensor", "WantedOutput"}
"""Schemas whose fields the Open Inference Protocol describes."""


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    """Of a schema whose references are into the document."""
    return Draft202012Validator({**DOCUMENT, **schema})


def nested(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from nested(each)
    elif isinstance(value, list):
        for each in value:
            yield from nested(each)


def test_every_schema_is_valid_and_every_reference_leads_to_one() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for name, schema in schemas.items():
        Draft202012Validator.check_schema(schema)
        assert schema.keys() & {"type", "anyOf", "allOf", "enum"}, name
        for field, described in schema.get("properties", {}).items():
            assert name in FOREIGN or described.get("description"), f"{name}.{field} says nothing"
    for each in nested(DOCUMENT):
        if isinstance(reference := each.get("$ref"), str):
            assert reference.rpartition("/")[2] in schemas, reference


def test_every_example_fits_its_schema() -> None:
    described = [each for each in nested(DOCUMENT["paths"]) if "example" in each]
    assert described
    for each in described:
        validator(each["schema"]).validate(each["example"])


def test_operations_have_names_of_their_own_and_state_the_parameters_of_their_path() -> None:
    names = [each["operationId"] for each in nested(DOCUMENT["paths"]) if "operationId" in each]
    assert len(names) == len(set(names))
    for path, methods in DOCUMENT["paths"].items():
        declared = {each["name"] for each in methods.get("parameters", ()) if each["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path)), path


def test_only_a_node_with_keys_asks_for_one() -> None:
    assert DOCUMENT["security"] == [{"key": []}]
    assert DOCUMENT["paths"]["/healthz"]["get"]["security"] == []
    open_node = openapi.document(keys=False)
    assert "security" not in json.dumps(open_node)


@pytest.fixture
def page(caller: Caller) -> str:
    return caller.get("/docs").body.decode()


def test_the_page_loads_what_it_needs_from_the_node_and_nothing_from_elsewhere(caller: Caller, page: str) -> None:
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {name for name in loaded if name.startswith("docs/")} == {f"docs/{each}" for each in FILES}
    assert set(loaded) - {f"docs/{each}" for each in FILES} == {"openapi.json", "data:,"}
    for name in FILES:
        reply = caller.get(f"/docs/{name}")
        assert reply.status == 200
        assert reply.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
        assert f"/docs/{name}" in OPEN_PATHS, "the page asks for the key, and has none yet"
    policy = caller.get("/docs").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_description_of_a_node_without_keys_is_served(caller: Caller) -> None:
    assert caller.get("/openapi.json").json == json.loads(json.dumps(openapi.document(keys=False)))


def subclasses(error: type[HawkVisionError]) -> Iterator[type[HawkVisionError]]:
    for each in error.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize("family", [RequestError, ServiceError])
def test_every_status_of_an_error_is_explained(family: type[HawkVisionError]) -> None:
    codes = {each.code: each.status for each in subclasses(family) if each.__module__ == errors.__name__}
    assert codes
    assert {str(status) for code, status in codes.items() if code not in NEVER_LEAVE_A_NODE} <= set(ERRORS)

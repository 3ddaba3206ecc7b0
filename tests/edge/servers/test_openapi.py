"""The description of the API: it is valid, complete, and true of what a node answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from edge.servers import openapi
from edge.servers.openapi import ERRORS
from hawkvision.core import errors
from hawkvision.core.errors import HawkVisionError, RequestError, ServiceError

DOCUMENT: Final = json.loads(json.dumps(openapi.document()))
NEVER_LEAVE_A_NODE: Final = {"unreachable", "bad_reply"}
"""Codes of errors that arise in clients."""


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
        assert schema.get("type") or schema.get("anyOf"), name
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
        assert declared == ({"task"} if "{task}" in path else set()), path


def subclasses(error: type[HawkVisionError]) -> Iterator[type[HawkVisionError]]:
    for each in error.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize("family", [RequestError, ServiceError])
def test_every_status_of_an_error_is_explained(family: type[HawkVisionError]) -> None:
    codes = {each.code: each.status for each in subclasses(family) if each.__module__ == errors.__name__}
    assert codes
    assert {str(status) for code, status in codes.items() if code not in NEVER_LEAVE_A_NODE} <= set(ERRORS)

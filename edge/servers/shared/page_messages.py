"""Queries and responses of the paths that take no image."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edge.servers.shared.request_fields import read_query
from hawkvision.core.errors import BadField
from hawkvision.imaging.preprocessing import probe

Given = TypeVar("Given", bound=msgspec.Struct)


def fresh_json(value: Any) -> Response:
    """A value as JSON, which nobody may keep."""
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})


def fresh_image(body: bytes) -> Response:
    """A caller's image, which nobody may keep."""
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(body, media_type=f"image/{probe(body).format.lower()}", headers=headers)


def query_of(request: Request, declared: type[Given]) -> Given:
    """The query of a request.

    Raises:
        BadField: if it is not as declared.
    """
    given = {name: text for _, name, text in read_query(request.scope["query_string"])}
    try:
        return msgspec.convert(given, declared, strict=False)
    except msgspec.ValidationError as error:
        raise BadField(f"query: {error}") from None

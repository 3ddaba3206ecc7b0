"""Pictures that come in multipart forms, with the fields beside them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from edge.fields import Source
from hawkvision.errors import BadField


async def read_multipart(raw_headers: list[tuple[bytes, bytes]], data: bytes) -> tuple[bytes, list[Source]]:
    """The picture in `image` and the other fields of a multipart form."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield data

    try:
        parser = MultiPartParser(Headers(raw=raw_headers), stream(), max_files=1, max_fields=16)
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, AttributeError) as error:
        # The parser raises bare KeyError or AttributeError for a missing boundary or disposition.
        raise BadField(f"multipart body: {getattr(error, 'message', None) or error!r}") from None
    picture: bytes | None = None
    fields: list[Source] = []
    async with _closing(form):
        for name, value in form.multi_items():
            if name == "image":
                if picture is not None:
                    raise BadField("multipart: expected one 'image', got several")
                picture = await value.read() if isinstance(value, UploadFile) else value.encode("latin-1", "replace")
            elif isinstance(value, UploadFile):
                raise BadField(f"multipart: the file must be named 'image', got {name[:40]!r}")
            else:
                fields.append(("multipart", name, value))
    if not picture:
        raise BadField("multipart: expected the picture in a part named 'image'")
    return picture, fields


class _closing:  # noqa: N801 - used like contextlib.aclosing, which calls aclose
    def __init__(self, form: Any) -> None:
        self._form = form

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        await self._form.close()

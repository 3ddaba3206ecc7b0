"""Multipart forms (RFC 7578) with an image and request fields.

The image is the part named `image`, either a file (with `filename` or `filename*`) or a plain field. Parts may come in
any order.
"""

from __future__ import annotations

import asyncio
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from edge.servers.shared.request_fields import MAX_FIELDS, Source
from hawkvision.core.errors import BadField, BadImage, UnsupportedMedia

MAX_PARTS: Final = MAX_FIELDS + 1
MAX_FIELD_BYTES: Final = 4096
"""Longest plain field; the longest valid value has 128 characters."""
MAX_PART_HEADER_BYTES: Final = 16 * 1024
"""All headers of a part together; a file name has at most some hundred bytes."""
FORM_ON_LOOP_BYTES: Final = 64 * 1024
"""Longer forms are parsed in a thread."""

_IMAGE: Final = "image"


def is_form(content_type: str) -> bool:
    """Whether a header Content-Type states a form."""
    return content_type.lower().startswith("multipart/form-data")


def check_form(content_type: str) -> None:
    """Refuse a body that is no form before it is read.

    Raises:
        UnsupportedMedia: for another Content-Type.
    """
    if not is_form(content_type):
        raise UnsupportedMedia(
            f"Content-Type {content_type[:60]!r}: expected multipart/form-data with the image in a part named "
            f"{_IMAGE!r}"
        )


async def read_form(content_type: str, body: bytes) -> tuple[bytes, list[Source]]:
    """As `parse_form`, in a thread if the form is large.

    Raises:
        BadField, BadImage: as `parse_form`.
    """
    if len(body) <= FORM_ON_LOOP_BYTES:
        return parse_form(content_type, body)
    return await asyncio.to_thread(parse_form, content_type, body)


def parse_form(content_type: str, body: bytes) -> tuple[bytes, list[Source]]:
    """The image and the other fields of a form.

    Args:
        content_type: the header, with the boundary.
        body: the complete form.

    Raises:
        BadField: if it is malformed or cut off, or has no image, several images or another file.
        BadImage: if the image is empty.
    """
    boundary = _parameter(content_type, "boundary")
    if not boundary:
        raise BadField("multipart: Content-Type has no boundary")
    delimiter = boundary.encode("latin-1", "replace")
    if body.count(b"\r\n--" + delimiter) > MAX_PARTS + 1:
        raise BadField(f"multipart: expected at most {MAX_PARTS} parts")
    if not body.startswith(b"--" + delimiter):  # a preamble is ignored (RFC 2046 §5.1.1)
        body = body[max(0, body.find(b"\r\n--" + delimiter)) :]
    reader = _Reader()
    try:
        parser = MultipartParser(
            delimiter,
            {
                "on_part_begin": reader.on_part_begin,
                "on_header_field": reader.on_header_field,
                "on_header_value": reader.on_header_value,
                "on_header_end": reader.on_header_end,
                "on_headers_finished": reader.on_headers_finished,
                "on_part_data": reader.on_part_data,
                "on_part_end": reader.on_part_end,
                "on_end": reader.on_end,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise BadField(f"multipart: {error}") from None
    if not reader.ended:
        raise BadField("multipart: the form is cut off; expected the boundary and '--' at its end")
    if reader.image is None:
        raise BadField(f"multipart: expected the image in a part named {_IMAGE!r}")
    if not reader.image:
        raise BadImage(f"multipart: the part {_IMAGE!r} is empty; expected an image in it")
    return reader.image, reader.fields


class _Reader:
    """Collects the parts from the parser's callbacks."""

    def __init__(self) -> None:
        self.image: bytes | None = None
        self.fields: list[Source] = []
        self.ended = False
        self._number = 0
        self._name = ""
        self._file = False
        self._pieces: list[bytes] = []
        self._size = 0
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._key = b""
        self._value = b""

    def on_part_begin(self) -> None:
        self._number += 1
        if self._number > MAX_PARTS:
            raise BadField(f"multipart: expected at most {MAX_PARTS} parts")
        self._headers, self._header_bytes = {}, 0
        self._pieces, self._size = [], 0
        self._key = self._value = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._key += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, size: int) -> None:
        self._header_bytes += size + 1  # an empty header costs time too
        if self._header_bytes > MAX_PART_HEADER_BYTES:
            raise BadField(f"multipart: the headers of part {self._number} exceed {MAX_PART_HEADER_BYTES} bytes")

    def on_header_end(self) -> None:
        self._headers[self._key.decode("latin-1").lower()] = self._value.decode("utf-8", "replace")
        self._key = self._value = b""

    def on_headers_finished(self) -> None:
        disposition = self._headers.get("content-disposition", "")
        name = _parameter(disposition, "name")
        if not name:
            raise BadField(f"multipart: part {self._number} has no name; expected Content-Disposition with name=")
        self._name = name
        self._file = _parameter(disposition, "filename") is not None
        encoding = self._headers.get("content-transfer-encoding", "binary").strip().lower()
        if encoding not in ("binary", "8bit", "7bit", "identity"):
            raise BadField(f"multipart: {name[:40]!r} is encoded in {encoding[:40]!r}; send its bytes as they are")
        if name == _IMAGE:
            if self.image is not None:
                raise BadField(f"multipart: expected one {_IMAGE!r}, got several")
        elif self._file:
            raise BadField(f"multipart: the file must be named {_IMAGE!r}, got {name[:40]!r}")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._name != _IMAGE and self._size > MAX_FIELD_BYTES:
            raise BadField(f"multipart: {self._name[:40]!r} exceeds {MAX_FIELD_BYTES} bytes")
        self._pieces.append(data[start:end])

    def on_part_end(self) -> None:
        content = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        if self._name == _IMAGE:
            self.image = content
            return
        try:
            self.fields.append(("multipart", self._name, content.decode()))
        except UnicodeDecodeError:
            raise BadField(f"multipart: {self._name[:40]!r} is not UTF-8") from None

    def on_end(self) -> None:
        self.ended = True


def _parameter(header: str, name: str) -> str | None:
    """A parameter of a header, also quoted or in the form of RFC 5987 (`name*=utf-8''…`); None if it is missing."""
    message = Message()
    try:
        message["content-type"] = header  # every header writes parameters in this way
        value = message.get_param(name)
        return None if value is None else collapse_rfc2231_value(value)
    except (ValueError, LookupError):
        return None

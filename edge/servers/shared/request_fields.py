"""The fields of a request: one table for query, headers, multipart fields and OpenAPI.

A field may come as a query parameter (`deadline_ms=80`), a header (`X-HawkVision-Deadline-Ms: 80`) or a multipart
field. Unknown names, values out of range and contradictions are errors; nothing is guessed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from hawkvision.core.errors import BadField
from hawkvision.core.types import (
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    Quality,
    RequestFields,
    Target,
)

HEADER_PREFIX: Final = "x-hawkvision-"
MAX_FIELDS: Final = 32
"""Fields in one query string; ten are defined."""
MAX_NAME_LENGTH: Final = 128
MAX_TOP_K: Final = 100
MAX_NUMBER_LENGTH: Final = 32
MAX_DEADLINE_MS: Final = 600_000.0

Source = tuple[str, str, str]
"""(where it was written, field name, value)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its parser, and its JSON schema for the documentation."""

    name: str
    read: Callable[[str, str], Any]
    schema: Mapping[str, Any]
    description: str


def _fraction(where: str, text: str) -> float:
    value = _number(where, text)
    if not 0.0 <= value <= 1.0:
        raise BadField(f"{where}: expected a fraction from 0 to 1, got {text[:40]!r}")
    return value + 0.0  # zero without a sign


def _number(where: str, text: str) -> float:
    try:
        value = float(text) if len(text) <= MAX_NUMBER_LENGTH else math.nan
    except ValueError:
        value = math.nan
    # A decimal number and nothing else: float() also takes 'nan', 'inf', '1_0', blanks and other scripts' digits.
    if not math.isfinite(value) or "_" in text or not text.isascii() or text != text.strip():
        raise BadField(f"{where}: expected a number, got {text[:40]!r}")
    return value


def _deadline(where: str, text: str) -> float:
    value = _number(where, text)
    if not 0.0 < value <= MAX_DEADLINE_MS:
        raise BadField(
            f"{where}: expected milliseconds, more than 0 and at most {MAX_DEADLINE_MS:g}, got {text[:40]!r}"
        )
    return value


def _top_k(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_TOP_K):
        raise BadField(f"{where}: expected a whole number from 1 to {MAX_TOP_K}, got {text[:40]!r}")
    return int(text)


def _one_of(kind: type[Quality] | type[OnMiss]) -> Callable[[str, str], Any]:
    def read(where: str, text: str) -> Quality | OnMiss:
        try:
            return kind(text)
        except ValueError:
            expected = ", ".join(member.value for member in kind)
            raise BadField(f"{where}: expected one of {expected}; got {text[:40]!r}") from None

    return read


def _name(where: str, text: str) -> str:
    if not 1 <= len(text) <= MAX_NAME_LENGTH or not text.isprintable():
        got = repr(text) if len(text) <= 40 else f"{len(text)}, which begin with {text[:40]!r}"
        raise BadField(f"{where}: expected 1 to {MAX_NAME_LENGTH} printable characters, got {got}")
    return text


_FRACTION_SCHEMA = {"type": "number", "minimum": 0, "maximum": 1}
_NAME_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_LENGTH}

FIELDS: Final = {
    field.name: field
    for field in (
        Field("task", _name, _NAME_SCHEMA, "The task to answer; default: the node's first."),
        Field("kind", _name, _NAME_SCHEMA, "The kind of task to answer; typed forms imply it."),
        Field(
            "min_accuracy",
            _fraction,
            _FRACTION_SCHEMA,
            "At least this share of answers is right, over images like those of the profile.",
        ),
        Field(
            "max_accuracy_drop",
            _fraction,
            _FRACTION_SCHEMA,
            "At most this much less accurate than the cascade's reference stage; the target that can be certified.",
        ),
        Field(
            "quality",
            _one_of(Quality),
            {"type": "string", "enum": [q.value for q in Quality]},
            "A target class, for callers who do not want to choose a number; without any target: balanced.",
        ),
        Field(
            "min_confidence",
            _fraction,
            _FRACTION_SCHEMA,
            "Escalate unless this answer is right with at least this calibrated probability.",
        ),
        Field(
            "deadline_ms",
            _deadline,
            {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_MS},
            "Milliseconds from the first byte received; default: none.",
        ),
        Field(
            "on_miss",
            _one_of(OnMiss),
            {"type": "string", "enum": [m.value for m in OnMiss], "default": "degrade"},
            "When the deadline would pass: answer below target and say so, wait, or fail with 504.",
        ),
        Field("stream", _name, _NAME_SCHEMA, "Names the caller's stream."),
        Field(
            "top_k",
            _top_k,
            {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K, "default": 5},
            "How many classes a classification lists.",
        ),
    )
}

TARGET_FIELDS: Final = ("min_accuracy", "max_accuracy_drop", "quality", "min_confidence")

_DEFAULT = RequestFields()


def read_query(query: bytes) -> list[Source]:
    """The fields of a query string; empty pairs, as in `a=1&&b=2&`, are skipped.

    Raises:
        BadField: if it is not a UTF-8 list of `name=value`, or has more than `MAX_FIELDS` entries.
    """
    written = b"&".join(filter(None, query.split(b"&")))
    if not written:
        return []
    try:
        pairs = parse_qsl(
            written.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError as error:
        raise BadField(f"query: expected name=value pairs, at most {MAX_FIELDS}: {error}") from None
    return [("query", name, value) for name, value in pairs]


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[Source]:
    """The fields in `X-HawkVision-*` headers, whose names are in lower case."""
    return [
        ("header", name[len(HEADER_PREFIX) :].decode("latin-1").replace("-", "_"), value.decode("latin-1").strip())
        for name, value in headers
        if name.startswith(HEADER_PREFIX.encode())
    ]


MAX_CACHED_BYTES: Final = 1024
"""Longer requests are parsed anew each time, so that the cache stays below 1 MB."""


def read_request(query: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> RequestFields:
    """The request that a query and `X-HawkVision-*` headers state.

    Raises:
        BadField: as `parse_request`.
    """
    if len(query) + sum(len(value) for _, value in headers) > MAX_CACHED_BYTES:
        return parse_request(read_query(query) + read_headers(headers))
    return _cached(query, headers)


@functools.lru_cache(maxsize=1024)
def _cached(query: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> RequestFields:
    """As `read_request`; a camera asks the same for every frame. Errors are not cached."""
    return parse_request(read_query(query) + read_headers(headers))


def with_stream(template: bytes, meta: bytes) -> RequestFields:
    """The request of a datagram: a query string, and the name of the stream in UTF-8, which may be empty.

    Raises:
        BadField: as `parse_request`.
    """
    if not meta:
        return read_request(template, ())
    try:
        stream = meta.decode()
    except UnicodeDecodeError:
        raise BadField(f"meta: expected the stream's name in UTF-8, got {meta[:40]!r}") from None
    return parse_request([*read_query(template), ("meta", "stream", stream)])


def distinct(sources: Iterable[Source]) -> Iterator[Source]:
    """Each field once, also if it is given twice with the same value.

    Raises:
        BadField: for a field that is given twice differently.
    """
    seen: dict[str, tuple[str, str]] = {}
    for where, name, text in sources:
        if name not in seen:
            seen[name] = (where, text)
            yield where, name, text
        elif (earlier := seen[name])[1] != text:
            raise BadField(
                f"{name[:40]}: expected one value, got {earlier[1][:40]!r} ({earlier[0]}) and {text[:40]!r} ({where})"
            )


def unknown_field(where: str, name: str, known: Iterable[str]) -> BadField:
    """The error for a field that means nothing here."""
    return BadField(f"{where}: unknown field {name[:40]!r}; known fields: {', '.join(known)}")


def read_task(query: bytes) -> str | None:
    """The task that the query of a page names, which has no other field.

    Raises:
        BadField: as `parse_request`.
    """
    task: str | None = None
    for where, name, text in distinct(read_query(query)):
        if name != "task":
            raise unknown_field(where, name, ("task",))
        task = FIELDS[name].read(f"{where}: {name}", text)
    return task


def parse_request(sources: Iterable[Source]) -> RequestFields:
    """The request that these fields state.

    Raises:
        BadField: for an unknown field, a value out of range, a field given twice differently, or two targets.
    """
    values: dict[str, Any] = {}
    for where, name, text in distinct(sources):
        field = FIELDS.get(name)
        if field is None:
            raise unknown_field(where, name, FIELDS)
        values[name] = field.read(f"{where}: {name}", text)
    if not values:
        return _DEFAULT
    return RequestFields(
        task=values.get("task"),
        target=_target(values),
        deadline_ms=values.get("deadline_ms"),
        on_miss=values.get("on_miss", OnMiss.DEGRADE),
        stream=values.get("stream"),
        top_k=values.get("top_k", _DEFAULT.top_k),
        kind=values.get("kind"),
    )


def _target(values: Mapping[str, Any]) -> Target:
    given = [name for name in TARGET_FIELDS if name in values]
    if len(given) > 1:
        raise BadField(f"expected at most one of {', '.join(TARGET_FIELDS)}; got {' and '.join(given)}")
    match given:
        case ["min_accuracy"]:
            return MinAccuracy(values["min_accuracy"])
        case ["max_accuracy_drop"]:
            return MaxAccuracyDrop(values["max_accuracy_drop"])
        case ["min_confidence"]:
            return MinConfidence(values["min_confidence"])
        case ["quality"]:
            quality: Quality = values["quality"]
            return quality
        case _:
            return _DEFAULT.target

"""Detection in the form of DeepStack: `POST /v1/vision/detection`, as Frigate's detector plug-in calls it, and
`POST /v1/vision/custom/TASK`.

    multipart/form-data: image, min_confidence (default 0.4, also if it is empty), api_key; others mean nothing
    200 {"success": true, "duration": 0.041, "predictions": [
          {"label": "person", "confidence": 0.93, "x_min": 12, "y_min": 40, "x_max": 97, "y_max": 231}, …]}
    4xx, 5xx {"success": false, "error": …, "code": …}

Predictions are the surest objects from `min_confidence` on, the surest first, in pixels of the upright image. There
are at most `MOST` of them, because Frigate has room for no more; `top_k` in the query allows more. Other fields of
`/v1/infer` may be given in the query too. The key may be the header Authorization, or the field `api_key` of a form of
at most `UNKEYED_BYTES`. `duration` is in seconds. Source of the form: DeepStack's documentation, object
detection, and its server, which takes an empty confidence as none and ignores fields that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from edge.servers.shared.request_fields import FIELDS, Source, distinct, parse_request
from hawkvision.core.errors import Unauthorized
from hawkvision.core.types import Answer, RequestFields
from hawkvision.imaging.preprocessing import probe
from hawkvision.servers.keys import Keys
from hawkvision.tasks.registry import DEEPSTACK_CUSTOM, DEEPSTACK_PATH

MOST: Final = 20
MIN_CONFIDENCE: Final = 0.4
UNKEYED_BYTES: Final = 1024 * 1024
"""Longest form of a caller whose key is in it, and who is unknown until it has been read. Frigate sends some 30 kB."""
_TURNED: Final = 5
"""From this EXIF orientation on, width and height are exchanged."""


def takes_form(path: str) -> bool:
    """Whether images in DeepStack's form are sent to a path."""
    return path == DEEPSTACK_PATH or (path.startswith(DEEPSTACK_CUSTOM) and path != f"{DEEPSTACK_CUSTOM}list")


def check_unkeyed(declared: str | None, keys: Keys) -> None:
    """Refuse a long form of a caller without Authorization before it is read.

    Args:
        declared: the header Content-Length.
        keys: of the node.

    Raises:
        Unauthorized: if it is longer than `UNKEYED_BYTES`, or does not say how long it is.
    """
    whole = declared is not None and declared.isascii() and declared.isdigit() and len(declared) <= 10
    if not whole or int(declared or 0) > UNKEYED_BYTES:
        raise Unauthorized(
            f"{keys.refused().message}, or in 'api_key' of a form that states its length, at most {UNKEYED_BYTES} bytes"
        )


def parse(path: str, query: Sequence[Source], fields: Sequence[Source]) -> tuple[RequestFields, float, int, str | None]:
    """The request in a path, which may name the task, a query, and the fields of a form.

    Returns:
        The request, the least confidence of an object, how many objects at most, and the key in the form as the value
        of the header Authorization.

    Raises:
        BadField: for an unknown field of the query, a value out of range, or another task there than in the path.
    """
    key, min_confidence = None, MIN_CONFIDENCE
    for where, name, text in distinct(each for each in fields if each[1] in ("api_key", "min_confidence")):
        if name == "api_key":
            key = text or None
        elif text:
            min_confidence = FIELDS[name].read(f"{where}: {name}", text)
    named = [("path", "task", path.removeprefix(DEEPSTACK_CUSTOM))] if path != DEEPSTACK_PATH else []
    request = parse_request([*named, *query])
    most = request.top_k if any(name == "top_k" for _, name, _ in query) else MOST
    return request, min_confidence, most, None if key is None else f"Bearer {key}"


class Predicted(msgspec.Struct, frozen=True):
    """An object, with the corners of its box in pixels of the upright image."""

    label: Annotated[str, Meta(description="The name of its class.")]
    confidence: Annotated[float, Meta(description="The calibrated probability that class and box are right.")]
    x_min: Annotated[int, Meta(description="Left edge.")]
    y_min: Annotated[int, Meta(description="Upper edge.")]
    x_max: Annotated[int, Meta(description="Right edge.")]
    y_max: Annotated[int, Meta(description="Lower edge.")]


class Predictions(msgspec.Struct, frozen=True):
    """Detection in DeepStack's form."""

    success: Annotated[bool, Meta(description="True; an error has false.")]
    duration: Annotated[float, Meta(description="Seconds that the answer took.")]
    predictions: Annotated[list[Predicted], Meta(description="The objects, surest first.")]


def reply(answer: Answer, image: bytes, min_confidence: float, most: int) -> Predictions:
    """The body of an answer to `image`, which is of kind `detection`."""
    header = probe(image)
    width, height = header.width, header.height
    if header.orientation >= _TURNED:
        width, height = height, width
    found = [
        Predicted(
            each["label"],
            each["confidence"],
            *(round(corner * side) for corner, side in zip(each["box"], (width, height) * 2, strict=True)),
        )
        for each in answer.to_json()["objects"]
        if each["confidence"] >= min_confidence
    ]
    return Predictions(True, round(answer.timing_ms.total * 1e-3, 6), found[:most])


def refused(body: dict[str, Any]) -> dict[str, Any]:
    """The body of an error."""
    return {"success": False, **body}

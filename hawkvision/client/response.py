"""Parses replies of a node into answers and errors, after checking them."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET

from hawkvision.client.request import TARGETS, TimeLimit
from hawkvision.core import errors
from hawkvision.core.answer_json import AnswerFields, TargetFields
from hawkvision.core.errors import BY_CODE, MALFORMED, HawkVisionError, Overloaded, ServiceError, TargetUnreachable
from hawkvision.core.settings.access import is_loopback
from hawkvision.core.types import (
    AccuracyGuarantee,
    Answer,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Prediction,
    Quality,
    Target,
)

Reply: TypeAlias = tuple[int, float | None, bytes]
"""Status, Retry-After in seconds, body."""
Exchange: TypeAlias = Callable[[TimeLimit], Awaitable[Reply]]
"""One attempt within a limit."""


class Unreachable(ServiceError):
    """The node cannot be reached, or did not answer in time; the message names its URL."""

    code = "unreachable"
    broken = False
    """Whether the connection was refused or broke, as while the node restarts."""


def why_unreachable(url: str, error: Exception) -> str:
    """What a failed connection means, with advice where nothing listens on this machine."""
    cause = getattr(error, "os_error", error)
    if getattr(cause, "errno", None) != errno.ECONNREFUSED:
        return f"{url} cannot be reached: {str(error) or type(error).__name__}"
    here = is_loopback(urlsplit(url).hostname or "")
    return f"{url} cannot be reached: nothing listens there" + ("; `hawkvision up` starts a node" if here else "")


def broken(message: str) -> Unreachable:
    """The error of a connection that was refused or broke."""
    error = Unreachable(message)
    error.broken = True
    return error


class BadReply(ServiceError):
    """The reply is not from a HawkVision node, or from one of another version."""

    code = "bad_reply"


class OtherPrediction(Prediction, frozen=True):
    """A prediction of a kind that is not installed here, or of a task that the node does not list."""

    fields: dict[str, Any]
    """As the node wrote them."""

    def to_json(self) -> dict[str, Any]:
        """See `Prediction.to_json`."""
        return self.fields


_COMMON: Final = frozenset(AnswerFields.__struct_fields__)


def answer_from_json(value: dict[str, Any], kind: type[Prediction] | None) -> Answer:
    """Read the answer that `Answer.to_json` wrote; confidences and times are rounded.

    Args:
        value: the JSON object.
        kind: the type of the prediction; None makes an `OtherPrediction` of the fields that not every answer has.

    Raises:
        BadReply: naming the key that is missing or malformed.
    """
    try:
        reply = msgspec.convert(value, AnswerFields)
        if kind is None:
            prediction: Prediction = OtherPrediction({k: v for k, v in value.items() if k not in _COMMON})
        else:
            prediction = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadReply(f"answer: {error}") from None
    guarantee = reply.accuracy
    return Answer(
        id=reply.id,
        task=reply.task,
        prediction=prediction,
        model=reply.model,
        tier=reply.tier,
        accuracy=AccuracyGuarantee(
            target=_target(guarantee.target),
            status=guarantee.status,
            basis=guarantee.basis,
            max_drop=guarantee.max_drop,
            watched_max_drop=guarantee.watched_max_drop,
            delta=guarantee.delta,
            n=guarantee.n,
            labels=guarantee.labels,
            since=guarantee.since,
            until=guarantee.until,
            max_disagreement=None if guarantee.max_disagreement is UNSET else guarantee.max_disagreement,
            status_reason=guarantee.status_reason,
        ),
        escalated=reply.escalated,
        reason=reply.reason,
        degraded=reply.degraded,
        degraded_reason=reply.degraded_reason,
        edge_score=reply.edge_score,
        edge_threshold=reply.edge_threshold,
        received_fraction=reply.received_fraction,
        deadline_met=reply.deadline_met,
        timing_ms=reply.timing_ms,
    )


_TARGETS: Final = {
    "min_accuracy": MinAccuracy,
    "max_accuracy_drop": MaxAccuracyDrop,
    "min_confidence": MinConfidence,
    "quality": Quality,
}


def _target(written: TargetFields) -> Target:
    given = msgspec.to_builtins(written)
    if len(given) != 1:
        raise BadReply(f"answer: accuracy.target: expected exactly one of {', '.join(TARGETS)}, got {len(given)}")
    ((name, value),) = given.items()
    target: Target = _TARGETS[name](value)
    return target


def error_from_reply(status: int, payload: bytes, retry_after_s: float | None, where: str) -> HawkVisionError:
    """The error of a reply other than 200, with the node's class, message and figures.

    A reply that is no node's error becomes `BadReply`, except that 503 is `NotReady`, 429 `Overloaded` and 401
    `Unauthorized` from any sender, because proxies in front of a node use them in the same sense.
    """
    try:
        body = object_of(payload, where)
    except BadReply:
        body = {}
    written, code = body.get("error"), body.get("code")
    message = written if isinstance(written, str) else f"{where} answered HTTP {status}: {payload[:120]!r}"
    kind = BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None or kind.status != status:
        kind = {401: errors.Unauthorized, 429: Overloaded, 503: errors.NotReady}.get(status, BadReply)
        message = f"{where} answered HTTP {status}: {payload[:120]!r}"
    if issubclass(kind, Overloaded):
        return kind(message, 1.0 if retry_after_s is None else retry_after_s)
    if issubclass(kind, TargetUnreachable):
        maximum = body.get("maximum")
        return kind(message, float(maximum)) if isinstance(maximum, int | float) else BadReply(message)
    return kind(message)


def object_of(payload: bytes, where: str) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises:
        BadReply: if it is none.
    """
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except MALFORMED:
        raise BadReply(f"{where}: expected a JSON object, got {payload[:120]!r}") from None

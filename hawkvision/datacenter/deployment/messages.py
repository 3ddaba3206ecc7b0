"""What the server and the replicas send each other through Serve: bytes, so that neither unpickles objects.

    server ── protocol, image, request ──► replica ── reply, or replies ──► server

The image stays as it came. Requests and replies are MessagePack. `PROTOCOL` is the version of all that: a replica
refuses requests of another version. `Failure` has the same form in every version, and so has `Presence`, whose new
fields go last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from hawkvision.core import __version__
from hawkvision.core.errors import (
    BY_CODE,
    MALFORMED,
    HawkVisionError,
    InternalError,
    NotReady,
    Overloaded,
    TargetUnreachable,
)
from hawkvision.core.logs import RequestIds
from hawkvision.datacenter.stages.ensemble import Augmentation, EvaluationRequest, VariantAnswer

PROTOCOL: Final = 2
"""Changes whenever a replica could misread a request, or a server a reply."""

Part: TypeAlias = tuple[VariantAnswer, ...]
_Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Answer: TypeAlias = tuple[str, Augmentation, tuple[_Length, ...], bytes, float, float, float, int]
"""A `VariantAnswer` without its statement; the output is its shape and its numbers, float32 and little-endian."""
ReplicaRequest: TypeAlias = tuple[tuple[EvaluationRequest, ...], float | None, RequestIds | None]
"""What to evaluate on an image; the milliseconds left when this was sent, because clocks of machines differ, or None
without a deadline; and the caller's request, for the log."""
MessageT = TypeVar("MessageT")
_NUMBERS: Final = np.dtype("<f4")


class Answers(msgspec.Struct, frozen=True, array_like=True, tag="answers"):
    """One or more parts of an answer, all under one statement."""

    statement: str
    parts: tuple[tuple[_Answer, ...], ...]


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Why there is no (further) answer; the form never changes."""

    code: str
    message: str
    retry_after_s: float = 0.0


class Presence(msgspec.Struct, frozen=True, array_like=True):
    """What a replica says of itself. New fields go last."""

    protocol: int
    version: str
    statement: str = ""
    backends: tuple[str, ...] = ()
    refused: str = ""
    """Why the replica did not take its newest settings; empty if it did."""
    failed: str = ""
    """Why the replica has no models, so that it answers no image; empty if it has."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_request: Final = msgspec.msgpack.Decoder(ReplicaRequest).decode
_decode_reply: Final = msgspec.msgpack.Decoder(Answers | Failure).decode
_decode_presence: Final = msgspec.msgpack.Decoder(Presence).decode


def encode_request(
    evaluations: tuple[EvaluationRequest, ...], remaining_ms: float | None, ids: RequestIds | None
) -> bytes:
    """The bytes of a `ReplicaRequest`."""
    return _encode((evaluations, remaining_ms, ids))


def decode_request(data: bytes) -> ReplicaRequest:
    """The request of these bytes.

    Raises:
        InternalError: if they are not one of this version.
    """
    request: ReplicaRequest = _decoded(_decode_request, data)
    return request


def encode_answers(parts: Sequence[Part]) -> bytes:
    """The reply that holds these parts of one request."""
    statement = next((answer.statement for part in parts for answer in part), "")
    return _encode(Answers(statement, tuple(tuple(map(_encoded, part)) for part in parts)))


def encode_failure(error: HawkVisionError) -> bytes:
    """The reply that reports an error."""
    return _encode(Failure(error.code, error.message, error.retry_after_s if isinstance(error, Overloaded) else 0.0))


def decode_reply(data: bytes) -> tuple[Part, ...]:
    """The parts in a reply.

    Raises:
        HawkVisionError: the error that the reply reports.
        InternalError: if it is no reply of this version.
    """
    reply = _decoded(_decode_reply, data)
    if isinstance(reply, Failure):
        raise _error(reply)
    return tuple(tuple(_answer(each, reply.statement) for each in part) for part in reply.parts)


def encode_presence(presence: Presence) -> bytes:
    """The bytes of a presence."""
    return _encode(presence)


def decode_presence(data: bytes) -> Presence:
    """The presence of these bytes.

    Raises:
        NotReady: if the replica speaks another version.
        InternalError: if they are no presence.
    """
    presence = _decoded(_decode_presence, data)
    if presence.protocol != PROTOCOL:
        raise _mismatch(f"the replica speaks {presence.protocol} ({presence.version})", "this server")
    return presence


def own_metadata() -> dict[str, int]:
    """What a replica of this version tells the routers of itself."""
    return {"protocol": PROTOCOL}


def check_protocol(received: int) -> None:
    """Refuse a request of another version.

    Raises:
        NotReady: names both versions.
    """
    if received != PROTOCOL:
        raise _mismatch(f"the server speaks {received}", "this replica")


def _decoded(decode: Callable[[bytes], MessageT], data: bytes) -> MessageT:
    try:
        return decode(data)
    except MALFORMED as error:
        raise InternalError(f"a message between server and replica is malformed: {error}") from None


def _mismatch(other: str, this: str) -> NotReady:
    return NotReady(
        f"server and replica are of different versions: of the internal protocol, {other} and {this} {PROTOCOL} "
        f"({__version__}); deploy both from one version"
    )


def _encoded(answer: VariantAnswer) -> _Answer:
    output = answer.output.astype(_NUMBERS, copy=False)
    times = answer.decode_ms, answer.queue_ms, answer.infer_ms
    return (answer.variant, answer.augmentation, output.shape, output.tobytes(), *times, answer.batch_size)


def _answer(sent: _Answer, statement: str) -> VariantAnswer:
    variant, augmentation, shape, numbers, decode_ms, queue_ms, infer_ms, batch_size = sent
    try:
        output = np.frombuffer(numbers, _NUMBERS).reshape(shape).astype(np.float32, copy=False)
    except ValueError as error:
        raise InternalError(f"a message between server and replica is malformed: {error}") from None
    return VariantAnswer(variant, augmentation, output, decode_ms, queue_ms, infer_ms, batch_size, statement)


def _error(failure: Failure) -> HawkVisionError:
    if failure.code == Overloaded.code:
        return Overloaded(failure.message, failure.retry_after_s)
    kind = BY_CODE.get(failure.code, InternalError)
    return InternalError(failure.message) if kind is TargetUnreachable else kind(failure.message)

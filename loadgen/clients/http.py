"""Client of a node over HTTP: the image as the raw body of a POST, the fields as query parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from hawkvision.core.types import AccuracyStatus
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import CLASSIFY_PATH
from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.clients.connections import ConnectionBroken, ConnectionPool, HttpReply
from loadgen.workload.judging import read_prediction
from loadgen.workload.record import UNANSWERED

WARM: Final = 8
"""Connections opened beforehand."""
MAX_CODE: Final = 60
"""Characters of an error's code that are kept."""


class HttpClient:
    """An `Asker` of a path that takes an image, and answers with a prediction of the kind or with an `index`."""

    def __init__(
        self,
        connections: ConnectionPool,
        limit: int,
        path: str = CLASSIFY_PATH,
        task: str | None = None,
        kind: TaskKind[Any] | None = None,
    ) -> None:
        self._connections = connections
        self._limit = limit
        self._path = path
        self._task = {} if task is None else {"task": task}
        self._kind = kind
        self._heads: dict[tuple[tuple[str, str], ...], bytes] = {}

    async def open(self) -> None:
        """See `Asker`."""
        await self._connections.open(min(WARM, self._limit))

    async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> ClientReply:
        """See `Asker`."""
        key = tuple(fields.items())
        head = self._heads.get(key)
        if head is None:
            query = urlencode({**self._task, **fields})
            head = self._heads[key] = self._connections.head(
                "POST", f"{self._path}?{query}" if query else self._path, "Content-Type: application/octet-stream\r\n"
            )
        reply = await exchange(self._connections, head, image, times)
        return reply if isinstance(reply, ClientReply) else read_answer(reply, len(image), self._kind)

    async def close(self) -> None:
        """See `Asker`."""
        await self._connections.close()


async def exchange(
    connections: ConnectionPool, head: bytes, body: bytes, times: RequestTimes
) -> HttpReply | ClientReply:
    """The reply, or what to say of its absence."""
    try:
        return await connections.exchange(head, body, times)
    except TimeoutError:
        return ClientReply(UNANSWERED, "timeout")
    except ConnectionBroken as error:
        return ClientReply(UNANSWERED, error.code)


class _AnswerBody(msgspec.Struct, frozen=True):
    """An answer of `docs/reference/api.md`; other servers may leave out all but the class."""

    index: int | None = None
    confidence: float | None = None
    tier: str = ""
    model: str = ""
    escalated: bool = False
    degraded: bool = False
    received_fraction: float = 1.0
    accuracy: dict[str, Any] = {}


_ANSWER: Final = msgspec.json.Decoder(_AnswerBody)
_ERROR: Final = msgspec.json.Decoder(dict[str, Any])


def read_answer(reply: HttpReply, sent_bytes: int, kind: TaskKind[Any] | None = None) -> ClientReply:
    """What a reply says; one that has neither an index nor a prediction says `bad_reply` and counts as no answer."""
    if reply.status != 200:
        return refusal_of(reply, sent_bytes)
    try:
        answer = _ANSWER.decode(reply.body)
        guarantee = msgspec.convert(answer.accuracy.get("status"), AccuracyStatus | None)
        max_drop = msgspec.convert(answer.accuracy.get("max_drop"), float | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ClientReply(UNANSWERED, "bad_reply", sent_bytes=sent_bytes)
    prediction = read_prediction(kind, reply.body)
    if answer.index is None and prediction is None:
        return ClientReply(UNANSWERED, "bad_reply", sent_bytes=sent_bytes)
    return ClientReply(
        status=200,
        index=answer.index,
        confidence=answer.confidence,
        tier=answer.tier,
        model=answer.model,
        escalated=answer.escalated,
        degraded=answer.degraded,
        guarantee=guarantee,
        max_drop=max_drop,
        received_fraction=answer.received_fraction,
        sent_bytes=sent_bytes,
        prediction=prediction,
    )


def refusal_of(reply: HttpReply, sent_bytes: int) -> ClientReply:
    """An error reply, by its code where it has one."""
    try:
        code = str(_ERROR.decode(reply.body).get("code", ""))[:MAX_CODE]
    except (msgspec.DecodeError, UnicodeDecodeError):
        code = ""
    return ClientReply(reply.status, code or f"http_{reply.status}", sent_bytes=sent_bytes)

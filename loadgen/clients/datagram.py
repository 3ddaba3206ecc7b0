"""Client of a node over the datagram transport, by the public client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.request import ClassifyFields
from hawkvision.client.response import BadReply, Unreachable, answer_from_json
from hawkvision.core.errors import HawkVisionError
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import CLASSIFY_PATH
from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.workload.record import UNANSWERED

MAX_UNDER_WAY: Final = 1 << 16
"""Images under way at once: whatever the server does, the schedule is kept."""


class DatagramLoadClient:
    """An `Asker` whose images travel as datagrams."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        path: str = CLASSIFY_PATH,
        task: str | None = None,
        kind: TaskKind[Any] | None = None,
        api_key: str | None = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            ConfigError: if the URL is none.
        """
        self._client = AsyncClient(
            url, transport="datagram", timeout_s=timeout_s, late_s=timeout_s, api_key=api_key, connections=MAX_UNDER_WAY
        )
        self._path = path
        self._task = task
        self._prediction = None if kind is None else kind.prediction
        self._counted = 0

    async def open(self) -> None:
        """See `Asker`."""
        await self._client.connect()

    async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> ClientReply:
        """See `Asker`."""
        asked: dict[str, Any] = dict(fields)
        if "deadline_ms" in asked:
            asked["deadline_ms"] = float(asked["deadline_ms"])
        times.send()  # preparing the datagrams is the transport's own work, and counts
        try:
            asked = {"task": self._task, **asked}
            replied = await self._client.send(self._path, image, ClassifyFields(**asked))  # type: ignore[typeddict-item]
            answer = answer_from_json(replied, self._prediction)
        except (Unreachable, BadReply) as error:
            return ClientReply(UNANSWERED, error.code, sent_bytes=self._sent())
        except HawkVisionError as error:
            return ClientReply(error.status, error.code, sent_bytes=self._sent())
        return ClientReply(
            status=200,
            index=replied.get("index"),
            confidence=replied.get("confidence"),
            tier=answer.tier,
            model=answer.model,
            escalated=answer.escalated,
            degraded=answer.degraded,
            guarantee=answer.accuracy.status,
            max_drop=answer.accuracy.max_drop,
            received_fraction=answer.received_fraction,
            sent_bytes=self._sent(),
            prediction=None if self._prediction is None else answer.prediction,
        )

    async def close(self) -> None:
        """See `Asker`."""
        await self._client.close()

    def _sent(self) -> int:
        """Bytes of datagrams sent since this was asked last: exact over all images together, not for each alone."""
        total = self._client.sent_bytes
        sent, self._counted = total - self._counted, total
        return sent

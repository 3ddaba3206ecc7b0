"""Client of a node over the datagram transport, by the public client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.response import BadReply, Unreachable
from hawkvision.core.errors import HawkVisionError
from loadgen.clients.base import Reply, RequestTimes
from loadgen.workload.record import UNANSWERED

MAX_UNDER_WAY: Final = 1 << 16
"""Images under way at once: whatever the server does, the schedule is kept."""


class DatagramClient:
    """An `Asker` whose images travel as datagrams."""

    def __init__(self, url: str, *, timeout_s: float, task: str | None = None, api_key: str | None = None) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            ConfigError: if the URL is none.
        """
        self._client = AsyncClient(
            url, transport="datagram", timeout_s=timeout_s, late_s=timeout_s, api_key=api_key, connections=MAX_UNDER_WAY
        )
        self._task = task
        self._counted = 0

    async def open(self) -> None:
        """See `Asker`."""
        await self._client.connect()

    async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> Reply:
        """See `Asker`."""
        asked: dict[str, Any] = dict(fields)
        if "deadline_ms" in asked:
            asked["deadline_ms"] = float(asked["deadline_ms"])
        times.send()  # preparing the datagrams is the transport's own work, and counts
        try:
            answer = await self._client.classify(image, task=self._task, **asked)
        except (Unreachable, BadReply) as error:
            return Reply(UNANSWERED, error.code, sent_bytes=self._sent())
        except HawkVisionError as error:
            return Reply(error.status, error.code, sent_bytes=self._sent())
        return Reply(
            status=200,
            index=answer.index,
            confidence=answer.confidence,
            tier=answer.tier,
            model=answer.model,
            escalated=answer.escalated,
            degraded=answer.degraded,
            guarantee=answer.accuracy.status,
            max_drop=answer.accuracy.max_drop,
            received_fraction=answer.received_fraction,
            sent_bytes=self._sent(),
        )

    async def close(self) -> None:
        """See `Asker`."""
        await self._client.close()

    def _sent(self) -> int:
        """Bytes of datagrams sent since this was asked last: exact over all images together, not for each alone."""
        total = self._client.sent_bytes
        sent, self._counted = total - self._counted, total
        return sent

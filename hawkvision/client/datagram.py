"""The client's way to a node by datagrams: over `transport.client`, and told as HTTP replies would tell it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import msgspec

from hawkvision.client.request import DatagramRequest, TimeLimit
from hawkvision.client.response import BadReply, Reply, Unreachable, error_from_reply
from hawkvision.core.errors import MALFORMED, ConfigError, DeadlineMissed, NotReady, Overloaded, TooLarge
from hawkvision.core.escalation_api import TRANSPORT_PATH, DatagramEndpoint, Transports
from hawkvision.core.types import Pixels
from hawkvision.transport.client.connection_manager import NotConnectedInTime
from hawkvision.transport.client.datagram_client import DatagramLink
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.coding.jpeg_header import cut
from hawkvision.transport.protocol.status import Status

MAY_MISS: Final = 0.05
"""Of images that travel as they are, where one sent again later will do: it is small, and answered below what is
guaranteed of the image itself, as all of them would be that are coded anew."""

ANSWER_S: Final = 0.02
"""Of the deadline, for an edge node's look and the wait for overdue fragments: half of what a datacenter takes.
Over a simulated LTE link, with a deadline of 100 ms, a quarter more bytes come, and 79 of 100 answers are right, no
longer 73."""


class DatagramTransport:
    """One node, over a link that belongs to the running loop; close it."""

    def __init__(
        self,
        url: str,
        offered: Callable[[], Awaitable[Reply]],
        *,
        paths: Sequence[str],
        api_key: str | None,
        timeout_s: float,
    ) -> None:
        """Prepare a link; nothing is sent yet.

        Args:
            url: of the node.
            offered: asks the node over HTTP what is at `TRANSPORT_PATH`; one attempt.
            paths: this machine's addresses to send from; empty lets the system choose one.
            api_key: of the node, if it asks for one.
            timeout_s: for connecting beforehand.
        """
        self.url = url
        self._offered = offered
        self._timeout_s = timeout_s
        self._link = DatagramLink(
            urlsplit(url).hostname or "",
            self._discover,
            local=paths,
            api_key=api_key,
            may_miss=MAY_MISS,
            answer_s=ANSWER_S,
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of datagrams sent so far."""
        return self._link.sent_bytes

    async def exchange(self, image: bytes | Pixels, question: DatagramRequest, limit: TimeLimit) -> Reply:
        """One attempt, told as an HTTP reply would tell it.

        Raises:
            DeadlineMissed: if no answer came back in time, or the node could make nothing of what came in time.
            Unreachable: if the node cannot be reached, or says nothing.
            BadReply: if what it says is not what nodes say.
            HawkVisionError: what it says against datagrams.
        """
        try:
            if limit.deadline_ms is None and not self._link.state().connected:
                await self._link.probe(limit.seconds)  # making a connection has a time of its own
            status, body = await self._ask(image, question, limit.seconds)
        except NotReady as error:  # the node says so over HTTP, asked for where it listens
            return error.status, None, msgspec.json.encode(error.body())
        except NotConnectedInTime as error:
            if limit.deadline_ms is not None:
                raise self._missed(limit.deadline_ms) from None
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None
        except ConnectionLost as error:
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None
        except TimeoutError:
            if question.deadline_s is not None and question.deadline_s < limit.seconds:
                raise self._missed(question.deadline_s * 1e3) from None
            raise Unreachable(f"{self.url} had not answered an image after {limit.seconds:g} s") from None
        return _reply_of(status.name, body, self.url)

    def _missed(self, deadline_ms: float) -> DeadlineMissed:
        return DeadlineMissed(f"{self.url}: no answer came for the deadline {deadline_ms:g} ms")

    async def _ask(self, image: bytes | Pixels, question: DatagramRequest, timeout_s: float) -> tuple[Status, bytes]:
        """An encoded image goes as it is where it fits and there is time to repair all losses, for without a deadline
        there is; with one, over a quick link, unless the question is fast or it travels undamaged in any case, cut
        along restart markers, of which parts can be shown.
        """
        deadline_s = question.deadline_s
        ask = partial(
            self._link.ask,
            question.template,
            image,
            meta=question.meta,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
            accept_late=question.insist,
        )
        if deadline_s is None:
            with contextlib.suppress(TooLarge):
                return await ask(lossless=True)
        return await ask(
            lossless=not question.fast and self._may_travel_whole(image, deadline_s, strict=not question.insist)
        )

    def _may_travel_whole(self, image: bytes | Pixels, deadline_s: float | None, *, strict: bool) -> bool:
        if deadline_s is None or not isinstance(image, bytes):
            return False
        return self._link.fits_lossless(image, deadline_s, strict=strict) and cut(image) is None

    async def connect(self) -> None:
        """Connect now.

        Raises:
            Unreachable: if nothing answers.
            HawkVisionError: what the node says against it.
        """
        try:
            await self._link.probe(self._timeout_s)
        except ConnectionLost as error:
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None

    async def close(self) -> None:
        """Close the link."""
        await self._link.close()

    async def _discover(self) -> DatagramEndpoint:
        """Where the node listens for datagrams."""
        where = f"{self.url}{TRANSPORT_PATH}"
        try:
            status, retry_after, payload = await self._offered()
        except Unreachable as error:
            raise ConnectionLost(str(error)) from None
        if status != 200:
            raise error_from_reply(status, payload, retry_after, where)
        try:
            offer = msgspec.json.decode(payload, type=Transports).datagram
        except MALFORMED as error:
            raise BadReply(f"{where}: {error}") from None
        if offer is None:
            raise ConfigError(f"{self.url} does not listen for datagrams; expected a node with edge.datagram_port set")
        return offer


class _DatagramRefusal(msgspec.Struct):
    error: str = ""
    code: str = ""
    status: int = 0
    retry_after_s: float | None = None


def _reply_of(status: str, body: bytes, where: str) -> Reply:
    """A status of the datagram transport (`WIRE.md` §6) and its body as HTTP would tell them.

    Raises:
        DeadlineMissed: if the node had too little of the image, or not what was asked, when its time was up.
        BadReply: if the node could not make anything of the fragments.
    """
    if status == "OK":
        return 200, None, body
    try:
        refusal = msgspec.json.decode(body, type=_DatagramRefusal)
    except MALFORMED:
        raise BadReply(f"{where}: expected a refusal in JSON, got {body[:120]!r}") from None
    match status:
        case "REFUSED":
            return refusal.status, refusal.retry_after_s, body
        case "OVERLOADED":
            return Overloaded.status, 1.0, body
        case "EXPIRED" | "NO_TEMPLATE":
            raise DeadlineMissed(f"{where}: {refusal.error}")
        case _:
            raise BadReply(f"{where}: {status.lower()}: {refusal.error}")

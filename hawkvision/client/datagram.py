"""The client's datagram transport, with replies in the form of HTTP replies."""

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
from hawkvision.transport.coding.jpeg_splitting import cut
from hawkvision.transport.protocol.status import Status

MAY_MISS: Final = 0.05
"""Share of unchanged images that may miss their deadline on the link. Such an image is then sent again, smaller, and
its answer carries no guarantee, like that of any image that is encoded again."""

ANSWER_S: Final = 0.02
"""Part of the deadline for the edge node's inference and the wait for late fragments."""


class DatagramConnection:
    """Datagrams to one node. It belongs to the running loop; close it."""

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
            offered: gets `TRANSPORT_PATH` from the node over HTTP, in one attempt.
            paths: this machine's addresses to send from; empty lets the system choose one.
            api_key: of the node, if it asks for one.
            timeout_s: for `connect`.
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

    async def exchange(self, image: bytes | Pixels, request: DatagramRequest, limit: TimeLimit) -> Reply:
        """One attempt, with the reply in the form of an HTTP reply.

        Raises:
            DeadlineMissed: if no answer arrived in time, or too little of the image reached the node.
            Unreachable: if the node cannot be reached, or does not reply.
            BadReply: if the reply is malformed.
            HawkVisionError: if the node refuses datagrams.
        """
        try:
            if limit.deadline_ms is None and not self._link.state().connected:
                await self._link.probe(limit.seconds)  # connecting has its own time
            status, body = await self._ask(image, request, limit.seconds)
        except NotReady as error:  # the reply to `TRANSPORT_PATH`
            return error.status, None, msgspec.json.encode(error.body())
        except NotConnectedInTime as error:
            if limit.deadline_ms is not None:
                raise self._missed(limit.deadline_ms) from None
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None
        except ConnectionLost as error:
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None
        except TimeoutError:
            if request.deadline_s is not None and request.deadline_s < limit.seconds:
                raise self._missed(request.deadline_s * 1e3) from None
            raise Unreachable(f"{self.url} had not answered an image after {limit.seconds:g} s") from None
        return _reply_of(status.name, body, self.url)

    def _missed(self, deadline_ms: float) -> DeadlineMissed:
        return DeadlineMissed(f"{self.url}: no answer came for the deadline {deadline_ms:g} ms")

    async def _ask(self, image: bytes | Pixels, request: DatagramRequest, timeout_s: float) -> tuple[Status, bytes]:
        """Send an encoded image unchanged if it fits and losses can be repaired in time, else encode it again.

        Without a deadline there is always time. With one, the link must be fast enough; requests for speed, and images
        with restart markers, which survive losses in parts, do not need it.
        """
        deadline_s = request.deadline_s
        ask = partial(
            self._link.ask,
            request.template,
            image,
            meta=request.meta,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
            accept_late=request.accept_late,
        )
        if deadline_s is None:
            with contextlib.suppress(TooLarge):
                return await ask(lossless=True)
        return await ask(
            lossless=not request.fast and self._may_travel_whole(image, deadline_s, strict=not request.accept_late)
        )

    def _may_travel_whole(self, image: bytes | Pixels, deadline_s: float | None, *, strict: bool) -> bool:
        if deadline_s is None or not isinstance(image, bytes):
            return False
        return self._link.fits_lossless(image, deadline_s, strict=strict) and cut(image) is None

    async def connect(self) -> None:
        """Connect now.

        Raises:
            Unreachable: if nothing answers.
            HawkVisionError: if the node refuses the connection.
        """
        try:
            await self._link.probe(self._timeout_s)
        except ConnectionLost as error:
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None

    async def close(self) -> None:
        """Close the link."""
        await self._link.close()

    async def _discover(self) -> DatagramEndpoint:
        """The datagram endpoint of the node."""
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
    """A status of the datagram transport (`WIRE.md` §6) and its body as an HTTP reply.

    Raises:
        DeadlineMissed: if the node had too little of the image or no template at the deadline.
        BadReply: if the node could not read the fragments.
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

"""The client's datagram transport, with replies in the form of HTTP replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import msgspec

from hawkvision.client.request import TimeLimit, datagram_template
from hawkvision.client.response import BadReply, Reply, Unreachable, broken, error_from_reply
from hawkvision.core.errors import MALFORMED, ConfigError, DeadlineMissed, NotReady, Overloaded, TooLarge
from hawkvision.core.escalation_api import TRANSPORT_PATH, DatagramEndpoint, Transports
from hawkvision.core.types import OnMiss, Pixels, Quality
from hawkvision.transport.client.connection_manager import NotConnectedInTime
from hawkvision.transport.client.datagram_client import DatagramLink
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.coding.jpeg_splitting import cut

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

    async def exchange(self, image: bytes | Pixels, query: dict[str, str], limit: TimeLimit) -> Reply:
        """One attempt, with the reply in the form of an HTTP reply.

        Args:
            image: encoded, or RGB pixels.
            query: the fields of the request.
            limit: of this attempt.

        Raises:
            DeadlineMissed: if no answer arrived in time, or too little of the image reached the node.
            Unreachable: if the node cannot be reached, or does not reply.
            BadReply: if the reply is malformed.
            HawkVisionError: if the node refuses datagrams.
        """
        query = limit.applied(query)
        template, meta, deadline_s = datagram_template(query)
        accept_late = query.get("on_miss") != OnMiss.FAIL
        ask = partial(
            self._link.ask,
            template,
            image,
            meta=meta,
            deadline_s=deadline_s,
            timeout_s=limit.seconds,
            accept_late=accept_late,
        )
        try:
            if limit.deadline_ms is None and not self._link.state().connected:
                await self._link.probe(limit.seconds)  # connecting has its own time
            # Without a deadline there is time to repair any loss. A caller in a hurry sends less.
            unchanged = deadline_s is None or (
                query.get("quality") != Quality.FAST
                and self._may_travel_whole(image, deadline_s, strict=not accept_late)
            )
            try:
                status, body = await ask(lossless=unchanged)
            except TooLarge:
                if not unchanged:
                    raise
                status, body = await ask(lossless=False)
        except NotReady as error:  # the reply to `TRANSPORT_PATH`
            return error.status, None, msgspec.json.encode(error.body())
        except NotConnectedInTime as error:
            if limit.deadline_ms is not None:
                raise self._missed(limit.deadline_ms) from None
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None
        except ConnectionLost as error:
            raise broken(f"{self.url} cannot be reached by datagrams: {error}") from None
        except TimeoutError:
            if deadline_s is not None and deadline_s < limit.seconds:
                raise self._missed(deadline_s * 1e3) from None
            raise Unreachable(f"{self.url} had not answered an image after {limit.seconds:g} s") from None
        return _reply_of(status.name, body, self.url)

    def _missed(self, deadline_ms: float) -> DeadlineMissed:
        return DeadlineMissed(f"{self.url}: no answer came for the deadline {deadline_ms:g} ms")

    def _may_travel_whole(self, image: bytes | Pixels, deadline_s: float, *, strict: bool) -> bool:
        """Whether the link is fast enough to send an encoded image unchanged and to repair its losses in time.

        An image with restart markers need not travel whole, because it survives losses in parts.
        """
        if not isinstance(image, bytes):
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
            raise broken(f"{self.url} cannot be reached by datagrams: {error}") from None

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

"""The datagram transport to the datacenter, and the probes that measure its link while no images are sent.

The peer's address is asked for over HTTP. A probe is one small datagram that asks for a report, about 80 bytes each way
with headers. Losses are counted over ten seconds, so a hundred probes distinguish a loss of one percent from none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import msgspec

from edge.escalation.http_transport import HttpTransport
from edge.escalation.transport import Escalation, ReplyLate, TooLargeForDatagrams, TransportBroken, ignore_interim
from hawkvision.core.errors import (
    MALFORMED,
    BadImage,
    EscalationFailed,
    HawkVisionError,
    Overloaded,
    TooLarge,
    UnsupportedMedia,
)
from hawkvision.core.escalation_api import DatagramEndpoint
from hawkvision.network.circuit_breaker import CircuitBreaker
from hawkvision.network.response_time import ResponseTimes
from hawkvision.transport.client.datagram_client import DatagramLink, LinkView
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.protocol.wire import Status

log = logging.getLogger("hawkvision.edge")

CONNECT_S: Final = 10.0
"""For one attempt: the request for the address, over TCP that may lose packets, and the handshake."""
SILENT_S: Final = 2.0
"""How long a peer may leave probes unanswered before it counts as gone. Outages of radio links are shorter."""

MAY_MISS: Final = 0.05
"""Share of unchanged images whose reply may miss the deadline, so that the edge's answer is given. Encoded anew, all of
them would be answered with less than the guarantee of the image itself."""

_STATUSES: Final = {
    Status.OK: 200,
    Status.OVERLOADED: Overloaded.status,
    Status.EXPIRED: 504,
    Status.NO_TEMPLATE: 504,
}
"""The HTTP status of each; any other status is a defect of this end or of the wire."""


class _Refusal(msgspec.Struct):
    status: int


_refusal_decoder = msgspec.json.Decoder(_Refusal)


class DatagramTransport:
    """Sends images as datagrams. Unavailable until `probe` has found the peer."""

    def __init__(self, http: HttpTransport, api_key: str | None, congestion: CongestionFactory = LossTolerant) -> None:
        """Prepare; `http` gives the peer's address, which is on the same host."""
        self.breaker = CircuitBreaker(ResponseTimes(), connected=False)
        self.rest = ResponseTimes()
        self._http = http
        self._complained = False
        self._datagram = DatagramLink(
            urlsplit(http.url).hostname or "",
            self._discover,
            api_key=api_key,
            may_miss=MAY_MISS,
            congestion=congestion,
        )

    @property
    def view(self) -> LinkView:
        """What is known about the link."""
        return self._datagram.state()

    @property
    def available(self) -> bool:
        """Whether the peer is connected and answers."""
        view = self.view
        return view.connected and view.silent_s < SILENT_S

    def fits_lossless(self, body: bytes, deadline_s: float, *, strict: bool) -> bool:
        """See `DatagramLink.fits_lossless`."""
        return self._datagram.fits_lossless(body, deadline_s, strict=strict)

    async def send(
        self, escalation: Escalation, on_interim: Callable[[bytes], None] = ignore_interim
    ) -> tuple[int, bytes]:
        """See `EscalationTransport.send`.

        Without a deadline the bytes always travel unchanged, because there is time to repair all losses.

        Raises:
            TooLargeForDatagrams: if the image does not fit.
        """
        request, timeout_s = escalation.request, escalation.timeout_s
        deadline_s = None if request.deadline_ms is None else min(request.deadline_ms * 1e-3, timeout_s)
        asking = self._datagram.ask(
            request.template(),
            escalation.body,
            meta=request.meta(escalation.trace),
            deadline_s=deadline_s,
            timeout_s=timeout_s,
            lossless=escalation.lossless or deadline_s is None,
            on_interim=on_interim,
        )
        try:
            status, payload = await asking
        except (BadImage, UnsupportedMedia):
            raise
        except TooLarge as error:
            raise TooLargeForDatagrams(str(error)) from None
        except TimeoutError:
            raise ReplyLate(f"{self._http.url} had not answered datagrams after {timeout_s * 1e3:.0f} ms") from None
        except HawkVisionError as error:
            raise TransportBroken(f"{self._http.url} cannot be reached by datagrams: {error}") from None
        if status is Status.REFUSED:
            try:
                return _refusal_decoder.decode(payload).status, payload
            except MALFORMED:
                raise TransportBroken(f"{self._http.url} refused with a malformed body: {payload[:80]!r}") from None
        return _STATUSES.get(status, 500), payload

    async def probe(self) -> bool:
        """Connect if there is no connection, and send one probe; whether the peer is there."""
        try:
            await self._datagram.probe(CONNECT_S)
        except HawkVisionError as error:
            self.breaker.connected = False
            if not self._complained:
                log.warning("images go to %s over TCP: no datagrams, %s", self._http.url, error)
                self._complained = True
            return False
        self._complained = False
        self.breaker.connected = self.available
        return True

    async def close(self) -> None:
        """End the connection."""
        await self._datagram.close()

    async def _discover(self) -> DatagramEndpoint:
        """The peer's address.

        Raises:
            ConnectionLost: if it does not answer.
            EscalationFailed: if it does not offer datagrams.
        """
        try:
            offer = (await self._http.transports()).datagram
        except EscalationFailed as error:
            raise ConnectionLost(str(error)) from None
        if offer is None:
            raise EscalationFailed(f"{self._http.url} does not offer the datagram transport (dc.datagram_port)")
        return offer

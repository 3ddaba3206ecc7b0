"""The transport to the datacenter over HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote
from weakref import WeakSet

import aiohttp
import msgspec

from edge.escalation.reply_validation import ListingRefused, refused
from edge.escalation.transport import Escalation, Ingress, KeyRefused, ReplyLate, TransportBroken, ignore_interim
from hawkvision.core.errors import MALFORMED, EscalationFailed, Forbidden, NotFound, Unauthorized
from hawkvision.core.escalation_api import (
    INFER_PATH,
    PROGRESSIVE_TYPE,
    STAGES_PATH,
    TRACE_HEADER,
    TRANSPORT_PATH,
    WIRE_HEADER,
    WIRE_VERSION,
    StageList,
    Transports,
)
from hawkvision.core.logs import REQUEST_ID_HEADER
from hawkvision.network.circuit_breaker import CircuitBreaker
from hawkvision.network.response_time import ResponseTimes

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

log = logging.getLogger("hawkvision.edge")

CONNECT_TIMEOUT_S: Final = 1.0
MAX_REPLY_BYTES: Final = 1024 * 1024
"""A reply with 1,000 classes is 45 KB."""
LISTING_TIMEOUT_S: Final = 5.0
KEY_REFUSED: Final = (Unauthorized.status, Forbidden.status)
DRAIN_S: Final = 2.0
"""How long a late exchange continues so that its connection stays open; see `HttpTransport.send`."""
DRAIN_BYTES: Final = 1024 * 1024
"""Largest image whose abandoned exchange may continue: the node's memory budget no longer counts it."""

ListingT = TypeVar("ListingT")

_NOT_SENT: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp adds and no datacenter reads. A proxy that heeded them might compress replies."""
_LISTING_TIMEOUT: Final = aiohttp.ClientTimeout(total=LISTING_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)

_stages_decoder = msgspec.json.Decoder(StageList)
_transports_decoder = msgspec.json.Decoder(Transports)


class Connector(aiohttp.TCPConnector):
    """A connector that reports when a connection ends."""

    def __init__(self, on_end: Callable[[], None] | None = None, **options: Any) -> None:
        """Prepare as aiohttp does; `on_end` is called whenever either end closes a connection."""
        super().__init__(**options)
        self._on_end = on_end
        self._watched: WeakSet[asyncio.Future[None]] = WeakSet()
        """The `closed` futures that already have a callback."""

    async def connect(
        self,
        req: ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  aiohttp's own signature
    ) -> Connection:
        """See `aiohttp.TCPConnector.connect`."""
        connection = await super().connect(req, traces, timeout)
        closed: asyncio.Future[None] | None = getattr(connection.protocol, "closed", None)  # from aiohttp 3.12 on
        if closed is not None and closed not in self._watched:
            self._watched.add(closed)
            closed.add_done_callback(self._connection_ended)
        return connection

    def _connection_ended(self, future: asyncio.Future[None]) -> None:
        if not future.cancelled():
            future.exception()  # mark it as retrieved
        if self._on_end is not None:
            self._on_end()


class HttpTransport:
    """Sends unchanged images over kept-alive connections, and asks for listings."""

    def __init__(
        self,
        ingress: Ingress,
        *,
        drain_s: float = DRAIN_S,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            ingress: of the datacenter.
            drain_s: how long an abandoned exchange may continue, see `send`.
            on_end: called when either end closes a connection.
        """
        self.url = ingress.url.rstrip("/")
        self.breaker = CircuitBreaker(ResponseTimes())
        self.rest = ResponseTimes()
        self._free = asyncio.Semaphore(ingress.connections)
        """One place for each connection: a request that waits here has sent nothing, which the caller must know."""
        self._drain_s = drain_s
        self._max_draining = ingress.connections // 2
        self._exchanges: set[asyncio.Task[tuple[int, bytes]]] = set()
        self._draining: set[asyncio.Task[tuple[int, bytes]]] = set()
        """The exchanges that were abandoned."""
        self._closed = False
        self._has_answered = False
        self._tls_reason: str | None = None
        """The last TLS error; None after a successful connection."""
        headers = {WIRE_HEADER: str(WIRE_VERSION)}
        if ingress.api_key:
            headers["Authorization"] = f"Bearer {ingress.api_key}"
        tls = True if ingress.tls is None else ingress.tls
        connector = Connector(on_end, limit=ingress.connections, keepalive_timeout=60.0, ssl=tls)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            skip_auto_headers=_NOT_SENT,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._keyless = aiohttp.ClientSession(
            connector=connector,
            connector_owner=False,
            skip_auto_headers=_NOT_SENT,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        """For requests that need no key, over the same connections."""

    @property
    def draining(self) -> int:
        """Connections that are busy with abandoned exchanges."""
        return len(self._draining)

    async def send(
        self, escalation: Escalation, on_interim: Callable[[bytes], None] = ignore_interim
    ) -> tuple[int, bytes]:
        """See `EscalationTransport.send`; the image's bytes always travel unchanged.

        When a reply misses its deadline, or `send` is cancelled before it, the exchange continues in the background
        (`_let_drain`): the datacenter drops what is late by itself. Closing the connection would make the next image
        wait for a new one, be late because of that, and close its connection too.
        """
        if self._closed:
            raise TransportBroken(f"{self.url}: the connections are closed at this end")
        body, request, timeout_s = escalation.body, escalation.request, escalation.timeout_s
        headers = request.headers()
        headers[TRACE_HEADER] = escalation.trace.header()
        headers[REQUEST_ID_HEADER] = escalation.trace.request_id
        begun = asyncio.Event()
        exchange = asyncio.create_task(self._exchange(body, headers, begun, on_interim))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._ended)
        may_continue = True
        try:
            done, _ = await asyncio.wait({exchange}, timeout=timeout_s)
            may_continue = request.deadline_ms is not None  # else the datacenter would not know that it is late
        finally:
            if not exchange.done():
                if may_continue and begun.is_set() and self._may_drain(body):
                    self._let_drain(exchange)
                else:
                    exchange.cancel()
        if not done:
            raise ReplyLate(f"{self.url} had not answered after {timeout_s * 1e3:.0f} ms")
        if exchange.cancelled():
            raise TransportBroken(f"{self.url}: the connections were closed at this end")
        try:
            return exchange.result()
        except aiohttp.ServerTimeoutError:
            raise TransportBroken(f"{self.url} did not accept a connection within {CONNECT_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TransportBroken(self._why_not(error)) from None

    async def _exchange(
        self, body: bytes, headers: dict[str, str], begun: asyncio.Event, on_interim: Callable[[bytes], None]
    ) -> tuple[int, bytes]:
        """Post one image; `begun` is set when it has a connection or opens one."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with self._free:
            begun.set()
            url = f"{self.url}{INFER_PATH}"
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
                self._has_answered, self._tls_reason = True, None
                if response.content_type == PROGRESSIVE_TYPE:
                    return response.status, await read_lines(response.content, on_interim)
                return response.status, await _read(response)

    def _why_not(self, error: Exception) -> str:
        """The error in words. A TLS error is also logged, once, because only an operator can correct it."""
        reason = _tls_reason(error)
        if reason is None and self.url.startswith("https:") and not self._has_answered and _is_cut_off(error):
            # The alert by which TLS 1.3 asks for a certificate may be lost with the connection.
            reason = "it closed the connection (a datacenter may ask for edge.datacenter_certificate)"
        if reason is None:
            return f"{self.url} cannot be reached: {str(error) or type(error).__name__}"
        message = f"{self.url} cannot be reached: {reason}"
        if reason != self._tls_reason:
            log.warning("%s; escalations fail until it is corrected", message)
            self._tls_reason = reason
        return message

    def _may_drain(self, body: bytes) -> bool:
        """Whether an abandoned exchange may continue: on at most half of the connections, and with small images."""
        return len(self._draining) < self._max_draining and len(body) <= DRAIN_BYTES

    def _let_drain(self, exchange: asyncio.Task[tuple[int, bytes]]) -> None:
        self._draining.add(exchange)
        ending = asyncio.get_running_loop().call_later(self._drain_s, exchange.cancel)
        exchange.add_done_callback(lambda _: ending.cancel())

    def _ended(self, exchange: asyncio.Task[tuple[int, bytes]]) -> None:
        self._exchanges.discard(exchange)
        self._draining.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # mark it as retrieved: an abandoned one has no reader

    async def stages(self, task: str | None = None) -> StageList:
        """What the datacenter serves of a task; by default of its first.

        Raises:
            EscalationFailed: if it does not say.
        """
        query = "" if task is None else f"?task={quote(task, safe='')}"
        return await self._listing(self._session, f"{STAGES_PATH}{query}", _stages_decoder)

    async def check_key(self) -> None:
        """Send an empty body: the datacenter refuses either the key or the body.

        Raises:
            KeyRefused: if the key may not ask.
            EscalationFailed: if there is no answer.
        """
        try:
            async with self._session.post(f"{self.url}{INFER_PATH}", data=b"", timeout=_LISTING_TIMEOUT) as response:
                payload = await _read(response)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise EscalationFailed(self._why_not(error)) from None
        if response.status in KEY_REFUSED:
            raise KeyRefused(refused(response.status, payload)[1])

    async def transports(self) -> Transports:
        """The datacenter's other transports; none if it does not know the path.

        The key is not sent: the datagram handshake proves it without revealing it, and so must this request.

        Raises:
            EscalationFailed: if it does not say.
        """
        return await self._listing(self._keyless, TRANSPORT_PATH, _transports_decoder, Transports())

    async def close(self) -> None:
        """Close the connections; requests under way end with `TransportBroken`."""
        self._closed = True
        exchanges = tuple(self._exchanges)
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
        await self._keyless.close()
        await self._session.close()

    async def _listing(
        self,
        session: aiohttp.ClientSession,
        path: str,
        decoder: msgspec.json.Decoder[ListingT],
        absent: ListingT | None = None,
    ) -> ListingT:
        """Get and decode a document; `absent` if there is no such path."""
        try:
            async with session.get(f"{self.url}{path}", timeout=_LISTING_TIMEOUT) as response:
                payload = await _read(response)
            if response.status == NotFound.status and absent is not None:
                return absent
            if response.status in KEY_REFUSED:
                raise KeyRefused(refused(response.status, payload)[1])
            if response.status != 200:
                said = refused(response.status, payload)[1]
                raise ListingRefused(f"{self.url}{path} answered HTTP {response.status}: {said[:200]}")
            return decoder.decode(payload)
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise EscalationFailed(self._why_not(error)) from None
        except (TimeoutError, aiohttp.ClientError, OSError, *MALFORMED) as error:
            raise EscalationFailed(f"{self.url}{path}: {str(error) or type(error).__name__}") from None


async def read_lines(content: aiohttp.StreamReader, on_interim: Callable[[bytes], None]) -> bytes:
    """The last line of a body of at most `MAX_REPLY_BYTES`; `on_interim` gets every line as soon as it arrives."""
    last = rest = b""
    size = 0
    while size < MAX_REPLY_BYTES and (chunk := await content.read(MAX_REPLY_BYTES - size)):
        size += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for last in lines:
            on_interim(last)
    return rest or last


def _is_cut_off(error: Exception) -> bool:
    """Whether the other side ended a connection that there was."""
    ended = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError)
    return ended and not isinstance(error, aiohttp.ClientConnectorError)


def _tls_reason(error: Exception) -> str | None:
    """What is wrong with TLS, and which setting is concerned; None if TLS is not the reason."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        said = error.certificate_error
        why = getattr(said, "verify_message", None) or str(said)
        return f"its certificate is not trusted: {why} (edge.datacenter_ca says whose certificates are)"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError) or "[SSL" in str(error):
        found = re.search(r"\[SSL: (\w+)\]", str(error))
        why = found[1].replace("_", " ").lower() if found else str(error)
        return f"TLS failed: {why} (a datacenter may ask for edge.datacenter_certificate)"
    return None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, truncated to `MAX_REPLY_BYTES`."""
    payload = b""
    while len(payload) < MAX_REPLY_BYTES:
        chunk = await response.content.read(MAX_REPLY_BYTES - len(payload))
        if not chunk:
            break
        payload += chunk
    return payload

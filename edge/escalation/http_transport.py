"""Ways to send an image to the datacenter and get its answer; which one is taken, `edge.escalation.client` decides.

An escalation carries bytes and knows why it could not; what an answer means is not its affair. Here is the one over
HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from weakref import WeakSet

import aiohttp
import msgspec

from edge.escalation.reply_validation import refused
from hawkvision.core.errors import MALFORMED, EscalationFailed, Forbidden, NotFound, Unauthorized
from hawkvision.core.escalation_api import (
    INFER_PATH,
    PROGRESSIVE_TYPE,
    STAGES_PATH,
    TRACE_HEADER,
    TRANSPORT_PATH,
    WIRE_HEADER,
    WIRE_VERSION,
    EscalationRequest,
    Stages,
    Transports,
)
from hawkvision.core.logs import REQUEST_ID_HEADER, current_request
from hawkvision.core.trace import TraceContext
from hawkvision.network.circuit_breaker import CircuitBreaker
from hawkvision.network.response_time import ResponseTimes
from hawkvision.transport.client.pending_responses import ignore_interim

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
RUN_OUT_S: Final = 2.0
"""How long an exchange goes on whose answer nobody waits for, so that its connection stays open; see
`HttpTransport.send`."""
RUN_OUT_BYTES: Final = 1024 * 1024
"""Of an image whose exchange may go on: the node's bound on memory no longer counts it."""

ListingT = TypeVar("ListingT")

_LISTING_TIMEOUT: Final = aiohttp.ClientTimeout(total=LISTING_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)

_stages_decoder = msgspec.json.Decoder(Stages)
_transports_decoder = msgspec.json.Decoder(Transports)


class TransportBroken(EscalationFailed):
    """The way itself does not work just now: refused, broken off, not there."""


class KeyRefused(EscalationFailed):
    """The datacenter answers, but not with this key: it does not know it, or the key may not ask for answers."""


class ReplyLate(EscalationFailed):
    """No answer came within the time that was given."""


class EscalationTransport(Protocol):
    """A way to the datacenter."""

    breaker: CircuitBreaker
    """Whether it is taken, with its round trips until the first answer, as far as the uplink has learned them."""
    rest: ResponseTimes
    """From the first answer to a progressive request until the last."""

    async def send(
        self,
        body: bytes,
        request: EscalationRequest,
        trace: TraceContext,
        timeout_s: float,
        *,
        exact: bool,
        hear: Callable[[bytes], None] = ignore_interim,
    ) -> tuple[int, bytes]:
        """The answer's HTTP status and body; `exact` forbids sending anything but the image's very bytes.

        Of a progressive request that has several bodies, `hear` is told each as soon as it is there.

        Raises:
            TransportBroken, ReplyLate: as their names say.
            RequestError: what is wrong with the image, if the escalation had to look at it.
        """
        ...


class Connector(aiohttp.TCPConnector):
    """Tells whoever wants to know that a connection has ended."""

    def __init__(self, ended: Callable[[], None] | None = None, **options: Any) -> None:
        """As aiohttp's; `ended` is called whenever a connection is closed, by either end."""
        super().__init__(**options)
        self._ended = ended
        self._watched: WeakSet[asyncio.Future[None]] = WeakSet()
        """Those that tell of their connections' ends, one each."""

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
            future.exception()  # why does not matter
        if self._ended is not None:
            self._ended()


class HttpTransport:
    """The very bytes over kept-alive connections, and what else is asked over HTTP."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        connections: int,
        *,
        run_out_s: float = RUN_OUT_S,
        tls: ssl.SSLContext | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            url: of the ingress.
            api_key: of the ingress.
            connections: open at once at most.
            run_out_s: how long an exchange may go on for the sake of its connection, see `send`.
            tls: for https; None trusts whom the system trusts.
            ended: called when a connection is closed, by either end.
        """
        self.url = url
        self.breaker = CircuitBreaker(ResponseTimes())
        self.rest = ResponseTimes()
        self._free = asyncio.Semaphore(connections)
        """As many as the connector has; but who waits here has sent nothing, and that must be known."""
        self._run_out_s = run_out_s
        self._most_running_out = connections // 2
        self._exchanges: set[asyncio.Task[tuple[int, bytes]]] = set()
        self._running_out: set[asyncio.Task[tuple[int, bytes]]] = set()
        """Of those, the ones that nobody waits for any more."""
        self._closed = False
        self._tls_reason: str | None = None
        """What TLS last said against the datacenter; None once a connection was made."""
        headers = {WIRE_HEADER: str(WIRE_VERSION)}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        connector = Connector(ended, limit=connections, keepalive_timeout=60.0, ssl=True if tls is None else tls)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._keyless = aiohttp.ClientSession(
            connector=connector, connector_owner=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        """For what anybody may ask, over the same connections."""

    @property
    def running_out(self) -> int:
        """Connections that are busy with late answers, which nobody waits for."""
        return len(self._running_out)

    async def send(
        self,
        body: bytes,
        request: EscalationRequest,
        trace: TraceContext,
        timeout_s: float,
        *,
        exact: bool,  # noqa: ARG002  never anything else
        hear: Callable[[bytes], None] = ignore_interim,
    ) -> tuple[int, bytes]:
        """See `EscalationTransport.send`.

        An answer that misses a deadline, or whose caller leaves, is let come, unheard, see `_let_run_out`: to break off
        would close the connection, and the next image would wait for the round trip of a new one, be late for it, and
        close that too. The kernel sends the rest of the image in either case. The price is the tier's, which no
        longer sees the caller leave: it works on until the deadline that travels with the image.
        """
        if self._closed:
            raise TransportBroken(f"{self.url}: the connections are closed at this end")
        headers = request.headers()
        headers[TRACE_HEADER] = trace.header()
        if (about := current_request()) is not None:
            headers[REQUEST_ID_HEADER] = about.request_id
        begun = asyncio.Event()
        exchange = asyncio.create_task(self._exchange(body, headers, begun, hear))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._ended)
        try:
            done, _ = await asyncio.wait({exchange}, timeout=timeout_s)
        finally:
            if not exchange.done():  # it is late, or the caller is gone
                if begun.is_set() and request.deadline_ms is not None and self._may_run_out(body):
                    self._let_run_out(exchange)
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
        self, body: bytes, headers: dict[str, str], begun: asyncio.Event, hear: Callable[[bytes], None]
    ) -> tuple[int, bytes]:
        """`begun` says that it need not wait for others: it has a connection, or makes one."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with self._free:
            begun.set()
            url = f"{self.url}{INFER_PATH}"
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
                self._tls_reason = None
                if response.content_type == PROGRESSIVE_TYPE:
                    return response.status, await read_lines(response.content, hear)
                return response.status, await _read(response)

    def _why_not(self, error: Exception) -> str:
        """In words; what TLS says against the datacenter is logged, once: nobody mends it but an operator."""
        reason = _tls_reason(error)
        if reason is None:
            return f"{self.url} cannot be reached: {str(error) or type(error).__name__}"
        message = f"{self.url} cannot be reached: {reason}"
        if reason != self._tls_reason:
            log.warning("%s; escalations fail until that is mended", message)
            self._tls_reason = reason
        return message

    def _may_run_out(self, body: bytes) -> bool:
        """On half of the connections at most, the smaller half, and with images that memory hardly notices."""
        return len(self._running_out) < self._most_running_out and len(body) <= RUN_OUT_BYTES

    def _let_run_out(self, exchange: asyncio.Task[tuple[int, bytes]]) -> None:
        self._running_out.add(exchange)
        ending = asyncio.get_running_loop().call_later(self._run_out_s, exchange.cancel)
        exchange.add_done_callback(lambda _: ending.cancel())

    def _ended(self, exchange: asyncio.Task[tuple[int, bytes]]) -> None:
        self._exchanges.discard(exchange)
        self._running_out.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # where nobody waits any more, nobody wants to know

    async def stages(self) -> Stages:
        """What the datacenter serves.

        Raises:
            EscalationFailed: if it does not say.
        """
        return await self._listing(self._session, STAGES_PATH, _stages_decoder)

    async def check_key(self) -> None:
        """Ask for the answer to nothing, which is refused for the key's sake or for that of the empty body.

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
        """What the datacenter listens to beside HTTP; nothing, if it does not know of such things. The key is not sent:
        over datagrams it is only proved, which would be of no use had it been heard here.

        Raises:
            EscalationFailed: if it does not say.
        """
        return await self._listing(self._keyless, TRANSPORT_PATH, _transports_decoder, Transports())

    async def close(self) -> None:
        """Close the connections. Whoever still waits is told so."""
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
        """A document; `absent` if there is no such path."""
        try:
            async with session.get(f"{self.url}{path}", timeout=_LISTING_TIMEOUT) as response:
                payload = await _read(response)
            if response.status == NotFound.status and absent is not None:
                return absent
            if response.status in KEY_REFUSED:
                raise KeyRefused(refused(response.status, payload)[1])
            if response.status != 200:
                raise EscalationFailed(f"{self.url}{path} answered HTTP {response.status}")
            return decoder.decode(payload)
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise EscalationFailed(self._why_not(error)) from None
        except (TimeoutError, aiohttp.ClientError, OSError, *MALFORMED) as error:
            raise EscalationFailed(f"{self.url}{path}: {str(error) or type(error).__name__}") from None


async def read_lines(content: aiohttp.StreamReader, hear: Callable[[bytes], None]) -> bytes:
    """The last line of a body of at most `MAX_REPLY_BYTES`; every line is heard as soon as it is there."""
    last = rest = b""
    size = 0
    while size < MAX_REPLY_BYTES and (chunk := await content.read(MAX_REPLY_BYTES - size)):
        size += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for last in lines:
            hear(last)
    return rest or last


def _tls_reason(error: Exception) -> str | None:
    """What is wrong with TLS, and which setting has to do with it; None if something else is."""
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
    """The whole body, at most `MAX_REPLY_BYTES` of it."""
    payload = b""
    while len(payload) < MAX_REPLY_BYTES:
        chunk = await response.content.read(MAX_REPLY_BYTES - len(payload))
        if not chunk:
            break
        payload += chunk
    return payload

"""Ways to send a picture to the datacenter and get its answer; which one is taken, `edge.uplink` decides.

A hop carries bytes and knows why it could not; what an answer means is not its affair. Here is the one over HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, TypeVar

import aiohttp
import msgspec

from hawkvision.cascade.link import LinkEstimate
from hawkvision.errors import EscalationFailed, NotFound
from hawkvision.hop import INFER_PATH, RUNGS_PATH, TRACE_HEADER, TRANSPORT_PATH, HopRequest, Rungs, Transports
from hawkvision.trace import TraceContext

CONNECT_TIMEOUT_S: Final = 1.0
MAX_REPLY_BYTES: Final = 1024 * 1024
"""A reply with 1,000 classes is 45 KB."""
LISTING_TIMEOUT_S: Final = 5.0
RUN_OUT_S: Final = 2.0
"""How long an exchange that is too late goes on, so that its connection stays open; see `HttpHop.send`."""

ListingT = TypeVar("ListingT")

_rungs_decoder = msgspec.json.Decoder(Rungs)
_transports_decoder = msgspec.json.Decoder(Transports)


class HopBroken(EscalationFailed):
    """The way itself does not work just now: refused, broken off, not there."""


class HopLate(EscalationFailed):
    """No answer came within the time that was given."""


class Hop(Protocol):
    """A way to the datacenter."""

    link: LinkEstimate
    """Its round trips, as far as the uplink has learned them."""

    async def send(
        self, body: bytes, request: HopRequest, trace: TraceContext, timeout_s: float, *, exact: bool
    ) -> tuple[int, bytes]:
        """The answer's HTTP status and body; `exact` forbids sending anything but the picture's very bytes.

        Raises:
            HopBroken, HopLate: as their names say.
            RequestError: what is wrong with the picture, if the hop had to look at it.
        """
        ...


class HttpHop:
    """The caller's own bytes over kept-alive connections, and what else is asked over HTTP."""

    def __init__(self, url: str, api_key: str | None, connections: int) -> None:
        self.url = url
        self.link = LinkEstimate()
        self._free = asyncio.Semaphore(connections)
        self._running_out: set[asyncio.Task[tuple[int, bytes]]] = set()
        self._most_running_out = connections // 2
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=60.0),
            headers=headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def send(
        self,
        body: bytes,
        request: HopRequest,
        trace: TraceContext,
        timeout_s: float,
        *,
        exact: bool,  # noqa: ARG002  never anything else
    ) -> tuple[int, bytes]:
        """See `Hop.send`.

        An answer that is late is let come, unheard, for up to `RUN_OUT_S`, on half of the connections at most. The
        kernel sends the rest of the picture whether anybody waits or not, and to break off would close the connection:
        the next picture would wait for the round trip of a new one, be late for it, and close that too.
        """
        headers = request.headers()
        headers[TRACE_HEADER] = trace.header()
        begun = asyncio.Event()
        exchange = asyncio.create_task(self._exchange(body, headers, timeout_s + RUN_OUT_S, begun))
        try:
            done, _ = await asyncio.wait({exchange}, timeout=timeout_s)
        except asyncio.CancelledError:
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)
            raise
        if not done:
            self._let_run_out(exchange, begun=begun.is_set())
            raise HopLate(f"{self.url} had not answered after {timeout_s * 1e3:.0f} ms")
        try:
            return exchange.result()
        except aiohttp.ServerTimeoutError:
            raise HopBroken(f"{self.url} did not accept a connection within {CONNECT_TIMEOUT_S:g} s") from None
        except TimeoutError:  # the loop stood still until both times were over
            raise HopLate(f"{self.url} had not answered after {timeout_s * 1e3:.0f} ms") from None
        except (aiohttp.ClientError, OSError) as error:
            raise HopBroken(f"{self.url} cannot be reached: {error or type(error).__name__}") from None

    async def _exchange(
        self, body: bytes, headers: dict[str, str], timeout_s: float, begun: asyncio.Event
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with asyncio.timeout(timeout_s), self._free:
            begun.set()
            url = f"{self.url}{INFER_PATH}"
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
                return response.status, await _read(response)

    def _let_run_out(self, exchange: asyncio.Task[tuple[int, bytes]], *, begun: bool) -> None:
        """`begun`: it has a connection, or is making one; else it would only send what nobody waits for."""
        self._running_out.add(exchange)
        exchange.add_done_callback(self._ran_out)
        if not begun or len(self._running_out) > self._most_running_out:
            exchange.cancel()

    def _ran_out(self, exchange: asyncio.Task[tuple[int, bytes]]) -> None:
        self._running_out.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # nobody waits for it; what it would say is known: too late

    async def rungs(self) -> Rungs:
        """What the datacenter serves.

        Raises:
            EscalationFailed: if it does not say.
        """
        return await self._listing(RUNGS_PATH, _rungs_decoder)

    async def transports(self) -> Transports:
        """What the datacenter listens to beside HTTP; nothing, if it does not know of such things.

        Raises:
            EscalationFailed: if it does not say.
        """
        return await self._listing(TRANSPORT_PATH, _transports_decoder, Transports())

    async def close(self) -> None:
        """Close the connections."""
        for exchange in self._running_out:
            exchange.cancel()
        await asyncio.gather(*self._running_out, return_exceptions=True)
        await self._session.close()

    async def _listing(
        self, path: str, decoder: msgspec.json.Decoder[ListingT], absent: ListingT | None = None
    ) -> ListingT:
        """A document; `absent` if there is no such path."""
        try:
            timeout = aiohttp.ClientTimeout(total=LISTING_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
            async with self._session.get(f"{self.url}{path}", timeout=timeout) as response:
                payload = await _read(response)
            if response.status == NotFound.status and absent is not None:
                return absent
            if response.status != 200:
                raise EscalationFailed(f"{self.url}{path} answered HTTP {response.status}")
            return decoder.decode(payload)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EscalationFailed(f"{self.url}{path}: {error or type(error).__name__}") from None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, at most `MAX_REPLY_BYTES` of it."""
    payload = b""
    while len(payload) < MAX_REPLY_BYTES:
        chunk = await response.content.read(MAX_REPLY_BYTES - len(payload))
        if not chunk:
            break
        payload += chunk
    return payload

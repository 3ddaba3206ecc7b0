"""The client of an edge node for programs with an event loop; `hawkvision.client` says what clients do."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, Unpack
from urllib.parse import urlsplit

import aiohttp

from hawkvision.client.batch import Outcome, in_order
from hawkvision.client.request import (
    ArrayForm,
    ClassifyFields,
    Color,
    Encoding,
    Image,
    TimeLimit,
    datagram_request,
    query_fields,
    waits_beyond_deadline,
)
from hawkvision.client.response import (
    BadReply,
    Exchange,
    Reply,
    Unreachable,
    answer_from_json,
    error_from_reply,
    object_of,
)
from hawkvision.core.errors import ConfigError, DeadlineMissed, NotReady
from hawkvision.core.escalation_api import TRANSPORT_PATH
from hawkvision.core.key_text import clean_key
from hawkvision.core.types import Answer, Pixels

if TYPE_CHECKING:
    from hawkvision.client.datagram import DatagramWay

Transport: TypeAlias = Literal["http", "datagram"]

CLASSIFY_PATH: Final = "/v1/classify"
MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
"""Far above the largest reply (100 classes are 10 KB), far below what would harm the caller."""
KEEPALIVE_S: Final = 60.0
"""Idle connections are dropped before the node does so (after 75 s), lest an image be sent into a closing one. Long
enough that a camera with an image a minute, or every few seconds, connects once."""
MAX_ATTEMPTS: Final = 10
"""Per call, whatever the retry budget."""
LATE_S: Final = 1.0
"""How long after its deadline an answer is waited for by default: TCP sends a lost first segment again after one second
(RFC 6298 §2), so that one loss costs no answer."""
POLL_S: Final = (0.1, 1.0)
"""Between looks whether a node has started: at first, and at most."""
FIRST_PAUSE_S: Final = 0.1
"""Before the second attempt when a refusal has no Retry-After; doubles with each further one."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a node takes images now, and what it serves; task and variant are None while it is not ready."""

    ready: bool
    task: str | None = None
    variant: str | None = None


_INHERITED: Final[list[object]] = []
"""Sessions and links of a parent process. They are kept: collecting one would close what the parent still uses."""


class AsyncClient:
    """One node, over kept-alive connections. Use it on one event loop; close it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        late_s: float = LATE_S,
        connections: int = 16,
        retry_budget_s: float = 0.0,
        transport: Transport = "http",
        paths: Sequence[str] = (),
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        certificate_key: str | Path | None = None,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            url: of the node, such as `http://127.0.0.1:8080`.
            api_key: sent as `Authorization: Bearer …`.
            timeout_s: for one attempt, from when it has a connection to send on to the last byte of the reply; making
                a connection may take as long again. With a `deadline_ms` both share the time.
            late_s: how long after its `deadline_ms` a call may still get an answer; less than `timeout_s`.
            connections: open at once at most; further calls wait for a free one before their time begins. By datagrams
                there is one, and so many images are under way over it at once.
            retry_budget_s: how long one call may pause in all to try again after 429 and 503, honouring
                Retry-After; 0 never retries. A `deadline_ms` that is shorter bounds it too.
            transport: `datagram` sends images as datagrams; the node says over HTTP where to.
            paths: this machine's addresses to send datagrams from, each over a link of its own; default: one, the
                system's choice.
            ca: PEM file of the authorities that the node's certificate is checked against, for https; default: the
                system's.
            certificate: PEM file of this caller's own certificate, for a node that asks for one.
            certificate_key: PEM file of its private key; default: the same file.

        Raises:
            ConfigError: if the URL is none, a key or a file cannot be used, or what is given belongs to another
                transport.
        """
        self.url = _checked_url(url)
        if transport not in ("http", "datagram"):
            raise ConfigError(f"transport: expected 'http' or 'lossy', got {transport!r}")
        if paths and transport != "datagram":
            raise ConfigError("paths: only transport='lossy' uses several; HTTP goes the way the system chooses")
        self._datagram = transport == "datagram"
        self._paths = tuple(paths)
        self._tls: ssl.SSLContext | Literal[True] = True
        if ca is not None or certificate is not None or certificate_key is not None:
            if not self.url.lower().startswith("https:"):
                raise ConfigError(f"ca, certificate: only for https://HOST[:PORT], got {url!r}")
            # Imported here because other callers need no cryptography, which takes a while to load.
            from hawkvision.servers.tls import caller_context

            self._tls = caller_context(ca, certificate, certificate_key)
        api_key = clean_key(api_key, "api_key") if api_key else None
        self._api_key = api_key
        self._link: DatagramWay | None = None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._late_s = late_s
        self._connections = connections
        self._places = asyncio.Semaphore(connections)
        self._retry_budget_s = retry_budget_s
        self._session: aiohttp.ClientSession | None = None
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        """The process and the loop to which the connections belong."""
        self._closed = False

    async def classify(
        self,
        image: Image,
        *,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Answer:
        """What the image shows.

        Args:
            image: an encoded image or the path of one, which is sent byte for byte; or uint8 pixels.
            encoding: of pixels: `png`, which loses nothing and is the default over HTTP, or `jpeg`, a tenth of the
                bytes. By datagrams pixels are coded as the link allows, unless an encoding is given.
            color: order of the channels of pixels: `rgb`, the default, or `bgr`, as OpenCV has it.
            fields: what is asked.

        Raises:
            BadField: for contradictory fields, before anything is sent.
            RequestError, ServiceError: as the node says, or as the docstring of `hawkvision.client` draws. Over the
                datagram transport a broken image is found out before it is sent.
            DeadlineMissed: if there is no answer `late_s` after the deadline.
            OSError: if the path cannot be read.
        """
        query = query_fields(**fields)
        form = ArrayForm(encoding, color)
        form.check(image)
        deadline_ms = None if waits_beyond_deadline(fields) else fields.get("deadline_ms")
        budget_s = self._retry_budget_s if deadline_ms is None else min(self._retry_budget_s, deadline_ms / 1e3)
        async with self._place():
            # In its place, so that no more images are held encoded than are sent.
            body = await form.sendable(image, pixels=self._datagram)
            exchange: Exchange
            if self._datagram:
                exchange = partial(self._exchange_datagram, body, query)
            else:
                assert isinstance(body, bytes)
                exchange = partial(self._exchange, "POST", CLASSIFY_PATH, query, body)
            where = f"{self.url}{CLASSIFY_PATH}"
            return answer_from_json(await self._retried(exchange, where, budget_s, deadline_ms))

    async def classify_batch(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 8,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> AsyncGenerator[Outcome]:
        """What each image shows, in the order of the images, which may be any number.

        An error of one image stands in its place, and the next ones are asked all the same.

        Args:
            images: each as `classify` takes it; taken from the iterable as there is room for them.
            concurrency: images under way at once. Up to `AHEAD` (`hawkvision.client.batch`) times as many wait for
                one before them.
            encoding: as of `classify`.
            color: as of `classify`.
            fields: as of `classify`, the same for all.

        Raises:
            BadField: for contradictory fields, before anything is sent.
        """
        query_fields(**fields)
        async for outcome in in_order(
            images, partial(self.classify, encoding=encoding, color=color, **fields), concurrency
        ):
            yield outcome

    async def targets(self) -> dict[str, Any]:
        """The document of `GET /v1/targets`: attainable targets with guarantee, expected escalation and latency.

        Raises:
            ServiceError: if the node does not answer, or is not ready.
        """
        return await self._get("/v1/targets", self._retry_budget_s)

    async def health(self) -> Health:
        """Whether the node takes images now.

        Raises:
            Unreachable: if nothing answers.
        """
        try:
            body = await self._get("/readyz", 0.0)
        except NotReady:
            return Health(ready=False)
        return Health(ready=True, task=body.get("task"), variant=body.get("variant"))

    async def wait_ready(self, timeout_s: float = 60.0) -> Health:
        """Wait until the node takes images: it may still be starting, and not even listen.

        Raises:
            Unreachable: if nothing answers within `timeout_s`.
            NotReady: if what answers is not ready within `timeout_s`.
            HawkVisionError: at once, for what waiting does not mend.
        """
        until, pause_s = _now() + timeout_s, POLL_S[0]
        while True:
            try:
                health = await self.health()
                failure: NotReady | Unreachable = NotReady(f"{self.url} was still starting after {timeout_s:g} s")
            except Unreachable as error:
                failure = Unreachable(f"{error.message} (waited {timeout_s:g} s)")
            else:
                if health.ready:
                    return health
            if _now() + pause_s > until:
                raise failure
            await asyncio.sleep(pause_s)
            pause_s = min(POLL_S[1], 2.0 * pause_s)

    async def connect(self) -> None:
        """Connect now, so that the first image pays for no handshake.

        Raises:
            Unreachable: if nothing answers.
            HawkVisionError: what the node says against it.
        """
        if not self._datagram:
            await self.health()
            return
        await self._open_link().connect()

    @property
    def sent_bytes(self) -> int:
        """Bytes of datagrams sent so far; 0 over HTTP."""
        return 0 if self._link is None else self._link.sent_bytes

    async def close(self) -> None:
        """Close the connections. Closing twice does no harm."""
        self._closed = True
        if self._home is not None and self._home[0] != os.getpid():
            self._disinherit()
        if self._link is not None:
            await self._link.close()
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _get(self, path: str, budget_s: float) -> dict[str, Any]:
        async with self._place():
            return await self._retried(partial(self._exchange, "GET", path, {}, None), f"{self.url}{path}", budget_s)

    async def _retried(
        self, exchange: Exchange, where: str, budget_s: float, deadline_ms: float | None = None
    ) -> dict[str, Any]:
        """The JSON object of a 200 reply; retries within the budget. The call's time begins now."""
        began, spent_s = _now(), 0.0
        for attempt in range(MAX_ATTEMPTS):
            limit = TimeLimit.after(_now() - began, self._timeout_s, deadline_ms, self._late_s)
            status, retry_after, payload = await exchange(limit)
            if status == 200:
                return object_of(payload, where)
            pause_s = FIRST_PAUSE_S * 2.0**attempt if retry_after is None else retry_after
            may_retry = status in (429, 503) and budget_s > 0.0 and attempt + 1 < MAX_ATTEMPTS
            too_late = deadline_ms is not None and _now() + pause_s - began >= deadline_ms / 1e3
            if not may_retry or too_late or spent_s + pause_s > budget_s:
                raise error_from_reply(status, payload, retry_after, where)
            spent_s += pause_s
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        """One of the calls that may be under way at once."""
        self._settle()
        async with self._places:
            yield

    async def _exchange(
        self, method: str, path: str, query: dict[str, str], body: bytes | None, limit: TimeLimit
    ) -> Reply:
        """One attempt."""
        query = limit.applied(query)
        try:
            async with asyncio.timeout(limit.seconds) as running:
                # A deadline passes while the connection is made; other callers' time begins when it is there.
                connected = None if limit.deadline_ms is not None else partial(_begin, running, limit.seconds)
                try:
                    return await self._send(method, path, query, body, connected)
                except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                    # The server may close a kept-alive connection just as it is used again. Asking about an image
                    # twice changes nothing, so one new connection is tried before the caller is troubled.
                    return await self._send(method, path, query, body, connected)
        except TimeoutError:
            if limit.deadline_ms is not None:
                raise DeadlineMissed(f"{self.url}: no answer came for the deadline {limit.deadline_ms:g} ms") from None
            raise Unreachable(f"{self.url} had not answered {method} {path} after {limit.seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.url} cannot be reached: {str(error) or type(error).__name__}") from None

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: bytes | None,
        connected: Callable[[], None] | None,
    ) -> Reply:
        headers = {} if path == TRANSPORT_PATH else dict(self._headers)  # which anybody may ask, and anybody may hear
        if body is not None:
            headers["Content-Type"] = "application/octet-stream"
        async with self._open().request(
            method,
            self.url + path,
            params=query,
            data=body,
            headers=headers,
            allow_redirects=False,
            trace_request_ctx=connected,
        ) as response:
            payload = bytearray()
            async for chunk in response.content.iter_any():
                payload += chunk
                if len(payload) > MAX_REPLY_BYTES:
                    raise BadReply(f"{self.url}{path} sent more than {MAX_REPLY_BYTES} bytes")
            return response.status, _retry_after(response.headers.get("Retry-After")), bytes(payload)

    def _exchange_datagram(self, image: bytes | Pixels, query: dict[str, str], limit: TimeLimit) -> Awaitable[Reply]:
        """One attempt over datagrams, told as an HTTP reply would tell it."""
        return self._open_link().exchange(image, datagram_request(limit.applied(query)), limit)

    def _open_link(self) -> DatagramWay:
        """The link, made on first use because it belongs to the running loop."""
        # Imported here because the callers of HTTP need neither QUIC nor OpenCV, which take 300 ms to load.
        from hawkvision.client.datagram import DatagramWay

        self._settle()
        if self._link is None:
            offered = partial(self._exchange, "GET", TRANSPORT_PATH, {}, None, TimeLimit(self._timeout_s))
            self._link = DatagramWay(
                self.url, offered, paths=self._paths, api_key=self._api_key, timeout_s=self._timeout_s
            )
        return self._link

    def _open(self) -> aiohttp.ClientSession:
        """The session, made on first use because it belongs to the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEPALIVE_S, ssl=self._tls),
                timeout=aiohttp.ClientTimeout(total=None),  # each attempt has its own
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[_connection_trace()],
            )
        return self._session

    def _settle(self) -> None:
        """See to it that the connections belong to this process and the running loop.

        Raises:
            RuntimeError: if the client is closed, or used on a second loop.
        """
        if self._closed:
            raise RuntimeError(f"the client of {self.url} is closed")
        pid, loop = os.getpid(), asyncio.get_running_loop()
        if self._home is not None and self._home[0] != pid:
            self._disinherit()
        if self._home is not None and self._home[1] is not loop:
            raise RuntimeError(f"the client of {self.url} was used on another event loop; make one for each loop")
        self._home = pid, loop

    def _disinherit(self) -> None:
        """Leave alone what belongs to the parent of this process."""
        _INHERITED.append((self._session, self._link, self._places, self._home))
        self._session = self._link = self._home = None
        self._places = asyncio.Semaphore(self._connections)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _begin(running: asyncio.Timeout, seconds: float) -> None:
    """Have the time of an attempt begin now."""
    if not running.expired():
        running.reschedule(_now() + seconds)


def _connection_trace() -> aiohttp.TraceConfig:
    """Calls what a request gives as its context when it has a connection."""

    async def connected(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(connected)
    trace.on_connection_reuseconn.append(connected)
    return trace


def _retry_after(header: str | None) -> float | None:
    """Seconds; the date form of RFC 9110 §10.2.3 is taken as absent, since clocks may differ."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else None


def _checked_url(url: str) -> str:
    expected = f"url: expected http://HOST[:PORT] or https://HOST[:PORT], got {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # an unclosed bracket, a port that is none
        raise ConfigError(f"{expected} ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ConfigError(expected)
    return url.rstrip("/")

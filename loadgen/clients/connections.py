"""Kept-alive HTTP/1.1 connections with as little work per request as possible.

The time that the load generator spends on a request is measured as the server's, and a general HTTP client spends more
than a fast server does. So requests are bytes made beforehand, and httptools (llhttp) finds the end of the reply. A
connection carries one request at a time; the one used last is used next.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import SplitResult

import httptools

from hawkvision.client.response import Unreachable, why_unreachable
from hawkvision.core.errors import ConfigError
from hawkvision.core.server_access import check_server_url
from loadgen.clients.base import RequestTimes

MAX_REPLY_BYTES: Final = 4 << 20
"""As the client's: far above the largest reply."""


class ConnectionBroken(Exception):
    """The connection ended, or what came over it is no HTTP; the code says which."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class HttpReply:
    """A reply, whole once its future is done."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    """Names in lower case; the last of equal ones."""
    body: bytes = b""
    at: float = 0.0
    """When it was whole, by `time.monotonic`."""


def check_server(url: str, api_key: str | None) -> SplitResult:
    """The parts of a server's URL.

    Raises:
        ConfigError: as `check_server_url`, or if no header can hold the key.
    """
    parts = check_server_url("--url", url)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key: expected printable ASCII")
    return parts


class ConnectionPool:
    """To one server; at most `limit` at once. For one event loop."""

    def __init__(self, url: str, *, limit: int, timeout_s: float, api_key: str | None = None) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            ConfigError: as `check_server`.
        """
        parts = check_server(url, api_key)
        assert parts.hostname is not None
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._common = f"Host: {parts.netloc}\r\n{authorization}".encode()
        self._free = asyncio.Semaphore(limit)
        self._idle: list[_Connection] = []

    def head(self, method: str, path: str, headers: str = "") -> bytes:
        """A request up to its length, for `exchange`; `headers` are whole lines, each with its end."""
        start = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode()
        return start + self._common + headers.encode() + b"Content-Length: "

    async def open(self, count: int) -> None:
        """Connect so often, at once, so that first requests pay for no handshake; one that comes about is enough.

        Raises:
            Unreachable: if no connection can be made.
        """
        attempts = (asyncio.wait_for(self._connect(), self.timeout_s) for _ in range(count))
        failed: OSError = TimeoutError()
        for made in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(made, _Connection):
                self._idle.append(made)
            elif isinstance(made, OSError):  # TimeoutError is one
                failed = made
            else:
                raise made
        if not self._idle:
            if not str(failed):  # a TimeoutError says nothing
                failed = TimeoutError(f"no answer to connecting within {self.timeout_s:g} s")
            raise Unreachable(why_unreachable(self.url, failed))

    async def exchange(self, head: bytes, body: bytes = b"", times: RequestTimes | None = None) -> HttpReply:
        """Send a request, not before it is due, and wait for its reply.

        Raises:
            TimeoutError: if it takes longer than `timeout_s`, waiting for a free connection included.
            Broken: as its code says: `unreachable`, `broken_off`, `bad_reply`.
        """
        request = b"%s%d\r\n\r\n%s" % (head, len(body), body)
        async with asyncio.timeout(self.timeout_s), self._free:
            connection = self._take()
            if connection is not None:
                try:
                    return await self._ask(connection, request, times)
                except ConnectionBroken:
                    # The server may close a kept-alive connection just as it is used again: one new one is tried.
                    if connection.spoke:
                        raise
            if times is not None:
                times.send()  # connecting is part of what the request takes
            try:
                connection = await self._connect()
            except OSError:
                raise ConnectionBroken("unreachable") from None
            return await self._ask(connection, request, times)

    async def close(self) -> None:
        """Close what is open."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _ask(self, connection: _Connection, request: bytes, times: RequestTimes | None) -> HttpReply:
        try:
            reply = await connection.ask(request, times)
        except BaseException:  # timeouts and cancellation, too: a late reply must not be taken for another's
            connection.abort()
            raise
        if connection.usable:
            self._idle.append(connection)
        if times is not None:
            times.done = reply.at
        return reply

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection


class _Connection(asyncio.Protocol):
    """One connection: the parser's callbacks fill a reply."""

    def __init__(self) -> None:
        self.usable = False
        self.spoke = False
        """Whether anything came since the last request."""
        self._reply = HttpReply()
        self._chunks: list[bytes] = []
        self._received = 0
        self._waiting: asyncio.Future[HttpReply] | None = None
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)

    async def ask(self, request: bytes, times: RequestTimes | None = None) -> HttpReply:
        """Send; wait for the reply."""
        self.spoke = False
        self._waiting = asyncio.get_running_loop().create_future()
        if times is not None:
            times.send()
        self._transport.write(request)
        return await self._waiting

    def abort(self) -> None:
        """Close without waiting for anything."""
        self.usable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are alike, but no subclass
        self.usable = True

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.spoke = True
        self._received += len(data)
        if self._waiting is None or self._received > MAX_REPLY_BYTES:
            self._fail("bad_reply")  # unasked for, or far too much
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("bad_reply")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Called by the loop."""
        self._fail("broken_off")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._reply.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        reply, chunks = self._reply, self._chunks
        reply.status = self._parser.get_status_code()
        reply.body = b"".join(chunks)
        reply.at = time.monotonic()
        self._reply, self._chunks = HttpReply(), []
        if reply.status < 200 or self._waiting is None:  # an interim reply; the one that counts follows
            return
        self._received = 0
        if not self._parser.should_keep_alive():
            self.usable = False
            self._transport.close()
        waiting, self._waiting = self._waiting, None
        if not waiting.done():
            waiting.set_result(reply)

    def _fail(self, code: str) -> None:
        self.usable = False
        self._transport.abort()
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(ConnectionBroken(code))

"""HTTP connections of a client to one node."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

import aiohttp

from hawkvision.client.request import TimeLimit
from hawkvision.client.response import BadReply, Reply, Unreachable, broken, error_from_reply, why_unreachable
from hawkvision.core.errors import DeadlineMissed
from hawkvision.core.escalation_api import TRANSPORT_PATH

MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
"""A reply with 100 classes has 10 kB."""
KEEPALIVE_S: Final = 60.0
"""The client closes idle connections before the node does (75 s), so that it sends no image into a closing one."""


class HttpConnections:
    """Kept-alive connections to one node. It belongs to the loop that first uses it."""

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | Literal[True], connections: int
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            url: of the node, without a trailing slash.
            headers: sent with each request, except to `TRANSPORT_PATH`.
            tls: the context for https; True for the system's authorities.
            connections: open at once at most.
        """
        self.url = url
        self._headers = dict(headers)
        self._tls = tls
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def exchange(
        self, method: str, path: str, query: dict[str, str], body: bytes | None, limit: TimeLimit
    ) -> Reply:
        """One attempt.

        Raises:
            DeadlineMissed: if no reply arrives before the end of a limit that a deadline sets.
            Unreachable: if the node cannot be reached, or does not reply within the limit.
            BadReply: if the reply is too long.
        """
        query = limit.applied(query)
        try:
            async with asyncio.timeout(limit.seconds) as running:
                # A deadline includes the time to connect. Without one, the time begins when the connection is open.
                connected = None if limit.deadline_ms is not None else partial(_begin, running, limit.seconds)
                try:
                    return await self._send(method, path, query, body, connected)
                except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                    # The server may close a kept-alive connection just as it is used again. A request may be sent
                    # twice, so the client tries one new connection.
                    return await self._send(method, path, query, body, connected)
        except TimeoutError:
            if limit.deadline_ms is not None:
                raise DeadlineMissed(f"{self.url}: no answer came for the deadline {limit.deadline_ms:g} ms") from None
            raise Unreachable(f"{self.url} had not answered {method} {path} after {limit.seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            failed = (
                Unreachable
                if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.InvalidURL)
                else broken
            )
            raise failed(why_unreachable(self.url, error)) from None

    async def lines(self, path: str, query: dict[str, str], within_s: float) -> AsyncGenerator[bytes]:
        """The lines of a reply that does not end soon; `within_s` is the longest wait for the next one.

        Raises:
            HawkVisionError: as the node reports.
            Unreachable: if the node cannot be reached, or sends nothing for so long.
            BadReply: if a line is too long.
        """
        try:
            async with asyncio.timeout(within_s):
                response = await self._open().request(
                    "GET", self.url + path, params=query, headers=self._headers, allow_redirects=False,
                    read_bufsize=MAX_REPLY_BYTES,
                )  # fmt: skip
            try:
                if response.status != 200:
                    async with asyncio.timeout(within_s):
                        said = await response.content.read(MAX_REPLY_BYTES)
                    retry_after_s = _retry_after(response.headers.get("Retry-After"))
                    raise error_from_reply(response.status, said, retry_after_s, self.url + path)
                while True:
                    async with asyncio.timeout(within_s):
                        line = await response.content.readline()
                    if not line:
                        return
                    yield line
            finally:
                response.close()
        except TimeoutError:
            raise Unreachable(f"{self.url} had sent nothing of {path} for {within_s:g} s") from None
        except ValueError:
            raise BadReply(f"{self.url}{path} sent a line of more than {MAX_REPLY_BYTES} bytes") from None
        except (aiohttp.ClientError, OSError) as error:
            raise broken(why_unreachable(self.url, error)) from None

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: bytes | None,
        connected: Callable[[], None] | None,
    ) -> Reply:
        headers = {} if path == TRANSPORT_PATH else dict(self._headers)  # needs no key
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


def _begin(running: asyncio.Timeout, seconds: float) -> None:
    """Start the time of an attempt now."""
    if not running.expired():
        running.reschedule(asyncio.get_running_loop().time() + seconds)


def _connection_trace() -> aiohttp.TraceConfig:
    """Calls the request's context, a function, when the request has a connection."""

    async def connected(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx()

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(connected)
    trace.on_connection_reuseconn.append(connected)
    return trace


def _retry_after(header: str | None) -> float | None:
    """Seconds. The date form of RFC 9110 §10.2.3 counts as absent, because clocks may differ."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else None

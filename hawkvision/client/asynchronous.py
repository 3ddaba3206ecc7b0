"""The client of an edge node for programs with an event loop; see `hawkvision.client`."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from hawkvision.client.calls import ImageCalls
from hawkvision.client.http import HttpConnections
from hawkvision.client.request import (
    ClassifyFields,
    Image,
    PixelFormat,
    TimeLimit,
    datagram_request,
    query_fields,
    waits_beyond_deadline,
)
from hawkvision.client.response import (
    Exchange,
    Reply,
    Unreachable,
    error_from_reply,
    object_of,
)
from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.core.escalation_api import TRANSPORT_PATH
from hawkvision.core.key_text import clean_key
from hawkvision.core.server_url import check_server_url
from hawkvision.core.types import Pixels
from hawkvision.tasks.registry import KIND_OF_FORM

if TYPE_CHECKING:
    from hawkvision.client.datagram import DatagramConnection

Transport: TypeAlias = Literal["http", "datagram"]

MAX_ATTEMPTS: Final = 10
"""Attempts of one call at most, whatever its retry budget."""
LATE_S: Final = 1.0
"""Default of `late_s`. TCP repeats a lost first segment after one second (RFC 6298 §2), so one loss costs no answer."""
POLL_S: Final = (0.1, 1.0)
"""First and longest pause between checks whether a node has started."""
FIRST_PAUSE_S: Final = 0.1
"""Pause before the second attempt if the refusal has no Retry-After; it doubles with each attempt."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a node is ready, and what it serves. `task` and `variant` are None while it is not ready."""

    ready: bool
    task: str | None = None
    variant: str | None = None


_INHERITED: Final[list[object]] = []
"""Connections of the parent process. They are kept, because collecting one would close what the parent still uses."""


class AsyncClient(ImageCalls):
    """Client of one node. Use it on one event loop; close it, or use it as a context manager."""

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
            url: of the node, such as `http://127.0.0.1:8080`; with the path below which it answers, if there is one.
            api_key: sent as `Authorization: Bearer …`.
            timeout_s: time for one attempt, from an open connection to the last byte of the reply. Connecting may take
                as long again. With a `deadline_ms` both share the time.
            late_s: how long after its `deadline_ms` a call may still return an answer; less than `timeout_s`.
            connections: connections open at once. Further calls wait for a free one before their time begins. The
                datagram transport has one connection and sends this many images at once.
            retry_budget_s: total pause of one call before retries after 429 and 503, which follow Retry-After; 0 never
                retries. A shorter `deadline_ms` bounds it too.
            transport: `http`, or `datagram` to send images as datagrams. The node tells the address over HTTP.
            paths: addresses of this machine to send datagrams from, one link each. Default: one that the system
                chooses.
            ca: PEM file of the authorities that the node's certificate must be from, for https. Default: the system's.
            certificate: PEM file of this caller's certificate, for a node that asks for one.
            certificate_key: PEM file of its private key. Default: the same file.

        Raises:
            ConfigError: if the URL is malformed, a key or a file cannot be used, or an argument belongs to the other
                transport.
        """
        check_server_url("url", url)
        self.url = url.rstrip("/")
        _check_transport(transport, paths)
        self._datagram = transport == "datagram"
        self._paths = tuple(paths)
        self._tls: ssl.SSLContext | Literal[True] = True
        if ca is not None or certificate is not None or certificate_key is not None:
            if not self.url.lower().startswith("https:"):
                raise ConfigError(f"ca, certificate: only for https://HOST[:PORT][/PATH], got {url!r}")
            # Imported here because other callers do not need cryptography, which loads slowly.
            from hawkvision.servers.tls import caller_context

            self._tls = caller_context(ca, certificate, certificate_key)
        api_key = clean_key(api_key, "api_key") if api_key else None
        self._api_key = api_key
        self._link: DatagramConnection | None = None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._late_s = late_s
        self._connections = connections
        self._places = asyncio.Semaphore(connections)
        self._retry_budget_s = retry_budget_s
        self._http = self._new_http()
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        """The process and the loop that own the connections."""
        self._closed = False

    async def send(self, path: str, image: Image, form: PixelFormat, fields: ClassifyFields) -> dict[str, Any]:
        """The JSON of the answer to one image, which the calls of `ImageCalls` read.

        Raises:
            HawkVisionError, OSError: as `infer`.
        """
        query = query_fields(**fields)
        deadline_ms = None if waits_beyond_deadline(fields) else fields.get("deadline_ms")
        budget_s = self._retry_budget_s if deadline_ms is None else min(self._retry_budget_s, deadline_ms / 1e3)
        async with self._place():
            # Encoded only now, so that at most `connections` encoded images are in memory.
            body = await form.sendable(image, pixels=self._datagram)
            exchange: Exchange
            if self._datagram:
                kind = KIND_OF_FORM.get(path)
                exchange = partial(self._exchange_datagram, body, query if kind is None else {**query, "kind": kind})
            else:
                assert isinstance(body, bytes)
                exchange = partial(self._http.exchange, "POST", path, query, body)
            return await self._retried(exchange, f"{self.url}{path}", budget_s, deadline_ms)

    async def tasks(self) -> dict[str, Any]:
        """The reply to `GET /v1/tasks`: the tasks that the node serves, with their kinds, the default first.

        Raises:
            ServiceError: if the node does not reply, or is not ready.
        """
        return await self._get("/v1/tasks", self._retry_budget_s)

    async def targets(self, task: str | None = None) -> dict[str, Any]:
        """The reply to `GET /v1/targets`: attainable targets with guarantee, expected escalation rate and latency.

        Args:
            task: of the node's tasks; None is the first one.

        Raises:
            NotFound: if the node does not serve the task.
            ServiceError: if the node does not reply, or is not ready.
        """
        return await self._get("/v1/targets", self._retry_budget_s, {} if task is None else {"task": task})

    async def health(self) -> Health:
        """Whether the node is ready, and what it serves.

        Raises:
            Unreachable: if nothing replies.
        """
        try:
            body = await self._get("/readyz", 0.0)
        except NotReady:
            return Health(ready=False)
        return Health(ready=True, task=body.get("task"), variant=body.get("variant"))

    async def wait_ready(self, timeout_s: float = 60.0) -> Health:
        """Wait until the node is ready. It may not listen yet.

        Raises:
            Unreachable: if nothing replies within `timeout_s`.
            NotReady: if the node is not ready within `timeout_s`.
            HawkVisionError: at once, for an error that waiting does not resolve.
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
        """Connect now, so that the first image needs no handshake.

        Raises:
            Unreachable: if nothing replies.
            HawkVisionError: if the node refuses the connection.
        """
        if not self._datagram:
            await self.health()
            return
        await self._open_link().connect()

    @property
    def sent_bytes(self) -> int:
        """Bytes sent as datagrams so far; 0 over HTTP."""
        return 0 if self._link is None else self._link.sent_bytes

    async def close(self) -> None:
        """Close the connections. A second call does nothing."""
        self._closed = True
        if self._home is not None and self._home[0] != os.getpid():
            self._disinherit()
        if self._link is not None:
            await self._link.close()
        await self._http.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _get(self, path: str, budget_s: float, query: dict[str, str] | None = None) -> dict[str, Any]:
        async with self._place():
            exchange = partial(self._http.exchange, "GET", path, query or {}, None)
            return await self._retried(exchange, f"{self.url}{path}", budget_s)

    async def _retried(
        self, exchange: Exchange, where: str, budget_s: float, deadline_ms: float | None = None
    ) -> dict[str, Any]:
        """The JSON object of a 200 reply; retries within `budget_s`. The call's time begins now."""
        began, spent_s = _now(), 0.0
        for attempt in range(MAX_ATTEMPTS):
            elapsed_s = _now() - began if attempt else 0.0
            limit = TimeLimit.after(elapsed_s, self._timeout_s, deadline_ms, self._late_s)
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
        """One of the `connections` calls that may be in flight."""
        self._settle()
        async with self._places:
            yield

    def _exchange_datagram(self, image: bytes | Pixels, query: dict[str, str], limit: TimeLimit) -> Awaitable[Reply]:
        """One attempt over datagrams, returned as an HTTP reply."""
        return self._open_link().exchange(image, datagram_request(limit.applied(query)), limit)

    def _open_link(self) -> DatagramConnection:
        """The link, made on first use because it belongs to the running loop."""
        # Imported here because callers over HTTP need neither QUIC nor OpenCV, which load slowly.
        from hawkvision.client.datagram import DatagramConnection

        self._settle()
        if self._link is None:
            offered = partial(self._http.exchange, "GET", TRANSPORT_PATH, {}, None, TimeLimit(self._timeout_s))
            self._link = DatagramConnection(
                self.url, offered, paths=self._paths, api_key=self._api_key, timeout_s=self._timeout_s
            )
        return self._link

    def _new_http(self) -> HttpConnections:
        return HttpConnections(self.url, self._headers, self._tls, self._connections)

    def _settle(self) -> None:
        """Ensure that the connections belong to this process and the running loop.

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
        """Replace the connections that belong to the parent process, without closing them."""
        _INHERITED.append((self._http, self._link, self._places, self._home))
        self._http = self._new_http()
        self._link = self._home = None
        self._places = asyncio.Semaphore(self._connections)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _check_transport(transport: str, paths: Sequence[str]) -> None:
    if transport not in ("http", "datagram"):
        raise ConfigError(f"transport: expected 'http' or 'datagram', got {transport!r}")
    if paths and transport != "datagram":
        raise ConfigError("paths: only transport='datagram' takes them; the system chooses the path of HTTP")

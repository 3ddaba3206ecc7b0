"""The way to the datacenter tier: the caller's own bytes over a kept-alive connection, and what the link is like.

Failures never reach the caller as errors: `EscalationFailed` tells the node to answer by itself. Only what the
datacenter found wrong with the picture is the caller's to know. Replies are checked before anybody believes them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from hawkvision import errors
from hawkvision.cascade.link import LinkEstimate
from hawkvision.clock import Clock
from hawkvision.errors import EscalationFailed, RequestError
from hawkvision.hop import INFER_PATH, RUNGS_PATH, TRACE_HEADER, HopReply, HopRequest, Rungs
from hawkvision.trace import TraceContext

log = logging.getLogger("hawkvision.edge")

CONNECT_TIMEOUT_S: Final = 1.0
MAX_REPLY_BYTES: Final = 1024 * 1024
"""A reply with 1,000 classes is 45 KB."""
WAITING_PER_CONNECTION: Final = 4
"""Escalations that may wait for each connection; the next one fails at once, for it would only wait longer."""
PACE_GAIN: Final = 0.05
"""Weight of the newest round trip in what `/v1/targets` shows; slower than the link's estimate, which decides."""
CALLERS_FAULT: Final = {kind.code: kind for kind in (errors.BadImage, errors.UnsupportedMedia)}
"""What is wrong with the picture itself. A datacenter's own limits (413, 429) are not the caller's fault."""

_reply_decoder = msgspec.json.Decoder(HopReply)
_rungs_decoder = msgspec.json.Decoder(Rungs)


class _ErrorBody(msgspec.Struct):
    error: str = ""
    code: str = ""


_error_decoder = msgspec.json.Decoder(_ErrorBody)


@dataclass(frozen=True, slots=True)
class Escalated:
    """The datacenter's answer and the whole round trip in milliseconds."""

    reply: HopReply
    round_trip_ms: float


class Uplink:
    """One datacenter ingress. Its connections are bounded; callers beyond them wait, within their own deadline."""

    def __init__(self, url: str, api_key: str | None, connections: int, classes: int, clock: Clock) -> None:
        """Prepare; `classes` is what a reply's indices must stay below."""
        self.url = url.rstrip("/")
        self.link = LinkEstimate()
        self.lost = asyncio.Event()
        """Set when the link goes down, for whoever watches it."""
        self._classes = classes
        self._clock = clock
        self._connections = connections
        self._most_pending = connections * (1 + WAITING_PER_CONNECTION)
        self._pending = 0
        self._pace_ms: dict[str, float] = {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=60.0),
            headers=headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @property
    def idle(self) -> bool:
        """Whether the link is up and a connection is free: whoever sends now lets nobody wait."""
        return self.link.up and self._pending < self._connections

    def predict_ms(self) -> float | None:
        """How long an escalation would take now; None while the datacenter is left alone after a failure."""
        return self.link.predict_ms(self._clock.now())

    async def infer(self, body: bytes, request: HopRequest, trace: TraceContext, timeout_s: float) -> Escalated:
        """Ask the datacenter about a picture; with `request.middle`, the reply's `model` says which rung answered.

        Raises:
            RequestError: what the datacenter found wrong with the picture.
            EscalationFailed: for everything else, a timeout included.
        """
        if self._pending >= self._most_pending:
            raise EscalationFailed(f"{self._pending} escalations are already on their way")
        self._pending += 1
        started = self._clock.now()
        try:
            status, payload = await self._post(body, request, trace, timeout_s)
        finally:
            self._pending -= 1
        now = self._clock.now()
        if status != 200:
            raise self._refusal(status, payload, now)
        reply = self._checked(payload, request)
        round_trip_ms = (now - started) * 1e3
        self.link.succeeded(round_trip_ms, now)
        self._learn_pace(reply.model, round_trip_ms)
        return Escalated(reply, round_trip_ms)

    def mean_ms(self, rung: str) -> float:
        """Smoothed round trip of the answers that a rung gave; before its first, that of all."""
        return self._pace_ms.get(rung, self.link.mean_ms)

    def _learn_pace(self, rung: str, round_trip_ms: float) -> None:
        """Per rung that answered; replies are checked, so there are as many as a certificate names."""
        before = self._pace_ms.get(rung, round_trip_ms)
        self._pace_ms[rung] = before + PACE_GAIN * (round_trip_ms - before)

    async def _post(self, body: bytes, request: HopRequest, trace: TraceContext, timeout_s: float) -> tuple[int, bytes]:
        started = self._clock.now()
        headers = request.headers()
        headers[TRACE_HEADER] = trace.header()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(
                    f"{self.url}{INFER_PATH}",
                    data=body,
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                ) as response,
            ):
                return response.status, await _read(response)
        except aiohttp.ServerTimeoutError:
            self._failed()
            raise EscalationFailed(f"{self.url} did not accept a connection within {CONNECT_TIMEOUT_S:g} s") from None
        except TimeoutError:
            now = self._clock.now()
            self.link.late((now - started) * 1e3, now)
            if request.deadline_ms is None:
                self._failed()  # nobody hurried it, and still it did not answer
            raise EscalationFailed(f"{self.url} had not answered after {timeout_s * 1e3:.0f} ms") from None
        except (aiohttp.ClientError, OSError) as error:
            self._failed()
            raise EscalationFailed(f"{self.url} cannot be reached: {error or type(error).__name__}") from None

    def _checked(self, payload: bytes, request: HopRequest) -> HopReply:
        """The reply, if it can be true."""
        try:
            reply = _reply_decoder.decode(payload)
        except msgspec.DecodeError as error:
            self._failed()
            raise EscalationFailed(f"{self.url} sent a reply that is none: {error}") from None
        seen = [(c.index, c.confidence) for c in reply.top_k]
        if reply.passed_over is not None:
            seen.append((reply.passed_over.index, reply.passed_over.score))
        sound = all(0 <= index < self._classes and 0.0 <= sure <= 1.0 for index, sure in seen)
        if not reply.top_k or not sound or not _answers(reply, request):
            self._failed()
            raise EscalationFailed(f"{self.url} sent a reply that cannot be: {payload[:200]!r}")
        return reply

    def _failed(self) -> None:
        self.link.failed()
        self.lost.set()

    def _refusal(self, status: int, payload: bytes, now: float) -> RequestError | EscalationFailed:
        """What a reply other than 200 means here."""
        try:
            body = _error_decoder.decode(payload)
        except msgspec.DecodeError:
            body = _ErrorBody(error=f"HTTP {status}")
        fault = CALLERS_FAULT.get(body.code)
        if fault is not None and fault.status == status:
            return fault(body.error)
        if status in (429, 504):
            # Alive but too busy: the next request may try, with a longer round trip in mind.
            self.link.late(2 * self.link.mean_ms, now)
        elif status != errors.TooLarge.status:
            self._failed()
        return EscalationFailed(f"{self.url} refused with HTTP {status}: {body.error[:200]}")

    async def rungs(self) -> Rungs:
        """What the datacenter serves.

        Raises:
            EscalationFailed: if it does not say.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=5.0, sock_connect=CONNECT_TIMEOUT_S)
            async with self._session.get(f"{self.url}{RUNGS_PATH}", timeout=timeout) as response:
                payload = await _read(response)
            if response.status != 200:
                raise EscalationFailed(f"{self.url}{RUNGS_PATH} answered HTTP {response.status}")
            return _rungs_decoder.decode(payload)
        except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise EscalationFailed(f"{self.url}{RUNGS_PATH}: {error or type(error).__name__}") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def _answers(reply: HopReply, request: HopRequest) -> bool:
    """Whether the rung that answered was allowed to: the one asked for, or the middle one if it was sure enough.

    A tier that does not know of middle rungs states no score, and its answer would void the certificate.
    """
    middle = request.middle
    if middle is None:
        return reply.model == request.variant
    if reply.score is None or not 0.0 <= reply.score <= 1.0:
        return False
    if reply.model == request.variant:
        return reply.score >= middle.accept_score
    passed_over = reply.passed_over
    return reply.model == middle.otherwise and passed_over is not None and passed_over.score < middle.accept_score


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, at most `MAX_REPLY_BYTES` of it."""
    payload = b""
    while len(payload) < MAX_REPLY_BYTES:
        chunk = await response.content.read(MAX_REPLY_BYTES - len(payload))
        if not chunk:
            break
        payload += chunk
    return payload

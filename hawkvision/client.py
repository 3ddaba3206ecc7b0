"""The client of an edge node: send a picture and what is needed of the answer, get a `hawkvision.types.Answer`.

    with Client("http://127.0.0.1:8080") as client:
        answer = client.classify("cat.jpg", max_accuracy_drop=0.01, deadline_ms=80)

`AsyncClient` is the implementation; `Client` runs one on an event loop of its own, so both behave alike. Pictures
travel unchanged, as the raw body, and fields as query parameters. A refusal is raised as the very class of
`hawkvision.errors` that the node raised; two more can happen only on this side:

    ServiceError
    ├── Unreachable   no connection, a broken one, or no answer within `timeout_s`
    └── BadReply      something answered, but not in the way a node does

With `transport="lossy"` pictures travel as datagrams (`hawkvision.lossy`), for links that lose: shrunk to what the
node's models make use of and coded anew where that is needed, so that the answer says what was received. `deadline_ms`
then covers the link, both ways, from when the picture begins to leave, and fragments that would come too late are not
sent. If too little arrives in time for any answer, or none comes back, that is `DeadlineMissed` whatever `on_miss`
says, except for `wait`, which sends and waits without regard to the link's deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec
import numpy as np

from hawkvision import errors
from hawkvision.errors import (
    BadField,
    ConfigError,
    DeadlineMissed,
    HawkVisionError,
    NotReady,
    Overloaded,
    ServiceError,
    TargetUnreachable,
)
from hawkvision.hop import TRANSPORT_PATH, LossyOffer, Transports
from hawkvision.types import (
    AccuracyPromise,
    Answer,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    Pixels,
    Prediction,
    PromiseStatus,
    Quality,
    Reason,
    Target,
    Tier,
    Timing,
)

if TYPE_CHECKING:
    from hawkvision.lossy import LossyLink

Transport: TypeAlias = Literal["http", "lossy"]
Picture: TypeAlias = bytes | str | os.PathLike[str] | Pixels
"""An encoded picture, the path of one, or uint8 RGB pixels (height, width, 3)."""

CLASSIFY_PATH: Final = "/v1/classify"
Reply: TypeAlias = tuple[int, float | None, bytes]
"""Status, Retry-After in seconds, body."""
Exchange: TypeAlias = Callable[[], Awaitable[Reply]]

MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
"""Far above the largest reply (100 classes are 10 KB), far below what would harm the caller."""
KEEPALIVE_S: Final = 60.0
"""Idle connections are dropped before the node does so (after 75 s), lest a picture be sent into a closing one. Long
enough that a camera with a picture a minute, or every few seconds, connects once."""
MAX_ATTEMPTS: Final = 10
"""Per call, whatever the retry budget."""
FIRST_PAUSE_S: Final = 0.1
"""Before the second attempt when a refusal has no Retry-After; doubles with each further one."""

LONGEST_LINK_DEADLINE_MS: Final = 60_000.0
"""Fragments count milliseconds in 16 bits; longer deadlines are the node's alone."""
MAX_META: Final = 64
"""Bytes that fragments carry of their own, here the stream's name; a longer one makes a template of its own."""

_TARGETS: Final = ("min_accuracy", "max_accuracy_drop", "quality", "min_confidence")


class Unreachable(ServiceError):
    """The node cannot be reached, or did not answer in time; the message names its URL."""

    code = "unreachable"


class BadReply(ServiceError):
    """What answered is not a HawkVision node, or one of another version."""

    code = "bad_reply"


class ClassifyFields(TypedDict, total=False):
    """What may be asked of a picture; DESIGN §3. At most one of the first four, the target."""

    min_accuracy: float | None
    max_accuracy_drop: float | None
    quality: Quality | str | None
    min_confidence: float | None
    deadline_ms: float | None
    on_miss: OnMiss | str | None
    stream: str | None
    top_k: int | None
    task: str | None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a node takes pictures now, and what it serves; task and variant are None while it is not ready."""

    ready: bool
    task: str | None = None
    variant: str | None = None


class AsyncClient:
    """One node, over kept-alive connections. Use it on one event loop; close it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        connections: int = 16,
        retry_budget_s: float = 0.0,
        transport: Transport = "http",
        paths: Sequence[str] = (),
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            url: of the node, such as `http://127.0.0.1:8080`.
            api_key: sent as `Authorization: Bearer …`.
            timeout_s: for one attempt, from waiting for a free connection to the last byte of the reply.
            connections: open at once at most; further calls wait for a free one, within `timeout_s`.
            retry_budget_s: how long one call may pause in all to try again after 429 and 503, honouring
                Retry-After; 0 never retries. A `deadline_ms` that is shorter bounds it too.
            transport: `lossy` sends pictures as datagrams; the node says over HTTP where to.
            paths: this machine's addresses to send datagrams from, each over a link of its own; default: one, the
                system's choice.

        Raises:
            ConfigError: if the URL is none, or paths are given for HTTP.
        """
        self.url = _checked_url(url)
        if transport not in ("http", "lossy"):
            raise ConfigError(f"transport: expected 'http' or 'lossy', got {transport!r}")
        if paths and transport != "lossy":
            raise ConfigError("paths: only transport='lossy' uses several; HTTP goes the way the system chooses")
        self._lossy = transport == "lossy"
        self._paths = tuple(paths)
        self._api_key = api_key
        self._link: LossyLink | None = None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._connections = connections
        self._retry_budget_s = retry_budget_s
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def classify(self, picture: Picture, **fields: Unpack[ClassifyFields]) -> Answer:
        """What the picture shows.

        Over HTTP, encoded pictures are sent byte for byte; pixels are sent as PNG, which loses nothing.

        Raises:
            BadField: for contradictory fields, before anything is sent.
            RequestError, ServiceError: as the node says, or as the module's docstring draws. Over the lossy transport
                a broken picture is found out before it is sent.
            OSError: if the path cannot be read.
        """
        query = query_fields(**fields)
        deadline_ms = fields.get("deadline_ms")
        budget_s = self._retry_budget_s if deadline_ms is None else min(self._retry_budget_s, deadline_ms / 1e3)
        exchange: Exchange
        if self._lossy:
            exchange = partial(self._exchange_lossy, await _readable(picture), _question(query))
        else:
            exchange = partial(self._exchange, "POST", CLASSIFY_PATH, query, await _encoded(picture))
        return answer_from_json(await self._retried(exchange, f"{self.url}{CLASSIFY_PATH}", budget_s))

    async def targets(self) -> dict[str, Any]:
        """The document of `GET /v1/targets`: attainable targets with promise, expected escalation and latency.

        Raises:
            ServiceError: if the node does not answer, or is not ready.
        """
        return await self._get("/v1/targets", self._retry_budget_s)

    async def health(self) -> Health:
        """Whether the node takes pictures now.

        Raises:
            Unreachable: if nothing answers.
        """
        try:
            body = await self._get("/readyz", 0.0)
        except errors.NotReady:
            return Health(ready=False)
        return Health(ready=True, task=body.get("task"), variant=body.get("variant"))

    async def connect(self) -> None:
        """Connect now, so that the first picture pays for no handshake.

        Raises:
            Unreachable: if nothing answers.
            HawkVisionError: what the node says against it.
        """
        if not self._lossy:
            await self.health()
            return
        from hawkvision.transport.udp import ConnectionLost

        try:
            await self._open_link().probe(self._timeout_s)
        except ConnectionLost as error:
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None

    @property
    def sent_bytes(self) -> int:
        """Bytes of datagrams sent so far; 0 over HTTP."""
        return 0 if self._link is None else self._link.sent_bytes

    async def close(self) -> None:
        """Close the connections. Closing twice does no harm."""
        self._closed = True
        if self._link is not None:
            await self._link.close()
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _get(self, path: str, budget_s: float) -> dict[str, Any]:
        return await self._retried(partial(self._exchange, "GET", path, {}, None), f"{self.url}{path}", budget_s)

    async def _retried(self, exchange: Exchange, where: str, budget_s: float) -> dict[str, Any]:
        """The JSON object of a 200 reply; retries within the budget."""
        spent_s = 0.0
        for attempt in range(MAX_ATTEMPTS):
            status, retry_after, payload = await exchange()
            if status == 200:
                return _object(payload, where)
            pause_s = FIRST_PAUSE_S * 2.0**attempt if retry_after is None else retry_after
            may_retry = status in (429, 503) and budget_s > 0.0 and attempt + 1 < MAX_ATTEMPTS
            if not may_retry or spent_s + pause_s > budget_s:
                raise error_from_reply(status, payload, retry_after, where)
            spent_s += pause_s
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def _exchange(self, method: str, path: str, query: dict[str, str], body: bytes | None) -> Reply:
        """One attempt."""
        try:
            try:
                return await self._send(method, path, query, body)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                # The server may close a kept-alive connection just as it is used again. Asking about a picture twice
                # changes nothing, so one new connection is tried before the caller is troubled.
                return await self._send(method, path, query, body)
        except TimeoutError:
            raise Unreachable(f"{self.url} had not answered {method} {path} after {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.url} cannot be reached: {error or type(error).__name__}") from None

    async def _send(self, method: str, path: str, query: dict[str, str], body: bytes | None) -> Reply:
        headers = {} if body is None else {"Content-Type": "application/octet-stream"}
        async with self._open().request(
            method, self.url + path, params=query, data=body, headers=headers, allow_redirects=False
        ) as response:
            payload = bytearray()
            async for chunk in response.content.iter_any():
                payload += chunk
                if len(payload) > MAX_REPLY_BYTES:
                    raise BadReply(f"{self.url}{path} sent more than {MAX_REPLY_BYTES} bytes")
            return response.status, _retry_after(response.headers.get("Retry-After")), bytes(payload)

    async def _exchange_lossy(self, picture: bytes | Pixels, question: _Question) -> Reply:
        """One attempt over datagrams, told as an HTTP reply would tell it."""
        # Imported here because the callers of HTTP need neither QUIC nor OpenCV, which take 300 ms to load.
        from hawkvision.transport.udp import ConnectionLost

        try:
            status, body = await self._open_link().ask(
                question.template,
                picture,
                meta=question.meta,
                deadline_s=question.deadline_s,
                timeout_s=self._timeout_s,
            )
        except NotReady as error:  # the node says so over HTTP, asked for where it listens
            return error.status, None, msgspec.json.encode(error.body())
        except ConnectionLost as error:
            raise Unreachable(f"{self.url} cannot be reached by datagrams: {error}") from None
        except TimeoutError:
            if question.deadline_s is not None and question.deadline_s < self._timeout_s:
                raise DeadlineMissed(f"{self.url}: no answer came back in time for {question.deadline_s:g} s") from None
            raise Unreachable(f"{self.url} had not answered a picture after {self._timeout_s:g} s") from None
        return _reply_of(status.name, body, self.url)

    def _open_link(self) -> LossyLink:
        """The link, made on first use because it belongs to the running loop."""
        from hawkvision.lossy import LossyLink

        if self._closed:
            raise RuntimeError(f"the client of {self.url} is closed")
        if self._link is None:
            host = urlsplit(self.url).hostname or ""
            self._link = LossyLink(host, self._discover, local=self._paths, api_key=self._api_key)
        return self._link

    async def _discover(self) -> LossyOffer:
        """Where the node listens for datagrams."""
        from hawkvision.transport.udp import ConnectionLost

        where = f"{self.url}{TRANSPORT_PATH}"
        try:
            status, retry_after, payload = await self._exchange("GET", TRANSPORT_PATH, {}, None)
        except Unreachable as error:
            raise ConnectionLost(str(error)) from None
        if status != 200:
            raise error_from_reply(status, payload, retry_after, where)
        try:
            offer = msgspec.json.decode(payload, type=Transports).lossy
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadReply(f"{where}: {error}") from None
        if offer is None:
            raise ConfigError(f"{self.url} does not listen for datagrams; expected a node with edge.lossy_port set")
        return offer

    def _open(self) -> aiohttp.ClientSession:
        """The session, made on first use because it belongs to the running loop."""
        if self._closed:
            raise RuntimeError(f"the client of {self.url} is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


ResultT = TypeVar("ResultT")


class Client:
    """`AsyncClient` for code without an event loop; safe to call from several threads."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        connections: int = 16,
        retry_budget_s: float = 0.0,
        transport: Transport = "http",
        paths: Sequence[str] = (),
    ) -> None:
        """See `AsyncClient`."""
        self._async = AsyncClient(
            url,
            api_key=api_key,
            timeout_s=timeout_s,
            connections=connections,
            retry_budget_s=retry_budget_s,
            transport=transport,
            paths=paths,
        )
        self.url = self._async.url
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a program that forgot `close` can still end.
        self._thread = threading.Thread(target=self._loop.run_forever, name="hawkvision-client", daemon=True)
        self._thread.start()
        self._closing = threading.Lock()

    def classify(self, picture: Picture, **fields: Unpack[ClassifyFields]) -> Answer:
        """See `AsyncClient.classify`."""
        return self._run(self._async.classify(picture, **fields))

    def targets(self) -> dict[str, Any]:
        """See `AsyncClient.targets`."""
        return self._run(self._async.targets())

    def health(self) -> Health:
        """See `AsyncClient.health`."""
        return self._run(self._async.health())

    def close(self) -> None:
        """Close the connections and end the thread. Closing twice does no harm; calls under way are cut off."""
        with self._closing:
            if self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        if self._loop.is_closed():
            call.close()
            raise RuntimeError(f"the client of {self.url} is closed")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(f"the client of {self.url} was closed during a call") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _shut_down(self) -> None:
        await self._async.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def query_fields(**fields: Unpack[ClassifyFields]) -> dict[str, str]:
    """The fields as query parameters; None says nothing.

    Raises:
        BadField: if more than one target is given.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    targets = [name for name in _TARGETS if name in given]
    if len(targets) > 1:
        raise BadField(f"expected at most one of {', '.join(_TARGETS)}; got {' and '.join(targets)}")
    # Enums are written by value; repr gives floats their shortest exact form.
    return {name: repr(float(v)) if isinstance(v, float) else f"{v}" for name, v in given.items()}


@dataclass(frozen=True, slots=True)
class _Question:
    """The fields of a picture as the lossy transport carries them: what many pictures share, and what is its own."""

    template: bytes
    meta: bytes
    deadline_s: float | None


def _question(query: dict[str, str]) -> _Question:
    """The deadline leaves the template for the fragments where they can carry it and it is the link's to keep.

    What the node is to refuse stays in the template, so that it does.
    """
    shared = dict(query)
    deadline_s = None
    with contextlib.suppress(ValueError):  # the node says what is wrong with it
        deadline_ms = float(shared.get("deadline_ms", 0.0))
        if shared.get("on_miss") != "wait" and 0.0 < deadline_ms <= LONGEST_LINK_DEADLINE_MS:
            del shared["deadline_ms"]
            deadline_s = deadline_ms / 1e3
    meta = shared.get("stream", "").encode()
    if len(meta) <= MAX_META:
        shared.pop("stream", None)
    else:
        meta = b""
    return _Question(urlencode(sorted(shared.items())).encode(), meta, deadline_s)


# ------------------------------------------------------------------------------------------------- replies


class _Target(msgspec.Struct, frozen=True):
    min_accuracy: float | None = None
    max_accuracy_drop: float | None = None
    quality: Quality | None = None
    min_confidence: float | None = None


class _Promise(msgspec.Struct, frozen=True):
    target: _Target
    status: PromiseStatus
    basis: Basis
    max_drop: float | None = None
    delta: float | None = None
    n: int | None = None


class _Reply(msgspec.Struct, frozen=True):
    """`Answer.to_json` as it travels. Fields that a later node adds are ignored."""

    id: str
    task: str
    top_k: tuple[Prediction, ...]
    model: str
    tier: Tier
    escalated: bool
    reason: Reason | None
    degraded: bool
    received_fraction: float
    accuracy: _Promise
    deadline_met: bool | None
    timing_ms: Timing


def answer_from_json(value: dict[str, Any]) -> Answer:
    """The answer that `Answer.to_json` wrote, but for its rounding of confidences and times.

    Raises:
        BadReply: naming the key that is missing or malformed.
    """
    try:
        reply = msgspec.convert(value, _Reply)
    except msgspec.ValidationError as error:
        raise BadReply(f"answer: {error}") from None
    if not reply.top_k:
        raise BadReply("answer: top_k: expected at least one class, got none")
    promise = reply.accuracy
    return Answer(
        id=reply.id,
        task=reply.task,
        top_k=reply.top_k,
        model=reply.model,
        tier=reply.tier,
        accuracy=AccuracyPromise(
            target=_target(promise.target),
            status=promise.status,
            basis=promise.basis,
            max_drop=promise.max_drop,
            delta=promise.delta,
            n=promise.n,
        ),
        escalated=reply.escalated,
        reason=reply.reason,
        degraded=reply.degraded,
        received_fraction=reply.received_fraction,
        deadline_met=reply.deadline_met,
        timing_ms=reply.timing_ms,
    )


def _target(written: _Target) -> Target:
    given: list[Target] = []
    if written.min_accuracy is not None:
        given.append(MinAccuracy(written.min_accuracy))
    if written.max_accuracy_drop is not None:
        given.append(MaxAccuracyDrop(written.max_accuracy_drop))
    if written.min_confidence is not None:
        given.append(MinConfidence(written.min_confidence))
    if written.quality is not None:
        given.append(written.quality)
    if len(given) != 1:
        raise BadReply(f"answer: accuracy.target: expected exactly one of {', '.join(_TARGETS)}, got {len(given)}")
    return given[0]


def _subclasses(kind: type[HawkVisionError]) -> list[type[HawkVisionError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _subclasses(child))]


_BY_CODE: Final = {kind.code: kind for kind in _subclasses(HawkVisionError) if kind.__module__ == errors.__name__}


def error_from_reply(status: int, payload: bytes, retry_after_s: float | None, where: str) -> HawkVisionError:
    """The error that a reply other than 200 stands for: the node's own class, message and figures.

    A reply that is no node's error becomes `BadReply`, except that 503 is `NotReady`, 429 `Overloaded` and 401
    `Unauthorized` whoever says so: proxies in front of a node use them in the same sense.
    """
    try:
        body = _object(payload, where)
    except BadReply:
        body = {}
    written, code = body.get("error"), body.get("code")
    message = written if isinstance(written, str) else f"{where} answered HTTP {status}: {payload[:120]!r}"
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None or kind.status != status:
        kind = {401: errors.Unauthorized, 429: Overloaded, 503: errors.NotReady}.get(status, BadReply)
        message = f"{where} answered HTTP {status}: {payload[:120]!r}"
    if issubclass(kind, Overloaded):
        return kind(message, 1.0 if retry_after_s is None else retry_after_s)
    if issubclass(kind, TargetUnreachable):
        maximum = body.get("maximum")
        return kind(message, float(maximum)) if isinstance(maximum, int | float) else BadReply(message)
    return kind(message)


class _Refusal(msgspec.Struct):
    error: str = ""
    code: str = ""
    status: int = 0
    retry_after_s: float | None = None


def _reply_of(status: str, body: bytes, where: str) -> Reply:
    """A status of the lossy transport (`WIRE.md` §6) and its body as HTTP would tell them.

    Raises:
        DeadlineMissed: if the node had too little of the picture, or not what was asked, when its time was up.
        BadReply: if the node could not make anything of the fragments.
    """
    if status == "OK":
        return 200, None, body
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.DecodeError, UnicodeDecodeError):
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


def _object(payload: bytes, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadReply(f"{where}: expected a JSON object, got {payload[:120]!r}") from None


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


async def _encoded(picture: Picture) -> bytes:
    """The bytes to send."""
    readable = await _readable(picture)
    return readable if isinstance(readable, bytes) else await asyncio.to_thread(_png, readable)


async def _readable(picture: Picture) -> bytes | Pixels:
    """The picture, read if it is a path."""
    if isinstance(picture, bytes | np.ndarray):
        return picture
    return await asyncio.to_thread(Path(picture).read_bytes)


def _png(pixels: Pixels) -> bytes:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise BadField(f"picture: expected uint8 RGB (height, width, 3), got {pixels.dtype} {pixels.shape}")
    # Imported here because most callers send encoded pictures, and OpenCV takes 100 ms to load.
    import cv2

    done, encoded = cv2.imencode(".png", pixels[:, :, ::-1])
    if not done:
        raise BadField(f"picture: {pixels.shape} cannot be encoded as PNG")
    return bytes(encoded)

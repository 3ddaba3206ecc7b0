"""The client of an edge node for programs with an event loop; see `hawkvision.client`."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, Unpack

import msgspec

from hawkvision.client.batch import Outcome, in_order
from hawkvision.client.http import HttpConnections
from hawkvision.client.request import (
    ClassifyFields,
    Image,
    TimeLimit,
    check_image,
    query_fields,
    sendable,
    waited_ms,
)
from hawkvision.client.response import (
    Exchange,
    Unreachable,
    answer_from_json,
    error_from_reply,
    object_of,
)
from hawkvision.core.errors import ConfigError, HawkVisionError, ManifestError, NotReady
from hawkvision.core.escalation_api import CERTIFICATES_PATH, COMPARE_PATH, TRANSPORT_PATH
from hawkvision.core.server_access import check_server_url, clean_key
from hawkvision.core.types import Answer, OnMiss, Prediction
from hawkvision.tasks.registry import CLASSIFY_PATH, DETECT_PATH, INFER_PATH, KIND_OF_FORM, kind_class

if TYPE_CHECKING:
    from hawkvision.client.datagram import DatagramConnection

Transport: TypeAlias = Literal["http", "datagram"]

STATUS_PATH: Final = "/v1/status"
TIMEOUT_S: Final = 30.0
"""Default of `timeout_s`."""
CONNECTIONS: Final = 16
"""Default of `connections`."""
LATE_S: Final = 1.0
"""Least default of `late_s`. TCP repeats a lost first segment after 1 s (RFC 6298 §2), so one loss costs no answer."""
PAUSE_S: Final = (0.1, 1.0)
"""First and longest pause before another attempt, or another check whether a node has started; it doubles each time."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a node is ready, and what it serves. `task` and `variant` are None while it is not ready."""

    ready: bool
    task: str | None = None
    variant: str | None = None


_INHERITED: Final[list[object]] = []
"""Connections of the parent process. They are kept, because collecting one would close what the parent still uses."""


class ClientOptions(TypedDict, total=False):
    """How a client connects."""

    api_key: str | None
    """Sent as `Authorization: Bearer …`."""
    timeout_s: float
    """Time for one attempt, from an open connection to the last byte of the reply; 30 by default. Connecting may take
    as long again. With a `deadline_ms` both share the time."""
    late_s: float
    """How long after its `deadline_ms` a call may still return an answer, within `timeout_s`. Default: as long as that
    with `on_miss=degrade` over HTTP, else 1."""
    connections: int
    """Connections open at once; 16 by default. Further calls wait for a free one before their time begins. The datagram
    transport has one connection and sends this many images at once."""
    retry_budget_s: float
    """Total pause of one call before retries, after 429 and 503 as Retry-After says, and where the connection was
    refused or broke: with 30 a call survives a restart of its node. 0, the default, never retries. A shorter
    `deadline_ms` bounds it too. A repeated image may be answered twice."""
    transport: Transport
    """`http`, the default, or `datagram` to send images as datagrams. The node tells the address over HTTP."""
    paths: Sequence[str]
    """Addresses of this machine to send datagrams from, one link each. Default: one that the system chooses."""
    ca: str | Path | None
    """PEM file of the authorities that the node's certificate must be from, for https. Default: the system's."""
    certificate: str | Path | None
    """PEM file of this caller's certificate, for a node that asks for one."""
    certificate_key: str | Path | None
    """PEM file of its private key. Default: the same file."""


class AsyncClient:
    """Client of one node. Use it on one event loop; close it, or use it as a context manager."""

    _kinds: dict[str, str | None] | None = None
    """The kind of each task that the node served when it was asked; None until it has been."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            url: of the node, such as `http://127.0.0.1:8080`; with the path below which it answers, if there is one.
            options: see `ClientOptions`.

        Raises:
            TypeError: for an unknown option.
            ConfigError: if the URL is malformed, a key or a file cannot be used, or an option belongs to the other
                transport.
        """
        if unknown := options.keys() - ClientOptions.__annotations__.keys():
            raise TypeError(f"unknown options {', '.join(sorted(unknown))}; see ClientOptions")
        check_server_url("url", url)
        self.url = url.rstrip("/")
        transport, self._paths = options.get("transport", "http"), tuple(options.get("paths", ()))
        _check_transport(transport, self._paths)
        self._datagram = transport == "datagram"
        self._tls = _tls(self.url, options)
        api_key = options.get("api_key")
        self._api_key = clean_key(api_key, "api_key") if api_key else None
        self._timeout_s = options.get("timeout_s", TIMEOUT_S)
        self._late_s = options.get("late_s")
        self._connections = options.get("connections", CONNECTIONS)
        self._places = asyncio.Semaphore(self._connections)
        self._retry_budget_s = options.get("retry_budget_s", 0.0)
        self._http = self._new_http()
        self._link: DatagramConnection | None = None
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        """The process and the loop that own the connections."""
        self._closed = False

    async def infer(self, image: Image, **fields: Unpack[ClassifyFields]) -> Answer:
        """The answer to one image, by a task of any kind.

        `answer.prediction` has the type of the task's kind, or is an `OtherPrediction` if that is not known here. The
        first call also asks the node for the kinds of its tasks, over HTTP.

        Args:
            image: an encoded image or its path, sent byte for byte; or uint8 pixels.
            fields: the task, the target and further fields of the request.

        Raises:
            BadField: for contradictory fields, before anything is sent.
            RequestError, ServiceError: as the node reports; see `hawkvision.client` for those that arise here. The
                datagram transport refuses a broken image before it is sent.
            DeadlineMissed: if no answer arrived `late_s` after the deadline.
            OSError: if the path cannot be read.
        """
        query_fields(**fields)
        check_image(image, fields)
        listing = asyncio.create_task(self._kinds_of_tasks())
        deadline_ms = waited_ms(fields)
        until = None if deadline_ms is None else _now() + deadline_ms / 1e3
        kind: str | None = None
        try:
            answered = await self.send(INFER_PATH, image, fields)
            task = str(answered.get("task"))
            with suppress(TimeoutError):  # an answer is not kept back beyond its deadline for its type
                async with asyncio.timeout_at(until):
                    kinds = await listing
                    if task not in kinds and self._kinds is not None:
                        kinds = await self._listed_anew(task)
                    kind = kinds.get(task)
        finally:
            listing.cancel()
        return answer_from_json(answered, _prediction(kind))

    async def classify(self, image: Image, **fields: Unpack[ClassifyFields]) -> Answer:
        """Classify one image, by the first task of that kind or the one that is named. See `infer`."""
        return await self._typed(CLASSIFY_PATH, image, fields)

    async def detect(self, image: Image, **fields: Unpack[ClassifyFields]) -> Answer:
        """Find the objects in one image: `answer.prediction.objects`. See `infer`."""
        return await self._typed(DETECT_PATH, image, fields)

    def infer_batch(
        self, images: Iterable[Image], *, concurrency: int = 8, **fields: Unpack[ClassifyFields]
    ) -> AsyncGenerator[Outcome]:
        """As `infer` for any number of images; yields the outcomes in their order.

        An error of one image is its outcome; the other images are answered all the same.

        Args:
            images: each as `infer` takes it; read from the iterable when there is room.
            concurrency: images in flight at once. Up to `AHEAD` (`hawkvision.client.batch`) times as many finished
                ones wait for an earlier one.
            fields: see `infer`; the same for all images.

        Raises:
            BadField: for contradictory fields, before anything is sent.
        """
        return _batch(self.infer, images, concurrency, fields)

    def classify_batch(
        self, images: Iterable[Image], *, concurrency: int = 8, **fields: Unpack[ClassifyFields]
    ) -> AsyncGenerator[Outcome]:
        """As `classify` for any number of images; see `infer_batch`."""
        return _batch(self.classify, images, concurrency, fields)

    def detect_batch(
        self, images: Iterable[Image], *, concurrency: int = 8, **fields: Unpack[ClassifyFields]
    ) -> AsyncGenerator[Outcome]:
        """As `detect` for any number of images; see `infer_batch`."""
        return _batch(self.detect, images, concurrency, fields)

    async def send(self, path: str, image: Image, fields: ClassifyFields) -> dict[str, Any]:
        """The JSON of the answer to one image.

        Raises:
            HawkVisionError, OSError: as `infer`.
        """
        query = query_fields(**fields)
        check_image(image, fields)
        deadline_ms = waited_ms(fields)
        budget_s = self._retry_budget_s if deadline_ms is None else min(self._retry_budget_s, deadline_ms / 1e3)
        async with self._place():
            # Encoded only now, so that at most `connections` encoded images are in memory.
            body = await sendable(image, fields, pixels=self._datagram)
            exchange: Exchange
            if self._datagram:
                kind = KIND_OF_FORM.get(path)
                query = query if kind is None else {**query, "kind": kind}
                exchange = partial(self._open_link().exchange, body, query)
            else:
                assert isinstance(body, bytes)
                exchange = partial(self._http.exchange, "POST", path, query, body)
            late_s = self._late_s
            if late_s is None:  # a node that is asked to degrade answers, however late
                late_s = LATE_S if self._datagram or fields.get("on_miss") == OnMiss.FAIL else self._timeout_s
            return await self._retried(exchange, f"{self.url}{path}", budget_s, deadline_ms, late_s)

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

    async def status(self) -> dict[str, Any]:
        """The reply to `GET /v1/status`: rates, guarantees, alarms, the datacenter, the last answers.

        Raises:
            Forbidden: if the key may not `observe`.
            ServiceError: if the node does not reply.
        """
        return await self._get(STATUS_PATH, self._retry_budget_s)

    async def watch_status(self) -> AsyncGenerator[dict[str, Any]]:
        """As `status`, again and again, at most twice a second, until the node stops.

        Raises:
            Overloaded: if too many watch the node.
            ServiceError: if the node cannot be reached, or sends nothing for `timeout_s`.
            HawkVisionError: as `status`.
        """
        async with self._place(), aclosing(self._http.lines(STATUS_PATH, {"watch": "true"}, self._timeout_s)) as lines:
            async for line in lines:
                yield object_of(line, f"{self.url}{STATUS_PATH}")

    async def certify(self, task: str | None = None, *, labels_checked: bool = False) -> dict[str, Any]:
        """The reply to `POST /v1/certificates`: what the node has certified from its own audits and their labels.

        Args:
            task: of the node's tasks; None is the first one.
            labels_checked: whether somebody looked again at the labels of the images drawn at random.

        Raises:
            BadField: if there is too little evidence, or the labels are not believed.
            Forbidden: if the key may not `operate`.
            ServiceError: if the node does not reply, or is not ready.
        """
        asked = msgspec.json.encode({"labels_checked": labels_checked} | ({} if task is None else {"task": task}))
        async with self._place():
            exchange = partial(self._http.exchange, "POST", CERTIFICATES_PATH, {}, asked)
            return await self._retried(exchange, f"{self.url}{CERTIFICATES_PATH}", self._retry_budget_s)

    async def compare(self, image: bytes, task: str | None = None) -> dict[str, Any]:
        """The reply to `POST /v1/compare`: what both stages answer to an encoded image that is no traffic.

        Args:
            image: as it is sent.
            task: of the node's tasks; None is the first one.

        Raises:
            NotFound: if the node has no datacenter.
            Forbidden: if the key may not `operate`.
            RequestError, ServiceError: as `infer`.
        """
        async with self._place():
            query = {} if task is None else {"task": task}
            exchange = partial(self._http.exchange, "POST", COMPARE_PATH, query, image)
            return await self._retried(exchange, f"{self.url}{COMPARE_PATH}", self._retry_budget_s)

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
        until, pause_s = _now() + timeout_s, PAUSE_S[0]
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
            pause_s = min(PAUSE_S[1], 2.0 * pause_s)

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

    async def _typed(self, path: str, image: Image, fields: ClassifyFields) -> Answer:
        return answer_from_json(await self.send(path, image, fields), _prediction(KIND_OF_FORM[path]))

    async def _kinds_of_tasks(self) -> dict[str, str | None]:
        """The kind of each task of the node; empty if it does not say."""
        if self._kinds is None:
            try:
                listed = (await self.tasks()).get("tasks", [])
                self._kinds = {each["task"]: each.get("kind") for each in listed}
            except (HawkVisionError, TypeError, KeyError, AttributeError):
                return {}  # it cannot be asked now
        return self._kinds

    async def _listed_anew(self, task: str) -> dict[str, str | None]:
        """The kinds once more, for a task that was not listed: the node may have been started anew since."""
        self._kinds = None
        kinds = await self._kinds_of_tasks()
        kinds.setdefault(task, None)  # the node is not asked about it again
        return kinds

    async def _get(self, path: str, budget_s: float, query: dict[str, str] | None = None) -> dict[str, Any]:
        async with self._place():
            exchange = partial(self._http.exchange, "GET", path, query or {}, None)
            return await self._retried(exchange, f"{self.url}{path}", budget_s)

    async def _retried(
        self, exchange: Exchange, where: str, budget_s: float, deadline_ms: float | None = None, late_s: float = LATE_S
    ) -> dict[str, Any]:
        """The JSON object of a 200 reply; retries within `budget_s`. The call's time begins now."""
        began, spent_s, backoff_s = _now(), 0.0, PAUSE_S[0]
        while True:
            limit = TimeLimit.after(_now() - began if spent_s else 0.0, self._timeout_s, deadline_ms, late_s)
            retry_after = None
            failure: HawkVisionError
            try:
                status, retry_after, payload = await exchange(limit)
            except Unreachable as error:
                failure, passing = error, error.broken
            else:
                if status == 200:
                    return object_of(payload, where)
                failure, passing = error_from_reply(status, payload, retry_after, where), status in (429, 503)
            pause_s = max(backoff_s, retry_after or 0.0)
            too_late = deadline_ms is not None and _now() + pause_s - began >= deadline_ms / 1e3
            if not passing or too_late or spent_s + pause_s > budget_s:
                raise failure
            spent_s += pause_s
            backoff_s = min(PAUSE_S[1], 2.0 * backoff_s)
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None]:
        """One of the `connections` calls that may be in flight."""
        self._settle()
        async with self._places:
            yield

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
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        return HttpConnections(self.url, headers, self._tls, self._connections)

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


async def _batch(
    call: Callable[..., Awaitable[Answer]], images: Iterable[Image], concurrency: int, fields: ClassifyFields
) -> AsyncGenerator[Outcome]:
    query_fields(**fields)
    async with aclosing(in_order(images, partial(call, **fields), concurrency)) as outcomes:
        async for outcome in outcomes:
            yield outcome


def _prediction(kind: str | None) -> type[Prediction] | None:
    """The type of predictions of a kind; None if it is not installed."""
    if kind is None:
        return None
    try:
        found: type[Prediction] = kind_class(kind).prediction
    except ManifestError:
        return None
    return found


def _tls(url: str, options: ClientOptions) -> ssl.SSLContext | Literal[True]:
    """The context for https; True for the system's authorities."""
    ca, certificate, key = options.get("ca"), options.get("certificate"), options.get("certificate_key")
    if ca is None and certificate is None and key is None:
        return True
    if not url.lower().startswith("https:"):
        raise ConfigError(f"ca, certificate: only for https://HOST[:PORT][/PATH], got {url!r}")
    # Imported here because other callers do not need cryptography, which loads slowly.
    from hawkvision.servers.tls import caller_context

    return caller_context(ca, certificate, key)


def _check_transport(transport: str, paths: Sequence[str]) -> None:
    if transport not in ("http", "datagram"):
        raise ConfigError(f"transport: expected 'http' or 'datagram', got {transport!r}")
    if paths and transport != "datagram":
        raise ConfigError("paths: only transport='datagram' takes them; the system chooses the path of HTTP")

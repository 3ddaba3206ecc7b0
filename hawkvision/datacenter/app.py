"""The Ray Serve application: one deployment per group of variants, and an ingress deployment that hosts the server.

    caller ──HTTP──▶ server ──handle──▶ a committee's members  (1..n replicas, each decoding and batching)
                        └───handle──▶ a variant that is in no ensemble

On one machine (`run.serve`) the server is hosted by the process that started Ray, and asks replicas directly (`direct`)
unless their number changes; in a cluster the deployment `Ingress` hosts it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any, Protocol, TypeVar

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady, Overloaded
from hawkvision.core.logs import LogFormat, LogLevel, adopt, current_request
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.datacenter.catalog import Catalog, Group, load_catalog
from hawkvision.datacenter.execution.ensemble import Errand, VariantAnswer
from hawkvision.datacenter.execution.replica import GroupSettings, Replica, settings_of
from hawkvision.datacenter.servers.http_server import make_http_server, max_in_flight
from hawkvision.datacenter.servers.local_socket import PROBE_S, Address, HungUp, Question, Replicas, no_replica
from hawkvision.servers.reload import FileWatcher
from hawkvision.system.log_relay import configure_worker
from hawkvision.transport.settings import DatagramSettings

APP_NAME = "hawkvision"
# How long a shed caller should wait. A full queue of 128 at 8 a batch and 50 ms a batch drains in 0.8 s.
_RETRY_AFTER_S = 1.0
# How soon Serve learns that a replica has died, and replaces it; its own default is 10 s. How long one may take to
# answer stays at Serve's 30 s: a replica that was stopped for some seconds need not load its models anew.
_HEALTH_PERIOD_S = 1.0
# How long a question through a handle may go without an answer before a group counts as absent.
_HANDLE_SILENT_S = 5.0

AnswerT = TypeVar("AnswerT")


class Presence(Protocol):
    """Knows which groups have replicas that answer."""

    def gone(self, group: str) -> Coroutine[Any, Any, None]:
        """Until no replica of the group answers."""
        ...

    def heard(self, group: str) -> None:
        """One has answered somebody."""
        ...


class HandleVariants:
    """The server's way to the replicas: directly or by Serve's handles, with Serve's errors in our words."""

    def __init__(
        self,
        groups: Sequence[Group],
        handles: Sequence[DeploymentHandle],
        presence: Presence | None = None,
        direct: Replicas | None = None,
    ) -> None:
        """`presence` knows which groups have replicas; `direct` is the way to them without Serve."""
        self._groups = {v.name: (g.name, handle) for g, handle in zip(groups, handles, strict=True) for v in g.variants}
        self._presence = presence
        self._direct = direct

    async def ask(
        self, errands: Sequence[Errand], image: bytes, expires_at: float, *, piecemeal: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        """See `looks.Variants.ask`. A stage's members are all in one group; stages that share one are as well."""
        for (group, handle), its in groupby(errands, lambda errand: self._groups[next(iter(errand.wanted))]):
            question = Question(image, tuple(its), expires_at, piecemeal, current_request())
            if self._direct is not None:
                answering = self._direct.ask(group, question)
            else:
                answering = self._through_ray(group, handle, question)
            async with aclosing(answering) as parts:
                async for part in parts:
                    yield part

    async def _through_ray(
        self, group: str, handle: DeploymentHandle, question: Question
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        """By Serve's handle; a replica that dies before it has said anything costs a second try.

        Raises:
            NotReady: if there is no replica, which Serve would wait for without end.
        """
        asking = _piece_by_piece if question.piecemeal else _at_once
        for tries_left in (1, 0):
            heard = False
            try:
                through = asking(group, handle, question.image, question.errands, question.expires_at)
                async with aclosing(through), aclosing(self._while_present(group, through)) as parts:
                    async for part in parts:
                        heard = True
                        if self._presence is not None:
                            self._presence.heard(group)
                        yield part
            except HungUp:
                if heard or not tries_left:
                    raise
            else:
                return

    def _while_present(
        self, group: str, parts: AsyncGenerator[tuple[VariantAnswer, ...]]
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        return parts if self._presence is None else _until(self._presence.gone(group), parts, group)

    async def backends(self) -> str:
        """What runs the variants, as the replicas say; each name once, with commas between."""
        handles = dict(self._groups.values())
        told = await asyncio.gather(*(handle.backends.remote() for handle in handles.values()))
        return ",".join(dict.fromkeys(name for names in told for name in names))


async def _until(
    gone: Coroutine[Any, Any, None], parts: AsyncGenerator[AnswerT], group: str
) -> AsyncGenerator[AnswerT]:
    """The parts, for as long as the group has a replica.

    Raises:
        NotReady: if it has none.
    """
    leaving = asyncio.ensure_future(gone)
    coming: asyncio.Task[AnswerT | None] | None = None
    try:
        await asyncio.sleep(0)  # for `leaving` to have begun
        while True:
            if leaving.done():
                raise no_replica(group)
            coming = asyncio.create_task(_next(parts))
            await asyncio.wait((leaving, coming), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                if (part := coming.result()) is None:
                    return
                yield part
    finally:
        leaving.cancel()
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def _next(parts: AsyncGenerator[AnswerT]) -> AnswerT | None:
    return await anext(parts, None)


async def _piece_by_piece(
    group: str, handle: DeploymentHandle, image: bytes, errands: Sequence[Errand], expires_at: float
) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
    stream = handle.options(stream=True).piecemeal.remote(image, errands, expires_at, current_request())
    try:
        while (part := await _in_our_words(group, anext(stream, None))) is not None:
            yield part
    finally:
        stream.cancel()  # does nothing where it has ended


async def _at_once(
    group: str, handle: DeploymentHandle, image: bytes, errands: Sequence[Errand], expires_at: float
) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
    response = handle.classify.remote(image, errands, expires_at, current_request())
    try:
        parts: tuple[tuple[VariantAnswer, ...], ...] = await _in_our_words(group, response)
    except asyncio.CancelledError:
        response.cancel()
        raise
    for part in parts:
        yield part


async def _in_our_words(group: str, answering: Awaitable[AnswerT | HawkVisionError]) -> AnswerT:
    """What a replica of the group says.

    Raises:
        HawkVisionError: for what went wrong there, and on the way.
    """
    try:
        answer = await answering
    except BackPressureError:
        raise Overloaded(f"the queue of {group!r} is full", _RETRY_AFTER_S) from None
    except RayActorError as error:
        raise HungUp(f"a replica of {group!r} is gone: {type(error).__name__}") from None
    except DeploymentUnavailableError as error:
        raise NotReady(f"{group!r} has no replica just now: {type(error).__name__}") from None
    if isinstance(answer, HawkVisionError):
        raise answer
    return answer


def _log_as_the_tier(level: LogLevel, form: LogFormat) -> None:
    """Have this process, which Ray has started, log as the tier does, and Serve in it."""
    configure_worker(level, form)
    adopt("ray.serve")


class ServedReplica(Replica):
    """A replica in a process of Ray's."""

    def __init__(self, settings: GroupSettings) -> None:
        """See `Replica`."""
        _log_as_the_tier(settings.log_level, settings.log_format)
        super().__init__(settings)


class Ingress:
    """The server inside a cluster, behind Serve's own HTTP listener."""

    def __init__(self, config: DatacenterConfig, catalog: Catalog, *handles: DeploymentHandle) -> None:
        _log_as_the_tier(config.log_level, config.log_format)
        self._server = make_http_server(config, catalog)
        self._server.tier.metrics.describe(config.task, config.backend)
        self._presence = HandlePresence(
            {group.name: handle for group, handle in zip(catalog.groups, handles, strict=True)},
            self._server.tier.replicas_changed,
            self._server.tier.states,
        )
        # A deployment that may go down to no replica is woken by its callers, and kept awake by questions like these.
        self._watches = config.min_replicas > 0
        self._variants = HandleVariants(catalog.groups, handles, self._presence if self._watches else None)
        self._reloads = FileWatcher.of(self._server.keys)

    async def __call__(self, request: Request) -> Response:
        """Any request to the application."""
        self._reloads.start()  # the first time, for only now there is a loop for sure
        return await self._server.respond(request)

    async def check_health(self) -> None:
        """Serve asks this before it calls the ingress started, and ever again."""
        if self._watches:
            self._presence.begin()
        self._server.tier.variants = self._variants


class HandlePresence:
    """Which groups have a replica that answers, by asking through their handles; for a server that is not beside them.

    A question of this kind may wait behind callers' own; so answers to those count as well.
    """

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle],
        changed: Callable[[str, int], None],
        states: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Nobody is known to be there.

        `changed` is told of a group and whether (1, 0) it answers, `states` what a replica states that it runs.
        """
        self._states = states
        self._handles = handles
        self._changed = changed
        self._gone = {group: asyncio.Event() for group in handles}
        self._heard_at = dict.fromkeys(handles, -math.inf)
        self._asking: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Ask from now on; the second time does nothing."""
        if not self._asking:
            for group in self._handles:
                self._gone[group].set()
                self._changed(group, 0)
            self._asking = [asyncio.create_task(self._ask(group, handle)) for group, handle in self._handles.items()]

    async def gone(self, group: str) -> None:
        """Until no replica of the group answers."""
        await self._gone[group].wait()

    def heard(self, group: str) -> None:
        """One has answered somebody."""
        self._heard_at[group] = asyncio.get_running_loop().time()

    async def _ask(self, group: str, handle: DeploymentHandle) -> None:
        while True:
            try:
                async with asyncio.timeout(_HANDLE_SILENT_S):
                    self._states(await handle.present.remote())
                answers = True
            except BackPressureError:  # there are too many who ask, so somebody is asked
                answers = True
            except TimeoutError:
                answers = asyncio.get_running_loop().time() - self._heard_at[group] < _HANDLE_SILENT_S
            except Exception:  # noqa: BLE001 - whatever it is, nobody answers
                answers = False
            if answers == self._gone[group].is_set():
                if answers:
                    self._gone[group].clear()
                else:
                    self._gone[group].set()
                self._changed(group, int(answers))
            await asyncio.sleep(PROBE_S)


# Wrapped by name, not by decorator, so that the classes stay plain: testable, and known to the type checker.
_GROUP: Any = serve.deployment(ServedReplica)
_INGRESS: Any = serve.deployment(Ingress)


def group_apps(config: DatacenterConfig, catalog: Catalog, server: Address | None = None) -> dict[str, Application]:
    """Each group's deployment with its settings, by its name; in the order of `catalog.groups`.

    Replicas report to `server`, where that is on their machine.
    """
    scale: dict[str, Any] = {"num_replicas": config.max_replicas}
    if config.min_replicas != config.max_replicas:
        scale = {
            "autoscaling_config": {
                "min_replicas": config.min_replicas,
                "max_replicas": config.max_replicas,
                "target_ongoing_requests": config.target_ongoing_requests,
            }
        }
    return {
        group.name: _GROUP.options(
            name=group.name,
            max_ongoing_requests=config.max_ongoing_requests,
            max_queued_requests=config.max_queued_requests,
            health_check_period_s=_HEALTH_PERIOD_S,
            ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
            **scale,
        ).bind(settings_of(group, catalog, config, server))
        for group in catalog.groups
    }


def build(args: dict[str, Any]) -> Application:
    """The whole application for `serve deploy` and KubeRay; `args` are fields of `[dc]`.

    They go over the `HAWKVISION_DC_*` variables of the node that builds, which is where the key belongs.

    Raises:
        ConfigError: for an unknown key or a bad value.
    """
    return application(load_config(DatacenterConfig, overrides=args))


def application(config: DatacenterConfig) -> Application:
    """The whole application under these settings.

    Raises:
        ConfigError: if the stages are unknown, or the datagram transport is asked for, which a cluster cannot offer:
            its proxies speak HTTP, and replicas come and go on ports of their own.
    """
    port = config.feature(DatagramSettings).port
    if port is not None:
        raise ConfigError(
            f"dc.datagram_port = {port}: in a cluster the tier speaks HTTP only; the datagram transport needs a "
            "tier on one machine (`hawkvision dc up`)"
        )
    catalog = load_catalog(config)
    limit = max_in_flight(config, catalog)
    return _INGRESS.options(
        name="ingress",
        # Above the server's own bound, so that it is the server that sheds, with 429 and Retry-After.
        max_ongoing_requests=2 * limit,
        max_queued_requests=limit,
        ray_actor_options={"num_cpus": config.num_cpus},
    ).bind(config, catalog, *group_apps(config, catalog).values())

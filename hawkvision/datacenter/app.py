"""The Ray Serve application: one deployment per group of variants, and an ingress deployment that hosts the door.

    caller ──HTTP──▶ door ──handle──▶ a committee's members  (1..n replicas, each decoding and batching)
                        └───handle──▶ a variant that is in no committee

On one machine (`run.up`) the door is hosted by the process that started Ray, and asks a group's only replica directly
(`direct`); in a cluster the deployment `Ingress` hosts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from hawkvision.config import DatacenterConfig, load_config
from hawkvision.datacenter.catalog import Catalog, Group, load_catalog
from hawkvision.datacenter.direct import Direct, HungUp, Question
from hawkvision.datacenter.door import make_door, max_in_flight
from hawkvision.datacenter.opinions import Errand, VariantAnswer
from hawkvision.datacenter.replica import Replica, settings_of
from hawkvision.errors import ConfigError, HawkVisionError, NotReady, Overloaded
from hawkvision.servers.reload import Reloads

APP_NAME = "hawkvision"
# How long a shed caller should wait. A full queue of 128 at 8 a batch and 50 ms a batch drains in 0.8 s.
_RETRY_AFTER_S = 1.0
# Between two tries to find the short way to a replica, and how long one may take.
_RECONNECT_S = 1.0
_CONNECT_S = 5.0

log = logging.getLogger("hawkvision.datacenter")

AnswerT = TypeVar("AnswerT")


class HandleVariants:
    """The door's way to the replicas: Serve handles, with Serve's errors in our words."""

    def __init__(
        self, groups: Sequence[Group], handles: Sequence[DeploymentHandle], shortened: DatacenterConfig | None = None
    ) -> None:
        """`shortened` is given where replicas are on this machine; if each group has one, they are asked directly."""
        self._groups = {v.name: (g.name, handle) for g, handle in zip(groups, handles, strict=True) for v in g.variants}
        single = shortened is not None and shortened.min_replicas == shortened.max_replicas == 1
        self._shortened = shortened if single else None
        self._short: dict[str, Direct] = {}
        self._next_try: dict[str, float] = {}
        self._shortening: dict[str, asyncio.Task[None]] = {}

    async def ask(
        self, errands: Sequence[Errand], picture: bytes, expires_at: float, *, piecemeal: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        """See `looks.Variants.ask`. A rung's members are all in one group; rungs that share one are as well."""
        for (group, handle), its in groupby(errands, lambda errand: self._groups[next(iter(errand.wanted))]):
            async with aclosing(
                self._parts(group, handle, Question(picture, tuple(its), expires_at, piecemeal))
            ) as parts:
                async for part in parts:
                    yield part

    async def _parts(
        self, group: str, handle: DeploymentHandle, question: Question
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        direct = self._direct(group, handle)
        if direct is not None:
            heard = False
            try:
                async with aclosing(direct.ask(question)) as parts:
                    async for part in parts:
                        heard = True
                        yield part
            except HungUp:
                if heard:
                    raise
            else:
                return
        asking = _piece_by_piece if question.piecemeal else _at_once
        through_ray = asking(group, handle, question.picture, question.errands, question.expires_at)
        async with aclosing(through_ray) as parts:
            async for part in parts:
                yield part

    def _direct(self, group: str, handle: DeploymentHandle) -> Direct | None:
        """The short way, if there is one just now; if not, one is looked for meanwhile."""
        direct = self._short.get(group)
        if direct is not None and not direct.closed:
            return direct
        now, earlier = asyncio.get_running_loop().time(), self._shortening.get(group)
        if (
            self._shortened is not None
            and (earlier is None or earlier.done())
            and now >= self._next_try.get(group, now)
        ):
            self._next_try[group] = now + _RECONNECT_S
            self._shortening[group] = asyncio.create_task(self._shorten(group, handle, self._shortened))
        return None

    async def shortened(self) -> None:
        """Until short ways that are being looked for are found, or not."""
        await asyncio.gather(*self._shortening.values())

    async def _shorten(self, group: str, handle: DeploymentHandle, config: DatacenterConfig) -> None:
        """Connect to the replica."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                address = await handle.listen.remote()
                if address is None:
                    self._shortened = None
                    return
                self._short[group] = await Direct.connect(
                    address,
                    group,
                    max_ongoing=config.max_ongoing_requests,
                    max_queued=config.max_queued_requests,
                    retry_after_s=_RETRY_AFTER_S,
                )
        except Exception as error:  # noqa: BLE001 - whatever it is, the way through Ray stands by
            log.warning("no short way to %r, pictures go through Ray: %s: %s", group, type(error).__name__, error)

    async def close(self) -> None:
        """Hang up on the replicas, which give up what they are still asked."""
        self._shortened = None
        for task in self._shortening.values():
            task.cancel()
        await asyncio.gather(*self._shortening.values(), return_exceptions=True)
        for direct in self._short.values():
            direct.close()


async def _piece_by_piece(
    group: str, handle: DeploymentHandle, picture: bytes, errands: Sequence[Errand], expires_at: float
) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
    stream = handle.options(stream=True).piecemeal.remote(picture, errands, expires_at)
    try:
        while (part := await _in_our_words(group, anext(stream, None))) is not None:
            yield part
    finally:
        stream.cancel()  # does nothing where it has ended


async def _at_once(
    group: str, handle: DeploymentHandle, picture: bytes, errands: Sequence[Errand], expires_at: float
) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
    response = handle.classify.remote(picture, errands, expires_at)
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
    except (RayActorError, DeploymentUnavailableError) as error:
        raise NotReady(f"{group!r} has no replica just now: {type(error).__name__}") from None
    if isinstance(answer, HawkVisionError):
        raise answer
    return answer


class Ingress:
    """The door inside a cluster, behind Serve's own HTTP listener."""

    def __init__(self, config: DatacenterConfig, catalog: Catalog, *handles: DeploymentHandle) -> None:
        self._door = make_door(config, catalog)
        self._door.tier.variants = HandleVariants(catalog.groups, handles)
        self._reloads = Reloads.of(self._door.keys)

    async def __call__(self, request: Request) -> Response:
        """Any request to the application."""
        self._reloads.start()  # the first time, for only now there is a loop for sure
        return await self._door.respond(request)


# Wrapped by name, not by decorator, so that the classes stay plain: testable, and known to the type checker.
_GROUP: Any = serve.deployment(Replica)
_INGRESS: Any = serve.deployment(Ingress)


def group_apps(config: DatacenterConfig, catalog: Catalog) -> dict[str, Application]:
    """Each group's deployment with its settings, by its name; in the order of `catalog.groups`."""
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
            ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
            **scale,
        ).bind(settings_of(group, catalog, config))
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
        ConfigError: if the rungs are unknown, or the lossy transport is asked for, which a cluster cannot offer: its
            proxies speak HTTP, and replicas come and go on ports of their own.
    """
    if config.lossy_port is not None:
        raise ConfigError(
            f"dc.lossy_port = {config.lossy_port}: in a cluster the tier speaks HTTP only; the lossy transport needs a "
            "tier on one machine (`hawkvision dc up`)"
        )
    catalog = load_catalog(config)
    limit = max_in_flight(config, catalog)
    return _INGRESS.options(
        name="ingress",
        # Above the door's own bound, so that it is the door that sheds, with 429 and Retry-After.
        max_ongoing_requests=2 * limit,
        max_queued_requests=limit,
        ray_actor_options={"num_cpus": config.num_cpus},
    ).bind(config, catalog, *group_apps(config, catalog).values())

"""The Ray Serve application: one deployment per variant, and an ingress deployment that hosts the door.

    caller ──HTTP──▶ door ──handle──▶ variant A  (1..n replicas, each batching)
                      │ ───handle──▶ variant B
                      └─ a committee asks several and averages

On one machine (`run.up`) the door is hosted by the process that started Ray; in a cluster by the deployment `Ingress`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from hawkvision.config import DatacenterConfig, load_config
from hawkvision.datacenter.catalog import Catalog, load_catalog
from hawkvision.datacenter.door import make_door, max_in_flight
from hawkvision.datacenter.replica import Replica, VariantAnswer, Views, settings_of
from hawkvision.errors import ConfigError, HawkVisionError, NotReady, Overloaded

APP_NAME = "hawkvision"
# How long a shed caller should wait. A full queue of 128 at 8 a batch and 50 ms a batch drains in 0.8 s.
_RETRY_AFTER_S = 1.0


class HandleVariants:
    """The door's way to the replicas: Serve handles, with Serve's errors in our words."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = handles

    async def classify(
        self, variant: str, picture: bytes, views: Views, expires_at: float, *, alone: bool = True
    ) -> VariantAnswer:
        """See `looks.Variants.classify`."""
        response = self._handles[variant].classify.remote(picture, views, expires_at, alone=alone)
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError:
            raise Overloaded(f"the queue of variant {variant!r} is full", _RETRY_AFTER_S) from None
        except (RayActorError, DeploymentUnavailableError) as error:
            raise NotReady(f"variant {variant!r} has no replica just now: {type(error).__name__}") from None
        if isinstance(answer, HawkVisionError):
            raise answer
        assert isinstance(answer, VariantAnswer)
        return answer


class Ingress:
    """The door inside a cluster, behind Serve's own HTTP listener."""

    def __init__(self, config: DatacenterConfig, catalog: Catalog, *handles: DeploymentHandle) -> None:
        self._door = make_door(config, catalog)
        names = [v.name for v in catalog.variants]
        self._door.tier.variants = HandleVariants(dict(zip(names, handles, strict=True)))

    async def __call__(self, request: Request) -> Response:
        """Any request to the application."""
        return await self._door.respond(request)


# Wrapped by name, not by decorator, so that the classes stay plain: testable, and known to the type checker.
_VARIANT: Any = serve.deployment(Replica)
_INGRESS: Any = serve.deployment(Ingress)


def variant_apps(config: DatacenterConfig, catalog: Catalog) -> dict[str, Application]:
    """Each variant's deployment with its settings, by variant name."""
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
        variant.name: _VARIANT.options(
            name=variant.name,
            max_ongoing_requests=config.max_ongoing_requests,
            max_queued_requests=config.max_queued_requests,
            ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
            **scale,
        ).bind(settings_of(variant, catalog.classes, config, alone=catalog.looks_alone(variant.name)))
        for variant in catalog.variants
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
    ).bind(config, catalog, *variant_apps(config, catalog).values())

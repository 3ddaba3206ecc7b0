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
from ray.util.metrics import Counter, Histogram
from starlette.requests import Request
from starlette.responses import Response

from hawkvision.config import DatacenterConfig, load_config
from hawkvision.datacenter.catalog import Catalog, load_catalog
from hawkvision.datacenter.door import Door, DoorLimits
from hawkvision.datacenter.replica import Replica, VariantAnswer, VariantSettings, settings_of
from hawkvision.errors import HawkVisionError, NotReady, Overloaded

APP_NAME = "hawkvision"
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]
_SIZES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
# How long a shed caller should wait. A full queue of 128 at 8 a batch and 50 ms a batch drains in 0.8 s.
_RETRY_AFTER_S = 1.0


class VariantDeployment:
    """A `Replica` under Ray, with its metrics."""

    def __init__(self, settings: VariantSettings) -> None:
        self._replica = Replica(settings)
        tags = {"task": settings.task, "variant": settings.variant.name}
        keys = tuple(tags)
        self._queue_time = Histogram(
            "hawkvision_dc_queue_seconds", "Wait for the model.", boundaries=_SECONDS, tag_keys=keys
        )
        self._infer_time = Histogram(
            "hawkvision_dc_infer_seconds", "Time in the model.", boundaries=_SECONDS, tag_keys=keys
        )
        self._batch_size = Histogram(
            "hawkvision_dc_batch_size", "Pictures inferred together.", boundaries=_SIZES, tag_keys=keys
        )
        for metric in (self._queue_time, self._infer_time, self._batch_size):
            metric.set_default_tags(tags)

    async def classify(self, picture: bytes, mirrored: bool, expires_at: float) -> VariantAnswer | HawkVisionError:
        """See `Replica.classify`."""
        answer = await self._replica.classify(picture, mirrored, expires_at)
        if isinstance(answer, VariantAnswer):
            self._queue_time.observe(answer.queue_ms / 1e3)
            self._infer_time.observe(answer.infer_ms / 1e3)
            self._batch_size.observe(answer.batch_size)
        return answer


class HandleVariants:
    """The door's way to the replicas: Serve handles, with Serve's errors in our words."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = handles

    async def classify(self, variant: str, picture: bytes, mirrored: bool, expires_at: float) -> VariantAnswer:
        """See `door.Variants.classify`."""
        response = self._handles[variant].classify.remote(picture, mirrored, expires_at)
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
        self._door.variants = HandleVariants(dict(zip(names, handles, strict=True)))

    async def __call__(self, request: Request) -> Response:
        """Any request to the application."""
        return await self._door.respond(request)


# Wrapped by name, not by decorator, so that the classes stay plain: testable, and known to the type checker.
_VARIANT: Any = serve.deployment(VariantDeployment)
_INGRESS: Any = serve.deployment(Ingress)


def make_door(config: DatacenterConfig, catalog: Catalog) -> Door:
    """The door with its metrics; it says 503 until it is given its variants."""
    requests = Counter("hawkvision_dc_requests_total", "Requests answered.", tag_keys=("path", "code"))
    return Door(
        catalog,
        DoorLimits(config.max_body_bytes, max_in_flight(config, catalog), config.api_key),
        on_reply=lambda path, status: requests.inc(1.0, tags={"path": path, "code": str(status)}),
    )


def max_in_flight(config: DatacenterConfig, catalog: Catalog) -> int:
    """What all variants together can hold, running and queued; anything more would be shed further in."""
    per_variant = config.max_replicas * config.max_ongoing_requests + max(config.max_queued_requests, 0)
    return per_variant * len(catalog.variants)


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
        ).bind(settings_of(variant, catalog.classes, config))
        for variant in catalog.variants
    }


def build(args: dict[str, Any]) -> Application:
    """The whole application for `serve deploy` and KubeRay; `args` are fields of `[dc]`.

    They go over the `HAWKVISION_DC_*` variables of the node that builds, which is where the key belongs.

    Raises:
        ConfigError: for an unknown key or a bad value.
    """
    config = load_config(DatacenterConfig, overrides=args)
    catalog = load_catalog(config)
    limit = max_in_flight(config, catalog)
    return _INGRESS.options(
        name="ingress",
        # Above the door's own bound, so that it is the door that sheds, with 429 and Retry-After.
        max_ongoing_requests=2 * limit,
        max_queued_requests=limit,
        ray_actor_options={"num_cpus": config.num_cpus},
    ).bind(config, catalog, *variant_apps(config, catalog).values())

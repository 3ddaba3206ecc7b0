"""What the deployments of the groups ask of Serve; read from the application, without Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from ray.serve._private.build_app import build_app

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.group_deployments import group_apps
from hawkvision.datacenter.stages.catalog import Catalog, catalog_of
from hawkvision.models.manifest import Manifest
from tests.hawkvision.tasks.classes import classes_of


def deployment(config: DatacenterConfig, catalog: Catalog) -> Any:
    ((name, app),) = group_apps(config, catalog).items()
    (built,) = build_app(app, name=name).deployments
    return built


def test_replicas_reserve_their_threads_and_spread_as_the_settings_say(
    manifest: Manifest, config: DatacenterConfig
) -> None:
    built = deployment(
        msgspec.structs.replace(config, max_replicas_per_node=2), catalog_of(manifest, classes_of(manifest), config)
    )
    assert built.ray_actor_options["num_cpus"] == 4.0, "two variants, and two threads that decode"
    assert built._replica_config.max_replicas_per_node == 2


def test_replicas_are_added_soon_and_removed_late(manifest: Manifest, config: DatacenterConfig) -> None:
    scaled = msgspec.structs.replace(config, max_replicas=3)
    scaling = deployment(
        scaled, catalog_of(manifest, classes_of(manifest), scaled)
    )._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30.0, 600.0)


def test_images_leave_no_access_log(manifest: Manifest, config: DatacenterConfig) -> None:
    logging = deployment(config, catalog_of(manifest, classes_of(manifest), config))._deployment_config.logging_config
    assert logging["enable_access_log"] is False


def test_other_models_and_limits_replace_no_replica_and_what_a_process_keeps_does(
    manifest: Manifest, config: DatacenterConfig
) -> None:
    catalog = catalog_of(manifest, classes_of(manifest), config)
    warmer = tuple(msgspec.structs.replace(variant, temperature=2.0) for variant in catalog.variants)
    before = deployment(config, catalog)
    models = deployment(config, replace(catalog, variants=warmer))
    limits = deployment(msgspec.structs.replace(config, max_batch_size=3), catalog)
    memory = deployment(msgspec.structs.replace(config, memory_bytes=2**26), catalog)
    assert before.version == models.version == limits.version != memory.version
    assert before.user_config != models.user_config != limits.user_config

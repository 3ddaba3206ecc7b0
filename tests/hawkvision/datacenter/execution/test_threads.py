"""The cores that a replica reserves are the threads that it uses."""

from __future__ import annotations

import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.execution.group_settings import (
    group_settings,
    process_settings,
    replica_cpus,
    replica_threads,
)
from hawkvision.datacenter.execution.replica import Replica
from hawkvision.datacenter.stages.catalog import Group, catalog_of
from hawkvision.models.manifest import Manifest
from tests.hawkvision.tasks.classes import classes_of


def group(manifest: Manifest, variants: int) -> Group:
    return Group("group", manifest.variants[:1] * variants)


@pytest.mark.parametrize(
    ("variants", "settings", "cores"),
    [
        (1, {"backend": "noop"}, 2),
        (1, {"backend": "auto"}, 4),
        (1, {"backend": "auto", "intra_op_threads": 6}, 8),
        (3, {"backend": "auto"}, 5),
        (3, {"backend": "noop"}, 5),
        (3, {"backend": "auto", "num_cpus": 2.0}, 2),
        (1, {"backend": "auto", "num_cpus": 0.5}, 0.5),
    ],
)
def test_a_replica_reserves_a_core_for_each_thread_unless_a_setting_says_how_many(
    manifest: Manifest, variants: int, settings: dict[str, object], cores: float
) -> None:
    config = msgspec.convert(settings, DatacenterConfig)
    assert replica_cpus(group(manifest, variants), config) == cores


@given(st.floats(0.01, 200.0), st.integers(1, 4), st.integers(0, 64))
def test_threads_never_exceed_the_cores_that_a_setting_allows(num_cpus: float, variants: int, intra_op: int) -> None:
    config = DatacenterConfig(num_cpus=num_cpus, intra_op_threads=intra_op)
    decode, infer = replica_threads(Group("group", ()), config)
    assert decode + infer == max(1, int(num_cpus))
    assert infer >= 1
    assert decode >= 1 or infer == 1


def test_a_replica_of_one_core_decodes_and_infers_on_one_thread(manifest: Manifest, config: DatacenterConfig) -> None:
    one = msgspec.structs.replace(config, num_cpus=1.0)
    catalog = catalog_of(manifest, classes_of(manifest), one)
    (its,) = catalog.groups
    replica = Replica(process_settings(its, catalog, one), group_settings(its, catalog, one))
    pools = replica.inferring, replica.decoding
    names = {pool.submit(lambda: threading.current_thread().name).result() for pool in pools}
    assert len(names) == 1

"""The health check of a replica: it runs real inferences, and a backend that is stuck or fails makes it fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hawkvision.core.errors import BackendError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.types import Pixels, Tensors
from hawkvision.datacenter.execution import model as model_module
from hawkvision.datacenter.execution.group_settings import group_settings, process_settings
from hawkvision.datacenter.execution.model import Model
from hawkvision.datacenter.execution.replica import Replica
from hawkvision.datacenter.stages.catalog import catalog_of
from hawkvision.datacenter.stages.ensemble import Augmentation
from hawkvision.inference.backend_registry import NoopBackend
from hawkvision.models.fingerprints import VariantRun
from hawkvision.models.manifest import FileSource, InputSpec, Manifest, Variant
from hawkvision.tasks.serving import OutputDecoder
from tests.hawkvision.tasks.classes import classes, classes_of

SPEC = InputSpec(8, 8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
LIMIT_S = 60.0
SMALL = Variant(
    name="small", architecture="none", precision="fp32", license="MIT", input=SPEC,
    source=FileSource(file="weights/small.onnx", sha256="a" * 64),
)  # fmt: skip


class Breakable(NoopBackend):
    """A backend that, once `broken` is set, does that instead of inferring; it counts its inferences."""

    def __init__(self) -> None:
        super().__init__((8, 8, 3), 3)
        self.broken: Callable[[], None] = lambda: None
        self.inferences = 0

    def infer(self, batch: Pixels) -> Tensors:
        self.inferences += 1
        self.broken()
        return super().infer(batch)


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as idle: the last inference is always too long ago."""
    monkeypatch.setattr(model_module, "_RECENT_S", 0.0)


def loaded(backend: Breakable) -> Model:
    run = VariantRun("small", None, SPEC, 1.0, "test")
    threads = ThreadPoolExecutor(1)
    return Model(
        backend,
        None,
        OutputDecoder(SMALL, classes(3)),
        threads,
        max_batch_size=2,
        backend="test",
        run=run,
    )


def test_an_idle_model_is_checked_by_an_inference() -> None:
    backend = Breakable()
    model = loaded(backend)
    before = backend.inferences
    asyncio.run(model.check_health(LIMIT_S))
    assert backend.inferences == before + 1


def test_a_model_that_has_just_inferred_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_RECENT_S", LIMIT_S)
    backend = Breakable()
    model = loaded(backend)

    async def scenario() -> int:
        await model.infer(np.zeros((8, 8, 3), np.uint8), None, Augmentation.UPRIGHT, None, alone=True)
        before = backend.inferences
        await model.check_health(LIMIT_S)
        return backend.inferences - before

    assert asyncio.run(scenario()) == 0


def test_a_backend_that_fails_makes_the_check_fail_and_the_message_names_the_cause() -> None:
    backend = Breakable()
    model = loaded(backend)

    def fail() -> None:
        raise RuntimeError("device lost")

    backend.broken = fail
    with pytest.raises(BackendError, match="small: a blank image failed: RuntimeError: device lost"):
        asyncio.run(model.check_health(LIMIT_S))


def test_a_stuck_backend_makes_every_check_fail_within_its_limit_and_gets_one_blank_image() -> None:
    backend, go = Breakable(), threading.Event()
    model = loaded(backend)
    backend.broken = lambda: assert_set(go)
    before = backend.inferences

    async def scenario() -> None:
        for _ in range(3):
            with pytest.raises(BackendError, match=r"small: no inference has ended within 0\.1 s"):
                await asyncio.wait_for(model.check_health(0.1), LIMIT_S)
        assert backend.inferences == before + 1
        go.set()
        await model.check_health(LIMIT_S)

    try:
        asyncio.run(scenario())
    finally:
        go.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)


def test_a_replica_whose_inference_threads_are_blocked_is_unhealthy(
    manifest: Manifest, config: DatacenterConfig
) -> None:
    catalog = catalog_of(manifest, classes_of(manifest), config)
    (group,) = catalog.groups
    replica = Replica(process_settings(group, catalog, config), group_settings(group, catalog, config))
    blocking, go = replica.inferring, threading.Event()

    async def scenario() -> None:
        await replica.check_health()
        blocked = [blocking.submit(assert_set, go) for _ in range(blocking._max_workers)]
        with pytest.raises(BackendError, match="no inference has ended"):
            await asyncio.wait_for(replica.check_health(0.1), LIMIT_S)
        go.set()
        for each in blocked:
            await asyncio.wrap_future(each)
        await replica.check_health(LIMIT_S)

    try:
        asyncio.run(scenario())
    finally:
        go.set()

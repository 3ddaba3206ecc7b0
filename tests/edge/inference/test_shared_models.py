from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edge.inference.shared_models import OpenModel, SharedModels
from hawkvision.core.errors import BackendError
from hawkvision.inference.backend_registry import open_backend
from hawkvision.models.manifest import InputSpec
from hawkvision.models.onnx_layers import GraphBuilder

SPEC = InputSpec(height=8, width=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
BATCH = np.zeros((1, 8, 8, 3), np.uint8)


def model() -> bytes:
    builder = GraphBuilder("test")
    builder.classifier(builder.pixels((0.0, 0.0, 0.0)), np.ones((2, 3), np.float32), np.zeros(2, np.float32))
    data: bytes = builder.model(8, 8, 2).SerializeToString()
    return data


def opened() -> OpenModel:
    data = model()
    return OpenModel(open_backend("onnxruntime", data, SPEC, 2), open_backend("onnxruntime", data, SPEC, 2, threads=2))


def test_model_is_opened_once_and_closed_after_its_last_user() -> None:
    shared = SharedModels()
    first, second = shared.take("a", opened), shared.take("a", opened)
    assert first is second
    shared.give_back("a")
    assert first.wide is not None
    for backend in (first.backend, first.wide):
        assert set(backend.infer(BATCH)) == {"logits"}
    shared.give_back("a")
    for backend in (first.backend, first.wide):
        with pytest.raises(BackendError, match="closed"):
            backend.infer(BATCH)
    assert shared.take("a", opened) is not first
    shared.give_back("a")


def test_other_models_are_not_shared_and_a_failed_load_leaves_nothing() -> None:
    shared = SharedModels()

    def fails() -> OpenModel:
        raise BackendError("it cannot be loaded")

    with pytest.raises(BackendError):
        shared.take("a", fails)
    assert shared.take("a", opened) is not shared.take("b", opened)
    shared.give_back("a")
    shared.give_back("b")


def test_many_threads_load_a_model_once() -> None:
    shared, loads = SharedModels(), Counter[str]()

    def load() -> OpenModel:
        loads["a"] += 1
        return opened()

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: shared.take("a", load), range(32)))
    assert loads["a"] == 1
    assert {id(each) for each in taken} == {id(taken[0])}
    for _ in taken:
        shared.give_back("a")
    with pytest.raises(BackendError, match="closed"):
        taken[0].backend.infer(BATCH)

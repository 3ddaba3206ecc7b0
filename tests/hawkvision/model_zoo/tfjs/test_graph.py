from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.tfjs.graph import Node, read_archive, read_model
from tests.hawkvision.model_zoo.tfjs.tfjs_files import integers, model_files, node, package, text, texts

GOOD = model_files(
    [node("x", "Placeholder"), node("y", "Relu", "x:0", "^x", T={"type": 1})],
    {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int32)},
)


def read(files: dict[str, bytes]) -> Any:
    return read_model(files["model.json"], files, "file")


def changed(**fields: Any) -> dict[str, bytes]:
    """The good model with fields of its first group of weights replaced."""
    model = json.loads(GOOD["model.json"])
    model["weightsManifest"][0] |= fields
    return {**GOOD, "model.json": json.dumps(model).encode()}


names = st.text("abc/_", min_size=1, max_size=6)
arrays = st.builds(
    lambda shape, seed, whole: np.random.default_rng(seed).integers(-99, 99, shape).astype("i4" if whole else "f4"),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
    st.booleans(),
)


@settings(deadline=None)
@given(st.dictionaries(names, arrays, max_size=5), st.booleans(), st.integers(1, 4))
def test_weights_are_read_as_written(weights: dict[str, Any], half: bool, shards: int) -> None:
    found = read(model_files([], weights, half, shards)).weights
    assert list(found) == list(weights)
    for name, array in weights.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_inputs_are_names_and_control_inputs_are_left_out() -> None:
    assert read(GOOD).nodes["y"].inputs == ("x",)


def test_strings_are_lists_of_bytes_or_base64() -> None:
    each = Node("n", "op", (), {"old": text("SAME", old=True), "new": text("SAME"), "several": texts("a", "b")})
    assert (each.text("old"), each.text("new"), each.texts("several"), each.texts("none")) == (
        "SAME",
        "SAME",
        ("a", "b"),
        (),
    )
    assert Node("n", "op", (), {"i": integers(1, 2)}).integers("i") == (1, 2)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (changed(paths=["group1-shard1of2"]), "w: the shards end before its 6 numbers|n: the shards end"),
        (changed(paths=["group1-shard1of2", "group1-shard2of2", "group1-shard1of2"]), "bytes more than their weights"),
        (changed(paths=["missing"]), "the shard 'missing' is missing"),
        (changed(paths=["../secret"]), r"regex.*paths"),
        (changed(weights=[{"name": "w", "shape": [-1], "dtype": "float32"}]), "shape"),
        (changed(weights=[{"name": "w", "shape": [1] * 70, "dtype": "float32"}]), "shape"),
        (changed(weights=[{"name": "w", "shape": [2], "dtype": "complex64"}]), "dtype"),
        (model_files([node("x", "Relu", "w"), node("x", "Relu", "w")], {"w": np.zeros(1, "f4")}), "two nodes"),
        (model_files([{"name": "c", "op": "Const"}], {}), "constant 'c' has no weights"),
    ],
)
def test_models_that_contradict_themselves_are_refused(files: dict[str, bytes], says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        read(files)


def test_model_is_read_from_a_package_with_the_shards_beside_it() -> None:
    archive = package(GOOD)
    assert list(read_archive(archive, "package/models/model.json", "file").weights) == ["w", "n"]
    with pytest.raises(ArtifactError, match=r"no file 'package/model\.json'"):
        read_archive(archive, "package/model.json", "file")

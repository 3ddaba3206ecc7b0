from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.checkpoint import StateDict, parse_checkpoint
from tests.fuzz.examples import examples
from tests.hawkvision.model_zoo.weight_files import c_strides, state_of, state_pickle, stream, tensor

ARRAYS = {
    "conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "conv.bias": np.array([1.5, -2.5], np.float32),
    "steps": np.array(7, np.float32),
}
STREAM = stream(state_of(ARRAYS), ARRAYS)
LISTS = pickle.dumps({"conv1": [np.asfortranarray(ARRAYS["conv.weight"]), ARRAYS["conv.bias"]]}, protocol=3)

Kind = Literal["torch", "numpy_pickle"]
VALID: list[tuple[bytes, Kind]] = [(STREAM, "torch"), (LISTS, "numpy_pickle")]


def test_torchs_stream_gives_back_what_was_written() -> None:
    state = parse_checkpoint(STREAM, "torch", "test")
    assert list(state) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(state[name], array)
        assert state[name].dtype == array.dtype


def test_numpy_lists_are_named_by_key_and_position() -> None:
    state = parse_checkpoint(LISTS, "numpy_pickle", "test")
    np.testing.assert_array_equal(state["conv1.0"], ARRAYS["conv.weight"])
    np.testing.assert_array_equal(state["conv1.1"], ARRAYS["conv.bias"])


class Malicious:
    """Pickles into a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("kind", ["torch", "numpy_pickle"])
@pytest.mark.parametrize("wrapped", ["bare", "stream"])
def test_malicious_pickle_runs_nothing(tmp_path: Path, wrapped: str, kind: Kind) -> None:
    proof = tmp_path / "ran"
    evil = pickle.dumps(Malicious(f"touch {proof}"), protocol=2)
    data = {"bare": evil, "stream": stream(evil, {})}[wrapped]
    with pytest.raises(ArtifactError, match="refused"):
        parse_checkpoint(data, kind, "evil.pth")
    assert not proof.exists()
    pickle.loads(evil)
    assert proof.exists(), "the pickle must be one that would have run"


@pytest.mark.parametrize(
    ("item", "offence"),
    [
        (tensor("0", 4, (5,), (1,)), "outside its storage"),
        (tensor("0", 4, (2,), (1,), offset=3), "outside its storage"),
        (tensor("0", 4, (2, 2), (0, 0)), "gaps or overlaps"),
        (tensor("0", 4, (2,), (2,)), "gaps or overlaps"),
        (tensor("0", 4, (-1,), (1,)), "malformed shape"),
        (tensor("0", 4, (4,), (1,), kind="QInt8Storage"), "QInt8Storage"),
        (tensor("other", 4, (4,), (1,)), "no tensor uses"),
        (b"K\x01", "expected a tensor"),
        (b"}r\xff\xff\xff\xff", "'w' is a dict, expected a tensor"),
        (b"B\xff\xff\xff\xff", "file ends"),
        (b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f", "opcode 0x96"),
        (b"j\x01\x00\x00\x00", "memo 1"),
    ],
)
def test_offence_is_named(item: bytes, offence: str) -> None:
    data = stream(state_pickle({"w": item}), {"0": np.zeros(4, np.float32)})
    with pytest.raises(ArtifactError, match=offence) as caught:
        parse_checkpoint(data, "torch", "weights.pth")
    assert "weights.pth" in str(caught.value)


MUTATIONS = st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6)


@given(which=st.sampled_from(VALID), mutations=MUTATIONS)
@settings(max_examples=examples(400), deadline=None)
def test_mutated_files_are_read_or_refused_in_bounded_memory(
    which: tuple[bytes, Kind], mutations: list[tuple[int, bytes]]
) -> None:
    data, kind = bytearray(which[0]), which[1]
    for position, patch in mutations:
        at = position % len(data)
        data[at : at + len(patch)] = patch
    tracemalloc.start()
    try:
        state = parse_checkpoint(bytes(data), kind, "fuzz.pth")
    except ArtifactError:
        state = {}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 + 200 * len(data)
    assert all(isinstance(a, np.ndarray) for a in state.values())


@given(shape=st.lists(st.integers(1, 4), min_size=0, max_size=4), order=st.randoms())
def test_any_order_of_axes_survives(shape: list[int], order: Any) -> None:
    stored = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    strides = [c_strides(shape)[a] for a in axes]
    pickled = state_pickle({"w": tensor("0", stored.size, [shape[a] for a in axes], strides)})
    found = parse_checkpoint(stream(pickled, {"0": stored.ravel()}), "torch", "t")["w"]
    np.testing.assert_array_equal(found, stored.transpose(axes))


def test_safetensors_give_back_every_array() -> None:
    arrays: StateDict = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.array([1.5], np.float32)}
    state = parse_checkpoint(safetensors.numpy.save(arrays), "safetensors", "here")
    assert {key: (array.dtype, array.tolist()) for key, array in state.items()} == {
        key: (array.dtype, array.tolist()) for key, array in arrays.items()
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        safetensors.numpy.save({"a": np.zeros(3, np.float32)})[:-1],
        safetensors.numpy.save({}),
        safetensors.numpy.save({"a": np.zeros(4, np.float16)}).replace(b'"F16"', b'"BF16"').replace(b"    ", b"   ", 1),
        safetensors.numpy.save({"a": np.zeros(4, np.float32)}).replace(b"[4]", b"[5]"),
    ],
)
def test_malformed_safetensors_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="here: refused as a safetensors weight file"):
        parse_checkpoint(data, "safetensors", "here")

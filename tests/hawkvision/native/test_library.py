"""The int8 kernels' library: where it comes from, when it serves, and what takes its place where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backend_registry import open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.inference.int8.backend import Int8Backend
from hawkvision.inference.int8.equivalence_check import agrees
from hawkvision.models.manifest import InputSpec
from hawkvision.native import library
from hawkvision.system.build_cache import VARIABLE, is_intact
from tests.hawkvision.inference.graphs import tiny_classifier
from tests.hawkvision.inference.quantised import residual_network, two_outputs

runs = pytest.mark.skipif(
    library.unsupported_reason() is not None, reason=f"this machine cannot: {library.unsupported_reason()}"
)
SPEC, FLOATS = (
    InputSpec(height=height, width=width, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    for height, width in ((36, 30), (16, 12))
)


@runs
def test_what_these_kernels_can_run_they_run() -> None:
    with closing(open_backend("auto", residual_network(), SPEC, 11)) as backend:
        assert isinstance(backend, Int8Backend)


def test_what_they_cannot_run_onnx_runtime_runs_unless_they_were_asked_for_by_name() -> None:
    with closing(open_backend("auto", tiny_classifier(), FLOATS, 7)) as backend:
        assert isinstance(backend, OnnxRuntimeBackend)
    if library.unsupported_reason() is None:
        with pytest.raises(BackendError, match=r"int8: node .*\(Cast\): no layer of an integer network"):
            open_backend("int8", tiny_classifier(), FLOATS, 7)


@pytest.fixture
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "hawkvision" / "compiled"


class OffByOne:
    """A backend whose last number is not what the model says."""

    def __init__(self, right: Backend) -> None:
        self._right = right
        self.input_shape, self.outputs, self.close = right.input_shape, right.outputs, right.close

    def infer(self, batch: Pixels) -> Tensors:
        found = self._right.infer(batch)
        last = list(found.values())[-1]
        last[..., -1] = np.nextafter(last[..., -1], np.float32(np.inf))
        return found


@runs
@pytest.mark.parametrize("network", [residual_network, two_outputs])
def test_other_outputs_than_onnx_runtimes_are_found_out_and_not_noted(
    network: Callable[[], bytes], new_cache: Path
) -> None:
    with closing(OnnxRuntimeBackend(network())) as right:
        assert not agrees(network(), OffByOne(right), "one way")
    assert not list(new_cache.glob("*.same"))


@runs
def test_agreement_is_noted_for_this_model_and_this_way_of_running_it_alone(new_cache: Path) -> None:
    with closing(OnnxRuntimeBackend(residual_network())) as right:
        assert agrees(residual_network(), right, "one way")
        assert len(list(new_cache.glob("*.same"))) == 1
        assert agrees(residual_network(), OffByOne(right), "one way")  # it is not looked at again
        assert not agrees(residual_network(), OffByOne(right), "another way")
        assert not agrees(residual_network(seed=1), OffByOne(right), "one way")


OPEN = """
import logging, sys
from pathlib import Path
from hawkvision.models.manifest import InputSpec
from hawkvision.inference.backend_registry import open_backend
logging.basicConfig(level=logging.INFO)
spec = InputSpec(height=36, width=30, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
print(type(open_backend(sys.argv[1], Path(sys.argv[2]), spec, 11)).__name__, "onnxruntime" in sys.modules)
"""


def opened_in_a_new_process(
    kind: str, cache: Path, prefix: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """The backend that a process with that cache opens, and whether it has loaded ONNX Runtime."""
    model = cache / "model.onnx"
    model.write_bytes(residual_network())
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [*prefix, sys.executable, "-c", OPEN, kind, str(model)],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, "XDG_CACHE_HOME": str(cache), **environment},
    )


@runs
@pytest.mark.parametrize(
    ("kind", "environment", "opened", "says"),
    [
        ("auto", {"PATH": "/nowhere"}, ["OnnxRuntimeBackend"], "no C++ compiler (c++, g++, clang++); install one"),
        ("int8", {"PATH": "/nowhere"}, [], "BackendError: int8: no C++ compiler"),
        ("auto", {"XDG_CACHE_HOME": f"/{'x' * 300}"}, ["OnnxRuntimeBackend"], "cannot read the folder: File name too"),
    ],
)
def test_without_a_compiler_or_a_cache_onnx_runtime_takes_over_unless_the_kernels_were_asked_for_by_name(
    tmp_path: Path, kind: str, environment: dict[str, str], opened: list[str], says: str
) -> None:
    done = opened_in_a_new_process(kind, tmp_path, **environment)
    assert done.stdout.split()[:1] == opened, done.stderr
    assert says in done.stderr


@runs
def test_an_assembler_that_knows_no_tiles_makes_a_kernel_without_them(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    refusing = 'echo "Error: no such instruction"; exit 1'
    (tmp_path / "c++").write_text(f'#!/bin/sh\ncase "$*" in *WITHOUT_TILES*) exec {compiler} "$@";; esac\n{refusing}\n')
    (tmp_path / "c++").chmod(0o755)
    done = opened_in_a_new_process("auto", tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout.split()[0] == "Int8Backend", done.stderr
    assert "network.cpp: trying with -DWITHOUT_TILES: " in done.stderr
    assert "cannot compile network.cpp: Error: no such instruction" in done.stderr


@runs
def test_the_kernel_is_compiled_once_and_onnx_runtime_is_not_even_loaded_afterwards(tmp_path: Path) -> None:
    first = opened_in_a_new_process("auto", tmp_path)
    second = opened_in_a_new_process("auto", tmp_path, PATH=str(tmp_path))
    assert first.stdout.split() == ["Int8Backend", "True"], first.stderr
    assert second.stdout.split() == ["Int8Backend", "False"], second.stderr
    assert "compiling network.cpp" in first.stderr
    assert "compiling network.cpp" not in second.stderr


def test_an_images_builder_compiles_it_beside_its_source(tmp_path: Path) -> None:
    package = tmp_path / "hawkvision"
    shutil.copytree(Path(library.__file__).parents[1], package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "hawkvision.native"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    made = Path(done.stdout.strip())
    assert made.parent.parent == package / "native"
    assert is_intact(made.parent)


def test_a_builder_without_a_compiler_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hawkvision.native"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "no C++ compiler" in done.stderr


@runs
def test_a_kernel_that_a_power_cut_has_damaged_is_compiled_anew_and_not_run(tmp_path: Path) -> None:
    ours = Path(library.library()._name)
    kernel = tmp_path / "hawkvision" / "compiled" / ours.parent.name / ours.name
    shutil.copytree(ours.parent, kernel.parent)
    whole = kernel.read_bytes()
    kernel.write_bytes(whole[:16_384] + bytes(12_288) + whole[28_672:])
    done = opened_in_a_new_process("auto", tmp_path)
    assert done.stdout.split()[0] == "Int8Backend", done.stderr
    assert f"WARNING:hawkvision.system.build_cache:{kernel.parent}: damaged; built again" in done.stderr
    assert is_intact(kernel.parent)


@runs
def test_without_a_home_the_kernels_are_done_without(tmp_path: Path) -> None:
    nobody = ["unshare", "--user", "--map-user=12345", "--map-group=0", "env", "-u", "HOME", "-u", "XDG_CACHE_HOME"]
    if subprocess.run([*nobody, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody have a namespace of users")
    done = opened_in_a_new_process("auto", tmp_path, nobody)
    assert done.stdout.split()[0] == "OnnxRuntimeBackend", done.stderr
    assert "user 12345 has no HOME and no entry in /etc/passwd; set XDG_CACHE_HOME" in done.stderr

"""A provider that is asked for either runs the model, or the error says what is missing: never the CPU instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.core.errors import BackendError
from hawkvision.doctor.findings import Finding, Level
from hawkvision.doctor.onnx_runtime import runtime
from hawkvision.inference.backends.execution_providers import runtime_packages, start_failure
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend, with_exact_options
from tests.hawkvision.inference.graphs import tiny_classifier

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
IDLE = "AzureExecutionProvider"
"""A provider of every ONNX Runtime for CPUs that takes no node of our models."""


def install(folder: Path, name: str, holds: str = "onnxruntime/__init__.py") -> None:
    """What an installer leaves of a package: its name, and the list of its files."""
    info = folder / f"{name.replace('-', '_')}-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n")
    (info / "RECORD").write_text(f"{holds},,\n")


def by_check(providers: tuple[str, ...]) -> dict[str, Finding]:
    return {finding.check: finding for finding in runtime(providers)}


def test_part_of_a_graph_runs_on_the_cpu_only_if_the_cpu_is_named() -> None:
    with pytest.raises(BackendError, match=f"CPU EP.*to allow that, name {CPU} last"):
        OnnxRuntimeBackend(tiny_classifier(), (IDLE,))
    backend = OnnxRuntimeBackend(tiny_classifier(), (IDLE, CPU))
    assert backend.providers == (IDLE, CPU)
    backend.close()


def test_cuda_computes_in_float32_unless_the_options_say_otherwise() -> None:
    assert with_exact_options(CUDA) == (CUDA, {"use_tf32": "0"})
    assert with_exact_options((CUDA, {"device_id": 1})) == (CUDA, {"use_tf32": "0", "device_id": 1})
    assert with_exact_options((CUDA, {"use_tf32": "1"})) == (CUDA, {"use_tf32": "1"})
    assert with_exact_options(CPU) == (CPU, {})


def test_packages_of_the_runtime_are_separated_from_others_of_similar_names(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime-gpu")
    install(tmp_path, "onnxruntime-genai", "onnxruntime_genai/__init__.py")
    install(tmp_path, "numpy", "numpy/__init__.py")
    assert runtime_packages([str(tmp_path)]) == ("onnxruntime-gpu",)


def test_missing_gpu_names_the_extra_that_brings_it() -> None:
    with pytest.raises(BackendError, match=rf"{CUDA} is not installed.*{CPU}.*install the extra `gpu`"):
        OnnxRuntimeBackend(tiny_classifier(), (CUDA, CPU))
    finding = by_check((CUDA, CPU))[f"provider {CUDA}"]
    assert finding.level is Level.PROBLEM
    assert "gpu.md" in str(finding.advice)


def test_two_runtimes_in_one_environment_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "onnxruntime-gpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendError, match=r"onnxruntime and onnxruntime-gpu.*overwritten each other: pip uninstall"):
        OnnxRuntimeBackend(tiny_classifier(), (CUDA,))
    assert by_check((CPU,))["ONNX Runtime"].level is Level.WARNING
    found = by_check((CUDA, CPU))["ONNX Runtime"]
    assert found.level is Level.PROBLEM
    assert "pip uninstall --yes onnxruntime onnxruntime-gpu" in str(found.advice)


def test_provider_whose_library_does_not_load_is_reported_with_that_library() -> None:
    assert "libonnxruntime_providers_cuda.so" in str(start_failure(CUDA))  # the CPU's package has none
    assert start_failure(CPU) is None


def test_doctor_reports_a_runtime_with_holes(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").touch()  # what is left if one of two packages is removed
    code = "from hawkvision.doctor.onnx_runtime import runtime; print(*runtime(('CPUExecutionProvider',)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "is not whole" in done.stdout
    assert "PROBLEM" in done.stdout
    assert "--no-deps" in done.stdout

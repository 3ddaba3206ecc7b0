"""The bench of GPUs, on the CPU: PyTorch runs the packed operators and gives the logits of our own runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.model_zoo.building.build import build
from tests.bench import gpu, gpu_pack
from tests.images import encoded


def packed(folder: Path, monkeypatch: pytest.MonkeyPatch, *models: str) -> Path:
    """A pack of networks whose weights are committed, and ten images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    build("cifar10", models)
    for index in range(10):
        path = folder / "images" / str(index) / "a.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(".png", seed=index))
    wanted = [word for name in models for word in ("--model", f"cifar10:{name}")]
    pack = folder / "pack.npz"
    assert gpu.main(["--pack", str(pack), *wanted, "--images", f"cifar10={folder / 'images'}"]) == 0
    return pack


@pytest.mark.models
def test_pytorch_gives_the_logits_of_our_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the [models] extra is not installed")
    pack, out = packed(tmp_path, monkeypatch, "tiny", "large"), tmp_path / "result.json"
    # Isolated, as on a machine that has a checkout and no HawkVision.
    command = [sys.executable, "-I", gpu.__file__, str(pack), "--device", "cpu", "--quick", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(out.read_text())
    assert [each["batch"] for each in result["speed"]] == [1, 2] * 4
    assert result["left_out"] == []
    assert all(0.0 < each["p50_ms"] <= each["p99_ms"] for each in result["speed"])
    for each in result["agreement"]:
        assert each["same_class"] == each["images"] == 8
        bound = {"fp32": 1e-4, "fp16": 2e-3}[each["precision"]]
        assert each["largest_difference"] <= bound * each["logits_range"]
    assert "the CPU's class for 8 of 8 images" in ran.stdout


def test_packs_that_the_other_machine_cannot_take_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, images = packed(tmp_path, monkeypatch, "tiny"), {"cifar10": tmp_path / "images"}
    assert 0 < pack.stat().st_size < gpu_pack.LARGEST_PACK
    with pytest.raises(SystemExit, match=r"does not know the operators .*Conv"):
        gpu_pack.pack(pack, ["cifar10:tiny"], images, 2, ["Cast"])
    monkeypatch.setattr(gpu_pack, "LARGEST_PACK", 1000)
    with pytest.raises(SystemExit, match="expected 1000 at most"):
        gpu_pack.pack(pack, ["cifar10:tiny"], images, 2, gpu.OPERATORS)
    assert not pack.exists()

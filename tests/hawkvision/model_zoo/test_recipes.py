"""The recipe of the shipped cascades, for a few images. Needs `[models]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hawkvision.model_zoo.building.build import build
from hawkvision.models.manifest import load_manifest

pytestmark = [pytest.mark.models, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[3]
IMAGES = REPOSITORY.parent / "shared" / "data" / "cifar10.npz"


def few_images(path: Path, count: int) -> Path:
    if not IMAGES.is_file():
        pytest.skip(f"{IMAGES} is absent")
    with np.load(IMAGES) as z:
        data, offsets, labels, is_test = z["data"], z["offsets"], z["labels"], z["is_test"]
    chosen = np.sort(np.random.default_rng(0).choice(len(labels), count, replace=False))
    bodies = [data[offsets[i] : offsets[i + 1]] for i in chosen]
    ends = np.cumsum([0, *map(len, bodies)])
    np.savez(path, data=np.concatenate(bodies), offsets=ends, labels=labels[chosen], is_test=is_test[chosen])
    return path


def test_a_trial_writes_a_cascade_of_the_shipped_form_that_can_be_built(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the [models] extra is not installed")
    data, out = few_images(tmp_path / "few.npz", 900), tmp_path / "trial"
    trial = ["cifar10", "--data", str(data), "--out", str(out), "--epochs", "1", "--images", "520"]
    subprocess.run([sys.executable, str(REPOSITORY / "models" / "train.py"), *trial], check=True)
    made, shipped = (load_manifest("cifar10", models) for models in (out, REPOSITORY / "models"))
    assert made.cascade == shipped.cascade
    for found, known in zip(made.variants, shipped.variants, strict=True):
        assert (found.name, found.precision, found.input) == (known.name, known.precision, known.input)
        assert found.source.file == known.source.file  # type: ignore[union-attr]
        assert abs((found.bytes or 0) - (known.bytes or 0)) < 500
    built = build("cifar10", models=out, cache=tmp_path / "cache")
    assert len(built) == len(shipped.variants)

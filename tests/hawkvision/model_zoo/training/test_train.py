"""Training: torch and our graphs agree, interrupted trainings resume exactly, and the command end to end."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hawkvision.core.errors import ArtifactError, ManifestError
from hawkvision.model_zoo.building.architectures import emit
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.building.checkpoint import parse_checkpoint
from hawkvision.model_zoo.building.convnet import CONVNETS
from hawkvision.model_zoo.training.recipe import InputFacts, TrainedNetwork
from hawkvision.models.manifest import InputSpec, load_manifest
from hawkvision.system.onnx_runtime import ort
from tests.hawkvision.model_zoo.synthetic_task import write_task

pytestmark = pytest.mark.models

FACTS = InputFacts(side=12, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))
NETWORK = TrainedNetwork(name="n", architecture="convnet_tiny", seed=5, epochs=3, batch=16, cutout=4)


@pytest.fixture(scope="module")
def train() -> Any:
    """`hawkvision.model_zoo.training.train`, which needs torch."""
    pytest.importorskip("torch", reason="the [models] extra is not installed")
    return importlib.import_module("hawkvision.model_zoo.training.train")


def data(train: Any, sha256: str = "a" * 64, n: int = 50) -> Any:
    rng = np.random.default_rng(2)
    return train.TrainingSet(
        rng.integers(0, 256, (n, 12, 12, 3), dtype=np.uint8), rng.integers(0, 4, n).astype(np.int64), sha256
    )


def quiet(epoch: int, index: int, loss: float) -> None:
    assert np.isfinite(loss)


@pytest.mark.parametrize("architecture", list(CONVNETS))
def test_graph_of_the_weight_file_answers_as_the_trained_network(train: Any, architecture: str, tmp_path: Path) -> None:
    network = msgspec.structs.replace(NETWORK, architecture=architecture, epochs=1)
    model = train.train_network(network, FACTS, data(train), 4, tmp_path, quiet)
    state = parse_checkpoint(train.weight_file(model), "safetensors", "file")
    spec = InputSpec(height=12, width=12, mean=FACTS.mean, std=FACTS.std)
    graph = emit(architecture, state, spec, "file").SerializeToString()
    pixels = data(train, n=24).pixels
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    found, expected = session.run(["logits"], {"image": pixels})[0], train.infer(model, FACTS, pixels)
    # Half-precision weights are off by 2^-11 of themselves; layers add up.
    assert np.abs(found - expected).max() < 5e-3 * max(1.0, np.abs(expected).max())


def test_interrupted_training_ends_with_the_same_weights(train: Any, tmp_path: Path) -> None:
    whole = train.weight_file(train.train_network(NETWORK, FACTS, data(train), 4, tmp_path / "whole", quiet))

    def interrupt(epoch: int, index: int, loss: float) -> None:
        if (epoch, index) == (1, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train_network(NETWORK, FACTS, data(train), 4, tmp_path / "parts", interrupt)
    assert not train.is_finished(NETWORK, FACTS, data(train), 4, tmp_path / "parts")
    seen: list[int] = []
    model = train.train_network(
        NETWORK, FACTS, data(train), 4, tmp_path / "parts", lambda epoch, index, loss: seen.append(epoch)
    )
    assert train.weight_file(model) == whole
    assert set(seen) == {1, 2}


def test_finished_training_is_taken_up_without_a_batch(train: Any, tmp_path: Path) -> None:
    first = train.train_network(NETWORK, FACTS, data(train), 4, tmp_path, quiet)
    seen: list[int] = []
    again = train.train_network(NETWORK, FACTS, data(train), 4, tmp_path, lambda e, i, loss: seen.append(e))
    assert not seen
    assert train.weight_file(again) == train.weight_file(first)


@pytest.mark.parametrize("change", [{"seed": 6}, {"epochs": 4}, {"learning_rate": 0.3}])
def test_training_by_another_recipe_starts_anew_and_keeps_the_old(train: Any, change: Any, tmp_path: Path) -> None:
    train.train_network(NETWORK, FACTS, data(train), 4, tmp_path, quiet)
    other = msgspec.structs.replace(NETWORK, **change)
    assert not train.is_finished(other, FACTS, data(train), 4, tmp_path)
    train.train_network(other, FACTS, data(train), 4, tmp_path, quiet)
    assert train.is_finished(NETWORK, FACTS, data(train), 4, tmp_path)


def test_training_on_other_images_is_another_training(train: Any, tmp_path: Path) -> None:
    train.train_network(NETWORK, FACTS, data(train), 4, tmp_path, quiet)
    assert not train.is_finished(NETWORK, FACTS, data(train, "b" * 64), 4, tmp_path)


def test_training_goes_on_from_a_weight_file_apart_from_one_that_does_not(train: Any, tmp_path: Path) -> None:
    content = train.weight_file(train.train_network(NETWORK, FACTS, data(train), 4, tmp_path, quiet))
    still = msgspec.structs.replace(NETWORK, learning_rate=1e-12, epochs=1)
    model = train.train_network(still, FACTS, data(train), 4, tmp_path, quiet, content)
    expected, found = (parse_checkpoint(file, "safetensors", "file") for file in (content, train.weight_file(model)))
    assert np.array_equal(found["head.weight"], expected["head.weight"])
    assert not train.is_finished(still, FACTS, data(train), 4, tmp_path)


def test_weights_of_another_network_are_no_start(train: Any, tmp_path: Path) -> None:
    content = train.weight_file(train.train_network(NETWORK, FACTS, data(train), 4, tmp_path, quiet))
    with pytest.raises(ArtifactError, match=r"the weights to start from: head.bias: expected shape \(5,\), got \(4,"):
        train.train_network(NETWORK, FACTS, data(train), 5, tmp_path, quiet, content)


def test_half_of_what_trains_are_other_views_of_the_same_images(train: Any, tmp_path: Path) -> None:
    # Views are white and tell their label nothing; images are black or grey, which is their label.
    labels = np.arange(128) % 2
    pixels = np.broadcast_to((120 * labels).astype(np.uint8)[:, None, None, None], (128, 12, 12, 3)).copy()
    views = np.full((2, 128, 12, 12, 3), 255, np.uint8)
    plain = train.TrainingSet(pixels, labels, "a" * 64)
    network = msgspec.structs.replace(NETWORK, epochs=20, batch=64, cutout=0)
    losses: dict[str, list[float]] = {"plain": [], "viewed": []}
    for name, given in (("plain", plain), ("viewed", train.TrainingSet(pixels, labels, "b" * 64, views))):
        train.train_network(network, FACTS, given, 2, tmp_path, lambda e, i, loss, to=losses[name]: to.append(loss))
    # An image costs nothing once learnt, a view one bit: half of ln 2 on average.
    assert np.mean(losses["plain"][-20:]) < 0.02
    assert np.mean(losses["viewed"][-20:]) == pytest.approx(np.log(2) / 2, abs=0.08)


@pytest.mark.parametrize("cut", [0, 10, -100])
def test_damaged_checkpoint_is_named(train: Any, tmp_path: Path, cut: int) -> None:
    train.train_network(NETWORK, FACTS, data(train), 4, tmp_path, quiet)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ArtifactError, match=rf"{file.name}: the kept training is damaged, remove it"):
        train.is_finished(NETWORK, FACTS, data(train), 4, tmp_path)


def test_fewer_images_than_a_batch_are_refused(train: Any, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="n: a batch has 16 images, but only 15 train"):
        train.train_network(NETWORK, FACTS, data(train, n=15), 4, tmp_path, quiet)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "hawkvision.cli", "models", "train", "shapes", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.slow
def test_command_trains_in_parts_and_writes_a_cascade_that_builds(train: Any, tmp_path: Path) -> None:
    models, images = write_task(tmp_path)
    common = ("--data", images, "--models-dir", models, "--cache-dir", tmp_path / "cache")
    first = command(*common, "--only", "tiny")
    assert first.returncode == 0, first.stderr
    assert "left to train: other, tiny_w4" in first.stdout
    assert not (models / "shapes" / "manifest.toml").exists()
    second = command(*common)
    assert second.returncode == 0, second.stderr
    manifest = load_manifest("shapes", models)
    assert len(build("shapes", models=models, cache=tmp_path / "cache")) == 3
    for name in ("tiny", "tiny_w4"):
        accuracy = manifest.variant(name).accuracy
        assert accuracy is not None
        assert accuracy.value > 0.8  # guessing gives a third
    assert manifest.training is not None


def test_recipe_that_leaves_nothing_to_measure_with_is_refused_before_training(train: Any, tmp_path: Path) -> None:
    models, images = write_task(tmp_path)
    recipe = models / "shapes" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("train = 192", "train = 250"))
    done = command("--data", images, "--models-dir", models, "--cache-dir", tmp_path / "cache")
    assert done.returncode == 1
    assert "leaves 2 to fit on, 4 to certify with and 64 held out; expected at least 10" in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_trial_writes_elsewhere_or_nowhere(train: Any, tmp_path: Path) -> None:
    models, images = write_task(tmp_path)
    common = ("--data", images, "--models-dir", models, "--cache-dir", tmp_path / "cache", "--epochs", 1)
    before = sorted(models.rglob("*"))
    for refused in (command(*common), command(*common, "--out", models)):
        assert refused.returncode == 1
        assert "must not overwrite the cascade" in refused.stderr
    done = command(*common, "--out", tmp_path / "trial")
    assert done.returncode == 0, done.stderr
    assert sorted(models.rglob("*")) == before
    assert len(build("shapes", models=tmp_path / "trial", cache=tmp_path / "trial-cache")) == 3

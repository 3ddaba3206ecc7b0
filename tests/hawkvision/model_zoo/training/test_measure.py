"""From weight files to a measured manifest that builds without any network, and the cascades that are committed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import LOGITS, Logits
from hawkvision.inference.backend_registry import open_backend
from hawkvision.model_zoo.building.build import build, emit_variant, list_variants, verify
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_images
from hawkvision.model_zoo.training.measure import weight_path
from hawkvision.model_zoo.training.recipe import load_recipe
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import Manifest, load_labels, load_manifest, models_dir
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.tasks.registry import load_kind
from tests.hawkvision.model_zoo.synthetic_task import images_of, inputs_of, write_cascade
from tests.images import DATA

IMAGES = {"cifar10": DATA / "cifar10.npz", "fashion_mnist": Path("/usr/share/datasets/fashion-mnist")}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Manifest]:
    """Models folder, images and manifest of two untrained networks."""
    return write_cascade(tmp_path_factory.mktemp("task"))


def test_manifest_reads_back_the_same_and_builds_without_packages(
    task: tuple[Path, Path, Manifest], tmp_path: Path
) -> None:
    models, _, manifest = task
    assert load_manifest("shapes", models) == manifest
    built = build("shapes", models=models, cache=tmp_path, wheels=tmp_path / "none")
    assert {a.variant: a.sha256 for a in built} == {v.name: v.sha256 for v in manifest.variants}
    assert verify("shapes", models=models, cache=tmp_path)
    assert {s.state for s in list_variants("shapes", models, tmp_path)} == {"built"}


def test_temperatures_are_of_the_profile_part_and_accuracies_of_the_rest(
    task: tuple[Path, Path, Manifest], tmp_path: Path
) -> None:
    models, data, manifest = task
    build("shapes", models=models, cache=tmp_path)
    images = images_of(data)
    split = split_images(manifest, images, SPLIT_SEED)
    variant = manifest.variant("tiny")
    logits = _logits(load_variant(tmp_path, "shapes", variant), manifest, images.bodies)
    unseen, kind = np.concatenate([split.certify, split.held_out]), load_kind(manifest, models)
    assert variant.temperature == pytest.approx(
        fit_temperature(kind, list(logits[split.profile]), images.labels[split.profile].tolist()), abs=1e-3
    )
    assert variant.accuracy is not None
    assert variant.accuracy.value == pytest.approx((logits.argmax(axis=1) == images.labels)[unseen].mean(), abs=1e-6)
    assert (variant.accuracy.n, len(split.held_out)) == (len(unseen), 64)


def test_weight_file_that_changed_or_is_missing_is_named(task: tuple[Path, Path, Manifest], tmp_path: Path) -> None:
    models, _, manifest = task
    copy = tmp_path / "models" / "shapes"
    write_atomic(copy / "manifest.toml", format_manifest(manifest).encode())
    with pytest.raises(ArtifactError, match=r"weights/tiny\.safetensors: cannot read the weight file: No such file"):
        build("shapes", ["tiny"], models=tmp_path / "models", cache=tmp_path)
    content = (models / "shapes" / weight_path("tiny")).read_bytes()
    write_atomic(copy / weight_path("tiny"), content[:-1] + b"\x7f")
    with pytest.raises(ArtifactError, match=r"weights/tiny\.safetensors: expected SHA-256"):
        build("shapes", ["tiny"], models=tmp_path / "models", cache=tmp_path)
    at_hand = {"tiny": models / "shapes" / weight_path("tiny")}
    assert build("shapes", ["tiny"], models=tmp_path / "models", cache=tmp_path, files=at_hand)[0].variant == "tiny"


def test_quantised_network_that_is_not_what_the_manifest_says_is_refused(task: tuple[Path, Path, Manifest]) -> None:
    models, _, manifest = task
    variant = manifest.variant("tiny_w4")
    assert variant.precision == "w4a8"
    content = (models / "shapes" / weight_path("tiny_w4", "onnx")).read_bytes()
    with pytest.raises(ArtifactError, match=r"tiny_w4\.onnx: expected .* \(12, 12, 'w8a8'\), found \(12, 12, 'w4a8'\)"):
        emit_variant("shapes", msgspec.structs.replace(variant, precision="w8a8"), models, content)
    source = msgspec.structs.replace(variant.source, sha256=sha256_of(b"none"))
    with pytest.raises(ArtifactError, match=r"tiny_w4\.onnx: no ONNX file|one input and one output"):
        emit_variant("shapes", msgspec.structs.replace(variant, source=source), models, b"none")


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_committed_cascade_builds_to_the_pinned_bytes_from_what_is_committed(name: str, tmp_path: Path) -> None:
    models = models_dir()
    manifest, recipe = load_manifest(name, models), load_recipe(name, models)
    built = build(name, models=models, cache=tmp_path, wheels=tmp_path / "none")
    assert {a.variant: a.sha256 for a in built} == {v.name: v.sha256 for v in manifest.variants}
    assert manifest.cascade == recipe.cascade
    assert [v.name for v in manifest.variants] == list(recipe.trained)
    assert [(c.members, c.horizontal_flip) for c in manifest.ensembles] == [
        (c.members, c.horizontal_flip) for c in recipe.ensembles
    ]
    assert manifest.training is not None
    assert (manifest.training.images, manifest.training.seed) == (recipe.images.train, recipe.images.seed)


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_committed_cascade_is_as_right_as_it_says_on_test_images(name: str, tmp_path: Path) -> None:
    if not IMAGES[name].exists():
        pytest.skip(f"{IMAGES[name]} is not here; the data are never part of the repository")
    models = models_dir()
    manifest = load_manifest(name, models)
    images = read_images(IMAGES[name], load_labels(manifest, models))
    assert manifest.training is not None
    assert images.sha256 == manifest.training.data_sha256
    first = np.flatnonzero(images.is_test)[:200]
    build(name, models=models, cache=tmp_path)
    for variant in manifest.variants:
        logits = _logits(load_variant(tmp_path, name, variant), manifest, [images.bodies[i] for i in first])
        right = float((logits.argmax(axis=1) == images.labels[first]).mean())
        assert variant.accuracy is not None
        # Four standard errors of 200 images: beyond them it is another network, or other images.
        spread = 4 * np.sqrt(variant.accuracy.value * (1 - variant.accuracy.value) / 200)
        assert right == pytest.approx(variant.accuracy.value, abs=spread), variant.name


def _logits(model: bytes, manifest: Manifest, bodies: Sequence[bytes]) -> Logits:
    spec = manifest.variants[0].input
    with closing(open_backend("onnxruntime", model, spec, manifest.classes, threads=1)) as backend:
        return backend.infer(inputs_of(bodies, spec.height))[LOGITS]

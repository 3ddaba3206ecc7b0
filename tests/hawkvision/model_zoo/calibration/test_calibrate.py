"""`hawkvision calibrate` on a user's own images, through the command line, with the real cascade."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hawkvision.cascade.certification.predictions import split_indices
from hawkvision.cascade.certification.profile import design_sha256
from hawkvision.cascade.certification.profile_files import load_profile
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import LOGITS, Quality
from hawkvision.imaging.preprocessing import load_input
from hawkvision.inference.backend_registry import open_backend
from hawkvision.model_zoo.building.build import verify
from hawkvision.model_zoo.building.quantize import load_ranges
from hawkvision.model_zoo.calibration.certification import DELTA
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import cache_dir, load_labels, load_manifest, models_dir
from hawkvision.tasks.registry import load_kind
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.answers import answers_of, into_class_folders
from tests.images import DATA, encoded


@pytest.mark.slow
def test_a_directory_of_images_becomes_a_profile_that_a_policy_can_use(tmp_path: Path) -> None:
    try:
        verify("imagenet")
    except ArtifactError as error:
        pytest.skip(f"the cascade is not built: {error}")
    out, bodies = tmp_path / "mine.json", [encoded(seed=i) for i in range(100)]
    into_class_folders(bodies, answers_of("imagenet", "reference", bodies, cache_dir(None)), tmp_path / "images")
    ran = invoke("calibrate", "--data", str(tmp_path / "images"), "--out", str(out), "--edge", "squeezenet1_1_int8")
    assert ran.exit_code == 0, ran.stderr
    profile = load_profile(out)
    assert (profile.data.profile, profile.data.certify, profile.data.held_out) == (20, 50, 30)
    policy = Policy(profile, "squeezenet1_1_int8", "reference")
    assert policy.route(Quality.BEST).direct
    held_out = json.loads((tmp_path / "held_out.json").read_text())
    assert held_out["data_sha256"] == profile.data.sha256
    assert len(held_out["indices"]) == 30


def test_unknown_stage_to_certify_against_is_named(tmp_path: Path) -> None:
    bodies = [encoded(height=8, width=8, seed=seed) for seed in range(100)]
    np.savez(
        tmp_path / "p.npz",
        data=np.frombuffer(b"".join(bodies), np.uint8),
        offsets=np.cumsum([0, *map(len, bodies)]),
        labels=np.arange(100) % 2,
    )
    ran = invoke("calibrate", "--best", "resnet", "--data", str(tmp_path / "p.npz"), "--out", str(tmp_path / "p.json"))
    assert ran.exit_code == 1
    assert "'resnet'" in ran.stderr


def test_too_few_images_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "a.jpg").write_bytes(encoded())
    ran = invoke("calibrate", "--data", str(tmp_path), "--out", str(tmp_path / "p.json"))
    assert ran.exit_code == 1
    assert "1 images certify nothing; expected at least 100" in ran.stderr
    assert not (tmp_path / "p.json").exists()


def test_shipped_profile_names_the_models_of_the_manifest_and_its_data() -> None:
    models = models_dir()
    manifest = load_manifest("imagenet", models)
    profile = load_profile(models / "imagenet" / "profile.json")
    for stage in profile.stages:
        assert stage.models == {v.name: v.sha256 for v in manifest.members(stage.name)}
    assert {pair.edge for pair in profile.pairs} == set(manifest.cascade.edge)
    held_out = json.loads((models / "imagenet" / "held_out.json").read_text())
    assert held_out["data_sha256"] == profile.data.sha256
    assert len(held_out["indices"]) == profile.data.held_out


def test_shipped_temperatures_and_ranges_use_no_certification_or_test_image() -> None:
    models = models_dir()
    manifest = load_manifest("imagenet", models)
    data = load_profile(models / "imagenet" / "profile.json").data
    for accuracy in [v.accuracy for v in manifest.variants] + [c.accuracy for c in manifest.ensembles]:
        assert accuracy is not None
        assert (accuracy.n, accuracy.data_sha256) == (data.certify + data.held_out, data.sha256)
    for variant in manifest.variants:
        ranges = load_ranges(models, "imagenet", variant)
        assert (ranges.images, ranges.seed, ranges.data_sha256) == (data.profile, data.seed, data.sha256)


@pytest.mark.slow
def test_shipped_ensemble_votes_by_temperatures_of_the_profile_part() -> None:
    path = DATA / "imagenet_eval.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not here; the data are never part of the repository")
    models = models_dir()
    manifest = load_manifest("imagenet", models)
    images = read_images(path, load_labels(manifest, models))
    fitting = split_indices(images.sources, load_profile(models / "imagenet" / "profile.json").data.seed).profile
    variant, kind = manifest.variant(manifest.members(manifest.best)[0].name), load_kind(manifest, models)
    try:
        model = load_variant(cache_dir(), "imagenet", variant)
    except ArtifactError as error:
        pytest.skip(f"the cascade is not built: {error}")
    inputs = np.stack([load_input(images.bodies[i], variant.input, max_pixels=10**6)[0] for i in fitting])
    with closing(open_backend("onnxruntime", model, variant.input, manifest.classes, threads=1)) as backend:
        logits = np.concatenate([backend.infer(inputs[i : i + 8])[LOGITS] for i in range(0, len(inputs), 8)])
    assert fit_temperature(kind, list(logits), images.labels[fitting].tolist()) == pytest.approx(
        variant.temperature, abs=2e-4
    )


def test_shipped_profile_was_made_of_the_evaluation_images() -> None:
    path = DATA / "imagenet_eval.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not here; the data are never part of the repository")
    models = models_dir()
    profile = load_profile(models / "imagenet" / "profile.json")
    images = read_images(path, load_labels(load_manifest("imagenet", models), models))
    assert images.sha256 == profile.data.sha256
    split = split_indices(images.sources, profile.data.seed)
    held_out = json.loads((models / "imagenet" / "held_out.json").read_text())["indices"]
    np.testing.assert_array_equal(split.held_out, held_out)
    assert not set(held_out) & (set(split.certify.tolist()) | set(split.profile.tolist()))


def test_shipped_certificates_were_made_on_images_that_had_no_part_in_the_design_or_paid_for_it() -> None:
    for task in ("imagenet", "cifar10", "fashion_mnist"):
        profile = load_profile(models_dir() / task / "profile.json")
        (certifying,) = [use for use in profile.uses if use.purpose == "certify"]
        designed = {use.sha256 for use in profile.uses if use.purpose in ("fit", "design")}
        assert certifying.openings is not None
        assert certifying.sha256 not in designed or certifying.compared > 1, task
        paid = DELTA / certifying.compared / 2 ** (certifying.openings - 1)
        for pair in profile.pairs:
            whole = pair.conditions[0]
            for certificate in (whole.balanced, whole.fast, *whole.certificates):
                if certificate.basis != "profile":
                    assert certificate.delta == pytest.approx(paid)
                    assert certificate.n <= certifying.n
        assert certifying.design == design_sha256(profile, profile.pairs), "the design that was fixed before"
        if task == "imagenet":
            assert certifying.design in (models_dir() / task / "CERTIFICATION.md").read_text()

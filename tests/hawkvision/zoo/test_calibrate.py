"""`hawkvision calibrate` on a user's own pictures, through the command line, with the real ladder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hawkvision.cascade.policy import Policy
from hawkvision.cascade.profile import load_profile
from hawkvision.errors import ArtifactError
from hawkvision.manifest import load_manifest, models_dir
from hawkvision.types import Quality
from hawkvision.zoo.build import verify
from tests.pictures import DATA, encoded


def calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hawkvision.cli", "calibrate", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_directory_of_pictures_becomes_a_profile_that_a_policy_can_use(tmp_path: Path) -> None:
    try:
        verify("imagenet")
    except ArtifactError as error:
        pytest.skip(f"the ladder is not built: {error}")
    for i in range(100):
        folder = tmp_path / "pictures" / str(i % 10)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(encoded(seed=i))
    out = tmp_path / "mine.json"
    ran = calibrate("--data", str(tmp_path / "pictures"), "--out", str(out), "--edge", "squeezenet1_1_int8")
    assert ran.returncode == 0, ran.stderr
    profile = load_profile(out)
    assert (profile.data.profile, profile.data.certify, profile.data.held_out) == (20, 50, 30)
    policy = Policy(profile, "squeezenet1_1_int8", "committee")
    assert policy.route(Quality.BEST).direct
    held_out = json.loads((tmp_path / "held_out.json").read_text())
    assert held_out["data_sha256"] == profile.data.sha256
    assert len(held_out["indices"]) == 30


def test_too_few_pictures_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "a.jpg").write_bytes(encoded())
    ran = calibrate("--data", str(tmp_path), "--out", str(tmp_path / "p.json"))
    assert ran.returncode == 1
    assert "1 pictures certify nothing; expected at least 100" in ran.stderr
    assert not (tmp_path / "p.json").exists()


def test_shipped_profile_names_the_models_of_the_manifest_and_its_data() -> None:
    models = models_dir()
    manifest = load_manifest("imagenet", models)
    profile = load_profile(models / "imagenet" / "profile.json")
    for rung in profile.rungs:
        assert rung.models == {v.name: v.sha256 for v in manifest.members(rung.name)}
    assert {pair.edge for pair in profile.pairs} == set(manifest.ladder.edge)
    held_out = json.loads((models / "imagenet" / "held_out.json").read_text())
    assert held_out["data_sha256"] == profile.data.sha256
    assert len(held_out["indices"]) == profile.data.held_out


def test_shipped_profile_was_made_of_the_evaluation_pictures() -> None:
    path = DATA / "imagenet_eval.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not here; the data are never part of the repository")
    from hawkvision.cascade.profiling import split_indices
    from hawkvision.manifest import load_labels
    from hawkvision.pictures import read_pictures

    models = models_dir()
    profile = load_profile(models / "imagenet" / "profile.json")
    pictures = read_pictures(path, load_labels(load_manifest("imagenet", models), models))
    assert pictures.sha256 == profile.data.sha256
    split = split_indices(pictures.sources, profile.data.seed)
    held_out = json.loads((models / "imagenet" / "held_out.json").read_text())["indices"]
    np.testing.assert_array_equal(split.held_out, held_out)
    assert not set(held_out) & (set(split.certify.tolist()) | set(split.profile.tolist()))

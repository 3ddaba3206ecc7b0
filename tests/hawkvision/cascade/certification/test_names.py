"""No word voids a certificate: what names models is what it was before 0.2 renamed things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.models.manifest import load_manifest, models_dir

STAGES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("fingerprints.json").read_text())


@pytest.mark.parametrize("task", STAGES)
def test_fingerprints_of_stages_outlive_a_rename(task: str) -> None:
    manifest = load_manifest(task, models_dir())
    profile = load_profile_of(manifest, models_dir(), None)
    assert {stage: manifest.fingerprint(stage) for stage in STAGES[task]} == STAGES[task]
    assert {stage.name for stage in profile.stages} <= STAGES[task].keys()

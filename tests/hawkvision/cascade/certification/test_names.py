"""No word voids a certificate: what names models and certificates is what it was before 0.2 renamed things."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from hawkvision.cascade.certification.profile import design_sha256
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.cascade.policy import Policy
from hawkvision.models.manifest import load_manifest, models_dir

STAGES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("fingerprints.json").read_text())
CERTIFICATES = {
    "cifar10": (
        "54623e1d08267bf3f090884437552c2d805043d2ca7c083d636643fed130f0bc",
        "facf4be3b01991b17882325d337b1a7e57f788c8d02f5b4c536f8b5c208ce72a",
    ),
    "fashion_mnist": (
        "a0246dfeca986bd4d1275310bb31f921116d48c211b6a663a288cf956616b5ff",
        "758f55e4af53f3fe03e315554a4e9f04b5b5a38adad4582d7d7d329eb07c809a",
    ),
    "imagenet": (
        "9403abcc52a0255ec1e65acefa031efbf81112cf972053e402b3b79c85258a22",
        "9db0901f00922177d3682a0c0cd1401758d8277c7a120049a94a4c9953d7708c",
    ),
}
"""The design, and one digest over the names of all certificates."""


def digest(names: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(sorted(set(names))).encode()).hexdigest()


@pytest.mark.parametrize("task", STAGES)
def test_fingerprints_of_stages_and_names_of_certificates_outlive_a_rename(task: str) -> None:
    manifest = load_manifest(task, models_dir())
    profile = load_profile_of(manifest, models_dir(), None)
    assert {stage: manifest.fingerprint(stage) for stage in STAGES[task]} == STAGES[task]
    assert {stage.name for stage in profile.stages} <= STAGES[task].keys()
    policies = [Policy(profile, pair.edge, pair.best) for pair in profile.pairs]
    found = (
        design_sha256(profile, profile.pairs),
        digest(name for policy in policies for name in policy.profiles),
    )
    assert found == CERTIFICATES[task]

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
        "c68d0ad5be7ad9d44f96e16a95eddaac0845d3ef5f11d4bdfa5583c27367b158",
    ),
    "fashion_mnist": (
        "a0246dfeca986bd4d1275310bb31f921116d48c211b6a663a288cf956616b5ff",
        "6a16d3677c8830680832e4be5543140486844a48fe6b60581393b51d7d882f42",
    ),
    "imagenet": (
        "9403abcc52a0255ec1e65acefa031efbf81112cf972053e402b3b79c85258a22",
        "ad7b3181c3be258b7591ba9735e8d5b2818a9355a0bfa1729937725b6d393f48",
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

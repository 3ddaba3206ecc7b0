"""Profiles and certificates of classification stay the same to the last digit, whatever other kinds of tasks need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from hawkvision.cascade.certification.profile import Profile
from tests.hawkvision.cascade.synthetic import make_profile

TWO = "ed4dbb9b87441953c4ab7834d0f0a123ec768050f68401ce7b75a4d7730aa613"
THREE = "5397ba1bf391922c4ae4ad5ba8aec7f0303fdfe67b5d5ecbb5bae29e47b99dd9"


@pytest.mark.parametrize(
    ("made", "digest"),
    [
        (make_profile, TWO),
        (partial(make_profile, intermediate=True), THREE),
    ],
    ids=["two levels", "three levels"],
)
def test_temperatures_scores_paths_accuracies_and_certificates_are_what_they_were(
    made: Callable[[], Profile], digest: str
) -> None:
    profile = made()
    text = json.dumps(msgspec.to_builtins((profile.stages, profile.pairs)), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == digest

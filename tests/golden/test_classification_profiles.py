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

TWO = "996843c4a75aa5affa595a8ade4bab62e89a20f0727a412c9ec89b295aab6e1e"
THREE = "c295f16b96c9b4b6282fd8587aaadebe694105d2154a51921ea4b58e7a9dceb8"


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

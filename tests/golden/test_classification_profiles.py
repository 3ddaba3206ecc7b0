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

TWO = "993810d881ca05f3106747b14f277e7323df819b9b8b8d7b7b9da3a8535a8b62"
THREE = "447d61079c86c050175bf5eb5fa22bc1412754d4461bc32e337ffb70c202a334"


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

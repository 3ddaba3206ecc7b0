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

TWO = "ae626a42370f18f8d167b76dec7e1bda0149ba994d140409089b06f3b554db58"
THREE = "956266ec2c63db974c9a3a96f9ebfab14ecdee656486055160eaa133ecbc09ef"


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

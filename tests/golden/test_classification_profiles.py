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

TWO = "af7f3905ba41b728b786c5bdcc437654c4e57a412d6e38cce5705d040878b36e"
THREE = "7c3db340ce44213b9fb819f1df3ccdfcface2cb520727137a95b8e2803c5fd0d"


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

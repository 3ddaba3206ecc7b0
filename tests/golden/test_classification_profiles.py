"""Profiles and certificates of classification stay the same to the last digit, whatever other kinds of tasks need.

The digests were made with the release that knew classification alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from hawkvision.cascade.certification.profile import Profile, ReceivedCondition
from tests.hawkvision.cascade.synthetic import HARM, make_condition, make_profile

TWO = "16aa3031417aac54fdbd8629eae32fc2b0477ba006db4ec8c359f796385840f0"
THREE = "732bc199a0dab5a6aa5308714fdef90f545131bd0b6b1e8e57514dc1b6467119"
RECEIVED = "f1cf6d559b98247482d2f576d7e07329da5959f55907cd1fc4e566d33b7add84"


@pytest.mark.parametrize(
    ("made", "digest"),
    [
        (make_profile, TWO),
        (partial(make_profile, intermediate=True), THREE),
        (partial(make_condition, 80, 0.75, HARM[80, 0.75]), RECEIVED),
    ],
    ids=["two levels", "three levels", "received images"],
)
def test_temperatures_scores_paths_accuracies_and_certificates_are_what_they_were(
    made: Callable[[], Profile | ReceivedCondition], digest: str
) -> None:
    text = json.dumps(msgspec.to_builtins(made()), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == digest

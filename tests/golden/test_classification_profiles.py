"""Profiles and certificates of classification stay the same to the last digit, whatever other kinds of tasks need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from hawkvision.cascade.certification.profile import Profile, ReceivedCondition
from tests.hawkvision.cascade.synthetic import HARM, make_condition, make_profile

TWO = "e7b8cd99f949d0af8ea9ce84ec5cec3ad6ae4bfbebd6e5b319a301648cc97e0c"
THREE = "3e0dabc46d93832538c7c700e2932463b327d44586a99b04b56b703140faf382"
RECEIVED = "69698b027c62d71e2b1c51582dd8ea8cc265912eb1bb117ef967df3cfb682f18"


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

"""No word voids a certificate: what names models and certificates is what it was before 0.2 renamed things."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import pytest

from hawkvision.cascade.certification.profile import design_sha256
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.cascade.policy import Policy
from hawkvision.core.types import Quality
from hawkvision.models.manifest import load_manifest, models_dir

STAGES = {
    "cifar10": {
        "tiny_w4": "0771c5e428cb8e4ea6f30590756ffe3cbd101f5122ed141838fc9c193b2e237e",
        "tiny_w8": "82f2d95a0bd59a1998c967e61bf96b3ed5d2323e20ed09ab0ecb300bb0f0337a",
        "tiny": "0e36d33236215d84dfcab80f2636dfc34f5e3e6b9c1298a05ffc1c8fae245a6e",
        "small": "eb914b9935368e97af6e08ad96956ba26601e06159a474cef209b49e898631f8",
        "large": "63d1d5249527b0a7004083ee7bc1862a5c497fd425ab5b6ffeb445c6a1474eb9",
        "committee": "fa0869880e490b71fe87b95542139f45d23e29e61e736dc90713162d35dc7822",
    },
    "fashion_mnist": {
        "tiny_w4": "b6e3c11977938784cd30f694f28470428106e5de3795916b047382970cad6cc9",
        "tiny_w8": "7e5fddaaeaaf62e73ec4421be0da0e827bcd2fab5ccee260265287534fe35584",
        "tiny": "c645d2ed6db6ca23694508c3671cc9d9a1bc0c9fdbe206dc01fb22e46a2e1415",
        "small": "0bd0a478904079503d42b44c615a4c1fec1145517b9f791a55ec0317f9d0b284",
        "large": "d7edf99eff780c437eb52e76e2ab70a8a3b401dc081b4c60f70507d82dc1a9ca",
        "committee": "7a3e4d2823e56c9b39d825df8f55901bd11a93c866055110a0355a82f8345e41",
    },
    "imagenet": {
        "squeezenet1_1_int8": "a4b4b02039c2fdedc7facbd2f1256158eff62cd54aeb326289594a9049aeffcc",
        "mobilenet_v2_int8": "c6c0a5f0871ba66b72db090d8e1b28fd9de96fb900c3033f4efb7aa03092c4ab",
        "efficientnet_lite0_int8": "3f435a91ba38696f90e3f0a52bb05fddcf5bc9319e503aef5787b67559974280",
        "edge_committee": "a49375d7fc919aa125043e107414af4f40609cf1388ac7dbc3c236242a2a24f4",
        "committee_upright": "edaa67fdaba4019a103a866746b5b1514374c886cca0ca26f8e066e2723c56ee",
        "committee": "1e7fadc1d604dda07dcdd0daee4dcae9142c0997316eb5e28d164fa1923cea0d",
    },
}
CERTIFICATES = {
    "cifar10": (
        "54623e1d08267bf3f090884437552c2d805043d2ca7c083d636643fed130f0bc",
        "c68d0ad5be7ad9d44f96e16a95eddaac0845d3ef5f11d4bdfa5583c27367b158",
        "eb2849b25efa892a9645799fbcc9aae79a8e116e180c8515ee11c2a9e238b480",
    ),
    "fashion_mnist": (
        "a0246dfeca986bd4d1275310bb31f921116d48c211b6a663a288cf956616b5ff",
        "6a16d3677c8830680832e4be5543140486844a48fe6b60581393b51d7d882f42",
        "8c6dedc483865b00ce9ab5a521c486767a67f441d356d9b6d010c85057a9d2e5",
    ),
    "imagenet": (
        "9403abcc52a0255ec1e65acefa031efbf81112cf972053e402b3b79c85258a22",
        "ad7b3181c3be258b7591ba9735e8d5b2818a9355a0bfa1729937725b6d393f48",
        "2f21aab8839230b75cc7cb94723c6c44a95a0ac3789ff916d06b5ce999b9f6ac",
    ),
}
"""The design; one digest over the names of all certificates; one over the keys of all controllers."""


def digest(names: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(sorted(set(names))).encode()).hexdigest()


@pytest.mark.parametrize("task", STAGES)
def test_fingerprints_of_stages_and_names_of_certificates_outlive_a_rename(task: str) -> None:
    manifest = load_manifest(task, models_dir())
    profile = load_profile_of(manifest, models_dir(), None)
    assert {stage.name: manifest.fingerprint(stage.name) for stage in profile.stages} == STAGES[task]
    policies = [Policy(profile, pair.edge, pair.best) for pair in profile.pairs]
    controls = [policy.route(quality).controls for policy in policies for quality in Quality]
    both = [each for known in controls if known is not None for each in (known.edge, known.intermediate)]
    found = (
        design_sha256(profile, profile.pairs),
        digest(name for policy in policies for name in policy.profiles),
        digest(followed.key for followed in both if followed is not None),
    )
    assert found == CERTIFICATES[task]

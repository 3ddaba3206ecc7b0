"""Files of earlier versions: profiles and site certificates are read and sealed; manifests are refused by key."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from hawkvision.cascade.certification.profile import Profile, design_sha256
from hawkvision.cascade.certification.profile_files import load_profile, load_site
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ManifestError
from hawkvision.core.types import Quality
from hawkvision.models.manifest import models_dir
from tests.hawkvision.command import invoke

FILES = {name: Path(__file__).with_name("old_formats") / f"{name}.json.gz" for name in ("profile_4", "site_1")}
"""As 0.1 wrote them: the profile of CIFAR-10, and certificates that stand for a site's."""


def unpacked(name: str, folder: Path) -> Path:
    path = folder / f"{name}.json"
    path.write_bytes(gzip.decompress(FILES[name].read_bytes()))
    return path


def load(path: Path) -> Profile | SiteCertificates:
    return load_site(path) if path.stem.startswith("site") else load_profile(path)


def test_a_profile_of_format_4_keeps_its_design_and_its_certificates(tmp_path: Path) -> None:
    old = load_profile(unpacked("profile_4", tmp_path))
    new = load_profile(models_dir() / "cifar10" / "profile.json")
    assert old.format == 4
    assert design_sha256(old, old.pairs) == design_sha256(new, new.pairs)
    policies = [[Policy(profile, pair.edge, pair.best) for pair in profile.pairs] for profile in (old, new)]
    assert [policy.profiles for policy in policies[0]] == [policy.profiles for policy in policies[1]]
    assert {stage.name for stage in old.stages} == {stage.name for stage in new.stages}


def test_site_certificates_of_format_1_replace_the_certificates_of_a_present_profile(tmp_path: Path) -> None:
    site = load_site(unpacked("site_1", tmp_path))
    profile = load_profile(models_dir() / "cifar10" / "profile.json")
    policy = Policy(profile, "small", "committee", site=site)
    assert policy.route(Quality.BALANCED) == Policy(profile, "small", "committee").route(Quality.BALANCED)
    assert site.pairs[0].intermediate == "large"


@pytest.mark.parametrize("name", FILES)
def test_an_altered_old_file_is_refused_until_it_is_sealed_under_its_own_keys(name: str, tmp_path: Path) -> None:
    path = unpacked(name, tmp_path)
    before = load(path)
    content = msgspec.json.decode(path.read_bytes())
    content["pairs"][0]["conditions"][0]["fast"]["observed_drop"] = 0.123
    path.write_bytes(msgspec.json.encode(content))
    with pytest.raises(ManifestError, match="was altered"):
        load(path)
    result = invoke("seal", str(path))
    assert result.exit_code == 0, result.output
    assert load(path).pairs[0].conditions[0].fast.observed_drop == 0.123
    assert load(path).stages == before.stages
    sealed = msgspec.json.decode(path.read_bytes())
    assert sealed.pop("digest") != content.pop("digest")
    assert sealed == content

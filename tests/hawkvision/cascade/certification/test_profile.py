"""Profiles and site certificates as files: what survives them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.cascade.certification.profile import Profile
from hawkvision.cascade.certification.profile_files import dump, load_profile, load_site
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.core.errors import ManifestError
from hawkvision.model_zoo.calibration.certification import to_replace
from hawkvision.system.files import sha256_of
from hawkvision.tasks.class_scores import Score
from tests.fuzz.examples import examples
from tests.hawkvision.cascade.synthetic import SHA, make_profile


def content_of(document: bytes) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.json.decode(document)
    assert len(content.pop("digest")) == 64
    return content


def write(folder: Path, data: bytes) -> Path:
    path = folder / "document.json"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("intermediate", [False, True])
def test_a_profile_survives_the_file(tmp_path: Path, intermediate: bool) -> None:
    profile = make_profile(intermediate=intermediate)
    assert load_profile(write(tmp_path, dump(profile))) == profile


def make_site() -> SiteCertificates:
    pair = SitePair(edge="small", best="large", score=Score.TOP1, conditions=make_profile().pairs[0].conditions)
    data = SiteData(name="yard", sha256=SHA, n=900, labels=900, shrinks_images=True)
    stage = SiteStage(name="small", fingerprint=SHA, temperature=1.0)
    return SiteCertificates(
        format=4, task="digits", basis="site", since=None, until=datetime(2026, 11, 21, tzinfo=UTC), data=data,
        stages=(stage,), pairs=(pair,),
    )  # fmt: skip


def test_site_certificates_are_read_from_a_file(tmp_path: Path) -> None:
    site = make_site()
    loaded = load_site(write(tmp_path, dump(site)))
    assert loaded == site
    assert loaded.stage("small") == site.stages[0]
    assert loaded.stage("large") is None
    assert loaded.pair("small", "large") == site.pairs[0]


def test_a_pair_that_a_site_lacks_names_the_command_that_certifies_it() -> None:
    with pytest.raises(ManifestError, match=r"hawkvision certify --task \w+ --edge tiny"):
        make_site().pair("tiny", "large")


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert dump(make_profile.__wrapped__(seed=3, n=600)) == dump(make_profile.__wrapped__(seed=3, n=600))


@pytest.mark.parametrize(
    ("load", "command"), [(load_profile, "hawkvision calibrate"), (load_site, "hawkvision certify")]
)
def test_a_missing_file_names_the_command(load: Callable[[Path], object], command: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=command):
        load(tmp_path / "none.json")


@given(st.data())
@settings(deadline=None, max_examples=examples(200))
def test_a_bent_profile_is_refused_or_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever byte is changed, what is read back is what was written or an error; nothing else escapes."""
    document = bytearray(dump(make_profile()))
    for _ in range(3):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = load_profile(write(tmp_path_factory.mktemp("bent"), bytes(document)))
    except ManifestError:
        return
    assert read == make_profile()


def test_an_altered_threshold_is_refused_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    content = msgspec.json.decode(dump(make_site()))
    content["pairs"][0]["conditions"][0]["certificates"][0]["threshold"] = 0.0
    path = write(tmp_path, msgspec.json.encode(content))
    with pytest.raises(
        ManifestError, match=r"was altered.*restore it, or move it away.*`hawkvision certify --data IMAGES`"
    ):
        load_site(path)


def test_a_file_without_a_digest_is_refused(tmp_path: Path) -> None:
    site = make_site()
    path = write(tmp_path, msgspec.json.encode(site))
    with pytest.raises(ManifestError, match="has no digest of its content"):
        load_site(path)


@pytest.mark.parametrize("load", [load_profile, load_site])
def test_files_of_other_formats_are_refused_and_nothing_replaces_them(
    load: Callable[[Path], SiteCertificates | Profile], tmp_path: Path
) -> None:
    document = make_profile() if load is load_profile else make_site()
    path = write(tmp_path, dump(document).replace(b'"format": %d' % document.format, b'"format": 1'))
    with pytest.raises(ManifestError, match=r"format.*of another version: move it away.*`hawkvision c"):
        load(path)
    with pytest.raises(ManifestError, match=r"not replaced, because it says how often .*--compared K"):
        to_replace(path, load)


def test_spaces_order_and_a_byte_order_mark_are_no_alteration(tmp_path: Path) -> None:
    profile = make_profile()
    content = dict(reversed(msgspec.json.decode(dump(profile)).items()))
    assert load_profile(write(tmp_path, b"\xef\xbb\xbf" + msgspec.json.encode(content))) == profile


def test_a_pinned_profile_is_the_pinned_file_or_none(tmp_path: Path) -> None:
    document = dump(make_profile())
    path = write(tmp_path, document)
    assert load_profile(path, sha256_of(document)) == make_profile()
    path.write_bytes(dump(make_profile.__wrapped__(seed=4, n=600)))
    with pytest.raises(ManifestError, match=f"expected SHA-256 {sha256_of(document)}, found"):
        load_profile(path, sha256_of(document))


def test_a_folder_in_the_place_of_a_profile_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=tmp_path.name):
        load_profile(tmp_path)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    bent = dump(make_profile()).replace(b'"format": ', b'"fromat": 2, "format": ', 1)
    with pytest.raises(ManifestError, match="fromat"):
        load_profile(write(tmp_path, bent))


def test_stages_and_pairs_are_found_by_name_and_others_named() -> None:
    profile = make_profile()
    assert profile.stage("small").name == "small"
    with pytest.raises(ManifestError, match="no stage 'tiny'"):
        profile.stage("tiny")
    with pytest.raises(ManifestError, match=r"hawkvision calibrate --task \w+ --edge tiny --best large"):
        profile.pair("tiny", "large")

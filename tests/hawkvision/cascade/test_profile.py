"""Profiles and site certificates as files: what survives them, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawkvision.cascade.profile import (
    Certificate,
    Condition,
    Profile,
    ScoreCurve,
    SiteCertificates,
    SiteData,
    SitePair,
    SiteRung,
    Watch,
    dump,
    load_profile,
    load_site,
    threshold_value,
)
from hawkvision.cascade.scores import Score
from hawkvision.errors import ManifestError
from hawkvision.manifest import MeasuredAccuracy
from tests.hawkvision.cascade.synthetic import SHA, make_profile

FRACTIONS = st.floats(0.0, 1.0)
NAMES = st.from_regex(re.compile(r"[a-z0-9][a-z0-9_.-]{0,20}", re.ASCII), fullmatch=True)
HASHES = st.from_regex(re.compile(r"[0-9a-f]{64}", re.ASCII), fullmatch=True)
THRESHOLDS = st.one_of(FRACTIONS, st.sampled_from(["always", "never"]))
WATCHES = st.builds(Watch, max_drop=FRACTIONS, disagreement=FRACTIONS, difficulty=FRACTIONS)
CERTIFICATES = st.builds(
    Certificate,
    max_drop=FRACTIONS,
    threshold=THRESHOLDS,
    middle_threshold=THRESHOLDS,
    delta=FRACTIONS,
    n=st.integers(1, 10**6),
    basis=st.sampled_from(["labelled", "agreement", "profile"]),
    escalation=FRACTIONS,
    to_best=FRACTIONS,
    observed_drop=st.floats(-1.0, 1.0),
    edge_watch=WATCHES,
    middle_watch=st.one_of(st.none(), WATCHES),
)
CONDITIONS = st.builds(
    Condition,
    min_received_fraction=FRACTIONS,
    balanced=CERTIFICATES,
    fast=CERTIFICATES,
    certificates=st.lists(CERTIFICATES, max_size=3).map(tuple),
)
ACCURACIES = st.builds(
    MeasuredAccuracy, value=FRACTIONS, n=st.integers(1, 10**6), low=FRACTIONS, high=FRACTIONS, data_sha256=HASHES
)
SITES = st.builds(
    SiteCertificates,
    format=st.just(1),
    task=NAMES,
    as_of=st.dates().map(lambda day: day.isoformat()),
    data=st.builds(SiteData, name=st.text(max_size=20), sha256=HASHES, n=st.integers(1, 10**6), labelled=st.booleans()),
    rungs=st.lists(
        st.builds(
            SiteRung,
            name=NAMES,
            fingerprint=HASHES,
            temperature=st.floats(0.05, 20.0),
            accuracy=st.one_of(st.none(), ACCURACIES),
        ),
        max_size=3,
    ).map(tuple),
    pairs=st.lists(
        st.builds(
            SitePair,
            edge=NAMES,
            best=NAMES,
            middle=st.one_of(st.none(), NAMES),
            score=st.sampled_from(Score),
            middle_score=st.one_of(st.none(), st.sampled_from(Score)),
            conditions=st.lists(CONDITIONS, min_size=1, max_size=2).map(tuple),
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "document.json"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("middle", [False, True])
def test_a_profile_survives_the_file(tmp_path: Path, middle: bool) -> None:
    profile = make_profile(middle=middle)
    assert load_profile(write(tmp_path, dump(profile))) == profile


@given(SITES)
@settings(max_examples=60, deadline=None)
def test_site_certificates_survive_the_file(site: SiteCertificates) -> None:
    assert msgspec.json.decode(dump(site), type=SiteCertificates) == site


def make_site() -> SiteCertificates:
    pair = SitePair(edge="small", best="large", score=Score.TOP1, conditions=make_profile().pairs[0].conditions)
    data = SiteData(name="yard", sha256=SHA, n=900, labelled=True)
    rung = SiteRung(name="small", fingerprint=SHA, temperature=1.0)
    return SiteCertificates(format=1, task="digits", as_of="2026-11-21", data=data, rungs=(rung,), pairs=(pair,))


def test_site_certificates_are_read_from_a_file(tmp_path: Path) -> None:
    site = make_site()
    loaded = load_site(write(tmp_path, dump(site)))
    assert loaded == site
    assert loaded.rung("small") == site.rungs[0]
    assert loaded.rung("large") is None
    assert loaded.pair("small", "large") == site.pairs[0]


def test_a_pair_that_a_site_lacks_names_the_command_that_certifies_it() -> None:
    with pytest.raises(ManifestError, match="hawkvision certify --edge tiny"):
        make_site().pair("tiny", "large")


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert dump(make_profile.__wrapped__(seed=3, n=600)) == dump(make_profile.__wrapped__(seed=3, n=600))


@pytest.mark.parametrize(
    ("load", "command"), [(load_profile, "hawkvision calibrate"), (load_site, "hawkvision certify")]
)
def test_a_missing_file_names_the_command(load: Callable[[Path], object], command: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=command):
        load(tmp_path / "none.json")


@given(data=st.binary(max_size=200), load=st.sampled_from([load_profile, load_site]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_refused_by_name(data: bytes, load: Callable[[Path], object], tmp_path: Path) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ManifestError, match=path.name):
        load(path)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_a_bent_profile_is_refused_or_still_a_profile(data: st.DataObject) -> None:
    """Whatever byte is changed, what is read back is a profile or an error that says so; nothing else escapes."""
    document = bytearray(dump(make_profile()))
    for _ in range(3):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = msgspec.json.decode(bytes(document), type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert isinstance(read, Profile)
    assert msgspec.json.decode(dump(read), type=Profile) == read


def test_a_folder_in_the_place_of_a_profile_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=tmp_path.name):
        load_profile(tmp_path)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    bent = dump(make_profile()).replace(b'"format": 3,', b'"format": 2, "fromat": 2,', 1)
    with pytest.raises(ManifestError, match="fromat"):
        load_profile(write(tmp_path, bent))


@pytest.mark.parametrize("written", ["1", "4", '"2"'])
def test_a_profile_of_another_format_says_how_to_make_it_anew(tmp_path: Path, written: str) -> None:
    other = dump(make_profile()).replace(b'"format": 3,', f'"format": {written},'.encode(), 1)
    with pytest.raises(ManifestError, match=r"format.*made anew with `hawkvision calibrate`"):
        load_profile(write(tmp_path, other))


@pytest.mark.parametrize(
    ("scores", "disagreement", "drop", "message"),
    [
        ((0.1, 0.2), (0.5, 0.4, 0.3), (0.1, 0.1), "as many"),
        ((0.2, 0.1), (0.5, 0.4), (0.1, 0.1), "scores of a curve must be sorted"),
        ((0.1, 0.2), (0.4, 0.5), (0.1, 0.1), "disagreement of a curve must be sorted"),
        ((0.1,), (0.4,), (0.1,), "length >= 2"),
        ((0.1, 1.2), (0.4, 0.3), (0.1, 0.1), "<= 1.0"),
        ((0.1, 0.2), (0.4, 0.3), (0.1, -0.1), ">= 0.0"),
    ],
)
def test_curves_that_make_no_sense_are_refused(
    scores: tuple[float, ...], disagreement: tuple[float, ...], drop: tuple[float, ...], message: str
) -> None:
    document = {"scores": scores, "disagreement": disagreement, "drop": drop}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(document, ScoreCurve)


def test_words_stand_for_infinite_thresholds() -> None:
    assert threshold_value("always") == math.inf
    assert threshold_value("never") == -math.inf
    assert threshold_value(0.25) == 0.25


def test_rungs_and_pairs_are_found_by_name_and_others_named() -> None:
    profile = make_profile()
    assert profile.rung("small").name == "small"
    with pytest.raises(ManifestError, match="no rung 'tiny'"):
        profile.rung("tiny")
    with pytest.raises(ManifestError, match="hawkvision calibrate --edge tiny --best large"):
        profile.pair("tiny", "large")

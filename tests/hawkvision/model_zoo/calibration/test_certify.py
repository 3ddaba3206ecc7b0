"""`hawkvision certify`: a site's own certificates for the cascade whose weights are committed."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from hawkvision.cascade.certification.profile_files import load_profile, load_site
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import AccuracyStatus, Basis, MaxAccuracyDrop, MinAccuracy
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.calibration.certify import certify_site
from hawkvision.models.manifest import models_dir
from tests.hawkvision.command import invoke
from tests.images import DATA, encoded

PROFILE = models_dir() / "cifar10" / "profile.json"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    build("cifar10", cache=folder)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty images of nothing, ten classes; what a network says of them is the same for every run."""
    root = tmp_path_factory.mktemp("site")
    for i in range(80):
        folder = root / str(i % 10)
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(encoded(seed=i))
    return root


@pytest.fixture(scope="module")
def flat(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flat")
    for image in sorted(site.glob("*/*.jpg")):
        (root / image.name).write_bytes(image.read_bytes())
    return root


def certify(data: Path, cache: Path, out: Path, **options: object) -> Policy:
    certify_site("cifar10", data, out, models=models_dir(), cache=cache, today=date(2026, 11, 21), **options)  # type: ignore[arg-type]
    return Policy(load_profile(PROFILE), "tiny", "committee", site=load_site(out))


def test_a_sites_certificates_are_taken_by_a_policy_and_say_whence_they_are(
    site: Path, cache: Path, tmp_path: Path
) -> None:
    policy = certify(site, cache, tmp_path / "site.json")
    guarantee = policy.route(MaxAccuracyDrop(0.3)).guarantee
    assert (guarantee.status, guarantee.basis, guarantee.n) == (AccuracyStatus.CERTIFIED, Basis.LABELLED, 80)
    written = load_site(tmp_path / "site.json")
    assert (written.as_of, written.data.n, written.data.labelled) == ("2026-11-21", 80, True)
    assert policy.best_accuracy.n == 80


def test_without_labels_agreement_is_certified_and_no_absolute_accuracy(
    flat: Path, cache: Path, tmp_path: Path
) -> None:
    policy = certify(flat, cache, tmp_path / "site.json", labelled=False)
    guarantee = policy.route(MaxAccuracyDrop(0.3)).guarantee
    assert guarantee.basis in (Basis.AGREEMENT, Basis.PROFILE)  # of the profile alone if everything goes to the best
    assert policy.route(MinAccuracy(0.7)).guarantee.status is AccuracyStatus.BEST_EFFORT


def test_agreement_bounds_the_drop_that_labels_show(site: Path, flat: Path, cache: Path, tmp_path: Path) -> None:
    certify(site, cache, tmp_path / "a.json")
    certify(flat, cache, tmp_path / "b.json", labelled=False)
    labelled, agreeing = (load_site(tmp_path / f"{name}.json").pair("tiny", "committee") for name in "ab")
    assert labelled.conditions[0].fast.observed_drop <= agreeing.conditions[0].fast.observed_drop


def test_certifying_leaves_the_profile_as_it_was(site: Path, cache: Path, tmp_path: Path) -> None:
    before = PROFILE.read_bytes()
    made = certify_site("cifar10", site, tmp_path / "site.json", edges=("small",), models=models_dir(), cache=cache)
    assert PROFILE.read_bytes() == before
    assert [pair.edge for pair in made.pairs] == ["small"]


def test_an_edge_stage_the_profile_lacks_is_named(site: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="huge"):
        certify(site, cache, tmp_path / "site.json", edges=("huge",))


def test_too_few_images_are_refused_with_the_number_that_is_expected(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.jpg").write_bytes(encoded())
    with pytest.raises(ConfigError, match="at least 50"):
        certify(tmp_path / "few", cache, tmp_path / "site.json", labelled=False)


@pytest.mark.skipif(not (DATA / "cifar10.npz").is_file(), reason="the CIFAR-10 images are not on this machine")
def test_images_that_the_cascade_was_trained_on_are_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained on these very images"):
        certify(DATA / "cifar10.npz", cache, tmp_path / "site.json")


def test_the_command_prints_what_was_certified_and_where_it_lies(site: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "site.json"
    words = ["--data", str(site), "--out", str(out), "--edge", "tiny", "--cache-dir", str(cache)]
    ran = invoke("certify", "--task", "cifar10", *words)
    assert ran.exit_code == 0, ran.output
    assert "certified on 80 images" in ran.stdout
    assert load_site(out).pair("tiny", "committee").edge == "tiny"

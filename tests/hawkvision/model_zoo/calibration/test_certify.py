"""`hawkvision certify`: a site's own certificates for the cascade whose weights are committed."""

from __future__ import annotations

import csv
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hawkvision.cascade.certification.profile import RightAnswers
from hawkvision.cascade.certification.profile_files import dump, load_profile, load_site
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import AccuracyStatus, Basis, MaxAccuracyDrop, MinAccuracy
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.calibration.certify import ComparedImages, certify_site
from hawkvision.models.manifest import MeasuredAccuracy, models_dir
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.answers import answers_of, into_class_folders
from tests.images import DATA, encoded

PROFILE = models_dir() / "cifar10" / "profile.json"
BODIES = [encoded(seed=number) for number in range(80)]
FIRST = datetime(2026, 11, 1, 6, 30, tzinfo=UTC)
LAST = FIRST + timedelta(minutes=79)
NOW = LAST + timedelta(days=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    build("cifar10", cache=folder)
    return folder


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty images of nothing; what a network says of them is the same for every run."""
    root = tmp_path_factory.mktemp("flat")
    for number, body in enumerate(BODIES):
        (root / f"{number:03}.jpg").write_bytes(body)
    return root


@pytest.fixture(scope="module")
def truth(cache: Path) -> dict[str, int]:
    """The class of each image: what the reference stage says of it, which is therefore always right."""
    answers = answers_of("cifar10", "reference", BODIES, cache)
    return {f"{number:03}.jpg": answer for number, answer in enumerate(answers)}


@pytest.fixture(scope="module")
def site(truth: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in a directory per class."""
    root = tmp_path_factory.mktemp("site")
    into_class_folders(BODIES, [*truth.values()], root)
    for number, path in enumerate(sorted(root.rglob("*.jpg"))):
        os.utime(path, times=(0, FIRST.timestamp() + 60 * number))
    return root


def written(path: Path, labels: dict[str, int]) -> Path:
    path.write_text("file,label\n" + "".join(f"{name},{label}\n" for name, label in labels.items()))
    return path


def certify(data: Path, cache: Path, out: Path, **options: object) -> Policy:
    certify_site("cifar10", data, out, models=models_dir(), cache=cache, now=NOW, **options)  # type: ignore[arg-type]
    return Policy(load_profile(PROFILE), "tiny", "reference", site=load_site(out))


def test_a_sites_certificates_are_taken_by_a_policy_and_say_whence_they_are(
    site: Path, cache: Path, tmp_path: Path
) -> None:
    policy = certify(site, cache, tmp_path / "site.json")
    guarantee = policy.route(MaxAccuracyDrop(0.3)).guarantee
    assert (guarantee.status, guarantee.basis, guarantee.n) == (AccuracyStatus.CERTIFIED, Basis.SITE, 80)
    assert (guarantee.labels, guarantee.since, guarantee.until) == (80, FIRST, LAST)
    assert load_site(tmp_path / "site.json").data.labels == 80
    assert policy.best_accuracy.n == 80


def test_without_labels_agreement_is_certified_and_no_absolute_accuracy(
    flat: Path, cache: Path, tmp_path: Path
) -> None:
    policy = certify(flat, cache, tmp_path / "site.json", labelled=False)
    guarantee = policy.route(MaxAccuracyDrop(0.3)).guarantee
    assert (guarantee.basis, guarantee.labels) in ((Basis.SITE, 0), (None, None)), "none if all is escalated"
    assert policy.route(MinAccuracy(0.7)).guarantee.status is AccuracyStatus.BEST_EFFORT


def test_a_stage_whose_models_ran_in_several_ways_is_not_certified(flat: Path, cache: Path, tmp_path: Path) -> None:
    """Nobody knows which model ran in which, and the next start may exchange them."""

    def comparing(*_: object) -> ComparedImages:
        return ComparedImages((), {"tiny": ["int8"], "reference": ["int8", "onnxruntime:CUDAExecutionProvider"]})

    with pytest.raises(ConfigError, match="reference: its models ran in 2 ways: int8, onnxruntime:CUDA"):
        certify(flat, cache, tmp_path / "site.json", labelled=False, comparing=comparing)


def test_agreement_bounds_the_drop_that_labels_show(site: Path, flat: Path, cache: Path, tmp_path: Path) -> None:
    certify(site, cache, tmp_path / "a.json")
    certify(flat, cache, tmp_path / "b.json", labelled=False)
    labelled, agreeing = (load_site(tmp_path / f"{name}.json").pair("tiny", "reference") for name in "ab")
    assert labelled.conditions[0].fast.observed_drop <= agreeing.conditions[0].fast.observed_drop


def test_certifying_leaves_the_profile_as_it_was(site: Path, cache: Path, tmp_path: Path) -> None:
    before = PROFILE.read_bytes()
    made = certify_site("cifar10", site, tmp_path / "site.json", edges=("small",), models=models_dir(), cache=cache)
    assert PROFILE.read_bytes() == before
    assert [pair.edge for pair in made.certificates.pairs] == ["small"]


def test_labels_by_which_neither_stage_is_right_oftener_than_in_the_profile_must_be_confirmed(
    flat: Path, truth: dict[str, int], cache: Path, tmp_path: Path
) -> None:
    """As of blurred images; the profile says that one of both is nearly always right."""
    shipped, own = load_profile(PROFILE), tmp_path / "profile.json"
    pairs = tuple(
        msgspec.structs.replace(pair, right=RightAnswers(n=1000, differing=80, reference=50, edge=29, neither=1))
        for pair in shipped.pairs
    )
    poor = MeasuredAccuracy(value=0.5, n=80, low=0.4, high=0.6, data_sha256="a" * 64)
    stages = tuple(
        msgspec.structs.replace(s, accuracy=poor, sent_accuracy=msgspec.UNSET) if s.name == "reference" else s
        for s in shipped.stages
    )
    own.write_bytes(dump(msgspec.structs.replace(shipped, pairs=pairs, stages=stages)))
    answers = answers_of("cifar10", "tiny", BODIES, cache)
    neither = {
        name: next(c for c in range(10) if c not in (index, answers[number]))
        for number, (name, index) in enumerate(truth.items())
    }
    names = list(truth)
    labels = written(tmp_path / "l.csv", truth | {name: neither[name] for name in names[::5]})
    with pytest.raises(
        ConfigError,
        match=r"on 80 images .* neither tiny nor reference is right on \d\d.\d%, and in the profile on 0.1%",
    ):
        certify(flat, cache, tmp_path / "site.json", labels=labels, profile=own, edges=("tiny",))
    certify_site(
        "cifar10", flat, tmp_path / "site.json", labels=labels, profile=own, edges=("tiny",), labels_checked=True,
        models=models_dir(), cache=cache,
    )  # fmt: skip
    assert load_site(tmp_path / "site.json").data.labels_checked


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_labels_of_the_listed_images_certify_what_labels_of_all_do(
    flat: Path, site: Path, truth: dict[str, int], cache: Path, tmp_path: Path
) -> None:
    """From an empty list to a filled one, until nothing more would help."""
    words = ["--task", "cifar10", "--edge", "tiny", "--cache-dir", str(cache), "--out", str(tmp_path / "site.json")]
    first = tmp_path / "list.csv"
    ran = invoke("certify", "--data", str(flat), "--unlabelled", "--to-label", str(first), *words)
    assert ran.exit_code == 0, ran.output
    listed = rows_of(first)
    assert f"{len(listed)} images to label: {first}" in ran.stdout
    assert 30 < len(listed) < 80
    assert all(row["helps"].startswith("tiny: ") and row["answer_1"] != row["answer_2"] for row in listed[30:])
    labels = {row["file"]: truth[row["file"]] for row in listed}
    some = certify(flat, cache, tmp_path / "some.json", labels=written(tmp_path / "some.csv", labels), edges=("tiny",))
    every = certify(site, cache, tmp_path / "every.json", edges=("tiny",))
    for drop in (0.1, 0.2, 0.3):
        few, all_of_them = (policy.route(MaxAccuracyDrop(drop)) for policy in (some, every))
        assert (few.threshold, few.guarantee.max_drop) == (all_of_them.threshold, all_of_them.guarantee.max_drop)
    assert few.guarantee.labels == len(labels)
    again = ["--labels", str(tmp_path / "some.csv"), "--to-label", str(first)]
    for _ in range(3):
        ran = invoke("certify", "--data", str(flat), *again, *words)
        assert ran.exit_code == 0, ran.output
        assert "reference is right on 100.0% of 30 images drawn at random" in ran.stdout
        listed = rows_of(first)
        assert all(row["answer_1"] != row["answer_2"] for row in listed)
        labels |= {row["file"]: truth[row["file"]] for row in listed}
        written(tmp_path / "some.csv", labels)
    assert listed == []
    assert len(labels) < 80


def test_too_few_labels_of_images_drawn_at_random_are_refused(
    flat: Path, truth: dict[str, int], cache: Path, tmp_path: Path
) -> None:
    labels = dict(list(truth.items())[:10])
    with pytest.raises(ConfigError, match=r"some.csv: \d of the 30 images drawn at random"):
        certify(flat, cache, tmp_path / "site.json", labels=written(tmp_path / "some.csv", labels))


def test_labels_that_are_wrong_are_refused_and_hard_images_want_a_second_look(
    flat: Path, truth: dict[str, int], cache: Path, tmp_path: Path
) -> None:
    names = sorted(set(truth.values()))
    other = dict(zip(names, [*names[1:], names[0]], strict=True))
    swapped = written(tmp_path / "swapped.csv", {name: other[label] for name, label in truth.items()})
    with pytest.raises(ConfigError, match=r"reference is right on 0.0%"):
        certify(flat, cache, tmp_path / "site.json", labels=swapped)
    third = {name: other[label] if i % 3 == 0 else label for i, (name, label) in enumerate(truth.items())}
    hard = written(tmp_path / "hard.csv", third)
    with pytest.raises(ConfigError, match=r"right on 66.2%, and in its profile on .*--labels-checked"):
        certify(flat, cache, tmp_path / "site.json", labels=hard)
    certify(flat, cache, tmp_path / "site.json", labels=hard, labels_checked=True)
    assert load_site(tmp_path / "site.json").data.labels_checked


@pytest.mark.skipif(not (DATA / "cifar10.npz").is_file(), reason="the CIFAR-10 images are not on this machine")
def test_labels_shifted_by_one_class_are_named(cache: Path, tmp_path: Path) -> None:
    known = np.load(DATA / "cifar10.npz")
    ends, data, rows = known["offsets"], known["data"], np.flatnonzero(known["is_test"])[:300]
    bodies = [data[ends[row] : ends[row + 1]] for row in rows]
    shifted = (known["labels"][rows] + 1) % 10
    np.savez(
        tmp_path / "shifted.npz", data=np.concatenate(bodies), offsets=np.cumsum([0, *map(len, bodies)]),
        labels=shifted, classes=known["classes"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"right on .*% if the labels were not shifted by \+1"):
        certify(tmp_path / "shifted.npz", cache, tmp_path / "site.json", edges=("small",))


def test_kinds_without_one_class_take_no_labels_file(cache: Path, tmp_path: Path) -> None:
    out, some = tmp_path / "site.json", tmp_path / "list.csv"
    with pytest.raises(ConfigError, match="--labels is for tasks whose label is one class"):
        certify_site("coco", tmp_path, out, labels=some, models=models_dir(), cache=cache)
    with pytest.raises(ConfigError, match="--to-label is for tasks whose label is one class"):
        certify_site("coco", tmp_path, out, to_label=some, models=models_dir(), cache=cache)


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
    assert load_site(out).pair("tiny", "reference").edge == "tiny"

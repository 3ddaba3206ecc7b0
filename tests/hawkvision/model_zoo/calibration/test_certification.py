"""Certifying a design on images that had no part in it, and paying for it where they had."""

from __future__ import annotations

import io
import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from edge.factory import load_components
from hawkvision.cascade.certification.profile import TESTED_DROPS, Profile, Shrinking, design_sha256
from hawkvision.cascade.certification.profile_files import dump, load_profile, load_site
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import AccuracyStatus, MaxAccuracyDrop, Quality
from hawkvision.guarantee.bounds import nuisance_beta, paired_exact_p
from hawkvision.model_zoo.calibration import summary
from hawkvision.model_zoo.calibration.calibrate import calibrate
from hawkvision.model_zoo.calibration.certification import certify_design, share_of_delta
from hawkvision.model_zoo.calibration.certify import certify_site
from hawkvision.models.manifest import load_manifest
from hawkvision.tasks.registry import load_kind
from models.plan import plan
from tests.hawkvision.model_zoo.band_task import BandTask, write_band_images, write_band_task


@dataclass(frozen=True)
class Site:
    task: BandTask
    others: Path
    """Images of the same kind that no profile was made of."""
    few: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    root = tmp_path_factory.mktemp("bands")
    task = write_band_task(root)
    others = tmp_path_factory.mktemp("others") / "others.npz"
    write_band_images(others, seed=1)
    with np.load(others) as archive:
        known = {name: archive[name] for name in archive.files}
    few = others.with_name("few.npz")
    np.savez(few, data=known["data"], offsets=known["offsets"][:61], labels=known["labels"][:60])
    return Site(task, others, few)


def certified(site: Site, data: Path, out: Path, design: Path | None = None, compared: int = 1) -> Profile:
    models, cache = site.task.models, site.task.cache
    return certify_design(
        "bands", design or site.task.profile, data, out, compared=compared, models=models, cache=cache
    )  # fmt: skip


def thresholds(profile: Profile) -> list[object]:
    return [[(s.threshold, s.intermediate_threshold) for s in pair.path] for pair in profile.pairs]


def test_a_profile_says_which_of_its_images_were_used_for_what(site: Site) -> None:
    profile = load_profile(site.task.profile)
    assert [(use.purpose, use.n, use.openings) for use in profile.uses] == [
        ("fit", profile.data.profile, None),
        ("certify", profile.data.certify, 1),
        ("test", profile.data.held_out, None),
    ]


def test_other_images_certify_a_design_and_leave_it_as_it_was(site: Site, tmp_path: Path) -> None:
    before = load_profile(site.task.profile)
    made = certified(site, site.others, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == made
    assert (thresholds(made), [r.temperature for r in made.stages]) == (
        thresholds(before),
        [r.temperature for r in before.stages],
    )
    use = made.uses[-1]
    assert (use.purpose, use.name, use.openings, use.design) == (
        "certify",
        "others.npz",
        1,
        design_sha256(before, before.pairs),
    )
    condition = made.pairs[0].conditions[0]
    assert {c.n for c in condition.certificates} == {use.n}
    assert all(stage.accuracy.data_sha256 == use.sha256 for stage in made.stages)


def test_images_that_served_the_design_certify_nothing_unless_the_choice_is_paid_for(
    site: Site, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="served the design"):
        certified(site, site.task.data, tmp_path / "p.json")
    made = certified(site, site.task.data, tmp_path / "p.json", compared=20)
    condition = made.pairs[0].conditions[0]
    assert {c.delta for c in (*condition.certificates, condition.fast)} == {0.05 / 20}
    before = load_profile(site.task.profile).pairs[0].conditions[0]
    assert condition.fast.max_drop > before.fast.max_drop
    assert {c.n for c in condition.certificates} == {load_profile(site.task.profile).data.certify}


def test_images_that_served_the_design_are_known_in_another_file_too(site: Site, tmp_path: Path) -> None:
    """As long as their bytes are the same: packed anew, in another order, among others."""
    packed, task = tmp_path / "packed.npz", site.task
    with np.load(task.data) as own, np.load(site.others) as others:
        bodies = [part["data"][a:b] for part, count in ((others, 100), (own, 7))
                  for a, b in itertools.pairwise(part["offsets"][: count + 1])]  # fmt: skip
        labels = np.concatenate([others["labels"][:100], own["labels"][:7]])
    np.savez(packed, data=np.concatenate(bodies), offsets=np.cumsum([0, *map(len, bodies)]), labels=labels)
    with pytest.raises(ConfigError, match="7 of these 107 images served the design"):
        certified(site, packed, tmp_path / "p.json")
    with pytest.raises(ConfigError, match="7 of these 107 images served the design"):
        certify_site("bands", packed, tmp_path / "site.json", models=task.models, cache=task.cache)
    with pytest.raises(ConfigError, match="7 of the images are in --data"):
        calibrate("bands", task.data, tmp_path / "p.json", seed=5, certify_data=packed, models=task.models,
                  cache=task.cache)  # fmt: skip


def test_copies_of_images_are_no_further_evidence(site: Site, tmp_path: Path) -> None:
    """Five copies of each would make certificates five times as tight, of the same knowledge."""
    copied, contradicting = tmp_path / "copied.npz", tmp_path / "contradicting.npz"
    with np.load(site.few) as few:
        known = {name: few[name] for name in few.files}
    end = known["offsets"][-1]
    offsets = np.concatenate([known["offsets"][:1], *(known["offsets"][1:] + i * end for i in range(5))])
    data = np.tile(known["data"][:end], 5)
    np.savez(copied, data=data, offsets=offsets, labels=np.tile(known["labels"], 5))
    once, often = (certified(site, each, tmp_path / "p.json").pairs[0].conditions for each in (site.few, copied))
    assert {c.n for c in often[0].certificates} == {60}
    assert often == once
    np.savez(contradicting, data=data, offsets=offsets, labels=np.arange(300) // 60 % 4)
    with pytest.raises(ConfigError, match="have the same bytes and different labels"):
        certified(site, contradicting, tmp_path / "p.json")


def test_a_profile_is_about_the_labels_that_it_was_made_with(site: Site, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(site.task.models, models)
    labels = models / "bands" / "labels.txt"
    labels.write_text("\n".join(reversed(labels.read_text().splitlines())) + "\n")
    config = EdgeConfig(task="bands", models_dir=models, cache_dir=site.task.cache)
    with pytest.raises(ManifestError, match="made with other labels"):
        load_components(config)
    with pytest.raises(ManifestError, match="made with other labels"):
        certify_site("bands", site.others, tmp_path / "site.json", models=models, cache=site.task.cache)
    with pytest.raises(ManifestError, match="made with other labels"):
        certify_design(
            "bands", site.task.profile, site.others, tmp_path / "p.json", models=models, cache=site.task.cache
        )


def test_a_sites_certificates_are_about_images_as_they_were_sent(site: Site, tmp_path: Path) -> None:
    out, task = tmp_path / "site.json", site.task
    certify_site("bands", site.others, out, models=task.models, cache=task.cache)
    known = load_profile(task.profile)
    whole = Shrinking(allowed=False, n=100, accuracy=0.5, accuracy_whole=0.9)
    Policy(known, "dim", "sharp", site=load_site(out))
    with pytest.raises(ManifestError, match="made smaller before they are sent"):
        Policy(msgspec.structs.replace(known, shrinking=whole), "dim", "sharp", site=load_site(out))


def test_asking_again_about_the_same_design_is_free_and_about_another_halves_delta(site: Site, tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    made = certified(site, site.others, first)
    again = certified(site, site.others, second, design=first)
    assert again == made
    warmer = msgspec.structs.replace(made.stages[0], temperature=made.stages[0].temperature * 1.5)
    other = tmp_path / "other.json"
    other.write_bytes(dump(msgspec.structs.replace(made, stages=(warmer, *made.stages[1:]))))
    changed = certified(site, site.others, second, design=other)
    assert changed.uses[-1].openings == 2
    assert {c.delta for c in changed.pairs[0].conditions[0].certificates} == {0.025}


def test_a_plan_that_few_images_cannot_confirm_stays_uncertified(site: Site, tmp_path: Path) -> None:
    made = certified(site, site.few, tmp_path / "p.json")
    planned = load_profile(site.task.profile).pairs[0].conditions[0].balanced
    tight = msgspec.structs.replace(planned, max_drop=0.01, threshold=0.9)
    before = load_profile(site.task.profile)
    pair = before.pairs[0]
    condition = msgspec.structs.replace(pair.conditions[0], balanced=tight)
    design = tmp_path / "design.json"
    design.write_bytes(
        dump(msgspec.structs.replace(before, pairs=(msgspec.structs.replace(pair, conditions=(condition,)),)))
    )
    made = certified(site, site.few, tmp_path / "p.json", design=design)
    policy = Policy(made, "dim", "sharp")
    balanced = policy.route(Quality.BALANCED)
    assert (balanced.threshold, balanced.guarantee.status) == (0.9, AccuracyStatus.BEST_EFFORT)
    assert (balanced.guarantee.delta, balanced.guarantee.max_drop, balanced.claims) == (None, None, None)
    drop = policy.route(MaxAccuracyDrop(0.01))
    assert drop.direct, "a drop that nothing certifies is kept by the best stage"
    assert policy.certificate.basis == "labelled"


def test_calibrating_with_images_of_their_own_to_certify_leaves_all_others_to_the_design(
    site: Site, tmp_path: Path
) -> None:
    out, task = tmp_path / "p.json", site.task
    profile = calibrate(
        "bands", task.data, out, seed=5, certify_data=site.others, models=task.models, cache=task.cache
    )  # fmt: skip
    assert [(use.purpose, use.name) for use in profile.uses] == [
        ("fit", "bands.npz"),
        ("design", "bands.npz"),
        ("test", "bands.npz"),
        ("certify", "others.npz"),
    ]
    with pytest.raises(ConfigError, match="900 of the images are in --data"):
        calibrate("bands", task.data, out, seed=5, certify_data=task.data, models=task.models, cache=task.cache)


def test_calibrating_other_models_on_the_same_images_halves_delta_and_the_same_ones_again_does_not(
    site: Site, tmp_path: Path
) -> None:
    out, models, cache = tmp_path / "p.json", tmp_path / "models", tmp_path / "cache"
    shutil.copytree(site.task.models, models)
    shutil.copytree(site.task.cache, cache)

    def calibrated(seed: int = 3) -> tuple[int | None, float, list[str]]:
        profile = calibrate("bands", site.task.data, out, seed=seed, models=models, cache=cache)
        notes = list(summary.notes(profile, load_kind(load_manifest("bands", models), models)))
        return profile.uses[1].openings, profile.pairs[0].conditions[0].fast.delta, notes

    assert calibrated()[:2] == (1, 0.05)
    assert calibrated()[:2] == (1, 0.05)
    manifest = models / "bands" / "manifest.toml"
    manifest.write_text(manifest.read_text().replace("\nsha256 = ", "\ntemperature = 1.5\nsha256 = ", 1))
    openings, delta, notes = calibrated()
    assert (openings, delta) == (2, 0.025)
    assert any("certified 2 designs" in note for note in notes)
    assert calibrated()[:2] == (2, 0.025)
    assert calibrated(seed=4)[:2] == (3, 0.0125)


def test_a_shipped_task_is_planned_anew_without_the_images_that_certify_it(site: Site, tmp_path: Path) -> None:
    out, printed = tmp_path / "design.json", Console(file=io.StringIO())
    before = load_profile(site.task.profile)
    planned = plan("bands", site.task.data, printed, site.task.models, site.task.cache)
    assert thresholds(planned) == thresholds(before)
    balanced = planned.pairs[0].conditions[0].balanced
    assert (balanced.max_drop in TESTED_DROPS, balanced.basis) == (True, "profile")
    assert balanced.n == before.data.profile
    assert design_sha256(planned, planned.pairs) in printed.file.getvalue()  # type: ignore[attr-defined]
    out.write_bytes(dump(planned))
    made = certified(site, site.task.data, tmp_path / "p.json", design=out, compared=2)
    condition = made.pairs[0].conditions[0]
    assert {c.delta for c in (condition.balanced, *condition.certificates)} == {
        share_of_delta(0.05, made.uses[-1].openings or 0, 2)
    }
    assert (condition.balanced.max_drop, condition.balanced.basis) == (balanced.max_drop, "labelled")
    with pytest.raises(ConfigError, match="expected the images of the profile"):
        plan("bands", site.others, printed, site.task.models, site.task.cache)


def test_a_profile_of_another_task_is_refused(site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(dump(msgspec.structs.replace(load_profile(site.task.profile), task="stripes")))
    config = EdgeConfig(task="bands", models_dir=site.task.models, cache_dir=site.task.cache, profile=other)
    with pytest.raises(ManifestError, match="the profile of task 'stripes', not of 'bands'"):
        load_components(config)


def test_a_site_pays_for_compared_configurations_and_for_a_second_opening(site: Site, tmp_path: Path) -> None:
    out, task = tmp_path / "site.json", site.task

    def ask(data: Path, profile: Path, compared: int = 1) -> float:
        certify_site(
            "bands", data, out, profile=profile, compared=compared, models=task.models, cache=task.cache
        )  # fmt: skip
        return load_site(out).pairs[0].conditions[0].fast.delta

    with pytest.raises(ConfigError, match="served the design"):
        ask(task.data, task.profile)
    assert ask(task.data, task.profile, compared=10) == pytest.approx(0.005)
    assert ask(site.others, task.profile) == 0.05
    assert ask(site.others, task.profile) == 0.05
    known = load_profile(task.profile)
    warmer = msgspec.structs.replace(known.stages[0], temperature=known.stages[0].temperature * 1.5)
    other = tmp_path / "other.json"
    other.write_bytes(dump(msgspec.structs.replace(known, stages=(warmer, *known.stages[1:]))))
    before = load_site(out).stages[1].accuracy
    assert ask(site.others, other) == 0.025
    after = load_site(out).stages[1].accuracy
    assert load_site(out).data.openings == 2
    assert before is not None
    assert after is not None
    assert after.value == before.value
    assert after.low < before.low, "absolute accuracies are certified from here on, and pay as well"


@pytest.mark.parametrize("compared", [1, 12, 40, 1_000])
def test_a_level_that_was_divided_can_still_be_reached(compared: int) -> None:
    delta = share_of_delta(0.05, 1, compared)
    assert paired_exact_p(0, 0, 10_000, 0.01, nuisance_beta(delta)) <= delta
    assert paired_exact_p(0, 0, 10_000, 0.01, nuisance_beta(delta)) >= nuisance_beta(delta)

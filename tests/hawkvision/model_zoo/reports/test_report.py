"""The calibration report: what it says is what was measured, and the page stands by itself."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import html5lib
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import Split
from hawkvision.cascade.certification.profile import ImageUse, Profile
from hawkvision.cascade.certification.profile_files import dump, load_profile
from hawkvision.cascade.certification.profiling import profile_stage
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import MaxAccuracyDrop
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.evidence import Thresholds
from hawkvision.model_zoo.reports.page import Findings, Outcome, render
from hawkvision.model_zoo.reports.report import (
    LabelledPredictions,
    measure,
    pair_findings,
    reliability,
    report_calibration,
)
from hawkvision.system.files import sha256_of
from tests.hawkvision.cascade.synthetic import KIND, SHA, make_logits, make_profile
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.band_task import BandTask, write_band_task
from tests.images import encoded

TODAY = date(2026, 11, 21)
HOSTILE = "<img src=x onerror=alert(1)>&.npz"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> BandTask:
    return write_band_task(tmp_path_factory.mktemp("bands"), HOSTILE)


@pytest.fixture(scope="module")
def report(task: BandTask) -> Findings:
    out = task.data.with_name("report.html")
    return report_calibration("bands", task.data, out, models=task.models, cache=task.cache, today=TODAY)


@pytest.fixture(scope="module")
def page(task: BandTask, report: Findings) -> str:
    return task.data.with_name("report.html").read_text(encoding="utf-8")


@functools.cache
def synthetic(intermediate: bool) -> tuple[Profile, LabelledPredictions, Split]:
    """A profile, and its stages on images of their own."""
    profile = make_profile(intermediate=intermediate)
    rng = np.random.default_rng(99)
    labels = rng.integers(0, 10, 3_000)
    third = np.arange(3_000) // 1_000
    split = Split(*(np.flatnonzero(third == part) for part in range(3)))
    strengths = {"small": 3.0, "medium": 6.0, "large": 8.0}
    stages = {
        stage.name: profile_stage(
            KIND, stage.name, {}, SHA, list(make_logits(rng, labels, strengths[stage.name])), labels.tolist(), split,
            SHA, 1.0,
        )[1]
        for stage in profile.stages
    }  # fmt: skip
    return profile, LabelledPredictions(KIND, {"small": stages.pop("small")}, stages, labels.tolist()), split


def right(seen: LabelledPredictions, name: str) -> NDArray[np.bool_]:
    """Whether a stage was right about each image."""
    stage = seen.edge.get(name) or seen.datacenter[name]
    return np.asarray(seen.kind.losses(stage.of(np.arange(len(seen.truths))), seen.truths) == 0.0)


@functools.cache
def findings(intermediate: bool = False) -> Findings:
    profile, seen, split = synthetic(intermediate)
    large = seen.datacenter["large"].of(np.arange(len(seen.truths)))
    return Findings(
        profile=profile, as_of=TODAY, data_name="synthetic", data_sha256=SHA, images=3_000,
        reliabilities=(reliability("large", KIND, large, large, seen.truths),), measures={},
        pairs=(pair_findings(profile.pairs[0], seen, split),),
    )  # fmt: skip


def test_page_is_valid_fetches_nothing_and_escapes_hostile_names(page: str) -> None:
    assert html5lib.HTMLParser(strict=True).parse(page) is not None
    assert page.count("<svg") == page.count("</svg>") >= 3
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<iframe|javascript:", page)
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;.npz" in page


def test_page_names_data_models_and_date(page: str, task: BandTask) -> None:
    profile = load_profile(task.profile)
    assert sha256_of(task.data.read_bytes()) in page
    assert "2026-11-21" in page
    for stage in profile.stages:
        assert stage.fingerprint in page
        assert all(sha256 in page for sha256 in stage.models.values())


def test_targets_are_measured_on_held_out_images_only() -> None:
    profile, seen, split = synthetic(False)
    found = findings().pairs[0]
    route = Policy(profile, "small", "large").route(MaxAccuracyDrop(0.05))
    measured = next(outcome for certificate, outcome in found.targets if stated_drop(certificate.max_drop) == 0.05)
    part = split.held_out
    accepted = seen.sample(profile.pairs[0], part).edge.scores >= route.threshold
    small, large = (right(seen, name)[part] for name in ("small", "large"))
    cascade = np.where(accepted, small, large)
    assert measured.escalation == pytest.approx(1 - accepted.mean())
    assert measured.drop == pytest.approx(large.mean() - cascade.mean())
    assert (found.edge_accuracy, found.best_accuracy) == pytest.approx((small.mean(), large.mean()))


def test_bins_hold_every_image_once_and_add_up_to_the_accuracy() -> None:
    _, seen, _ = synthetic(False)
    stage = findings().reliabilities[0]
    assert stage.counts.sum() == len(seen.truths)
    assert (stage.accuracy * stage.counts).sum() / len(seen.truths) == pytest.approx(right(seen, "large").mean())
    assert np.all(stage.low <= stage.accuracy)
    assert np.all(stage.accuracy <= stage.high)


def test_interval_of_the_drop_covers_the_truth_as_often_as_it_says() -> None:
    """The truth is the drop on all held-out images; samples of 400 are drawn from them."""
    profile, seen, split = synthetic(False)
    pair = profile.pairs[0]
    thresholds = Thresholds(float(np.median(seen.sample(pair, np.arange(len(seen.truths))).edge.scores)))
    truth = measure(seen.sample(pair, split.held_out), thresholds).drop
    rng = np.random.default_rng(12)
    hits = []
    for _ in range(200):
        one = measure(seen.sample(pair, rng.choice(split.held_out, 400)), thresholds)
        hits.append(abs(one.drop - truth) <= one.margin)
    assert 0.90 <= np.mean(hits) <= 0.99


@pytest.mark.parametrize("intermediate", [False, True])
def test_cascades_of_two_and_of_three_levels_have_a_page(intermediate: bool) -> None:
    html = render(findings(intermediate))
    assert ("where an intermediate stage is asked as well" in html) == intermediate


def test_cascade_that_certifies_nothing_still_has_a_page() -> None:
    found = findings().pairs[0]
    html = render(replace(findings(), pairs=(replace(found, targets=()),)))
    assert "Too few images to certify anything" in html


def reported(drops: dict[float, float], *, uncertified: float | None = None) -> str:
    """The page where targets (keys) were found to give up so much (values, ± 0.002), and all others nothing."""
    targets = []
    for certificate, _ in findings().pairs[0].targets:
        basis = "profile" if certificate.max_drop == uncertified else certificate.basis
        measured = Outcome(0.3, 0.3, drops.get(certificate.max_drop, 0.0), 0.002)
        targets.append((msgspec.structs.replace(certificate, basis=basis), measured))
    return render(replace(findings(), pairs=(replace(findings().pairs[0], targets=tuple(targets)),)))


def statuses(html: str) -> list[str]:
    """The last column of the first table."""
    table = html[html.index("<table>") : html.index("</table>")]
    return re.findall(r'<td class="(?:words|bad)">([^<]*)</td></tr>', table)


def claim(html: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", html)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ({}, "all {n} certified targets are kept"),
        ({0.0475: 0.048, 0.057: 0.0571, 0.095: 0.0969}, "3 of {n} certified targets exceeded"),
        ({0.0475: 0.0496, 0.057: 0.058, 0.095: 0.2}, "2 of {n} certified targets broken"),
    ],
)
def test_headline_says_what_the_table_below_it_says(drops: dict[float, float], expected: str) -> None:
    html = reported(drops)
    certified = [status for status in statuses(html) if status not in ("reference stage only", "not certified")]
    exceeded = sum(status in ("exceeded by chance", "broken here") for status in certified)
    assert exceeded == len(drops)
    assert len(certified) > 5
    assert expected.format(n=len(certified)) in claim(html)
    assert ("kept" in claim(html)) == (exceeded == 0)
    assert f"<dd>{exceeded} of {len(certified)}</dd>" in html


def test_target_without_a_certificate_is_not_counted_among_the_certified() -> None:
    certified = statuses(reported({})).count("kept")
    html = reported({0.0475: 0.3}, uncertified=0.0475)
    assert statuses(html).count("not certified") == 1
    assert f"all {certified - 1} certified targets are kept" in claim(html)


def test_page_says_so_where_the_held_out_images_served_the_design() -> None:
    profile, _, _ = synthetic(False)
    sha256 = profile.data.sha256

    def page_of(*uses: ImageUse) -> str:
        known = msgspec.structs.replace(profile, uses=uses)
        return render(replace(findings(), profile=known, data_sha256=sha256))

    designed = ImageUse(purpose="design", name="synthetic", sha256=sha256, n=3_000)
    elsewhere = ImageUse(purpose="certify", name="others.npz", sha256="e" * 64, n=410, openings=1)
    assert "no network, temperature or threshold has seen" in page_of()
    html = page_of(designed, elsewhere)
    assert "has seen" not in html
    assert "served the choice of the design" in html
    assert "410 images of others.npz for certificates" in html


def test_images_without_labels_are_refused(tmp_path: Path, task: BandTask) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded())
    with pytest.raises(ConfigError, match="no images in class directories"):
        report_calibration("bands", tmp_path, tmp_path / "r.html", models=task.models, cache=task.cache)
    assert not (tmp_path / "r.html").exists()


def test_too_few_held_out_images_are_refused(tmp_path: Path, task: BandTask) -> None:
    (tmp_path / "images" / "b").mkdir(parents=True)
    (tmp_path / "images" / "b" / "a.jpg").write_bytes(encoded())
    with pytest.raises(ConfigError, match="expected at least 30"):
        report_calibration("bands", tmp_path / "images", tmp_path / "r.html", models=task.models, cache=task.cache)


def test_profile_of_other_models_is_refused_by_name(tmp_path: Path, task: BandTask) -> None:
    profile, other = load_profile(task.profile), tmp_path / "profile.json"
    stages = tuple(msgspec.structs.replace(each, fingerprint="f" * 64) for each in profile.stages)
    other.write_bytes(dump(msgspec.structs.replace(profile, stages=stages)))
    with pytest.raises(ManifestError, match=r"with fingerprint ffff.*calibrate"):
        report_calibration("bands", task.data, tmp_path / "r", profile=other, models=task.models, cache=task.cache)


def test_command_writes_the_page(tmp_path: Path, task: BandTask) -> None:
    options = {"data": task.data, "models-dir": task.models, "cache-dir": task.cache, "out": tmp_path / "r.html"}
    words = [word for name, path in options.items() for word in (f"--{name}", str(path))]
    ran = invoke("report", "calibration", "--task", "bands", *words)
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")

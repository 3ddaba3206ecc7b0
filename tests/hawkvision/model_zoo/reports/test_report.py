"""The calibration report: what it says is what was measured, and the page stands by itself."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import html5lib
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from hawkvision.cascade.certification.certificate import Thresholds
from hawkvision.cascade.certification.predictions import Split
from hawkvision.cascade.certification.profile import ImageUse, Profile
from hawkvision.cascade.certification.profile_files import dump, load_profile, seal
from hawkvision.cascade.certification.profiling import profile_stage
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import MaxAccuracyDrop
from hawkvision.model_zoo.reports.metrics import (
    LabelledPredictions,
    PairFindings,
    Reliability,
    ThresholdsResult,
    measure,
    pair_findings,
    reliability,
)
from hawkvision.model_zoo.reports.page import Findings, render
from hawkvision.model_zoo.reports.report import report_calibration
from hawkvision.system.files import sha256_of
from tests.hawkvision.cascade.synthetic import KIND, SHA, make_logits, make_profile
from tests.hawkvision.model_zoo.band_task import BandTask, write_band_task
from tests.images import encoded

TODAY = date(2026, 11, 21)
HOSTILE = "<img src=x onerror=alert(1)>&.npz"
SECTIONS = (
    "What a caller can ask for",
    "Accuracy against escalation",
    "Two levels or three",
    "robabilities",
    "What was measured",
)


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
def findings(intermediate: bool) -> tuple[PairFindings, Reliability]:
    profile, seen, split = synthetic(intermediate)
    found = pair_findings(profile, profile.pairs[0], seen, split)
    large = seen.datacenter["large"].of(np.arange(len(seen.truths)))
    return found, reliability("large", 1.0, KIND, large, large, seen.truths)


def rendered(intermediate: bool) -> str:
    profile, _, _ = synthetic(intermediate)
    found, stage = findings(intermediate)
    return render(Findings(profile, TODAY, "synthetic", SHA, 3_000, False, (stage,), (), (found,)))


@pytest.mark.parametrize("section", SECTIONS)
def test_page_has_every_section(page: str, section: str) -> None:
    assert re.search(rf"<h2>[^<]*{section}", page)


def test_page_is_valid_html(page: str) -> None:
    parser = html5lib.HTMLParser(strict=True)
    document = parser.parse(page)
    assert document is not None
    assert page.count("<svg") == page.count("</svg>") >= 3


def test_page_fetches_nothing_and_runs_nothing(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<iframe|javascript:", page)
    assert not re.search(r'(?:src|href)="(?!#)', page)


def test_hostile_names_are_escaped(page: str) -> None:
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;.npz" in page


def test_page_names_data_models_and_date(page: str, task: BandTask) -> None:
    profile = load_profile(task.profile)
    assert sha256_of(task.data.read_bytes()) in page
    assert "2026-11-21" in page
    for stage in profile.stages:
        assert stage.fingerprint in page
        assert all(sha256 in page for sha256 in stage.models.values())


def test_names_inside_figures_are_unique_and_colours_are_the_pages_own(page: str) -> None:
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names)) > 0
    assert set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(names)
    for figure in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert not re.search(r"(?:fill|stroke): #", figure)


def test_same_findings_give_the_same_page() -> None:
    assert rendered(intermediate=False) == rendered(intermediate=False)


def test_cascade_without_an_intermediate_stage_says_so() -> None:
    assert "two levels it is" in rendered(intermediate=False)


def test_cascade_with_an_intermediate_stage_compares_costs() -> None:
    found, _ = findings(intermediate=True)
    assert found.pair.intermediate is not None
    assert [cost.max_drop for cost in found.costs] == [c.max_drop for c in found.pair.conditions[0].certificates]
    html = rendered(intermediate=True)
    assert "two levels it is" not in html
    assert "medium" in html


def test_targets_are_measured_on_held_out_images_only() -> None:
    profile, seen, split = synthetic(False)
    found, _ = findings(False)
    route = Policy(profile, "small", "large").route(MaxAccuracyDrop(0.05))
    kept = next(kept for kept in found.kept if kept.certificate.max_drop == 0.05)
    part = split.held_out
    accepted = seen.sample(profile.pairs[0], part).edge.scores >= route.threshold
    small, large = (right(seen, name)[part] for name in ("small", "large"))
    cascade = np.where(accepted, small, large)
    assert kept.measured.escalation == pytest.approx(1 - accepted.mean())
    assert kept.measured.drop == pytest.approx(large.mean() - cascade.mean())
    assert found.best_accuracy - found.edge_accuracy == pytest.approx(found.gap)


def test_plug_in_threshold_never_escalates_more_than_the_certified_one(report: Findings) -> None:
    """Both come from the same path and the same certification images; the test only stops sooner."""
    kept = report.pairs[0].kept
    assert len(kept) > 5
    assert all(one.plug_in.escalation <= one.measured.escalation for one in kept)
    assert any(one.plug_in.escalation < one.measured.escalation for one in kept)


def test_perfect_knowledge_escalates_what_only_the_best_stage_gets_right() -> None:
    _, seen, split = synthetic(False)
    found, _ = findings(False)
    small, large = (right(seen, name)[split.held_out] for name in ("small", "large"))
    assert found.oracle_escalation == np.mean(large & ~small)
    assert found.oracle_escalation >= found.gap


def test_bins_hold_every_image_once_and_add_up_to_the_accuracy() -> None:
    _, seen, _ = synthetic(False)
    _, stage = findings(False)
    assert stage.after.counts.sum() == stage.n == len(seen.truths)
    assert (stage.after.accuracy * stage.after.counts).sum() / stage.n == pytest.approx(right(seen, "large").mean())
    assert np.all(stage.after.low <= stage.after.accuracy)
    assert np.all(stage.after.accuracy <= stage.after.high)


def test_interval_of_the_drop_covers_the_truth_as_often_as_it_says() -> None:
    """The truth is the drop on all held-out images; samples of 400 are drawn from them."""
    profile, seen, split = synthetic(False)
    pair = profile.pairs[0]
    found, _ = findings(False)
    thresholds = Thresholds(float(np.median(seen.sample(pair, np.arange(len(seen.truths))).edge.scores)))
    truth = measure(seen.sample(pair, split.held_out), thresholds).drop
    rng = np.random.default_rng(12)
    hits = []
    for _ in range(200):
        one = measure(seen.sample(pair, rng.choice(split.held_out, 400)), thresholds)
        hits.append(abs(one.drop - truth) <= one.margin)
    assert 0.90 <= np.mean(hits) <= 0.99
    assert found.n == len(split.held_out)


def test_cascade_that_certifies_nothing_still_has_a_page() -> None:
    profile, seen, split = synthetic(False)
    few = Split(split.profile, split.certify, split.held_out[:40])
    found = pair_findings(profile, profile.pairs[0], seen, few)
    none = PairFindings(found.pair, 40, 0.7, 0.9, 0.2, found.frontier, (), ())
    _, stage = findings(False)
    html = render(Findings(profile, TODAY, "few", SHA, 40, True, (stage,), (), (none,)))
    assert "Too few images to certify anything" in html


def reported(drops: dict[float, float], *, uncertified: float | None = None) -> str:
    """The page where targets (keys) were found to give up so much (values, ± 0.002), and all others nothing."""
    profile, _, _ = synthetic(False)
    found, stage = findings(False)
    kept = []
    for one in found.kept:
        target = one.certificate.max_drop
        measured = ThresholdsResult(0.3, 0.3, drops.get(target, 0.0), 0.002)
        basis = "profile" if target == uncertified else one.certificate.basis
        kept.append(replace(one, measured=measured, certificate=msgspec.structs.replace(one.certificate, basis=basis)))
    changed = replace(found, kept=tuple(kept))
    return render(Findings(profile, TODAY, "synthetic", SHA, 3_000, True, (stage,), (), (changed,)))


def statuses(html: str) -> list[str]:
    """The last column of the first table, without its head."""
    table = html[html.index("<table>") : html.index("</table>")]
    return re.findall(r"<td class=words>([^<]*)</td></tr>", table)


def claim(html: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", html)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ({}, "all {n} certified targets are kept"),
        ({0.05: 0.051}, "1 of {n} certified targets exceeded"),
        ({0.05: 0.051, 0.06: 0.0601, 0.1: 0.1019}, "3 of {n} certified targets exceeded"),
        ({0.05: 0.0521}, "1 certified target of {n} broken"),
        ({0.05: 0.0521, 0.06: 0.061, 0.1: 0.2}, "2 certified targets of {n} broken"),
    ],
)
def test_headline_says_what_the_table_below_it_says(drops: dict[float, float], expected: str) -> None:
    html = reported(drops)
    found = statuses(html)
    certified = [status for status in found if status not in ("reference stage only", "not certified")]
    exceeded = sum(status in ("exceeded by chance", "broken here") for status in certified)
    assert exceeded == len(drops)
    assert len(certified) > 5
    assert expected.format(n=len(certified)) in claim(html)
    assert ("kept" in claim(html)) == (exceeded == 0)
    assert f"<dd>{exceeded} of {len(certified)}</dd>" in html
    assert f"Certified thresholds exceed {exceeded} of {len(certified)} targets" in html


def test_figure_of_half_the_gap_does_not_say_that_an_exceeded_target_is_kept() -> None:
    half = findings(False)[0].half
    assert half is not None
    target = half.certificate.max_drop
    assert "keeps the drop within" in reported({})
    assert "keeps the drop within" not in reported({target: target + 0.001})


def test_target_without_a_certificate_is_not_counted_among_the_certified() -> None:
    certified = statuses(reported({})).count("kept")
    html = reported({0.05: 0.3}, uncertified=0.05)
    assert statuses(html).count("not certified") == 1
    assert f"all {certified - 1} certified targets are kept" in claim(html)
    assert f"<dd>0 of {certified - 1}</dd>" in html


def test_page_says_so_where_the_held_out_images_served_the_design() -> None:
    profile, _, _ = synthetic(False)
    found, stage = findings(False)

    def page_of(*uses: ImageUse) -> str:
        known = msgspec.structs.replace(profile, uses=uses)
        return render(Findings(known, TODAY, "synthetic", SHA, 3_000, True, (stage,), (), (found,)))

    designed = ImageUse(purpose="design", name="synthetic", sha256=SHA, n=3_000)
    elsewhere = ImageUse(purpose="certify", name="others.npz", sha256="e" * 64, n=410, openings=1)
    assert "no network, temperature or threshold has seen" in page_of()
    html = page_of(designed, elsewhere)
    assert "has seen" not in html
    assert "served the choice of the design" in html
    assert "410 images of others.npz for certificates" in html


def test_images_without_labels_are_refused(tmp_path: Path, task: BandTask) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded())
    with pytest.raises(ConfigError, match="have no labels"):
        report_calibration("bands", tmp_path, tmp_path / "r.html", models=task.models, cache=task.cache)
    assert not (tmp_path / "r.html").exists()


def test_too_few_held_out_images_are_refused(tmp_path: Path, task: BandTask) -> None:
    (tmp_path / "images" / "b").mkdir(parents=True)
    (tmp_path / "images" / "b" / "a.jpg").write_bytes(encoded())
    with pytest.raises(ConfigError, match="expected at least 30"):
        report_calibration("bands", tmp_path / "images", tmp_path / "r.html", models=task.models, cache=task.cache)


def test_profile_of_other_models_is_refused_by_name(tmp_path: Path, task: BandTask) -> None:
    text = dump(load_profile(task.profile)).decode()
    fingerprint = load_profile(task.profile).stage("dim").fingerprint
    other = tmp_path / "profile.json"
    other.write_text(text.replace(fingerprint, "f" * 64))
    other.write_bytes(seal(other))
    with pytest.raises(ManifestError, match=r"dim with fingerprint ffff.*calibrate"):
        report_calibration("bands", task.data, tmp_path / "r", profile=other, models=task.models, cache=task.cache)


def test_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['jinja2'] = None; from hawkvision.cli import main; main()"
    command = [sys.executable, "-c", code, "report", "calibration", "--data", "x"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "pip install 'hawkvision[report]'" in ran.stderr


def test_command_writes_the_page(tmp_path: Path, task: BandTask) -> None:
    command = [sys.executable, "-m", "hawkvision.cli", "report", "calibration", "--task", "bands"]
    options = {"data": task.data, "models-dir": task.models, "cache-dir": task.cache, "out": tmp_path / "r.html"}
    for name, path in options.items():
        command += [f"--{name}", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")

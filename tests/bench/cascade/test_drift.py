"""The drift study on a synthetic cascade: its result follows the replay, and its report states the same."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from hawkvision.cascade.certification.predictions import split_indices
from hawkvision.cascade.certification.profiling import profile_stage
from hawkvision.model_zoo.calibration.drift_replay import PHASES, LabelledPredictions, Replay, summarise
from tests.bench.cascade.drift import CONTROLS, DECIDED, Cascade, DriftCell, certified_route, study, write
from tests.hawkvision.cascade.synthetic import KIND, SHA, make_logits, make_profile


@functools.cache
def cascade() -> Cascade:
    """`small` backed by `large`, on 4,000 images as they are and harder ones."""
    rng = np.random.default_rng(17)
    labels = rng.integers(0, 10, 4_000)
    split = split_indices(np.full(len(labels), "a"), 0)

    def seen(small: float, large: float) -> LabelledPredictions:
        edge, best = (
            profile_stage(
                KIND, name, {}, SHA, list(make_logits(rng, labels, strength)), labels.tolist(), split, SHA, 1.0
            )[1]
            for name, strength in (("small", small), ("large", large))
        )
        return LabelledPredictions(KIND, {"small": edge}, {"large": best}, labels.tolist())

    return Cascade(make_profile(), seen(3.0, 8.0), seen(1.5, 6.0))


def run_that_gives_up(share: float, audits: float) -> Replay:
    """A run in which so many answers of the shifted traffic are wrong where the reference stage is right."""
    shifted = np.repeat([phase.shifted for phase in PHASES], [phase.requests for phase in PHASES])
    n = len(shifted)
    every = np.arange(n) % 1_000
    return Replay(
        0, shifted, np.zeros(n, np.int8), every < 1_000 * audits,
        (shifted & (every < 1_000 * share)).astype(np.float64),
        np.zeros(n, np.bool_), np.zeros(n),
    )  # fmt: skip


def cell(share: float, audits: float, control: str = "written") -> DriftCell:
    runs = (run_that_gives_up(share, audits),)
    return DriftCell(0.02, control, runs, summarise(runs))


@pytest.mark.parametrize(("share", "audits", "failures"), [(0.01, 0.01, 0), (0.03, 0.01, 1), (0.03, 0.04, 2)])
def test_verdict_is_about_drop_and_audits(share: float, audits: float, failures: int) -> None:
    assert len(cell(share, audits).failures()) == failures


def test_a_fixed_threshold_owes_nothing() -> None:
    assert cell(0.5, 0.0, control="static").failures() == []


@pytest.mark.slow
def test_study_replays_every_target_under_every_control() -> None:
    cells = study(cascade(), (0.06,), certify=1_000, seeds=2)
    assert [found.control for found in cells] == list(CONTROLS)
    decided = {found.control: next(s for s in found.summaries if s.name == DECIDED) for found in cells}
    assert decided["written"].drop < decided["static"].drop
    assert decided["written"].drop <= 0.06
    assert decided["static"].audits == 0.0 < decided["written"].audits
    by_name = {found.control: found for found in cells}
    assert by_name["written"].false_alarms == 0
    assert by_name["written"].delays, "in the other run the threshold alone keeps the drop"


def test_certificate_is_made_for_the_very_drop_that_is_asked_for() -> None:
    route = certified_route(cascade(), np.arange(1_500), 0.0377)
    assert route.guarantee.max_drop == 0.0377
    assert route.guarantee.n == 1_500


def test_what_is_written_agrees_with_what_was_found(tmp_path: Path) -> None:
    found = cell(0.03, 0.01)
    write([found], tmp_path / "out")
    with (tmp_path / "out" / "drift.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [summary.name for summary in found.summaries]
    assert [float(row["drop"]) for row in rows] == [summary.drop for summary in found.summaries]
    document = json.loads((tmp_path / "out" / "drift.json").read_text())
    assert document[0]["failures"] == found.failures() != []

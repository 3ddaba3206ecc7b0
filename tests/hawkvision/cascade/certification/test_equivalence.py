"""An equivalence check passes only where the certificates could not have been others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.certification.equivalence import (
    CertificateInputs,
    ComparisonResult,
    EquivalenceCheck,
    EquivalenceChecks,
    certificate_inputs,
    dump_equivalences,
    load_equivalences,
    passed,
)
from hawkvision.cascade.certification.equivalence import compare as compare_outputs
from hawkvision.core.errors import ManifestError
from hawkvision.core.types import Tier
from hawkvision.tasks.class_scores import Probabilities, Score, score
from hawkvision.tasks.registry import task_kind
from tests.hawkvision.cascade.synthetic import SHA, make_profile

PROFILE = make_profile(intermediate=True)
PAIR = PROFILE.pairs[0]
ON_CUDA = f"{SHA}/onnxruntime:CUDAExecutionProvider"


def probabilities(rows: list[list[float]]) -> Probabilities:
    found = np.array(rows, np.float32)
    normal: Probabilities = found / found.sum(axis=1, keepdims=True)
    return normal


def judged(*thresholds: float, kind: Score | None = Score.MARGIN) -> CertificateInputs:
    return CertificateInputs("small", SHA, 1.0, kind, thresholds, SHA, Tier.EDGE)


def compare(asked: CertificateInputs, certified: Probabilities, ways: list[Probabilities]) -> ComparisonResult:
    kind = task_kind("classification", [str(label) for label in range(certified.shape[1])], {})
    return compare_outputs(kind, asked, list(certified), [list(way) for way in ways])


def test_the_same_answers_pass_even_where_a_score_lies_on_a_threshold() -> None:
    same = probabilities([[0.75, 0.25], [0.5, 0.5]])
    outcome = compare(judged(0.5, 0.0), same, [same, same])
    assert (outcome.passed, outcome.largest_difference, outcome.variation) == (True, 0.0, 0.0)


@pytest.mark.parametrize("kind", Score)
def test_another_label_or_decision_does_not(kind: Score) -> None:
    before = probabilities([[0.9, 0.1], [0.52, 0.48]])
    label, decision = probabilities([[0.9, 0.1], [0.48, 0.52]]), probabilities([[0.7, 0.3], [0.52, 0.48]])
    found = compare(judged(kind=kind), before, [label])
    assert (found.labels, found.passed) == (1, False)
    assert compare(judged(0.75, kind=kind), before, [decision]).decisions == 1
    assert compare(judged(0.02, kind=kind), before, [decision]).passed


def boxes(*rows: tuple[float, ...]) -> np.ndarray:
    """Of one image: x1, y1, x2, y2, score, class."""
    return np.array(rows, np.float32).reshape(-1, 6)


def test_boxes_that_match_may_match_different_true_ones_and_do_not_pass() -> None:
    detection = task_kind("detection", ["lamp"], {})
    asked = CertificateInputs("small", SHA, 1.0, "expected_f1", (), SHA, Tier.EDGE)
    one, moved = boxes((0.0, 0.0, 0.4, 0.4, 0.9, 0)), boxes((0.0, 0.0, 0.4, 0.25, 0.9, 0))
    truth = (np.array([[0.0, 0.0, 0.4, 0.55]]), np.array([0]))
    assert detection.disagreements([one], [moved]).tolist() == [0.0]
    assert detection.losses([one], [truth]).tolist() != detection.losses([moved], [truth]).tolist()
    assert not compare_outputs(detection, asked, [one], [[moved]]).passed
    assert compare_outputs(detection, asked, [one, boxes()], [[one, boxes()], [one, boxes()]]).passed
    assert not compare_outputs(detection, asked, [one, one], [[one, one], [one, boxes()]]).passed


def test_what_varies_by_as_much_as_a_threshold_is_away_does_not_pass() -> None:
    before = probabilities([[0.80, 0.20]])
    ways = [probabilities([[top, 1.0 - top]]) for top in (0.80, 0.79)]
    assert compare(judged(0.50), before, ways).passed
    assert compare(judged(0.57), before, ways).decisions == 1, "each way accepts it, and the next might not"
    assert compare(judged(0.99, kind=Score.TOP1), before, ways).passed
    nearly = [probabilities([[top, 1.0 - top]]) for top in (0.505, 0.51)]
    assert compare(judged(), nearly[0], nearly).labels == 1, "the next might say the other"


images = st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=1, max_size=6)


@given(images, st.integers(1, 3), st.floats(0.0, 0.2), st.randoms(use_true_random=False), st.sampled_from(Score))
def test_what_passes_would_have_been_certified_alike_in_every_way(
    rows: list[list[float]], ways: int, noise: float, draws: object, kind: Score
) -> None:
    before = probabilities(rows)
    moved = [
        probabilities([[value + noise * draws.random() for value in row] for row in rows])  # type: ignore[attr-defined]
        for _ in range(ways)
    ]
    asked = judged(0.2, 0.6, kind=kind)
    outcome = compare(asked, before, moved)
    seen = [
        (way.argmax(axis=1).tolist(), [(score(way, kind) >= t).tolist() for t in asked.thresholds])
        for way in (before, *moved)
    ]
    assert not outcome.passed or all(each == seen[0] for each in seen)


# ------------------------------------------------------------------------------------------------- what is kept


def checks(**changes: str) -> EquivalenceChecks:
    it = next(each for each in certificate_inputs(PROFILE, PAIR) if each.stage == "large")
    check = EquivalenceCheck(
        stage="large", fingerprint=ON_CUDA, judged=it.digest, images="images.npz", images_sha256=it.images_sha256, n=9,
        thresholds=(), largest_difference=0.001, variation=0.0, as_of="2026-11-27",
    )  # fmt: skip
    return EquivalenceChecks(format=1, task="digits", checks=(msgspec.structs.replace(check, **changes),))


def test_a_passed_check_counts_for_the_certificates_that_it_was_made_of_and_for_no_others(tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    file.write_bytes(dump_equivalences(checks()))
    assert passed(load_equivalences(file), PROFILE, PAIR) == {"large": {ON_CUDA}}
    assert passed(checks(judged="0" * 64), PROFILE, PAIR) == {}
    assert passed(checks(stage="medium"), PROFILE, PAIR) == {}
    data = msgspec.structs.replace(PROFILE.data, sha256="d" * 64)
    assert passed(checks(), msgspec.structs.replace(PROFILE, data=data), PAIR) == {}
    large = next(r for r in PROFILE.stages if r.name == "large")
    others = tuple(msgspec.structs.replace(r, fingerprint="d" * 64) if r is large else r for r in PROFILE.stages)
    assert passed(checks(), msgspec.structs.replace(PROFILE, stages=others), PAIR) == {}


def test_a_file_that_was_altered_is_refused_and_a_missing_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    assert load_equivalences(file) is None
    file.write_bytes(dump_equivalences(checks()).replace(b"CUDA", b"ROCM"))
    with pytest.raises(ManifestError, match="was altered"):
        load_equivalences(file)


def test_every_threshold_of_every_certificate_is_checked() -> None:
    condition = PAIR.conditions[0]
    every = (condition.balanced, condition.fast, *condition.certificates)
    found = {each.stage: each for each in certificate_inputs(PROFILE, PAIR)}
    assert set(found) == {"small", "medium", "large"}
    assert set(found["small"].thresholds) == {c.threshold for c in every if isinstance(c.threshold, float)}
    assert set(found["medium"].thresholds) == {
        c.intermediate_threshold for c in every if isinstance(c.intermediate_threshold, float)
    }
    assert found["large"].thresholds == ()

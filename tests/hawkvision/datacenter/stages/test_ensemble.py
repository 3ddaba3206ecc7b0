"""When a stage has enough views, as decided by replicas and checked by the server."""

from __future__ import annotations

import numpy as np
import pytest

from hawkvision.core.types import Score
from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.datacenter.stages.ensemble import (
    AcceptThreshold,
    Augmentation,
    EvaluationRequest,
    ViewOutputs,
    enough,
    evaluation_requests,
    likely_enough,
    stage_result,
    usable_views,
)
from hawkvision.tasks.kind import Output
from tests.hawkvision.tasks.classes import classes

KIND = classes(3)
PAIR = ServedStage("pair", ("a", "b"), mirrored=True)


def leaning(lead: float) -> Output:
    """Probabilities (3,) of which the first is larger than the second by so much."""
    return np.array([(1.0 + lead) / 2, (1.0 - lead) / 2, 0.0], np.float32)


@pytest.mark.parametrize("lead", np.linspace(0.3330, 0.3337, 71).tolist())
def test_the_check_of_a_result_never_contradicts_the_replicas_decision(lead: float) -> None:
    seen = {
        "a": {Augmentation.BOTH: leaning(lead)},
        "b": {Augmentation.UPRIGHT: leaning(lead)},
    }  # of four views, one is missing
    if enough(KIND, EvaluationRequest(PAIR, {"b": Augmentation.MIRROR}), seen):
        assert stage_result(KIND, PAIR, seen).decided


def test_a_lead_that_missing_views_cannot_make_up_is_enough_and_a_smaller_one_is_not() -> None:
    evaluation = EvaluationRequest(PAIR, {"b": Augmentation.MIRROR})

    def after_three_views(lead: float) -> dict[str, ViewOutputs]:
        return {"a": {Augmentation.BOTH: leaning(lead)}, "b": {Augmentation.UPRIGHT: leaning(lead)}}

    assert not enough(KIND, evaluation, {})
    assert not enough(KIND, evaluation, after_three_views(0.333))
    assert enough(KIND, evaluation, after_three_views(0.334))


def test_more_views_are_likely_enough_if_similar_ones_would_decide() -> None:
    evaluation, more = (
        EvaluationRequest(PAIR, {"a": Augmentation.MIRROR, "b": Augmentation.BOTH}),
        {"a": Augmentation.MIRROR, "b": Augmentation.UPRIGHT},
    )
    assert likely_enough(KIND, evaluation, {}, more), "nothing is known"
    for lead in (0.2, 0.3333, 0.3334, 0.9):  # after three views of four, each must lead by a third
        seen: dict[str, ViewOutputs] = {"a": {Augmentation.UPRIGHT: leaning(lead)}}
        then: dict[str, ViewOutputs] = {
            "a": {Augmentation.BOTH: leaning(lead)},
            "b": {Augmentation.UPRIGHT: leaning(lead)},
        }
        assert likely_enough(KIND, evaluation, seen, more) == stage_result(KIND, PAIR, then).decided


def test_a_threshold_needs_all_views_and_a_sufficient_score() -> None:
    pair = evaluation_requests(PAIR, None, AcceptThreshold(Score.MARGIN, 0.5))[0]
    sure, unsure = leaning(0.6), leaning(0.4)
    assert not enough(KIND, pair, {"a": {Augmentation.BOTH: leaning(1.0)}, "b": {Augmentation.UPRIGHT: leaning(1.0)}})
    assert enough(KIND, pair, {"a": {Augmentation.BOTH: sure}, "b": {Augmentation.BOTH: sure}})
    assert not enough(KIND, pair, {"a": {Augmentation.BOTH: unsure}, "b": {Augmentation.BOTH: unsure}})


def test_a_second_evaluation_wants_only_uncovered_views_and_is_left_out_without_any() -> None:
    upright, bar = ServedStage("upright", ("a", "b")), AcceptThreshold(Score.TOP1, 0.5)
    first, second = evaluation_requests(upright, PAIR, bar)
    assert (first.wanted, first.threshold) == ({"a": Augmentation.UPRIGHT, "b": Augmentation.UPRIGHT}, bar)
    assert (second.wanted, second.threshold) == ({"a": Augmentation.MIRROR, "b": Augmentation.MIRROR}, None)
    assert len(evaluation_requests(PAIR, ServedStage("sharper", ("b", "a"), mirrored=True, temperature=0.5), bar)) == 1


def test_an_average_of_both_views_is_of_no_use_to_a_stage_of_the_upright_view() -> None:
    both: dict[str, ViewOutputs] = {"a": {Augmentation.BOTH: leaning(0.5)}}
    assert usable_views(ServedStage("plain", ("a", "b")), both) == {}
    assert usable_views(PAIR, both).keys() == {"a"}

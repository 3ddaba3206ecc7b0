"""When a stage has enough views, as decided by replicas and checked by the server."""

from __future__ import annotations

import numpy as np
import pytest

from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.datacenter.stages.ensemble import (
    Augmentation,
    EvaluationRequest,
    ViewOutputs,
    enough,
    stage_result,
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

"""When there is enough, as seen by whoever looks and by whoever asked."""

from __future__ import annotations

import numpy as np
import pytest

from hawkvision.cascade.confidence.scores import Probabilities
from hawkvision.core.types import Score
from hawkvision.datacenter.catalog import ServedStage
from hawkvision.datacenter.execution.ensemble import (
    Bar,
    Errand,
    Seen,
    Views,
    enough,
    errands_of,
    known_of,
    likely_enough,
    looked,
)

PAIR = ServedStage("pair", ("a", "b"), mirrored=True)


def leaning(lead: float) -> Probabilities:
    """Probabilities (1, 3) of which the first is larger than the second by so much."""
    return np.array([[(1.0 + lead) / 2, (1.0 - lead) / 2, 0.0]], np.float32)


@pytest.mark.parametrize("lead", np.linspace(0.3330, 0.3337, 71).tolist())
def test_whoever_stops_looking_is_never_contradicted_by_who_checks(lead: float) -> None:
    seen = {"a": {Views.BOTH: leaning(lead)}, "b": {Views.UPRIGHT: leaning(lead)}}  # of four views, one is missing
    if enough(Errand(PAIR, {"b": Views.MIRROR}), seen):
        assert looked(PAIR, seen).decided


def test_a_lead_that_no_missing_view_can_make_up_is_enough_and_a_smaller_one_is_not() -> None:
    errand = Errand(PAIR, {"b": Views.MIRROR})

    def after_three_views(lead: float) -> dict[str, Seen]:
        return {"a": {Views.BOTH: leaning(lead)}, "b": {Views.UPRIGHT: leaning(lead)}}

    assert not enough(errand, {})
    assert not enough(errand, after_three_views(0.333))
    assert enough(errand, after_three_views(0.334))


def test_more_views_are_likely_enough_if_all_that_speak_so_would_settle_it() -> None:
    errand, more = Errand(PAIR, {"a": Views.MIRROR, "b": Views.BOTH}), {"a": Views.MIRROR, "b": Views.UPRIGHT}
    assert likely_enough(errand, {}, more), "nothing is known"
    for lead in (0.2, 0.3333, 0.3334, 0.9):  # after three views of four, each must lead by a third
        seen: dict[str, Seen] = {"a": {Views.UPRIGHT: leaning(lead)}}
        then: dict[str, Seen] = {"a": {Views.BOTH: leaning(lead)}, "b": {Views.UPRIGHT: leaning(lead)}}
        assert likely_enough(errand, seen, more) == looked(PAIR, then, rounding=0.0).decided
    assert likely_enough(errand, {"a": {Views.UPRIGHT: leaning(0.0)}}, errand.wanted) is False, "it would be a tie"


def test_a_bar_asks_for_all_views_and_for_a_score_that_reaches_it() -> None:
    pair = errands_of(PAIR, None, Bar(Score.MARGIN, 0.5))[0]
    sure, unsure = leaning(0.6), leaning(0.4)
    assert not enough(pair, {"a": {Views.BOTH: leaning(1.0)}, "b": {Views.UPRIGHT: leaning(1.0)}})
    assert enough(pair, {"a": {Views.BOTH: sure}, "b": {Views.BOTH: sure}})
    assert not enough(pair, {"a": {Views.BOTH: unsure}, "b": {Views.BOTH: unsure}})


def test_a_second_errand_wants_what_the_first_does_not_see_and_there_is_none_if_that_is_all() -> None:
    upright, bar = ServedStage("upright", ("a", "b")), Bar(Score.TOP1, 0.5)
    first, second = errands_of(upright, PAIR, bar)
    assert (first.wanted, first.bar) == ({"a": Views.UPRIGHT, "b": Views.UPRIGHT}, bar)
    assert (second.wanted, second.bar) == ({"a": Views.MIRROR, "b": Views.MIRROR}, None)
    assert len(errands_of(PAIR, ServedStage("sharper", ("b", "a"), mirrored=True, temperature=0.5), bar)) == 1


def test_an_average_of_both_views_counts_for_no_stage_that_wants_the_upright_one() -> None:
    both: dict[str, Seen] = {"a": {Views.BOTH: leaning(0.5)}}
    assert known_of(ServedStage("plain", ("a", "b")), both) == {}
    assert known_of(PAIR, both).keys() == {"a"}

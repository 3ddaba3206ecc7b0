"""Two levels in one hop, in memory: who is asked, whose answer counts, and what the deadline does between the looks."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.scores import Score, average, score
from hawkvision.datacenter.catalog import ServedRung
from hawkvision.datacenter.looks import Look, Second, look_up_to_twice
from hawkvision.datacenter.replica import VariantAnswer, Views
from hawkvision.errors import DeadlineMissed
from hawkvision.types import Logits

MIDDLE = ServedRung("c", ("c",))
TWO = ServedRung("two", ("b", "c"))
MIRRORED_TWO = ServedRung("mirrored two", ("c", "b"), mirrored=True)
ALL = ServedRung("all", ("a", "b", "c"), mirrored=True, temperature=0.8)
PLAIN_ALL = ServedRung("plain all", ("a", "b", "c"))
EXPIRES_AT = 5e9


def row(*key: object) -> Logits:
    """Probabilities (1, 6) that depend on nothing but the key."""
    seed = list(repr(key).encode())
    return np.random.default_rng(seed).dirichlet(np.ones(6)).astype(np.float32)[None]


@dataclass
class Drawn:
    """Variants that see another thing in every view and remember what they were asked, and until when."""

    asked: list[tuple[str, Views]] = field(default_factory=list)
    expiries: set[float] = field(default_factory=set)
    alone: list[bool] = field(default_factory=list)

    async def classify(
        self, variant: str, picture: bytes, views: Views, expires_at: float, *, alone: bool = True
    ) -> VariantAnswer:
        self.asked.append((variant, views))
        self.expiries.add(expires_at)
        self.alone.append(alone)
        one, other = row(picture, variant, Views.UPRIGHT), row(picture, variant, Views.MIRROR)
        seen = {Views.UPRIGHT: one, Views.MIRROR: other, Views.BOTH: average((one, other))}
        return VariantAnswer(seen[views], 1.0, 2.0, 3.0, 4)


def look(variants: Drawn, first: ServedRung, second: Second | None = None, picture: bytes = b"") -> tuple[Look, ...]:
    return asyncio.run(look_up_to_twice(variants, first, second, picture, EXPIRES_AT))


@given(st.binary(max_size=4), st.sampled_from(Score), st.floats(0.0, 1.0))
def test_the_first_answer_counts_exactly_if_its_score_reaches_the_threshold(
    picture: bytes, kind: Score, accept_score: float
) -> None:
    looks = look(Drawn(), MIDDLE, Second(ALL, kind, accept_score), picture)
    sure = float(score(row(picture, "c", Views.UPRIGHT), kind)[0]) >= accept_score
    assert looks[-1].rung is (MIDDLE if sure else ALL)


@given(st.binary(max_size=4), st.sampled_from(Score))
def test_a_score_equal_to_the_threshold_is_accepted_and_the_next_number_is_not(picture: bytes, kind: Score) -> None:
    value = look(Drawn(), MIDDLE, None, picture)[0].score(kind)
    above = math.nextafter(value, 2.0)
    ends = [look(Drawn(), MIDDLE, Second(ALL, kind, at), picture)[-1].rung.name for at in (value, above)]
    assert ends == ["c", "all"]


@pytest.mark.parametrize("first", [MIDDLE, TWO, MIRRORED_TWO])
@pytest.mark.parametrize("second", [ALL, PLAIN_ALL])
def test_a_second_look_ends_with_what_a_first_look_of_the_same_rung_gives(
    first: ServedRung, second: ServedRung
) -> None:
    (alone,) = look(Drawn(), second)
    seen = look(Drawn(), first, Second(second, Score.TOP1, math.inf))[-1]
    assert seen.probabilities.tobytes() == alone.probabilities.tobytes()


@pytest.mark.parametrize(
    ("first", "second", "added"),
    [
        (MIDDLE, ALL, [("a", Views.BOTH), ("b", Views.BOTH), ("c", Views.MIRROR)]),
        (MIDDLE, PLAIN_ALL, [("a", Views.UPRIGHT), ("b", Views.UPRIGHT)]),
        (MIRRORED_TWO, ALL, [("a", Views.BOTH)]),
        (MIRRORED_TWO, PLAIN_ALL, [("a", Views.UPRIGHT), ("b", Views.UPRIGHT), ("c", Views.UPRIGHT)]),
    ],
)
def test_a_second_look_asks_only_for_the_views_that_are_missing(
    first: ServedRung, second: ServedRung, added: list[tuple[str, Views]]
) -> None:
    variants = Drawn()
    looks = look(variants, first, Second(second, Score.TOP1, math.inf))
    assert variants.asked[len(first.members) :] == added
    assert list(looks[1].asked) == [member for member, _ in added]


def test_an_accepted_picture_costs_one_look() -> None:
    variants = Drawn()
    look(variants, MIDDLE, Second(ALL, Score.TOP1, 0.0))
    assert variants.asked == [("c", Views.UPRIGHT)]


def test_both_looks_run_under_the_same_deadline() -> None:
    variants = Drawn()
    look(variants, MIDDLE, Second(ALL, Score.TOP1, math.inf))
    assert variants.expiries == {EXPIRES_AT}


def test_members_hear_that_others_look_too_and_who_is_alone_hears_that() -> None:
    variants = Drawn()
    look(variants, MIDDLE, Second(ALL, Score.TOP1, math.inf))
    assert variants.alone == [len(MIDDLE.members) == 1] + [False] * (len(variants.asked) - 1)


class Late(Drawn):
    """Variants of which "a" finds the deadline passed."""

    async def classify(
        self, variant: str, picture: bytes, views: Views, expires_at: float, *, alone: bool = True
    ) -> VariantAnswer:
        if variant == "a":
            raise DeadlineMissed("the deadline passed before decoding began")
        return await super().classify(variant, picture, views, expires_at, alone=alone)


def test_a_deadline_that_passes_between_the_looks_fails_the_whole() -> None:
    with pytest.raises(DeadlineMissed):
        look(Late(), MIDDLE, Second(ALL, Score.TOP1, math.inf))

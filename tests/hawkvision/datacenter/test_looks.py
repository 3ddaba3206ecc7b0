"""Two levels in one hop, in memory: who is asked, whose answer counts, and what the deadline does between the looks."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.scores import Score, average, score
from hawkvision.datacenter.catalog import ServedRung
from hawkvision.datacenter.looks import MARGIN, Look, Pace, Second, look_up_to_twice
from hawkvision.datacenter.replica import VariantAnswer, Views
from hawkvision.errors import DeadlineMissed
from hawkvision.types import Logits
from tests.waiting import until

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

    async def classify(self, variant: str, picture: bytes, views: Views, expires_at: float) -> VariantAnswer:
        self.asked.append((variant, views))
        self.expiries.add(expires_at)
        one, other = row(picture, variant, Views.UPRIGHT), row(picture, variant, Views.MIRROR)
        seen = {Views.UPRIGHT: one, Views.MIRROR: other, Views.BOTH: average((one, other))}
        return VariantAnswer(seen[views], 1.0, 2.0, 3.0, 4)


def look(variants: Drawn, first: ServedRung, second: Second | None = None, picture: bytes = b"") -> tuple[Look, ...]:
    return asyncio.run(look_up_to_twice(variants, first, second, picture, EXPIRES_AT, pace=Pace()))


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


class Late(Drawn):
    """Variants of which "a" finds the deadline passed."""

    async def classify(self, variant: str, picture: bytes, views: Views, expires_at: float) -> VariantAnswer:
        if variant == "a":
            raise DeadlineMissed("the deadline passed before decoding began")
        return await super().classify(variant, picture, views, expires_at)


def test_a_deadline_that_passes_between_the_looks_fails_the_whole() -> None:
    with pytest.raises(DeadlineMissed):
        look(Late(), MIDDLE, Second(ALL, Score.TOP1, math.inf))


def pace_of(first_s: float, second_s: float) -> Pace:
    pace = Pace()
    pace.saw(MIDDLE, None, first_s)
    pace.saw(ALL, MIDDLE, second_s)
    return pace


@dataclass
class Waiting(Drawn):
    """Variants of which "c" sees the picture upright only when all others have been asked; what becomes of "b"."""

    others: asyncio.Event = field(default_factory=asyncio.Event)
    b: str = "answers"
    called_off: bool = False

    async def classify(self, variant: str, picture: bytes, views: Views, expires_at: float) -> VariantAnswer:
        answer = await super().classify(variant, picture, views, expires_at)
        if len(self.asked) == 4:
            self.others.set()
        if (variant, views) == ("c", Views.UPRIGHT):
            await self.others.wait()
        elif (variant, self.b) == ("b", "fails"):
            raise DeadlineMissed("the deadline passed before decoding began")
        elif (variant, self.b) == ("b", "goes on"):
            try:
                await asyncio.Event().wait()
            finally:
                self.called_off = True
        return answer


async def hurried(variants: Drawn, second: Second, *, pace: Pace, alone: bool = True) -> tuple[Look, ...]:
    return await look_up_to_twice(variants, MIDDLE, second, b"", time.time() + 1.0, pace=pace, alone=alone)


def test_without_time_for_one_after_the_other_both_are_asked_at_once_and_the_answer_is_the_same() -> None:
    second = Second(ALL, Score.TOP1, math.inf)
    variants = Waiting()
    looks = asyncio.run(hurried(variants, second, pace=pace_of(0.5, 0.6)))
    assert variants.asked == [("c", Views.UPRIGHT), ("a", Views.BOTH), ("b", Views.BOTH), ("c", Views.MIRROR)]
    assert [each.hurried for each in looks] == [True, False]
    assert looks[-1].probabilities.tobytes() == look(Drawn(), ALL)[0].probabilities.tobytes()


@pytest.mark.parametrize("b", ["answers", "fails", "goes on"])
def test_what_was_asked_at_once_and_is_not_needed_is_called_off_whatever_becomes_of_it(b: str) -> None:
    async def scenario() -> None:
        variants = Waiting(b=b)
        looks = await hurried(variants, Second(ALL, Score.TOP1, 0.0), pace=pace_of(0.5, 0.6))
        assert [(each.rung, each.hurried) for each in looks] == [(MIDDLE, True)]
        await until(lambda: variants.called_off == (b == "goes on"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("pace", "alone"),
    [(pace_of(0.5, 0.6), False), (pace_of(0.3, 0.45), True), (Pace(), True)],
    ids=["others are inside", "there is time", "nobody knows how long it takes"],
)
def test_else_the_second_look_waits_for_the_first(pace: Pace, alone: bool) -> None:
    variants = Drawn()
    looks = asyncio.run(hurried(variants, Second(ALL, Score.TOP1, 0.0), pace=pace, alone=alone))
    assert (len(looks), looks[0].hurried, variants.asked) == (1, False, [("c", Views.UPRIGHT)])


@given(st.floats(0.001, 10.0), st.floats(0.001, 10.0))
def test_looks_may_take_a_little_longer_than_lately(first_s: float, second_s: float) -> None:
    pace = pace_of(first_s, second_s)
    needed_s = MARGIN * (first_s + second_s)
    assert pace.too_slow(MIDDLE, ALL, 0.999 * needed_s)
    assert not pace.too_slow(MIDDLE, ALL, 1.001 * needed_s)
    assert not pace.too_slow(MIDDLE, ALL, math.inf)


@given(st.lists(st.floats(0.001, 10.0), min_size=2, max_size=30))
def test_the_pace_follows_what_looks_take(seconds: list[float]) -> None:
    pace = pace_of(seconds[0], 0.0)
    for each in seconds[1:]:
        pace.saw(MIDDLE, None, each)
    assert pace.too_slow(MIDDLE, ALL, MARGIN * min(seconds) * 0.999)
    assert not pace.too_slow(MIDDLE, ALL, MARGIN * max(seconds) * 1.001)


@pytest.mark.parametrize(("given_up_after_s", "too_slow"), [(0.0, False), (0.1, True)])
def test_a_look_that_is_broken_off_shows_that_it_takes_longer(given_up_after_s: float, too_slow: bool) -> None:
    class Endless(Drawn):
        async def classify(self, variant: str, picture: bytes, views: Views, expires_at: float) -> VariantAnswer:
            if variant == "a":
                await asyncio.Event().wait()
            return await super().classify(variant, picture, views, expires_at)

    async def scenario() -> None:
        pace = pace_of(0.0, 0.05)
        looking = look_up_to_twice(Endless(), MIDDLE, Second(ALL, Score.TOP1, math.inf), b"", math.inf, pace=pace)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(looking, given_up_after_s)
        assert pace.too_slow(MIDDLE, ALL, MARGIN * 0.05 + 0.001) == too_slow

    asyncio.run(scenario())

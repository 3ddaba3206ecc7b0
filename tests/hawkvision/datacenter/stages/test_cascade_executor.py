"""Two levels in one hop, in memory: who is asked, whose answer counts, and what the deadline does between the looks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.confidence.scores import average, score
from hawkvision.core.errors import DeadlineMissed
from hawkvision.core.types import Logits, Score
from hawkvision.datacenter.stages.cascade_executor import SecondStage, run_two_stages
from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.datacenter.stages.ensemble import Augmentation, EvaluationRequest, StageResult, VariantAnswer

INTERMEDIATE = ServedStage("c", ("c",))
TWO = ServedStage("two", ("b", "c"))
MIRRORED_TWO = ServedStage("mirrored two", ("c", "b"), mirrored=True)
ALL = ServedStage("all", ("a", "b", "c"), mirrored=True, temperature=0.8)
PLAIN_ALL = ServedStage("plain all", ("a", "b", "c"))
EXPIRES_AT = 5e9


def row(*key: object) -> Logits:
    """Probabilities (1, 6) that depend on nothing but the key."""
    seed = list(repr(key).encode())
    return np.random.default_rng(seed).dirichlet(np.ones(6)).astype(np.float32)[None]


@dataclass
class Drawn:
    """Variants that see another thing in every view and remember what they were asked, and until when."""

    asked: list[tuple[str, Augmentation]] = field(default_factory=list)
    expiries: set[float] = field(default_factory=set)

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, expires_at: float, *, streaming: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        self.expiries.add(expires_at)
        for evaluation in evaluations:
            self.asked.extend(evaluation.wanted.items())
            answers = tuple(self.answer(variant, image, views) for variant, views in evaluation.wanted.items())
            if not streaming:
                yield answers
                continue
            for answer in answers:
                if answer.augmentation is not Augmentation.BOTH:
                    yield (answer,)
                    continue
                for view in (Augmentation.UPRIGHT, Augmentation.MIRROR):
                    yield (self.answer(answer.variant, image, view),)

    def answer(self, variant: str, image: bytes, views: Augmentation) -> VariantAnswer:
        one, other = row(image, variant, Augmentation.UPRIGHT), row(image, variant, Augmentation.MIRROR)
        seen = {Augmentation.UPRIGHT: one, Augmentation.MIRROR: other, Augmentation.BOTH: average((one, other))}
        return VariantAnswer(variant, views, seen[views], 1.0, 2.0, 3.0, 4)


def look(
    variants: Drawn, first: ServedStage, second: SecondStage | None = None, image: bytes = b""
) -> tuple[StageResult, ...]:
    return asyncio.run(run_two_stages(variants, first, second, image, EXPIRES_AT))


@given(st.binary(max_size=4), st.sampled_from(Score), st.floats(0.0, 1.0))
def test_the_first_answer_counts_exactly_if_its_score_reaches_the_threshold(
    image: bytes, kind: Score, accept_score: float
) -> None:
    looks = look(Drawn(), INTERMEDIATE, SecondStage(ALL, kind, accept_score), image)
    sure = float(score(row(image, "c", Augmentation.UPRIGHT), kind)[0]) >= accept_score
    assert looks[-1].stage is (INTERMEDIATE if sure else ALL)


@given(st.binary(max_size=4), st.sampled_from(Score))
def test_a_score_equal_to_the_threshold_is_accepted_and_the_next_number_is_not(image: bytes, kind: Score) -> None:
    value = look(Drawn(), INTERMEDIATE, None, image)[0].score(kind)
    above = math.nextafter(value, 2.0)
    ends = [look(Drawn(), INTERMEDIATE, SecondStage(ALL, kind, at), image)[-1].stage.name for at in (value, above)]
    assert ends == ["c", "all"]


@pytest.mark.parametrize("first", [INTERMEDIATE, TWO, MIRRORED_TWO])
@pytest.mark.parametrize("second", [ALL, PLAIN_ALL])
def test_a_second_look_ends_with_what_a_first_look_of_the_same_stage_gives(
    first: ServedStage, second: ServedStage
) -> None:
    (alone,) = look(Drawn(), second)
    seen = look(Drawn(), first, SecondStage(second, Score.TOP1, math.inf))[-1]
    assert seen.probabilities.tobytes() == alone.probabilities.tobytes()


@pytest.mark.parametrize(
    ("first", "second", "added"),
    [
        (INTERMEDIATE, ALL, [("a", Augmentation.BOTH), ("b", Augmentation.BOTH), ("c", Augmentation.MIRROR)]),
        (INTERMEDIATE, PLAIN_ALL, [("a", Augmentation.UPRIGHT), ("b", Augmentation.UPRIGHT)]),
        (MIRRORED_TWO, ALL, [("a", Augmentation.BOTH)]),
        (
            MIRRORED_TWO,
            PLAIN_ALL,
            [("a", Augmentation.UPRIGHT), ("b", Augmentation.UPRIGHT), ("c", Augmentation.UPRIGHT)],
        ),
    ],
)
def test_a_second_look_asks_only_for_the_views_that_are_missing(
    first: ServedStage, second: ServedStage, added: list[tuple[str, Augmentation]]
) -> None:
    variants = Drawn()
    looks = look(variants, first, SecondStage(second, Score.TOP1, math.inf))
    assert variants.asked[len(first.members) :] == added
    single = {Augmentation.BOTH: (Augmentation.UPRIGHT, Augmentation.MIRROR)}
    heard_of = [(variant, each) for variant, views in added for each in single.get(views, (views,))]
    assert [(answer.variant, answer.augmentation) for answer in looks[1].answers] in (added, heard_of)


def test_an_accepted_image_costs_one_look() -> None:
    variants = Drawn()
    look(variants, INTERMEDIATE, SecondStage(ALL, Score.TOP1, 0.0))
    assert variants.asked == [("c", Augmentation.UPRIGHT)]


def test_both_looks_run_under_the_same_deadline() -> None:
    variants = Drawn()
    look(variants, INTERMEDIATE, SecondStage(ALL, Score.TOP1, math.inf))
    assert variants.expiries == {EXPIRES_AT}


class Late(Drawn):
    """Variants of which "a" finds the deadline passed."""

    def answer(self, variant: str, image: bytes, views: Augmentation) -> VariantAnswer:
        if variant == "a":
            raise DeadlineMissed("the deadline passed before inference began")
        return super().answer(variant, image, views)


def test_a_deadline_that_passes_between_the_looks_fails_the_whole() -> None:
    with pytest.raises(DeadlineMissed):
        look(Late(), INTERMEDIATE, SecondStage(ALL, Score.TOP1, math.inf))


def heard(
    first: ServedStage, second: SecondStage | None = None, image: bytes = b""
) -> tuple[list[tuple[StageResult, ...]], tuple[StageResult, ...]]:
    """What is told meanwhile, and in the end."""
    told: list[tuple[StageResult, ...]] = []
    return told, asyncio.run(run_two_stages(Drawn(), first, second, image, EXPIRES_AT, told.append))


STAGES = st.sampled_from([INTERMEDIATE, TWO, MIRRORED_TWO, ALL, PLAIN_ALL])


@given(STAGES, STAGES, st.booleans(), st.binary(max_size=4))
def test_what_is_told_meanwhile_is_of_the_stage_that_counts_and_ends_with_what_nobody_was_told_of(
    first: ServedStage, second: ServedStage, twice: bool, image: bytes
) -> None:
    asked = SecondStage(second, Score.TOP1, math.inf) if twice and second is not first else None
    told, looks = heard(first, asked, image)
    plain = look(Drawn(), first, asked, image)
    assert looks[-1].decided
    assert looks[-1].probabilities.argmax() == plain[-1].probabilities.argmax()
    if not looks[-1].missing:
        np.testing.assert_allclose(looks[-1].probabilities, plain[-1].probabilities, rtol=1e-6)
    for so_far in told:
        assert not so_far[-1].decided
        assert [each.stage for each in so_far] == [each.stage for each in looks]
        assert float(so_far[-1].probabilities.sum()) == pytest.approx(1.0, abs=1e-5)


def test_what_is_told_meanwhile_averages_those_who_have_looked() -> None:
    told, _ = heard(ALL)
    a, mirrored_a, b = (
        row(b"", name, view)
        for name, view in (("a", Augmentation.UPRIGHT), ("a", Augmentation.MIRROR), ("b", Augmentation.UPRIGHT))
    )
    expected = [average(rows, ALL.temperature) for rows in ([a], [average((a, mirrored_a))])]
    expected.append(average((average((a, mirrored_a)), b), ALL.temperature))
    for (so_far,), probabilities in zip(told, expected, strict=False):
        assert so_far.probabilities.tobytes() == probabilities.tobytes()
    assert len(told) == 5, "of six answers the last completes"


@dataclass
class Steep(Drawn):
    """Variants whose views lean towards class 2, some more than others: ensembles of them settle early or late."""

    lean: float = 0.0

    def answer(self, variant: str, image: bytes, views: Augmentation) -> VariantAnswer:
        plain = super().answer(variant, image, views)
        leaning = (1.0 - self.lean) * plain.probabilities + self.lean * np.eye(6, dtype=np.float32)[2:3]
        return replace(plain, probabilities=leaning.astype(np.float32))


MANY = st.sampled_from([MIRRORED_TWO, ALL, PLAIN_ALL])


@given(MANY, st.floats(0.0, 1.0), st.binary(max_size=4))
def test_a_settled_class_is_that_of_all_views(stage: ServedStage, lean: float, image: bytes) -> None:
    seen = in_parts(Steep(lean=lean), stage, image)[-1]
    all_of_it = average([Steep(lean=lean).answer(m, image, of).probabilities for m, of in view_count(stage)])
    assert seen.probabilities.argmax() == all_of_it.argmax()
    assert seen.missing == sum(1 for _ in view_count(stage)) - len(seen.answers)


@given(MANY, st.floats(0.0, 1.0), st.binary(max_size=4), st.binary(max_size=4))
def test_what_the_missing_views_show_changes_no_settled_class_and_may_change_any_other(
    stage: ServedStage, lean: float, image: bytes, other: bytes
) -> None:
    for so_far in in_parts(Steep(lean=lean), stage, image):
        shown = {(a.variant, a.augmentation): a.probabilities for a in so_far.answers}
        total = np.sum([*shown.values()], axis=0)[0].astype(np.float64)
        first, second = np.argsort(-total)[:2]
        against = np.eye(6)[second]  # the worst that a view can show
        left = [view for view in view_count(stage) if view not in shown]
        assert len(left) == so_far.missing
        worst = (total + len(left) * against).argmax()
        if so_far.decided:
            drawn = [Drawn().answer(variant, other, views).probabilities[0] for variant, views in left]
            assert worst == first == (total + np.sum(drawn, axis=0)).argmax() == so_far.probabilities.argmax()
        else:
            assert worst == second or total[first] - total[second] == pytest.approx(len(left), abs=1e-3)


def in_parts(variants: Drawn, stage: ServedStage, image: bytes = b"") -> list[StageResult]:
    """A look and all that is told of it meanwhile; the last is the one that counts."""
    told: list[tuple[StageResult, ...]] = []
    told.append(asyncio.run(run_two_stages(variants, stage, None, image, EXPIRES_AT, told.append)))
    return [looks[-1] for looks in told]


def view_count(stage: ServedStage) -> list[tuple[str, Augmentation]]:
    views = (Augmentation.UPRIGHT, Augmentation.MIRROR) if stage.mirrored else (Augmentation.UPRIGHT,)
    return [(member, view) for member in stage.members for view in views]


def test_an_ensemble_that_agrees_settles_with_the_last_views_unasked() -> None:
    seen = in_parts(Steep(lean=0.95), ALL)[-1]
    assert [(a.variant, a.augmentation) for a in seen.answers] == view_count(ALL)[:4]
    assert (seen.missing, seen.decided) == (2, True)


def test_a_first_look_whose_score_decides_is_whole_however_much_its_members_agree() -> None:
    looks = look(Steep(lean=0.95), PLAIN_ALL, SecondStage(ALL, Score.TOP1, 0.5))
    assert (len(looks), looks[0].missing) == (1, 0)


def test_a_second_look_begins_settled_where_the_first_saw_enough() -> None:
    variants = Steep(lean=0.99)
    three = ServedStage("three of four", ("a", "b", "c"))
    four = ServedStage("four", ("a", "b", "c", "d"))
    looks = look(variants, three, SecondStage(four, Score.TOP1, math.inf))
    assert (looks[1].missing, looks[1].answers) == (1, ())
    assert {variant for variant, _ in variants.asked} == {"a", "b", "c"}


def test_a_first_look_that_is_not_sure_enough_is_the_first_opinion_of_the_second_stage() -> None:
    told, looks = heard(INTERMEDIATE, SecondStage(ALL, Score.TOP1, math.inf))
    assert (
        told[0][-1].probabilities.tobytes() == average([row(b"", "c", Augmentation.UPRIGHT)], ALL.temperature).tobytes()
    )
    assert told[0][0] is looks[0]
    assert len(told) == 1 + 4, "and of five more answers the last completes"


def test_a_first_stage_of_other_members_still_has_the_first_opinion() -> None:
    told, _ = heard(INTERMEDIATE, SecondStage(ServedStage("others", ("a", "b")), Score.TOP1, math.inf))
    assert told[0][-1].probabilities.tobytes() == row(b"", "c", Augmentation.UPRIGHT).tobytes()


def test_of_a_first_look_that_decides_who_answers_no_part_is_told() -> None:
    told, _ = heard(TWO, SecondStage(ALL, Score.TOP1, 0.0))
    assert told == []

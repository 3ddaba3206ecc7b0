"""Two stages in one request, in memory: which variants run, which stage counts, and the deadline between the stages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed
from hawkvision.datacenter.stages.cascade_executor import SecondStage, run_two_stages
from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.datacenter.stages.ensemble import (
    AcceptThreshold,
    Augmentation,
    EvaluationRequest,
    StageResult,
    VariantAnswer,
)
from hawkvision.tasks.class_scores import Score
from hawkvision.tasks.kind import Output
from tests.hawkvision.tasks.classes import classes

INTERMEDIATE = ServedStage("c", ("c",))
TWO = ServedStage("two", ("b", "c"))
MIRRORED_TWO = ServedStage("mirrored two", ("c", "b"), mirrored=True)
ALL = ServedStage("all", ("a", "b", "c"), mirrored=True, temperature=0.8)
PLAIN_ALL = ServedStage("plain all", ("a", "b", "c"))
DEADLINE = Deadline(5e9)
KIND = classes(6)


def average(outputs: Sequence[Output], temperature: float = 1.0) -> Output:
    """The mean, at a temperature."""
    return KIND.combine(outputs, (1.0,) * len(outputs), temperature)


def row(*key: object) -> Output:
    """Probabilities (6,) that depend on nothing but the key."""
    seed = list(repr(key).encode())
    return np.random.default_rng(seed).dirichlet(np.ones(6)).astype(np.float32)


@dataclass
class Drawn:
    """Variants with different probabilities for each view; they record their evaluations and deadlines."""

    asked: list[tuple[str, Augmentation]] = field(default_factory=list)
    deadlines: set[Deadline | None] = field(default_factory=set)

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        self.deadlines.add(deadline)
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


def run_stages(
    variants: Drawn, first: ServedStage, second: SecondStage | None = None, image: bytes = b""
) -> tuple[StageResult, ...]:
    return asyncio.run(run_two_stages(variants, KIND, first, second, image, DEADLINE))


@given(st.binary(max_size=4), st.sampled_from(Score), st.floats(0.0, 1.0))
def test_the_first_answer_counts_exactly_if_its_score_reaches_the_threshold(
    image: bytes, kind: Score, accept_score: float
) -> None:
    results = run_stages(Drawn(), INTERMEDIATE, (ALL, AcceptThreshold(kind, accept_score)), image)
    sure = KIND.score(row(image, "c", Augmentation.UPRIGHT), kind) >= accept_score
    assert results[-1].stage is (INTERMEDIATE if sure else ALL)


@given(st.binary(max_size=4), st.sampled_from(Score))
def test_a_score_equal_to_the_threshold_is_accepted_and_the_next_number_is_not(image: bytes, kind: Score) -> None:
    value = run_stages(Drawn(), INTERMEDIATE, None, image)[0].score(kind)
    above = math.nextafter(value, 2.0)
    ends = [
        run_stages(Drawn(), INTERMEDIATE, (ALL, AcceptThreshold(kind, at)), image)[-1].stage.name
        for at in (value, above)
    ]
    assert ends == ["c", "all"]


@pytest.mark.parametrize("first", [INTERMEDIATE, TWO, MIRRORED_TWO])
@pytest.mark.parametrize("second", [ALL, PLAIN_ALL])
def test_the_second_stage_gives_the_same_result_as_that_stage_alone(first: ServedStage, second: ServedStage) -> None:
    (alone,) = run_stages(Drawn(), second)
    seen = run_stages(Drawn(), first, (second, AcceptThreshold(Score.TOP1, math.inf)))[-1]
    assert seen.output.tobytes() == alone.output.tobytes()


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
def test_the_second_stage_requests_only_missing_views(
    first: ServedStage, second: ServedStage, added: list[tuple[str, Augmentation]]
) -> None:
    variants = Drawn()
    results = run_stages(variants, first, (second, AcceptThreshold(Score.TOP1, math.inf)))
    assert variants.asked[len(first.members) :] == added
    single = {Augmentation.BOTH: (Augmentation.UPRIGHT, Augmentation.MIRROR)}
    received_of = [(variant, each) for variant, views in added for each in single.get(views, (views,))]
    assert [(answer.variant, answer.augmentation) for answer in results[1].answers] in (added, received_of)


def test_both_stages_run_under_the_same_deadline() -> None:
    variants = Drawn()
    run_stages(variants, INTERMEDIATE, (ALL, AcceptThreshold(Score.TOP1, math.inf)))
    assert variants.deadlines == {DEADLINE}


class Late(Drawn):
    """Variants of which "a" misses the deadline."""

    def answer(self, variant: str, image: bytes, views: Augmentation) -> VariantAnswer:
        if variant == "a":
            raise DeadlineMissed("the deadline passed before inference began")
        return super().answer(variant, image, views)


def test_a_deadline_between_the_stages_fails_the_request() -> None:
    with pytest.raises(DeadlineMissed):
        run_stages(Late(), INTERMEDIATE, (ALL, AcceptThreshold(Score.TOP1, math.inf)))


def run_with_partials(
    first: ServedStage, second: SecondStage | None = None, image: bytes = b""
) -> tuple[list[tuple[StageResult, ...]], tuple[StageResult, ...]]:
    """The partial results, and the final ones."""
    partials: list[tuple[StageResult, ...]] = []
    return partials, asyncio.run(run_two_stages(Drawn(), KIND, first, second, image, DEADLINE, partials.append))


STAGES = st.sampled_from([INTERMEDIATE, TWO, MIRRORED_TWO, ALL, PLAIN_ALL])


@given(STAGES, STAGES, st.booleans(), st.binary(max_size=4))
def test_partial_results_are_the_counting_stages_and_precede_its_result(
    first: ServedStage, second: ServedStage, twice: bool, image: bytes
) -> None:
    asked = (second, AcceptThreshold(Score.TOP1, math.inf)) if twice and second is not first else None
    partials, results = run_with_partials(first, asked, image)
    plain = run_stages(Drawn(), first, asked, image)
    assert results[-1].decided
    assert results[-1].output.argmax() == plain[-1].output.argmax()
    if not results[-1].missing:
        np.testing.assert_allclose(results[-1].output, plain[-1].output, rtol=1e-6)
    for so_far in partials:
        assert not so_far[-1].decided
        assert [each.stage for each in so_far] == [each.stage for each in results]
        assert float(so_far[-1].output.sum()) == pytest.approx(1.0, abs=1e-5)


def test_partial_results_average_the_members_that_have_answered() -> None:
    partials, _ = run_with_partials(ALL)
    a, mirrored_a, b = (
        row(b"", name, view)
        for name, view in (("a", Augmentation.UPRIGHT), ("a", Augmentation.MIRROR), ("b", Augmentation.UPRIGHT))
    )
    expected = [average(rows, ALL.temperature) for rows in ([a], [average((a, mirrored_a))])]
    expected.append(average((average((a, mirrored_a)), b), ALL.temperature))
    for (so_far,), probabilities in zip(partials, expected, strict=False):
        assert so_far.output.tobytes() == probabilities.tobytes()
    assert len(partials) == 5, "of six answers the last completes"


@dataclass
class Steep(Drawn):
    """Variants whose views favour class 2 to different degrees, so that ensembles of them decide early or late."""

    lean: float = 0.0

    def answer(self, variant: str, image: bytes, views: Augmentation) -> VariantAnswer:
        plain = super().answer(variant, image, views)
        leaning = (1.0 - self.lean) * plain.output + self.lean * np.eye(6, dtype=np.float32)[2]
        return replace(plain, output=leaning.astype(np.float32))


MANY = st.sampled_from([MIRRORED_TWO, ALL, PLAIN_ALL])


@given(MANY, st.floats(0.0, 1.0), st.binary(max_size=4))
def test_a_decided_class_is_that_of_all_views(stage: ServedStage, lean: float, image: bytes) -> None:
    seen = in_parts(Steep(lean=lean), stage, image)[-1]
    all_of_it = average([Steep(lean=lean).answer(m, image, of).output for m, of in view_count(stage)])
    assert seen.output.argmax() == all_of_it.argmax()
    assert seen.missing == sum(1 for _ in view_count(stage)) - len(seen.answers)


@given(MANY, st.floats(0.0, 1.0), st.binary(max_size=4), st.binary(max_size=4))
def test_missing_views_cannot_change_a_decided_class_but_may_change_an_undecided_one(
    stage: ServedStage, lean: float, image: bytes, other: bytes
) -> None:
    for so_far in in_parts(Steep(lean=lean), stage, image):
        shown = {(a.variant, a.augmentation): a.output for a in so_far.answers}
        total = np.sum([*shown.values()], axis=0).astype(np.float64)
        first, second = np.argsort(-total)[:2]
        against = np.eye(6)[second]  # the worst that a view can show
        left = [view for view in view_count(stage) if view not in shown]
        assert len(left) == so_far.missing
        worst = (total + len(left) * against).argmax()
        if so_far.decided:
            drawn = [Drawn().answer(variant, other, views).output for variant, views in left]
            assert worst == first == (total + np.sum(drawn, axis=0)).argmax() == so_far.output.argmax()
        else:
            assert worst == second or total[first] - total[second] == pytest.approx(len(left), abs=1e-3)


def in_parts(variants: Drawn, stage: ServedStage, image: bytes = b"") -> list[StageResult]:
    """The partial results of a stage, and its result."""
    partials: list[tuple[StageResult, ...]] = []
    partials.append(asyncio.run(run_two_stages(variants, KIND, stage, None, image, DEADLINE, partials.append)))
    return [results[-1] for results in partials]


def view_count(stage: ServedStage) -> list[tuple[str, Augmentation]]:
    views = (Augmentation.UPRIGHT, Augmentation.MIRROR) if stage.mirrored else (Augmentation.UPRIGHT,)
    return [(member, view) for member in stage.members for view in views]


def test_the_second_stage_runs_nothing_if_the_first_stages_views_decide_it() -> None:
    variants = Steep(lean=0.99)
    three = ServedStage("three of four", ("a", "b", "c"))
    four = ServedStage("four", ("a", "b", "c", "d"))
    results = run_stages(variants, three, (four, AcceptThreshold(Score.TOP1, math.inf)))
    assert (results[1].missing, results[1].answers) == (1, ())
    assert {variant for variant, _ in variants.asked} == {"a", "b", "c"}


def test_the_first_stages_views_are_the_first_partial_result_of_the_second() -> None:
    partials, results = run_with_partials(INTERMEDIATE, (ALL, AcceptThreshold(Score.TOP1, math.inf)))
    assert partials[0][-1].output.tobytes() == average([row(b"", "c", Augmentation.UPRIGHT)], ALL.temperature).tobytes()
    assert partials[0][0] is results[0]
    assert len(partials) == 1 + 4, "and of five more answers the last completes"

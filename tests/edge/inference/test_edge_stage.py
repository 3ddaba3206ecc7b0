"""The edge stage: temperatures, batches, and which members of a conditional ensemble run."""

from __future__ import annotations

from typing import ClassVar

import cv2
import msgspec
import numpy as np
import pytest

from edge.inference.edge_stage import ConditionalEnsemble, EdgeStage, InferenceJob, LoadedModel, StagePrediction
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import BadImage
from hawkvision.core.types import LOGITS, Pixels, Tensors
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_input, probe
from hawkvision.inference.backend_registry import NoopBackend
from hawkvision.inference.backends.interface import Outputs
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.tasks.class_scores import Score, average, log_probabilities, softmax, tempered
from hawkvision.tasks.decoders.sets import Ssd
from hawkvision.tasks.detection import DetectionKind
from tests.clocks import ManualClock
from tests.edge.bench import SPEC, GatedBackend
from tests.hawkvision.inference.graphs import tiny_detector
from tests.hawkvision.tasks.classes import TEN, classes_in
from tests.images import encoded

LEAD = 4.0
DARK, BRIGHT = (cv2.imencode(".png", np.full((24, 24, 3), level, np.uint8))[1].tobytes() for level in (40, 220))


def look(score: Score, temperature: float | None) -> StagePrediction:
    stage = EdgeStage("small", LoadedModel("small", GatedBackend(LEAD), SPEC), 1.5, score, TEN)
    return InferenceJob(stage, encoded(), probe(encoded()), 3, 1_000_000, MonotonicClock(), temperature)()


def _indices(found: StagePrediction) -> list[int]:
    return [each.index for each in classes_in(found.prediction)]


def expected(temperature: float) -> tuple[float, float]:
    """The probability of the class that leads among ten, and that of each other class."""
    total = np.exp(LEAD / temperature) + 9.0
    return float(np.exp(LEAD / temperature) / total), float(1.0 / total)


@pytest.mark.parametrize(("given", "used"), [(None, 1.5), (3.0, 3.0)])
def test_confidence_uses_the_temperature_of_the_condition_if_given(given: float | None, used: float) -> None:
    first, second = expected(used)
    assert [each.confidence for each in classes_in(look(Score.TOP1, given).prediction)[:2]] == pytest.approx(
        (first, second), rel=1e-5
    )
    assert look(Score.TOP1, given).score == pytest.approx(first, rel=1e-5)
    assert look(Score.MARGIN, given).score == pytest.approx(first - second, rel=1e-5)


def test_a_higher_temperature_changes_no_answer() -> None:
    assert _indices(look(Score.TOP1, None)) == _indices(look(Score.TOP1, 9.0))


def test_a_batch_gives_the_predictions_of_single_images_and_a_broken_one_fails_alone() -> None:
    stage = EdgeStage(
        "small", LoadedModel("small", NoopBackend((SPEC.height, SPEC.width, 3), 10), SPEC), 1.5, Score.MARGIN, TEN
    )
    bodies = [encoded(seed=1), encoded(seed=2)[:300], encoded(".png", seed=3)]
    looks = [
        InferenceJob(
            stage, body, probe(encoded(seed=2) if number == 1 else body), 3, 1_000_000, MonotonicClock(), 1.0 + number
        )
        for number, body in enumerate(bodies)
    ]
    first, broken, last = stage.infer_batch(looks)
    assert isinstance(broken, BadImage)
    for look_, found in ((looks[0], first), (looks[2], last)):
        alone = look_()
        assert isinstance(found, StagePrediction)
        assert (found.prediction, found.score) == (alone.prediction, alone.score)
    assert all(isinstance(found, BadImage) for found in stage.infer_batch([looks[1], looks[1]]))


class Brightness:
    """Ten classes; says `its` of a bright image, as surely as `bright` has it, and 7 of a dark one."""

    input_shape = (16, 16, 3)
    outputs: ClassVar[Outputs] = {LOGITS: (10,)}

    def __init__(self, bright: float, dark: float, its: int = 3) -> None:
        self.bright, self.dark, self.its = bright, dark, its
        self.looked: list[int] = []

    def infer(self, batch: Pixels) -> Tensors:
        self.looked.append(len(batch))
        logits = np.zeros((len(batch), 10), np.float32)
        for row, image in zip(logits, batch, strict=True):
            bright = image.mean() > 128
            row[self.its if bright else 7] = self.bright if bright else self.dark
        return {LOGITS: logits}

    def close(self) -> None: ...


def conditional(first: Brightness, second: Brightness, accept_confidence: float = 0.85) -> EdgeStage:
    others = ConditionalEnsemble((LoadedModel("second", second, SPEC),), (1.25, 2.0), 0.9, accept_confidence)
    return EdgeStage("pair", LoadedModel("first", first, SPEC), 1.5, Score.TOP1, TEN, others)


def seen_by(stage: EdgeStage, *bodies: bytes, first_only: bool = False) -> list[StagePrediction]:
    looks = [
        InferenceJob(stage, body, probe(body), 3, 1_000_000, MonotonicClock(), first_only=first_only) for body in bodies
    ]  # fmt: skip
    found = stage.infer_batch(looks)
    assert all(isinstance(each, StagePrediction) for each in found)
    return [each for each in found if isinstance(each, StagePrediction)]


def test_other_members_run_only_if_the_first_is_not_confident_and_the_average_counts() -> None:
    first, second = Brightness(bright=9.0, dark=2.0), Brightness(bright=0.0, dark=8.0)
    sure, doubtful, again = seen_by(conditional(first, second), BRIGHT, DARK, DARK)
    assert (first.looked, second.looked) == ([3], [2])
    assert (sure.full_ensemble, doubtful.full_ensemble, again.full_ensemble) == (False, True, True)
    by_first = tempered(np.array([[9.0] + [0.0] * 9], np.float32), 1.25)
    assert classes_in(sure.prediction)[0].confidence == softmax(by_first, 1.5)[0, 0]
    views = [softmax(np.array([[lead] + [0.0] * 9], np.float32), t) for lead, t in ((2.0, 1.25), (8.0, 2.0))]
    assert classes_in(doubtful.prediction)[0].confidence == softmax(log_probabilities(average(views, 0.9)), 1.5)[0, 0]
    assert (_indices(sure)[0], _indices(doubtful)[0]) == (3, 7)


def test_the_second_may_overrule_the_first() -> None:
    first, second = Brightness(bright=1.0, dark=1.0), Brightness(bright=9.0, dark=1.0, its=5)
    (found,) = seen_by(conditional(first, second), BRIGHT)
    assert _indices(found)[0] == 5


def test_first_only_gives_the_first_members_own_prediction() -> None:
    first, second = Brightness(bright=9.0, dark=2.0), Brightness(bright=0.0, dark=8.0)
    by_itself = seen_by(EdgeStage("first", LoadedModel("first", first, SPEC), 1.5, Score.TOP1, TEN), DARK)
    (alone,) = seen_by(conditional(first, second), DARK, first_only=True)
    assert (alone.prediction, alone.full_ensemble) == (by_itself[0].prediction, False)
    assert second.looked == []


def test_a_conditional_ensemble_predicts_a_batch_as_single_images() -> None:
    stage = conditional(Brightness(bright=9.0, dark=2.0), Brightness(bright=3.0, dark=1.0))
    bodies = [DARK, BRIGHT, encoded(seed=5), DARK]
    together = seen_by(stage, *bodies)
    singly = [seen_by(stage, body)[0] for body in bodies]
    assert [(each.prediction, each.full_ensemble) for each in together] == [
        (each.prediction, each.full_ensemble) for each in singly
    ]


def test_members_of_another_kind_are_placed_weighed_and_combined() -> None:
    kind = DetectionKind(("a", "b", "c"), {"threshold": 0.2})
    specs = [msgspec.structs.replace(SPEC, height=16, width=12, fit="letterbox"), SPEC]
    models = [
        LoadedModel(name, OnnxRuntimeBackend(tiny_detector(s.height, s.width, seed=seed)), s, decode=Ssd({}, s, 3))
        for seed, (name, s) in enumerate(zip(("first", "second"), specs, strict=True))
    ]
    others = ConditionalEnsemble(tuple(models[1:]), (1.25, 2.0), 0.9, np.inf, weights=(1.0, (0.5, 2.0, 1.0)))
    stage = EdgeStage("pair", models[0], 1.5, "expected_f1", kind, others)
    body = encoded(".png", height=30, width=50)
    (found,) = seen_by(stage, body)
    outputs = []
    for model, temperature in zip(models, others.temperatures, strict=True):
        pixels, header = load_input(body, model.spec, max_pixels=1_000_000)
        (output,) = kind.outputs(model.infer([pixels], lambda: False), temperature)
        outputs.append(kind.place(output, placement(header, model.spec).to_image))
    expected = kind.judge(kind.combine(outputs, others.weights, 0.9), 3, "expected_f1", 1.5)
    assert (found.prediction, found.score, found.full_ensemble) == (*expected, True)
    assert found.prediction.to_json()["objects"]


@pytest.mark.parametrize(
    ("must_end", "again"), [(None, True), (99.9, True), (100.5, False), (101.5, True)],
    ids=["no deadline", "late in any case", "in time without it", "in time with it"],
)  # fmt: skip
def test_other_members_run_unless_only_they_would_be_late(must_end: float | None, again: bool) -> None:
    stage = conditional(Brightness(bright=9.0, dark=2.0), Brightness(bright=0.0, dark=8.0))
    assert stage.others is not None
    stage.others.duration.record(1.0)
    look_ = InferenceJob(stage, DARK, probe(DARK), 3, 1_000_000, ManualClock(100.0), must_end=must_end)
    assert (look_().full_ensemble, look_().truncated) == (again, not again)


def test_a_confident_prediction_is_not_truncated() -> None:
    stage = conditional(Brightness(bright=9.0, dark=2.0), Brightness(bright=0.0, dark=8.0))
    assert stage.others is not None
    stage.others.duration.record(1.0)
    found = InferenceJob(stage, BRIGHT, probe(BRIGHT), 3, 1_000_000, ManualClock(100.0), must_end=100.5)()
    assert not found.truncated


def test_one_slow_ensemble_run_does_not_prevent_all_later_ones() -> None:
    stage = conditional(Brightness(bright=9.0, dark=2.0), Brightness(bright=0.0, dark=8.0))
    assert stage.others is not None
    stage.others.duration.record(2.0)
    look_ = InferenceJob(stage, DARK, probe(DARK), 3, 1_000_000, ManualClock(100.0), must_end=100.5)
    results = [look_() for _ in range(100)]
    assert results[0].truncated
    assert results[-1].full_ensemble

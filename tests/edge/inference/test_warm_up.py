"""Warm-up: samples take every path of an image before the node is ready."""

from __future__ import annotations

from collections import Counter

import numpy as np

from edge.inference.edge_stage import ConditionalEnsemble, EdgeStage, LoadedModel
from edge.inference.warm_up import FORMATS, run_samples, samples
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.types import LOGITS, Pixels, Tensors
from hawkvision.imaging.preprocessing import decode, probe
from hawkvision.inference.backends.interface import Outputs
from hawkvision.tasks.class_scores import Score
from tests.edge.bench import SPEC
from tests.hawkvision.tasks.classes import TEN


class Counting:
    """A backend that counts its inferences; the first of its ten classes leads by far."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self.input_shape = (SPEC.height, SPEC.width, 3)
        self.outputs: Outputs = {LOGITS: (10,)}
        self._name, self._counts = name, counts

    def infer(self, batch: Pixels) -> Tensors:
        self._counts[self._name] += len(batch)
        logits = np.zeros((len(batch), 10), np.float32)
        logits[:, 0] = 30.0
        return {LOGITS: logits}

    def close(self) -> None: ...


def test_warm_up_runs_every_model_on_every_format_alone_and_not_and_changes_no_estimate() -> None:
    counts: Counter[str] = Counter()
    models = [
        LoadedModel(n, Counting(n, counts), SPEC, Counting(f"{n} on several threads", counts)) for n in ("a", "b", "c")
    ]
    others = ConditionalEnsemble((models[1], models[2]), (1.0, 1.0, 1.0), 1.0, accept_confidence=0.5)
    stage = EdgeStage("both", models[0], 1.0, Score.TOP1, TEN, others)
    run_samples(stage, 1_000_000, MonotonicClock())
    assert counts == {f"{n}{how}": len(FORMATS) for n in "abc" for how in ("", " on several threads")}
    assert others.duration.seconds == 0.0


def test_samples_are_whole_images_of_each_format() -> None:
    found = [probe(body) for body in samples(32)]
    assert sorted(header.format.name for header in found) == ["JPEG", "PNG", "WEBP"]
    for body in samples(32):
        assert decode(body, probe(body), max_pixels=10_000, min_side=32).shape == (48, 48, 3)


def test_a_node_starts_with_a_pixel_bound_below_its_samples() -> None:
    counts: Counter[str] = Counter()
    stage = EdgeStage("a", LoadedModel("a", Counting("a", counts), SPEC), 1.0, Score.TOP1, TEN)
    run_samples(stage, 1, MonotonicClock())
    assert counts["a"] == 2 * len(FORMATS)

"""Which images a cascade's stages look at: those of the datacenter at what edge nodes send them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge.inference.edge_stage import ConditionalEnsemble, EdgeStage, InferenceJob, LoadedModel
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import ConfigError
from hawkvision.core.types import Score
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.preprocessing import probe
from hawkvision.inference.backend_registry import open_backend
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.calibration.model_runner import MAX_PIXELS, CascadePredictions, run_stages
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import UnlabelledImages
from hawkvision.models.manifest import Ensemble, Manifest, load_manifest, models_dir
from hawkvision.tasks.class_scores import softmax
from tests.hawkvision.tasks.classes import TEN, classes_in
from tests.images import encoded

CAMERA = [encoded(height=240, width=320, seed=seed) for seed in range(6)]
SMALL = [encoded(height=32, width=32, seed=seed) for seed in range(6)]
MANIFEST = load_manifest("cifar10", models_dir())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    build("cifar10", cache=folder)
    return folder


def looks_at(
    bodies: list[bytes], cache: Path, manifest: Manifest = MANIFEST, stages: tuple[str, ...] = ()
) -> CascadePredictions:
    images = UnlabelledImages("images", f"{hash(tuple(bodies)):x}", bodies)
    return run_stages(manifest, stages or ("tiny", "committee"), images, cache=cache)


def as_sent(bodies: list[bytes]) -> list[bytes]:
    reducer = Reducer(MANIFEST.datacenter_inputs, MAX_PIXELS)
    return [reducer.reduced(body, probe(body)) for body in bodies]


def test_datacenter_stages_run_on_images_as_sent_and_edge_stages_on_the_originals(cache: Path) -> None:
    sent = as_sent(CAMERA)
    assert all(probe(body).width == 32 for body in sent)
    looks, of_sent = looks_at(CAMERA, cache), looks_at(sent, cache)
    assert np.array_equal(looks.logits("committee"), of_sent.logits("committee"))
    assert not np.array_equal(looks.logits("tiny"), of_sent.logits("tiny"))


def test_small_images_are_sent_unchanged_and_run_once(cache: Path) -> None:
    assert all(sent is body for sent, body in zip(as_sent(SMALL), SMALL, strict=True))
    before = len(list(cache.glob("looks/**/*.npz")))
    looks_at(SMALL, cache)
    members = {member.name for stage in ("tiny", "committee") for member in MANIFEST.members(stage)}
    assert len(list(cache.glob("looks/**/*.npz"))) == before + len(members)


def test_logits_are_cached(cache: Path) -> None:
    first = looks_at(CAMERA, cache).logits("committee")
    written = {path: path.stat().st_mtime_ns for path in cache.glob("looks/**/*.npz")}
    assert np.array_equal(looks_at(CAMERA, cache).logits("committee"), first)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("looks/**/*.npz")} == written


def test_an_image_that_cannot_be_sent_is_named(cache: Path) -> None:
    with pytest.raises(ConfigError, match="images: image 1: "):
        looks_at([CAMERA[0], CAMERA[1][:2000]], cache, stages=("committee",))


def test_an_ensemble_reuses_the_views_of_shared_members(cache: Path) -> None:
    """As `datacenter.stages.cascade_executor` does: an upright view counts for a mirrored stage, an average of both
    for no other."""
    upright = Ensemble(name="upright", members=("small", "large"))
    manifest = msgspec.structs.replace(MANIFEST, ensembles=(*MANIFEST.ensembles, upright))
    looks = looks_at(SMALL, cache, manifest, ("small", "large", "upright", "committee", "tiny"))
    assert looks.reused_ms("upright", "committee") == pytest.approx(looks.cost_ms("upright"), abs=1e-3)
    assert looks.cost_ms("committee") == pytest.approx(2.0 * looks.cost_ms("upright"))
    assert looks.reused_ms("large", "committee") == pytest.approx(looks.cost_ms("large"), abs=1e-3)
    assert looks.reused_ms("committee", "upright") == 0.0
    assert looks.reused_ms("tiny", "committee") == 0.0


def test_a_conditional_ensemble_is_served_as_it_was_certified_to_the_bit(cache: Path) -> None:
    """What an edge node's stage says of each image, and the logits that certificates are made of."""
    members = tuple(MANIFEST.variant(name) for name in ("tiny", "large"))
    steps = Ensemble(name="steps", members=("tiny", "large"), temperature=0.9, accept_confidence=0.5)
    manifest = msgspec.structs.replace(MANIFEST, ensembles=(*MANIFEST.ensembles, steps))
    bodies = [encoded(height=32, width=32, seed=seed) for seed in range(24)]
    looks = looks_at(bodies, cache, manifest, ("tiny", "large", "steps"))
    models = [
        LoadedModel(
            v.name, open_backend("onnxruntime", load_variant(cache, "cifar10", v), v.input, manifest.classes), v.input
        )
        for v in members
    ]
    others = ConditionalEnsemble(tuple(models[1:]), tuple(v.temperature for v in members), steps.temperature, 0.5)
    stage = EdgeStage("steps", models[0], 1.25, Score.TOP1, TEN, others)
    found = [InferenceJob(stage, body, probe(body), 10, MAX_PIXELS, MonotonicClock())() for body in bodies]
    stage.close()
    served = softmax(looks.logits("steps"), 1.25)
    assert [each.score for each in found] == served.max(axis=1).tolist()
    assert [classes_in(each.prediction)[0].index for each in found] == served.argmax(axis=1).tolist()
    again = [each.full_ensemble for each in found]
    assert 0 < sum(again) < len(again)
    first, second = looks.cost_ms("tiny"), looks.cost_ms("large")
    assert looks.cost_ms("steps") == pytest.approx(first + second * sum(again) / len(again))

"""Which images a cascade's stages look at: those of the datacenter at what edge nodes send them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge.inference.edge_stage import ConditionalEnsemble, EdgeStage, InferenceJob, LoadedModel
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import ConfigError
from hawkvision.core.types import Tier
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.preprocessing import probe
from hawkvision.inference.backend_registry import open_backend
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.calibration.model_runner import MAX_PIXELS, CascadePredictions, run_stages
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import UnlabelledImages
from hawkvision.models.manifest import Ensemble, Manifest, load_manifest, models_dir
from hawkvision.tasks.class_scores import Score
from hawkvision.tasks.registry import load_kind
from tests.hawkvision.tasks.classes import TEN, classes_in
from tests.images import encoded

CAMERA = [encoded(height=240, width=320, seed=seed) for seed in range(6)]
SMALL = [encoded(height=32, width=32, seed=seed) for seed in range(6)]
MANIFEST = load_manifest("cifar10", models_dir())
KIND = load_kind(MANIFEST, models_dir())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    build("cifar10", cache=folder)
    return folder


def looks_at(
    bodies: list[bytes],
    cache: Path,
    manifest: Manifest = MANIFEST,
    edge: tuple[str, ...] = ("tiny",),
    datacenter: tuple[str, ...] = ("reference",),
    *,
    shrink: bool = True,
) -> CascadePredictions:
    images = UnlabelledImages("images", f"{hash(tuple(bodies)):x}", bodies)
    return run_stages(KIND, manifest, images, edge=edge, datacenter=datacenter, shrink=shrink, cache=cache)


def logits(looks: CascadePredictions, stage: str, tier: Tier) -> list[list[float]]:
    return [each.tolist() for each in looks.raw(stage, tier).values()]


def as_sent(bodies: list[bytes]) -> list[bytes]:
    reducer = Reducer(MANIFEST.datacenter_inputs, MAX_PIXELS)
    return [reducer.reduced(body, probe(body)) for body in bodies]


def test_datacenter_stages_run_on_images_as_sent_and_edge_stages_on_the_originals(cache: Path) -> None:
    sent = as_sent(CAMERA)
    assert all(probe(body).width == 32 for body in sent)
    looks, of_sent = looks_at(CAMERA, cache), looks_at(sent, cache)
    assert logits(looks, "reference", Tier.DATACENTER) == logits(of_sent, "reference", Tier.DATACENTER)
    assert logits(looks, "tiny", Tier.EDGE) != logits(of_sent, "tiny", Tier.EDGE)


def test_a_stage_of_both_tiers_is_shown_what_each_tier_is_shown(cache: Path) -> None:
    looks = looks_at(CAMERA, cache, edge=("large",), datacenter=("large",))
    of_sent, whole = looks_at(as_sent(CAMERA), cache, edge=("large",)), looks_at(CAMERA, cache, edge=("large",))
    assert logits(looks, "large", Tier.DATACENTER) == logits(of_sent, "large", Tier.EDGE)
    assert logits(looks, "large", Tier.EDGE) == logits(whole, "large", Tier.EDGE)
    assert logits(looks, "large", Tier.EDGE) != logits(looks, "large", Tier.DATACENTER)


def test_where_images_are_not_made_smaller_both_tiers_are_shown_the_originals(cache: Path) -> None:
    looks = looks_at(CAMERA, cache, edge=("large",), datacenter=("large",), shrink=False)
    assert logits(looks, "large", Tier.EDGE) == logits(looks, "large", Tier.DATACENTER)


def test_small_images_are_sent_unchanged_and_run_once(cache: Path) -> None:
    assert all(sent is body for sent, body in zip(as_sent(SMALL), SMALL, strict=True))
    before = len(list(cache.glob("looks/**/*.npz")))
    looks_at(SMALL, cache)
    members = {member.name for stage in ("tiny", "reference") for member in MANIFEST.members(stage)}
    assert len(list(cache.glob("looks/**/*.npz"))) == before + len(members)


def test_tensors_are_cached(cache: Path) -> None:
    first = logits(looks_at(CAMERA, cache), "reference", Tier.DATACENTER)
    written = {path: path.stat().st_mtime_ns for path in cache.glob("looks/**/*.npz")}
    assert logits(looks_at(CAMERA, cache), "reference", Tier.DATACENTER) == first
    assert {path: path.stat().st_mtime_ns for path in cache.glob("looks/**/*.npz")} == written


def test_an_image_that_cannot_be_sent_is_named(cache: Path) -> None:
    with pytest.raises(ConfigError, match="images: image 1: "):
        looks_at([CAMERA[0], CAMERA[1][:2000]], cache, edge=())


def test_an_ensemble_reuses_the_views_of_shared_members(cache: Path) -> None:
    """As `datacenter.stages.cascade_executor` does: an upright view counts for a mirrored stage, an average of both
    for no other."""
    upright = Ensemble(name="upright", members=("small", "large"))
    manifest = msgspec.structs.replace(MANIFEST, ensembles=(*MANIFEST.ensembles, upright))
    looks = looks_at(SMALL, cache, manifest, (), ("small", "large", "upright", "reference", "tiny"))

    def cost_ms(stage: str) -> float:
        return looks.cost_ms(stage, Tier.DATACENTER)

    assert looks.reused_ms("upright", "reference") == pytest.approx(cost_ms("upright"), abs=1e-3)
    assert cost_ms("reference") == pytest.approx(2.0 * cost_ms("upright"))
    assert looks.reused_ms("large", "reference") == pytest.approx(cost_ms("large"), abs=1e-3)
    assert looks.reused_ms("reference", "upright") == 0.0
    assert looks.reused_ms("tiny", "reference") == 0.0


def test_a_conditional_ensemble_is_served_as_it_was_certified_to_the_bit(cache: Path) -> None:
    """What an edge node's stage says of each image, and the logits that certificates are made of."""
    members = tuple(MANIFEST.variant(name) for name in ("tiny", "large"))
    steps = Ensemble(name="steps", members=("tiny", "large"), temperature=0.9, accept_confidence=0.5)
    manifest = msgspec.structs.replace(MANIFEST, ensembles=(*MANIFEST.ensembles, steps))
    bodies = [encoded(height=32, width=32, seed=seed) for seed in range(24)]
    looks = looks_at(bodies, cache, manifest, ("tiny", "large", "steps"), ())
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
    served = np.array(list(looks.outputs("steps", Tier.EDGE, 1.25).values()))
    assert [each.score for each in found] == served.max(axis=1).tolist()
    assert [classes_in(each.prediction)[0].index for each in found] == served.argmax(axis=1).tolist()
    again = [each.full_ensemble for each in found]
    assert 0 < sum(again) < len(again)
    first, second = (looks.cost_ms(name, Tier.EDGE) for name in ("tiny", "large"))
    assert looks.cost_ms("steps", Tier.EDGE) == pytest.approx(first + second * sum(again) / len(again))

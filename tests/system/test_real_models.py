"""The zoo's real cascades in the tier, against NumPy and direct ONNX Runtime runs."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from urllib.parse import urlsplit

import numpy as np
import pytest
from scipy.special import softmax

from hawkvision.core.escalation_api import INFER_PATH, EscalationReply, EscalationRequest
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.types import Pixels
from hawkvision.datacenter.stages.catalog import Catalog, load_catalogs, loaded
from hawkvision.imaging.preprocessing import load_input
from hawkvision.models.manifest import Variant, artifact_path, cache_dir
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.class_scores import Floats, decided
from tests.hawkvision.tasks.classes import read_reply, top_k
from tests.images import encoded
from tests.system.conftest import REAL_TASKS, Up

pytestmark = pytest.mark.slow
IMAGES = [encoded(height=200, width=240, seed=seed) for seed in range(12)]


@dataclass(frozen=True)
class Tier:
    """The address of the running tier, and the whole cascade of one of its tasks."""

    url: str
    catalog: Catalog

    def infer(self, body: bytes, request: EscalationRequest) -> EscalationReply:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        connection.request("POST", INFER_PATH, body, request.headers())
        answer = read_reply(connection.getresponse().read())
        connection.close()
        return answer


@pytest.fixture(params=REAL_TASKS)
def tier(request: pytest.FixtureRequest, both: Up) -> Tier:
    task: str = request.param
    return Tier(both.address("datacenter"), loaded(load_catalogs(DatacenterConfig(tasks=(task,))))[task])


def views(variant: Variant, catalog: Catalog, body: bytes) -> list[Floats]:
    """The member's probabilities of the image, and of its mirror image where the reference stage looks at that."""
    session = ort.InferenceSession(
        str(artifact_path(cache_dir(), catalog.task, variant.name)), providers=["CPUExecutionProvider"]
    )
    pixels, _ = load_input(body, variant.input, max_pixels=10**7)

    def view(upright: Pixels) -> Floats:
        (logits,) = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(upright[None])})
        result: Floats = softmax(logits[0].astype(np.float64) / variant.temperature)
        return result

    return [view(pixels), view(pixels[:, ::-1])] if catalog.best.mirrored else [view(pixels)]


def opinions(seen: list[tuple[str, Floats]]) -> Iterator[Floats]:
    """The mean of all views, and of each choice of some that settle the class whatever the others show.

    The tier waits for no more. Members count alike, whether one of their views was seen or both.
    """
    for number in range(len(seen), 0, -1):
        for some in combinations(seen, number):
            total = np.asarray(sum(view for _, view in some), np.float32)
            if decided(total[None], len(seen) - number):
                each = [np.mean([view for of, view in some if of == name], axis=0) for name in {of for of, _ in some}]
                yield np.mean(each, axis=0)


def test_the_best_stage_is_the_numpy_average_of_its_members(tier: Tier) -> None:
    catalog = tier.catalog
    answer = tier.infer(IMAGES[0], EscalationRequest(task=catalog.task, top_k=len(catalog.kind.labels)))
    served = [confidence for _, confidence in sorted((c.index, c.confidence) for c in top_k(answer))]
    members = [v for v in catalog.variants if v.name in catalog.best.members]
    seen = [(v.name, view) for v in members for view in views(v, catalog, IMAGES[0])]
    expected = [softmax(np.log(opinion) / catalog.best.temperature) for opinion in opinions(seen)]
    assert any(np.allclose(served, each, rtol=0.0, atol=2e-5) for each in expected), (served, expected)

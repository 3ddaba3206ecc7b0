"""Tasks of other kinds than classification through both tiers: real models, a tier of its own, and nodes in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import pytest

from edge.factory import Environment, NodeComponents, open_node
from edge.inference.resident_models import ModelMemory
from edge.inference.stage_loader import StageLoader
from edge.monitoring.certificate_reload import Certification
from edge.serving.node import EdgeNode
from edge.serving.request import ImageRequest
from hawkvision.cascade.policy import Policy
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import BackendError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.trace_context import start_trace
from hawkvision.core.types import (
    Answer,
    MaxAccuracyDrop,
    MinConfidence,
    Output,
    Pixels,
    Prediction,
    Quality,
    RequestFields,
    Target,
    Tier,
)
from hawkvision.imaging.downscale import Reducer
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_input, probe
from hawkvision.models.fingerprints import CertifiedVersions
from hawkvision.models.manifest import Manifest, Variant, artifact_path, load_manifest
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import load_kind
from hawkvision.tasks.serving import OutputDecoder
from tests.edge.bench import known
from tests.hawkvision.cascade.synthetic import make_profile
from tests.hawkvision.inference.graphs import tiny_classifier, tiny_detector
from tests.waiting import until

pytestmark = pytest.mark.slow

LABELS = ("person", "car", "dog")
VARIANT = """
[[variants]]
name = "{name}"
architecture = "tiny"
precision = "fp32"
license = "MIT"
source = {{ file = "{name}.onnx", sha256 = "{sha256}" }}
sha256 = "{sha256}"
temperature = {temperature}
decoder = "{decoder}"
input = {{ height = {height}, width = {width}, mean = [0, 0, 0], std = [1, 1, 1], {placed} }}
"""
TASKS = {
    "boxes": (
        'kind = "detection"\n',
        "[options]\nthreshold = 0.3\n"
        '[[ensembles]]\nname = "large"\nmembers = ["small", "medium"]\nhorizontal_flip = true\n'
        "weights = [1.0, [0.5, 2.0, 1.0]]\ntemperature = 0.9\n",
        (("small", 16, 12, 1.2, 'fit = "stretch"'), ("medium", 24, 24, 0.8, 'fit = "letterbox"')),
    ),
    "tags": (
        'kind = "multi_label"\n',
        "[options]\nthreshold = 0.3\n",
        (("small", 16, 12, 1.0, 'fit = "stretch"'), ("large", 24, 20, 1.5, 'fit = "stretch"')),
    ),
}


def write_tasks(root: Path) -> None:
    """A task of detection, whose reference stage is an ensemble, and one of labels."""
    for task, (head, tail, models) in TASKS.items():
        text = f'format = 1\ntask = "{task}"\n{head}labels = "labels.txt"\nclasses = 3\n'
        text += 'cascade = { edge = ["small"], dc = ["large"], default_edge = "small" }\n' + tail
        for seed, (name, height, width, temperature, placed) in enumerate(models):
            boxes = task == "boxes"
            model = (tiny_detector if boxes else tiny_classifier)(height, width, 3, seed=seed)
            path = artifact_path(root / "cache", task, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(model)
            text += VARIANT.format(
                name=name, height=height, width=width, temperature=temperature, placed=placed,
                sha256=hashlib.sha256(model).hexdigest(), decoder="ssd" if boxes else "logits",
            )  # fmt: skip
        folder = root / "models" / task
        folder.mkdir(parents=True)
        (folder / "manifest.toml").write_text(text)
        (folder / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    write_tasks(root)
    return root


@pytest.fixture(scope="module")
def datacenter(root: Path) -> Iterator[ServerProcess]:
    places = ("--models-dir", str(root / "models"), "--cache-dir", str(root / "cache"))
    with running("hawkvision.datacenter", "--port", "0", "--tasks", ",".join(TASKS), *places) as tier:
        yield tier


def images() -> list[bytes]:
    """Wide and tall ones, with a colour and some noise."""
    draw, found = np.random.default_rng(4), list[bytes]()
    for height, width in ((40, 72), (60, 30), (48, 48), (33, 50)):
        pixels = draw.integers(0, 256, (1, 1, 3)) + draw.normal(0, 70, (height, width, 3))
        found.append(bytes(cv2.imencode(".png", pixels.clip(0, 255).astype(np.uint8))[1]))
    return found


@asynccontextmanager
async def opened(root: Path, task: str, url: str, audit_share: float = 0.0) -> AsyncIterator[EdgeNode]:
    """A node of this task with made-up certificates, about the models that there are."""
    config = msgspec.structs.replace(
        EdgeConfig(), task=task, backend="onnxruntime", workers=1, datacenter_url=url, audit_share=audit_share
    )
    manifest = load_manifest(task, root / "models")
    kind = load_kind(manifest, root / "models")
    variant = manifest.variant("small")
    stage = StageLoader(config, manifest, kind, root / "cache").load("small", variant.temperature, kind.scores[0])
    profile = make_profile()
    policy = Policy(profile, "small", "large")
    versions = CertifiedVersions({name: manifest.fingerprint(name) for name in ("small", "large")})
    components = NodeComponents(
        ModelMemory().add(task, stage),
        Certification(profile, policy, versions, variant.temperature, policy.pair.score),
        "large",
        64,
        Reducer(manifest.datacenter_inputs, config.max_pixels, whole=kind.located),
        (variant.input,),
    )
    node = await open_node(config, components, Environment(EdgeMetrics(), MonotonicClock()))
    try:
        await known(node)
        yield node
    finally:
        await node.close()


async def ask(node: EdgeNode, body: bytes, target: Target) -> Answer:
    return await node.infer(ImageRequest(body, RequestFields(target=target), node.clock.now(), start_trace()))


class Expected:
    """What a task's stages make of an image, by ONNX Runtime alone."""

    def __init__(self, root: Path, task: str) -> None:
        self.root = root
        self.manifest: Manifest = load_manifest(task, root / "models")
        self.kind: TaskKind[Any] = load_kind(self.manifest, root / "models")

    def answer(self, tier: Tier, body: bytes) -> Prediction:
        """The prediction of the tier's stage; the datacenter gets the image as it is sent."""
        if tier is Tier.EDGE:
            return self._predicted("small", body)
        reducer = Reducer(self.manifest.datacenter_inputs, EdgeConfig().max_pixels, whole=self.kind.located)
        return self._predicted("large", reducer.reduced(body, probe(body)))

    def _predicted(self, stage: str, body: bytes) -> Prediction:
        found: Prediction = self.kind.predict(self.of(stage, body), 5)
        return found

    def of(self, stage: str, body: bytes) -> Output:
        ensemble = self.manifest.ensemble(stage)
        if ensemble is None:
            return self.view(self.manifest.variant(stage), body, mirrored=False)
        views = [[self.view(v, body, mirrored=m) for m in (False, True)] for v in self.manifest.members(stage)]
        members = [self.kind.combine(each, (1.0, 1.0), 1.0) for each in views]
        return self.kind.combine(members, ensemble.weights, ensemble.temperature)

    def view(self, variant: Variant, body: bytes, *, mirrored: bool) -> Output:
        pixels, header = load_input(body, variant.input, max_pixels=10**6)
        seen: Pixels = pixels[:, ::-1] if mirrored else pixels
        path = artifact_path(self.root / "cache", self.manifest.task, variant.name)
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = session.run(None, {"image": np.ascontiguousarray(seen[None])})
        names = [output.name for output in session.get_outputs()]
        (output,) = OutputDecoder(variant, self.kind)(dict(zip(names, found, strict=True)))
        output = self.kind.unmirror(output) if mirrored else output
        return self.kind.place(output, placement(header, variant.input).to_image) if self.kind.located else output


@pytest.mark.parametrize("task", TASKS)
def test_each_tier_answers_with_what_its_stage_makes_of_the_image(
    root: Path, datacenter: ServerProcess, task: str
) -> None:
    async def scenario() -> list[tuple[Answer, Answer, Answer]]:
        async with opened(root, task, datacenter.url) as node:
            targets = (Quality.FAST, Quality.BEST, MinConfidence(1.0))
            return [tuple([await ask(node, body, target) for target in targets]) for body in images()]  # type: ignore[misc]

    expected = Expected(root, task)
    for body, (edge, best, escalated) in zip(images(), asyncio.run(scenario()), strict=True):
        assert (edge.tier, edge.model, edge.escalated) == (Tier.EDGE, "small", False)
        assert edge.prediction == expected.answer(Tier.EDGE, body)
        assert (best.tier, best.model, best.escalated) == (Tier.DATACENTER, "large", True)
        assert best.prediction == expected.answer(Tier.DATACENTER, body)
        assert (escalated.tier, escalated.prediction) == (Tier.DATACENTER, best.prediction)
        fields = edge.to_json()
        assert fields["task"] == task
        assert fields.keys() >= edge.prediction.to_json().keys()
        with pytest.raises(AttributeError, match="see `prediction`"):
            _ = edge.top_k


def test_boxes_are_found_where_the_graph_found_them_in_the_image(root: Path, datacenter: ServerProcess) -> None:
    """An image that is stretched into the input has its boxes at the same fractions."""

    async def scenario() -> list[Answer]:
        async with opened(root, "boxes", datacenter.url) as node:
            return [await ask(node, body, Quality.FAST) for body in images()]

    variant, total = load_manifest("boxes", root / "models").variant("small"), 0
    session = ort.InferenceSession(str(artifact_path(root / "cache", "boxes", "small")))
    for body, answer in zip(images(), asyncio.run(scenario()), strict=True):
        pixels, _ = load_input(body, variant.input, max_pixels=10**6)
        boxes, scores, _ = session.run(None, {"image": pixels[None]})
        corners = boxes[0][:, [1, 0, 3, 2]]  # the graph's are y1, x1, y2, x2
        for found in answer.to_json()["objects"]:
            distance = np.abs(corners - found["box"]).max(axis=1)
            assert distance.min() < 1e-5
            assert found["label"] == LABELS[found["index"]]
            assert scores[0][distance.argmin()][found["index"]] > 0.2
            total += 1
    assert total > 2


@pytest.mark.parametrize("task", TASKS)
def test_audits_compare_predictions_by_the_kind_and_answers_are_certified_by_their_versions(
    root: Path, datacenter: ServerProcess, task: str
) -> None:
    async def scenario() -> tuple[list[Answer], dict[str, float]]:
        async with opened(root, task, datacenter.url, audit_share=1.0) as node:
            outcomes = {"agree": 0.0, "differ": 0.0}

            def completed() -> bool:
                for outcome in outcomes:
                    labels = {"task": task, "outcome": outcome}
                    outcomes[outcome] = node.metrics.registry.get_sample_value("hawkvision_audits_total", labels) or 0.0
                return sum(outcomes.values()) == len(answers)

            answers: list[Answer] = []
            for body in images():
                answers.append(await ask(node, body, MaxAccuracyDrop(1.0)))
                await until(completed)
            return answers, outcomes

    answers, outcomes = asyncio.run(scenario())
    expected = Expected(root, task)
    differ = 0
    for body, answer in zip(images(), answers, strict=True):
        assert answer.tier is Tier.EDGE
        reference = expected.answer(Tier.DATACENTER, body)
        differ += expected.kind.disagreement(answer.prediction, reference) > 0.0
    assert outcomes == {"agree": len(answers) - differ, "differ": differ}


def test_a_model_that_does_not_fit_its_task_is_refused_when_it_is_loaded(root: Path) -> None:
    config = msgspec.structs.replace(EdgeConfig(), task="tags", backend="onnxruntime")
    manifest = load_manifest("tags", root / "models")
    kind = load_kind(manifest, root / "models")
    more = type(kind)((*LABELS, "cat"), dict(kind.options))
    with pytest.raises(BackendError, match=r"small: tensor 'logits': expected \(n, 4\), got \(1, 3\)"):
        StageLoader(config, manifest, more, root / "cache").load("small", 1.0, kind.scores[0])

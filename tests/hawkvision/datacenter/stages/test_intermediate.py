"""A real tier on ONNX Runtime: an intermediate stage, on a cascade of ten classes and 32 x 32 pixels whose answers
depend on the image, beside a task whose model file is missing at first."""

from __future__ import annotations

import hashlib
import http.client
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest

from hawkvision.core.escalation_api import (
    INFER_PATH,
    STAGES_PATH,
    EscalationReply,
    EscalationRequest,
    IntermediateOffer,
    StageList,
)
from hawkvision.core.types import LOGITS, Logits
from hawkvision.datacenter.launch.isolation import family
from hawkvision.imaging.preprocessing import load_input
from hawkvision.inference.backend_registry import open_backend
from hawkvision.models.manifest import Manifest, Variant, artifact_path, load_manifest
from hawkvision.tasks.class_scores import Floats, Probabilities, Score, average, score, softmax
from tests.hawkvision.datacenter.conftest import Running, marked_processes, start, stop
from tests.hawkvision.datacenter.launch.test_supervision import command_line
from tests.hawkvision.datacenter.servers.test_service import ask
from tests.hawkvision.inference.graphs import tiny_classifier
from tests.hawkvision.tasks.classes import read_reply, write_labels
from tests.images import encoded
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
EXECUTION = "onnxruntime:CPUExecutionProvider"
IMAGES = [encoded(height=32, width=32, seed=seed) for seed in range(40)]
TASKS = ("tiny", "digits")
VARIANTS = {"small": 0.5, "medium": 0.125}
"""Their temperatures."""
ENSEMBLE_TEMPERATURE = 0.9


@dataclass(frozen=True)
class Tier:
    """The running tier, a child of `running.process`, with what an offline computation needs."""

    running: Running
    manifest: Manifest
    cache: Path
    away: Path
    """Where the model file of the task `digits` is, instead of beside that."""

    def get(self, path: str) -> bytes:
        return self._send("GET", path, None, {})

    def infer(self, body: bytes, request: EscalationRequest) -> EscalationReply:
        return read_reply(self._send("POST", INFER_PATH, body, request.headers()))

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        connection = http.client.HTTPConnection(urlsplit(self.running.url).netloc, timeout=30)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        payload = response.read()
        connection.close()
        assert response.status == 200, payload
        return payload


def write_cascade(root: Path, task: str) -> None:
    """A manifest below models/ and its two models below cache/."""
    entries = []
    for seed, (name, temperature) in enumerate(VARIANTS.items()):
        model = tiny_classifier(32, 32, classes=10, seed=seed)
        path = artifact_path(root / "cache", task, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model)
        entries.append(
            f"""
[[variants]]
name = "{name}"
architecture = "tiny"
precision = "fp32"
license = "MIT"
source = {{ package = "none", version = "1", member = "none", sha256 = "{"0" * 64}" }}
input = {{ height = 32, width = 32, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }}
sha256 = "{hashlib.sha256(model).hexdigest()}"
temperature = {temperature}
"""
        )
    head = f'format = 1\ntask = "{task}"\nlabels = "labels.txt"\nclasses = 10\n[cascade]\nedge = ["small"]\n'
    head += 'dc = ["medium", "reference"]\ndefault_edge = "small"\n'
    tail = '[[ensembles]]\nname = "reference"\nmembers = ["small", "medium"]\nhorizontal_flip = true\n'
    tail += f"temperature = {ENSEMBLE_TEMPERATURE}\n"
    (root / "models" / task).mkdir(parents=True)
    (root / "models" / task / "manifest.toml").write_text(head + "".join(entries) + tail)
    write_labels(root / "models" / task)


PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"
"""A program that starts another and waits for it."""


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    root = tmp_path_factory.mktemp("tiny")
    for task in TASKS:
        write_cascade(root, task)
    file = artifact_path(root / "cache", "digits", "medium")
    away = file.rename(file.with_suffix(".away"))
    words = ("--tasks", ",".join(TASKS), "--backend", "onnxruntime", "--num-cpus", "1", "--with-parent")
    prefix = (sys.executable, "-c", PARENT)
    running = start(root / "models", *words, log=root / "log", prefix=prefix, cache_dir=str(root / "cache"))
    yield Tier(running, load_manifest("tiny", root / "models"), root / "cache", away)
    stop(running)


def views(tier: Tier, variant: Variant) -> list[tuple[Logits, Logits]]:
    """Logits (1, 10) of every image and of its mirror image."""
    backend = open_backend("onnxruntime", artifact_path(tier.cache, "tiny", variant.name), variant.input, 10)
    inputs = [load_input(body, variant.input, max_pixels=10**6)[0][None] for body in IMAGES]
    seen = [(backend.infer(i)[LOGITS], backend.infer(np.ascontiguousarray(i[:, :, ::-1]))[LOGITS]) for i in inputs]
    backend.close()
    return seen


def offline(tier: Tier) -> tuple[Probabilities, Probabilities]:
    """Calibrated probabilities (n, 10) of the intermediate stage and of the ensemble, without the tier."""
    upright: dict[str, Probabilities] = {}
    mean: dict[str, Probabilities] = {}
    for name, temperature in VARIANTS.items():
        seen = views(tier, tier.manifest.variant(name))
        upright[name], mirror = (softmax(np.concatenate(v), temperature) for v in zip(*seen, strict=True))
        mean[name] = average((upright[name], mirror))
    return upright["medium"], average(list(mean.values()), ENSEMBLE_TEMPERATURE)


def scores(probabilities: Probabilities, kind: Score) -> Floats:
    """As certificates use them: float32, widened."""
    return score(probabilities, kind).astype(np.float64)


def asked(kind: Score, accept_score: float) -> EscalationRequest:
    return EscalationRequest(
        task="tiny", variant="medium", top_k=10, intermediate=IntermediateOffer(kind, accept_score, "reference")
    )


def states(tier: Running) -> dict[str, Any]:
    """The body of /readyz, by task."""
    reply = ask(tier, path="/readyz")
    assert reply.status == 200
    return {each["task"]: each for each in reply.json["tasks"]}


def test_a_task_without_its_file_fails_alone_and_is_served_once_it_is_mended(tier: Tier) -> None:
    running, file = tier.running, tier.away.with_suffix(".onnx")
    before = replicas(running)
    found = states(running)
    assert {task: each["status"] for task, each in found.items()} == {"tiny": "ready", "digits": "failed"}
    assert f"{file}: the model file is missing" in found["digits"]["reason"]
    assert ask(running, IMAGES[0], task="tiny").status == 200
    refused = ask(running, IMAGES[0], task="digits")
    assert (refused.status, str(file) in refused.body.decode()) == (503, True)
    assert [ask(running, path=f"/v1/stages?task={task}").status for task in TASKS] == [200, 503]
    tier.away.rename(file)
    wait_until(lambda: states(running)["digits"]["status"] == "ready")
    answer = ask(running, IMAGES[0], task="digits")
    assert (answer.status, read_reply(answer.body).model) == (200, "reference")
    assert replicas(running) == before
    assert running.log is not None
    log = running.log.read_text()
    assert log.count("task digits cannot be served: ") == log.count("task digits is served now") == 1


def replicas(tier: Running) -> list[int]:
    return [pid for pid in family(tier.process.pid) if "ServeReplica" in command_line(pid)]


@pytest.mark.parametrize("kind", Score)
def test_the_images_accepted_and_every_score_are_those_of_an_offline_computation(tier: Tier, kind: Score) -> None:
    expected = [scores(stage, kind) for stage in offline(tier)]
    threshold = float(np.sort(expected[0])[len(IMAGES) // 2])  # the score of one of them, so equality is met too
    accepted = expected[0] >= threshold
    replies = [tier.infer(body, asked(kind, threshold)) for body in IMAGES]
    assert [r.model == "medium" for r in replies] == accepted.tolist()
    assert 0 < accepted.sum() < len(IMAGES)
    assert [r.score for r in replies] == np.where(accepted, *expected).tolist()
    assert [r.passed_over.score for r in replies if r.passed_over] == expected[0][~accepted].tolist()


def test_a_crowd_changes_no_score_by_more_than_rounding(tier: Tier) -> None:
    expected = scores(offline(tier)[0], Score.TOP1)
    with ThreadPoolExecutor(16) as crowd:
        replies = list(crowd.map(lambda body: tier.infer(body, asked(Score.TOP1, 0.0)), IMAGES))
    # Of float32 models only: kernels differ by batch size. The zoo's int8 models gave the same bits in any batch.
    np.testing.assert_allclose([r.score or 0.0 for r in replies], expected, rtol=1e-5)


def test_both_stages_are_listed_with_the_fingerprints_of_the_manifest(tier: Tier) -> None:
    listed = msgspec.json.decode(tier.get(STAGES_PATH), type=StageList)
    expected = {name: tier.manifest.fingerprint(name) for name in ("medium", "reference")}
    assert {r.name: r.fingerprint for r in listed.stages} == expected
    assert (listed.task, listed.best) == ("tiny", "reference")


def test_replies_and_the_listing_say_what_the_replicas_have_loaded_and_run(tier: Tier) -> None:
    expected = {name: f"{tier.manifest.fingerprint(name)}/{EXECUTION}" for name in ("medium", "reference")}
    listed = msgspec.json.decode(tier.get(STAGES_PATH), type=StageList)
    assert {r.name: r.ran for r in listed.stages} == expected
    for body in IMAGES:
        best = tier.infer(body, EscalationRequest(variant="reference"))
        accepted, passed = tier.infer(body, asked(Score.TOP1, 0.0)), tier.infer(body, asked(Score.TOP1, 1.0))
        assert (best.fingerprint, accepted.fingerprint) == (expected["reference"], expected["medium"])
        assert passed.passed_over is not None
        assert (passed.fingerprint, passed.passed_over.fingerprint) == (expected["reference"], expected["medium"])


def test_a_dead_parent_takes_the_tier_with_it(tier: Tier) -> None:
    """The last use of this tier."""
    assert marked_processes(tier.running.mark)
    tier.running.process.kill()
    wait_until(lambda: not marked_processes(tier.running.mark))

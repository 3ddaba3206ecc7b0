"""A kind from a package of someone else is served by an edge node as the built-in ones are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from hawkvision.cascade.certification.profile_files import dump
from hawkvision.core.errors import NotReady
from hawkvision.models.manifest import Manifest, artifact_path, parse_manifest
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller
from tests.hawkvision.cascade.synthetic import make_profile
from tests.hawkvision.inference.graphs import tiny_classifier
from tests.hawkvision.tasks import added_kind
from tests.images import encoded

GRADES = ("green", "breaker", "pink", "red")
MANIFEST = """
format = 1
task = "ripeness"
kind = "grading"
labels = "labels.txt"
classes = 4
cascade = { edge = ["small"], dc = ["large"], default_edge = "small" }
"""
VARIANT = """
[[variants]]
name = "NAME"
architecture = "tiny"
precision = "fp32"
license = "MIT"
source = { file = "NAME.onnx", sha256 = "SHA" }
sha256 = "SHA"
input = { height = 16, width = 12, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }
"""


def write_task(models: Path, cache: Path) -> None:
    """A task of the added kind with two built models, and a profile about these."""
    text = MANIFEST
    for seed, name in enumerate(("small", "large")):
        content = tiny_classifier(classes=len(GRADES), seed=seed)
        built = artifact_path(cache, "ripeness", name)
        built.parent.mkdir(parents=True, exist_ok=True)
        built.write_bytes(content)
        text += VARIANT.replace("NAME", name).replace("SHA", hashlib.sha256(content).hexdigest())
    folder = models / "ripeness"
    folder.mkdir(parents=True)
    (folder / "manifest.toml").write_text(text)
    (folder / "labels.txt").write_text("\n".join(GRADES) + "\n")
    (folder / "profile.json").write_bytes(profile_of(parse_manifest(text, "here")))


def profile_of(manifest: Manifest) -> bytes:
    """Made-up figures, about these models."""
    profile = make_profile()
    stages = tuple(
        msgspec.structs.replace(
            stage,
            models={member.name: member.sha256 for member in manifest.members(stage.name)},
            fingerprint=manifest.fingerprint(stage.name),
        )
        for stage in profile.stages
    )
    pairs = tuple(msgspec.structs.replace(pair, score="confidence") for pair in profile.pairs)
    return dump(msgspec.structs.replace(profile, task=manifest.task, stages=stages, pairs=pairs))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ripeness")
    site = folder / "site"
    site.mkdir()
    added_kind.install(site)
    write_task(folder / "models", folder / "cache")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    places = ("--models-dir", str(folder / "models"), "--cache-dir", str(folder / "cache"))
    command = ("edge", "--port", "0", "--task", "ripeness", "--backend", "onnxruntime", *places)
    with running(*command, env={"PYTHONPATH": os.pathsep.join(paths)}) as server:
        yield server


@pytest.mark.slow
def test_a_kind_of_another_package_is_served(node: ServerProcess) -> None:
    with closing(Caller(node)) as caller:
        answers = [
            caller.send("POST", "/v1/infer?task=ripeness&quality=fast", encoded(seed=seed)).json for seed in range(3)
        ]
        for answer in answers:
            assert answer["grade"] == GRADES[answer["position"]]
            assert 0.0 < answer["confidence"] <= 1.0
            assert (answer["task"], answer["tier"], answer["model"]) == ("ripeness", "edge", "small")
            assert answer["accuracy"]["status"] == "best_effort", "there is no datacenter"
        assert answers[0] == caller.send("POST", "/v1/infer?quality=fast", encoded(seed=0)).json | {
            "id": answers[0]["id"], "timing_ms": answers[0]["timing_ms"]
        }  # fmt: skip


@pytest.mark.slow
def test_a_kind_that_is_not_installed_is_named(tmp_path: Path) -> None:
    write_task(tmp_path / "models", tmp_path / "cache")
    places = ("--models-dir", str(tmp_path / "models"), "--cache-dir", str(tmp_path / "cache"))
    with (
        pytest.raises(NotReady, match="kind 'grading' is not installed; there are classification, counting"),
        running("edge", "--port", "0", "--task", "ripeness", "--backend", "onnxruntime", *places),
    ):
        pass

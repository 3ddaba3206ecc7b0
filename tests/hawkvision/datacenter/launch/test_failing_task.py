"""One of two tasks of a real tier cannot load its models: the other one is served, and it comes back when mended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hawkvision.datacenter.launch.isolation import family
from hawkvision.models.manifest import artifact_path
from hawkvision.system.files import sha256_of
from tests.hawkvision.datacenter.conftest import MANIFEST, Running, image, start, stop_cleanly
from tests.hawkvision.datacenter.launch.test_stopping import until
from tests.hawkvision.datacenter.launch.test_supervision import command_line
from tests.hawkvision.datacenter.servers.test_service import ask
from tests.hawkvision.inference.graphs import tiny_classifier
from tests.hawkvision.tasks.classes import read_reply, write_labels

pytestmark = pytest.mark.slow
TASKS = ("shapes", "digits")


@dataclass(frozen=True)
class Damaged:
    """A tier that was started while the model file of digits was away."""

    tier: Running
    file: Path
    away: Path


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Damaged]:
    folder = tmp_path_factory.mktemp("damaged")
    model = tiny_classifier(height=48, width=48, classes=10, seed=0)
    hashed = MANIFEST.replace('name = "medium"\n', f'name = "medium"\nsha256 = "{sha256_of(model)}"\n', 1)
    for task in TASKS:
        described = folder / "manifests" / task
        described.mkdir(parents=True)
        (described / "manifest.toml").write_text(hashed.replace('"shapes"', f'"{task}"'))
        write_labels(described)
        file = artifact_path(folder, task, "medium")
        file.parent.mkdir(parents=True)
        file.write_bytes(model)
    away = file.rename(file.with_suffix(".away"))
    chosen = {"tasks": ",".join(TASKS), "variants": ",".join(f"{task}:medium" for task in TASKS)}
    words = ("--backend", "onnxruntime", "--num-cpus", "1")
    tier = start(folder / "manifests", *words, log=folder / "log", cache_dir=str(folder), **chosen)
    yield Damaged(tier, file, away)
    stop_cleanly(tier)


def states(tier: Running) -> dict[str, Any]:
    """The body of /readyz, by task."""
    reply = ask(tier, path="/readyz")
    assert reply.status == 200
    return {each["task"]: each for each in json.loads(reply.body)["tasks"]}


def replicas(tier: Running) -> list[int]:
    return [pid for pid in family(tier.process.pid) if "ServeReplica" in command_line(pid)]


def test_a_task_without_its_file_fails_alone_and_is_served_once_it_is_mended(damaged: Damaged) -> None:
    tier = damaged.tier
    before = replicas(tier)
    found = states(tier)
    assert {task: each["status"] for task, each in found.items()} == {"shapes": "ready", "digits": "failed"}
    assert f"{damaged.file}: the model file is missing" in found["digits"]["reason"]
    assert ask(tier, image(), task="shapes").status == 200
    refused = ask(tier, image(), task="digits")
    assert (refused.status, str(damaged.file) in refused.body.decode()) == (503, True)
    assert [ask(tier, path=f"/v1/stages?task={task}").status for task in TASKS] == [200, 503]
    damaged.away.rename(damaged.file)
    until(lambda: states(tier)["digits"]["status"] == "ready")
    answer = ask(tier, image(), task="digits")
    assert (answer.status, read_reply(answer.body).model) == (200, "medium")
    assert replicas(tier) == before
    assert tier.log is not None
    log = tier.log.read_text()
    assert log.count("task digits cannot be served: ") == log.count("task digits is served now") == 1

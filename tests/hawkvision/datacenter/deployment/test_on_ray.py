"""Replicas on a real Ray Serve, as a server calls them: deaths, updates and deadlines. One Ray for all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.hawkvision.datacenter.conftest import MARK, ROOT, marked_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(models: Path) -> dict[str, dict[str, Any]]:
    """What `ray_scenarios` prints. No process outlives it."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.hawkvision.datacenter.deployment.ray_scenarios", str(models)]
    environment = {**os.environ, MARK: mark}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert marked_processes(mark) == []
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_large_images_do_not_pass_through_rays_object_store(results: dict[str, dict[str, Any]]) -> None:
    sent, stored = results["stored"]["sent"], results["stored"]["stored"]  # two images; Serve's own objects are small
    assert stored < sent / 2 > 500_000


def test_another_replica_answers_for_one_that_is_killed(results: dict[str, dict[str, Any]]) -> None:
    assert set(results["killed"]["outcomes"]) == {"answered"}


def test_new_models_are_taken_without_a_new_process_or_a_failed_image(results: dict[str, dict[str, Any]]) -> None:
    assert results["reconfigured"]["same processes"]
    assert set(results["reconfigured"]["outcomes"]) == {"answered"}


def test_no_image_fails_while_all_replicas_are_replaced(results: dict[str, dict[str, Any]]) -> None:
    assert results["rolled"]["replicas"] == 2
    assert set(results["rolled"]["outcomes"]) == {"answered"}

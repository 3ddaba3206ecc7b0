"""docs/operations/updates.md: nodes are updated one after the other from wheels, under load, and no caller notices."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Final

import pytest

from hawkvision.client.blocking import Client
from hawkvision.core.errors import NotReady
from hawkvision.system.child_server import running
from tests.images import encoded
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT: Final = Path(__file__).resolve().parents[2]
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
EDGE: Final = 'default_edge = "small"'
VERSIONS: Final = {"1.0.0": "small", "1.1.0": "tiny", "1.2.0": "tiny_w8"}
"""Releases by the model that they run at the edge. The last is bad: its profile is not the one that it pins."""
CALLERS: Final = 2
"""Of each node."""
PAUSE_S: Final = 0.05
"""Between the calls of a caller, so that the rest of the test has the processor too."""


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each version, installed from a wheel that was built from a checkout."""
    folder = tmp_path_factory.mktemp("releases")
    checkout, tools = folder / "checkout", folder / "tools"
    for part in ("pyproject.toml", "README.md", "LICENSE", "models", "hawkvision", "edge", "fpga", "loadgen"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__", "kernel-*"))
        else:
            checkout.mkdir(exist_ok=True)
            shutil.copy(ROOT / part, checkout)
    lock = ROOT / "edge/deploy/requirements.wheel.txt"
    subprocess.run([*PIP, "--require-hashes", "-r", str(lock), "--target", str(tools)], check=True)
    manifest, project = checkout / "models/cifar10/manifest.toml", checkout / "pyproject.toml"
    shipped, released = manifest.read_text(), project.read_text()
    for version, edge in VERSIONS.items():
        manifest.write_text(shipped.replace(EDGE, f'default_edge = "{edge}"'))
        project.write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', released))
        if version == "1.2.0":
            with (manifest.parent / "profile.json").open("a") as profile:
                profile.write("\n")
        built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(built, cwd=checkout, env={**os.environ, "PYTHONPATH": str(tools)}, check=True)
        wheel = folder / f"hawkvision-{version}-py3-none-any.whl"
        subprocess.run(
            [*PIP, "--no-deps", "--no-index", "--no-compile", "--target", str(folder / version), str(wheel)], check=True
        )
    return folder


class Node:
    """A node on a port and with a cache of its own, as on a machine of its own."""

    def __init__(self, releases: Path, folder: Path, load: ThreadPoolExecutor) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.answered: Counter[str] = Counter()
        """Answers by each model."""
        self._releases, self._folder = releases, folder
        self._serving = ExitStack()
        self._done = Event()
        self._calls = [load.submit(self._call) for _ in range(CALLERS)]

    def install(self, version: str) -> None:
        """Build the models of a version, stop the node, and start it in that version."""
        env = {"PYTHONPATH": str(self._releases / version), "PYTHONSAFEPATH": "1", "XDG_STATE_HOME": str(self._folder)}
        options = ("--task", "cifar10", "--cache-dir", str(self._folder))
        building = [sys.executable, "-m", "hawkvision", "models", "build", VERSIONS[version], *options]
        subprocess.run(building, env={**os.environ, **env}, capture_output=True, check=True)
        self._serving.close()
        self._serving.enter_context(running("hawkvision", "edge", "up", *options, "--port", f"{self.port}", env=env))

    def answers_by(self, model: str) -> None:
        """Wait for an answer more by a model."""
        before = self.answered[model]
        wait_until(lambda: self.answered[model] > before or any(call.done() for call in self._calls))

    def close(self) -> None:
        """End the calls, which must not have failed, and then the node."""
        self._done.set()
        for call in self._calls:
            call.result()
        self._serving.close()

    def _call(self) -> None:
        with Client(f"http://127.0.0.1:{self.port}", retry_budget_s=60.0) as client:
            while not self._done.wait(PAUSE_S):
                self.answered[client.classify(encoded(), quality="fast", deadline_ms=60_000.0).model] += 1


def test_no_request_fails_while_two_nodes_are_updated_and_one_goes_back(releases: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2 * CALLERS) as load, ExitStack() as stack:
        nodes = [Node(releases, tmp_path / name, load) for name in ("one", "other")]
        for node in nodes:
            stack.callback(node.close)
        for version, model in (("1.0.0", "small"), ("1.1.0", "tiny")):
            for node in nodes:
                node.install(version)
                node.answers_by(model)
        with pytest.raises(NotReady, match="profile"):
            nodes[0].install("1.2.0")
        nodes[0].install("1.1.0")
        nodes[0].answers_by("tiny")
    assert [set(node.answered) for node in nodes] == [{"small", "tiny"}] * 2

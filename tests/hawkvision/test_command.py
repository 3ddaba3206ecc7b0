"""The command `hawkvision`, as its console script runs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hawkvision.core import __version__

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "hawkvision", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_console_script_runs_this_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"hawkvision": "hawkvision.__main__:main"}


@pytest.mark.parametrize("server", ["edge", "dc"])
def test_a_server_reads_its_words(server: str) -> None:
    ran = run(server, "up", "--port", "70000")
    assert ran.returncode == 1
    assert "error: command line: Expected `int` <= 65535 - at `$.port`" in ran.stderr
    assert "| rich" not in ran.stderr


def test_a_node_without_a_datacenter_imports_no_client_of_one() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hawkvision", "edge", "up", "--port", "0", "--backend", "noop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        ready = node.stdout.readline()
        node.terminate()
        _, imported = node.communicate()
    assert ready.startswith("ready: http://127.0.0.1:")
    assert " numpy\n" in imported
    assert not [name for name in ("aiohttp", "aioquic", "typer") if f" {name}\n" in imported]


@pytest.mark.parametrize("server", ["edge", "dc"])
def test_a_server_explains_itself(server: str) -> None:
    ran = run(server, "up", "--help")
    assert ran.returncode == 0
    assert f"usage: hawkvision {server} up" in ran.stdout


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"hawkvision {__version__}\n"

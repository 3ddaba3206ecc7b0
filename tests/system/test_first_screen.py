"""The README's first screen, executed as it stands; and the demonstration."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.process import running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = README.split("\n## ")[0]


def commands(block: str) -> list[str]:
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


BLOCKS = [match.group(1) for match in re.finditer(r"```console\n(.*?)```", FIRST_SCREEN, re.DOTALL)]


def columns(row: str) -> list[str]:
    """A row of the table as its columns, without the milliseconds."""
    cells = re.split(r"\s{2,}", row.strip())
    return [cell for cell in cells if not re.fullmatch(r"\d+\.\d", cell)]


OUTPUT = re.search(r"```text\n(picture.*?)```", FIRST_SCREEN, re.DOTALL)
SHOWN = [columns(line) for line in OUTPUT.group(1).splitlines()] if OUTPUT else []


def test_first_screen_has_an_installation_and_a_picture_to_ask_about() -> None:
    said = [command for block in BLOCKS for command in commands(block)]
    assert "make demo" in said
    assert any("classify" in command for command in said)
    assert any(command.startswith("curl") for command in said)
    assert len(SHOWN) > 3


@pytest.mark.timeout(900)
def test_make_demo_answers_everything_and_leaves_nothing_behind(ladder: None) -> None:
    ran = subprocess.run(["make", "--no-print-directory", "demo"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    last = ran.stdout.strip().splitlines()[-1]
    answered, at_edge, in_datacenter = map(int, re.findall(r"(\d+) ", last)[:3])
    assert answered == at_edge + in_datacenter > 20
    assert at_edge > 5
    assert in_datacenter > 5
    said = [columns(line) for line in ran.stdout.splitlines()]
    for row in SHOWN:
        assert row in said, f"the README shows {row}, the demonstration does not"


def test_every_other_command_of_the_first_screen_runs_as_it_stands(ladder: None) -> None:
    """Servers (the commands ending in &) are awaited by their ready line; the rest must succeed, in order."""
    said = [command for block in BLOCKS for command in commands(block) if command != "make demo"]
    if not (ROOT / ".venv" / "bin" / "hawkvision").exists():
        pytest.skip("the README's commands use .venv, which `make demo` or `make test` makes")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (apt-get install curl)")
    servers = [command for command in said if command.endswith("&")]
    assert len(servers) == 2
    asked = "\n".join(command for command in said if not command.endswith("&"))
    dc, edge = (shlex.split(server.removesuffix("&")) for server in servers)
    assert [words[:3] for words in (dc, edge)] == [
        [".venv/bin/hawkvision", "dc", "up"],
        [".venv/bin/hawkvision", "edge", "up"],
    ]
    with (
        running("hawkvision.cli", *dc[1:]),
        running("hawkvision.cli", *edge[1:]),
    ):
        ran = subprocess.run(["bash", "-e", "-c", asked], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "cat" in ran.stdout
    assert '"label"' in ran.stdout


def test_python_example_of_the_readme_runs(node_url: str) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    code = example.group(1).replace("http://127.0.0.1:8080", node_url)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "cat" in ran.stdout

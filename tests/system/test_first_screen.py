"""The README's first screen, executed as it stands; and the demonstration."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.system.process import ended

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


OUTPUT = re.search(r"```text\n(image.*?)```", FIRST_SCREEN, re.DOTALL)
SHOWN = [columns(line) for line in OUTPUT.group(1).splitlines()] if OUTPUT else []


def test_first_screen_has_an_installation_and_an_image_to_ask_about() -> None:
    said = [command for block in BLOCKS for command in commands(block)]
    assert "make demo" in said
    assert any("classify" in command for command in said)
    assert any(command.startswith("curl") for command in said)
    assert len(SHOWN) > 3


@pytest.mark.timeout(900)
def test_make_demo_answers_everything_and_leaves_nothing_behind(cascade: None) -> None:
    ran = subprocess.run(["make", "--no-print-directory", "demo"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, counted, following = ran.stdout.strip().splitlines()
    answered, at_edge, in_datacenter = map(int, re.findall(r"(\d+) ", counted)[:3])
    assert answered == at_edge + in_datacenter >= 18
    assert at_edge > 5
    assert in_datacenter >= 3
    assert following.startswith("next: `.venv/bin/hawkvision up`")
    said = [columns(line) for line in ran.stdout.splitlines()]
    for row in SHOWN:
        assert row in said, f"the README shows {row}, the demonstration does not"


def test_every_other_command_of_the_first_screen_runs_as_it_stands(cascade: None) -> None:
    """`up` serves in one terminal until the others, typed at once in a second, are done; each must succeed."""
    said = [command for block in BLOCKS for command in commands(block) if command != "make demo"]
    if not (ROOT / ".venv" / "bin" / "hawkvision").exists():
        pytest.skip("the README's commands use .venv, which `make demo` or `make test` makes")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (apt-get install curl)")
    served, *asked = said
    assert served == ".venv/bin/hawkvision up"
    with subprocess.Popen(shlex.split(served), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as up:
        try:
            ran = subprocess.run(["bash", "-e", "-c", "\n".join(asked)], cwd=ROOT, capture_output=True, text=True)
        finally:
            up.send_signal(signal.SIGINT)
            assert ended(up) == 0
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

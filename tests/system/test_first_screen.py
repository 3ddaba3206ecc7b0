"""README's first screen, run as it stands; its figure; and the demonstration."""

from __future__ import annotations

import html
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hawkvision.models.sample_images import photographs
from hawkvision.system.child_server import ended
from tests.system import pages

README = pages.ROOT / "README.md"
BLOCKS = pages.blocks(README)
FIGURE = pages.ROOT / "docs" / "images" / "session.svg"


def columns(row: str) -> list[str]:
    """A row of a table of answers as its columns, without the milliseconds."""
    cells = re.split(r"\s{2,}", row.strip())
    return [cell for cell in cells if not re.fullmatch(r"\d+\.\d", cell)]


def figure_lines() -> list[str]:
    """The lines of the terminal that the figure shows."""
    texts = re.findall(r'<text [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', FIGURE.read_text(encoding="utf-8"))
    lines: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in texts:
        lines.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    return ["".join(text for _, text in sorted(lines[y])).strip() for y in sorted(lines)]


def answers(lines: list[str]) -> list[list[str]]:
    """The rows of `lines` that are about an image."""
    return [columns(line) for line in lines if re.match(r"\w+\.png ", line)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_demo_answers_everything_and_leaves_nothing_behind(cascade: None) -> None:
    ran = subprocess.run(["make", "--no-print-directory", "demo"], cwd=pages.ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, counted, following = ran.stdout.strip().splitlines()
    answered, at_edge, in_datacenter = map(int, re.findall(r"(\d+) ", counted)[:3])
    assert answered == at_edge + in_datacenter >= 18
    assert at_edge > 5
    assert in_datacenter >= 3
    assert following.startswith("next: `.venv/bin/hawkvision up`")


@pytest.mark.slow
def test_commands_program_and_figure_of_the_first_screen_are_as_shown(cascade: None, tmp_path: Path) -> None:
    """`up` serves in one terminal until the other commands, typed at once in a second, are done."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (apt-get install curl)")
    environment = pages.shell_environment(tmp_path)
    asked = [command for block in BLOCKS if block.is_run for command in block.commands() if command != pages.SERVE]
    (program,) = (block for block in BLOCKS if block.language == "python")
    (shown,) = (block for block in BLOCKS if block.language == "text")
    in_figure = figure_lines()
    commands = [line.removeprefix("$ ") for line in in_figure if line.startswith("$ hawkvision classify ")]
    with subprocess.Popen(
        pages.SERVE.split(), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as up:
        try:
            printed = pages.run_block(BLOCKS[0], "\n".join(asked), tmp_path, environment)
            assert "cat" in printed
            assert '"label"' in printed
            assert pages.run_block(program, program.text, tmp_path, environment) == shown.text
            for image in photographs():
                shutil.copy(image, tmp_path)
            printed = pages.run_block(BLOCKS[0], "\n".join(commands), tmp_path, environment)
        finally:
            up.send_signal(signal.SIGINT)
            assert ended(up) == 0
    assert len(commands) == 2
    assert answers(printed.splitlines()) == answers(in_figure)

"""README's first screen, run as it stands; its figure; and the demonstration."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hawkvision.system.child_server import ended
from tests.hawkvision.datacenter.launch.test_supervision import command_line
from tests.system import pages
from tests.system.conftest import alive, descendants
from tests.waiting import wait_until

README = pages.ROOT / "README.md"
BLOCKS = pages.blocks(README)


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
def test_commands_and_program_of_the_first_screen_are_as_shown_until_a_tier_dies(cascade: None, tmp_path: Path) -> None:
    """`up` serves in one terminal until the other commands, typed at once in a second, are done. When a tier dies then,
    the other is stopped, and the error names it; test_up.py ends it by Ctrl-C.
    """
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (apt-get install curl)")
    environment = pages.shell_environment(tmp_path)
    asked = [command for block in BLOCKS if block.is_run for command in block.commands() if command != pages.SERVE]
    (program,) = (block for block in BLOCKS if block.language == "python")
    (shown,) = (block for block in BLOCKS if block.language == "text")
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(pages.SERVE.split(), env=environment, stdout=subprocess.DEVNULL, stderr=log) as up,
    ):
        try:
            printed = pages.run_block(BLOCKS[0], "\n".join(asked), tmp_path, environment)
            assert "cat" in printed
            assert '"label"' in printed
            assert pages.run_block(program, program.text, tmp_path, environment) == shown.text
            below = descendants(up.pid)
            (datacenter,) = (pid for pid in children(up.pid) if "-m\0hawkvision.datacenter\0" in command_line(pid))
            os.kill(datacenter, signal.SIGKILL)
            assert up.wait(60) == 1
        finally:
            up.send_signal(signal.SIGINT)
            ended(up)
    wait_until(lambda: not alive(below))
    assert "error: the datacenter tier ended by itself with status -9" in (tmp_path / "log").read_text()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

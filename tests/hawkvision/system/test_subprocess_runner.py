"""Commands: what they said, and never more CPU time than allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.core.errors import CompileError
from hawkvision.system.subprocess_runner import run

IMPORT = "from hawkvision.system.subprocess_runner import run"


def test_run_gives_status_output_and_cpu_time(tmp_path: Path) -> None:
    ran = run(
        sys.executable, ["-c", "import os; print(os.getcwd()); raise SystemExit(3)"], cpu_limit_s=20, folder=tmp_path
    )
    assert ran.status == 3
    assert ran.output.strip() == str(tmp_path.resolve())
    assert 0 < ran.cpu_s < 20
    assert not ran.succeeded


def test_tool_that_works_too_long_is_stopped() -> None:
    ran = run(sys.executable, ["-c", "while True: pass"], cpu_limit_s=1, title="spinner")
    assert ran.complaint == "spinner: stopped at its limit of 1 CPU seconds"
    with pytest.raises(CompileError, match="spinner: stopped"):
        ran.check()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_tool_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    tool = (
        "import sys, time; sys.stdout = open('alive', 'w'); print('here', flush=True); time.sleep(20); print('still')"
    )
    starts_it = f"import sys; {IMPORT}; run(sys.executable, ['-c', {tool!r}], cpu_limit_s=9)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, "-c", starts_it], cwd=tmp_path, env=environment)
    with parent, (tmp_path / "alive").open() as alive:
        assert alive.readline() == "here\n"
        parent.kill()
        assert alive.read() == ""


def test_tool_that_sleeps_too_long_is_ended() -> None:
    ran = run(sys.executable, ["-c", "import time; time.sleep(60)"], cpu_limit_s=20, wall_limit_s=0.5, title="sleeper")
    assert ran.complaint.startswith("sleeper: ended by signal 9 after 0 CPU seconds")


def test_limit_of_this_process_holds_where_it_is_less() -> None:
    starts_it = f"{IMPORT}; print(run('/bin/sh', ['-c', 'ulimit -t'], cpu_limit_s=99).output)"
    done = subprocess.run(
        ["/bin/sh", "-c", f'ulimit -t 50; exec {sys.executable} -c "{starts_it}"'],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.stdout.strip() == "50"


def test_complaint_is_what_the_tool_called_an_error() -> None:
    ran = run(
        sys.executable, ["-c", "print('chatter'); print('ERROR: no such cell'); raise SystemExit(1)"], cpu_limit_s=20
    )
    assert ran.complaint.endswith(": ERROR: no such cell")

"""A run fails if tests are skipped for reasons that are not in the list of allowed ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import read_allowed

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / ".ci" / "allowed_skips.toml"
TESTS = """
import pytest

def test_that_passes():
    pass

@pytest.mark.xfail(reason="known to fail")
def test_that_is_known_to_fail():
    assert False

def test_that_is_skipped():
    pytest.skip("no tiles here")
"""


def run(folder: Path, allowed: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").touch()
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_whole.py").write_text("import pytest\npytest.importorskip('no_such_module', reason='no module')\n")
    (folder / "allowed.toml").write_text(allowed)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.skips", f"--rootdir={folder}", *options, "."]
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def entry(reason: str) -> str:
    return f"[[skip]]\nreason = '{reason}'\nwhy = 'a test'\n"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_skip_that_is_not_allowed_fails_the_run_and_is_named(tmp_path: Path, workers: str) -> None:
    options = ("--allowed-skips", "allowed.toml", "-n", workers)
    done = run(tmp_path, entry("no .* here") + entry("no module"), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(tmp_path, entry("no"), *options)
    assert done.returncode == 1
    assert "test_some.py::test_that_is_skipped: no tiles here" in done.stdout
    assert "test_whole.py: no module" in done.stdout
    assert "known to fail" not in done.stdout


def test_what_ci_prepares_the_machine_for_may_be_skipped_elsewhere_only(tmp_path: Path) -> None:
    allowed = entry("no .* here") + "in_ci = false\n" + entry("no module")
    assert run(tmp_path, allowed, "--allowed-skips", "allowed.toml").returncode == 0
    assert run(tmp_path, allowed, "--allowed-skips", "allowed.toml", HAWKVISION_CI="1").returncode == 1


def test_without_the_option_skips_are_as_always(tmp_path: Path) -> None:
    assert run(tmp_path, "").returncode == 0


@pytest.mark.parametrize(("text", "said"), [("skip = 1", "array"), (entry("("), "reason '('"), ("?", "invalid")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    done = run(tmp_path, text, "--allowed-skips", "allowed.toml")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in done.stderr.lower()


def test_the_projects_own_list_says_why_each_is_allowed() -> None:
    allowed = read_allowed(ALLOWED)
    assert all(len(each.why) > 10 for each in allowed)
    assert len({each.reason for each in allowed}) == len(allowed)

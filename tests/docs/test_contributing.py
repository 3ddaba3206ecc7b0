"""CONTRIBUTING.md names commands and files that exist, and the Makefile names tests that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TARGETS = sorted(set(re.findall(r"make (\S+?)[`\s,]", TEXT)))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"[`\s](\.?(?:hawkvision|tests|\.ci)/[\w./]+\w)", TEXT)))


def test_it_names_targets_and_files_at_all() -> None:
    assert {"demo", "lint", "test"} <= set(TARGETS)
    assert len(PATHS) > 5


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_of_make_is_one(target: str) -> None:
    planned = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.parametrize("path", [*PATHS, *re.findall(r"tests/[\w/]+\.py", MAKEFILE)])
def test_each_file_is_there(path: str) -> None:
    assert (ROOT / path).exists()

"""The base installs from wheels alone: no compiler is needed on a Raspberry Pi or with the newest Python."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLIBC = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014", "manylinux_2_5")


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "python"), [("aarch64", "3.11"), ("x86_64", "3.14")])
def test_every_dependency_of_the_base_is_a_wheel(processor: str, python: str, tmp_path: Path) -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    words = [word for each in GLIBC for word in ("--platform", f"{each}_{processor}")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--target", str(tmp_path),
         "--only-binary=:all:", "--python-version", python, *words, *needed],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Retrying" in done.stderr:  # pip's word when it gets no connection
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr

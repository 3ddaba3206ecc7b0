"""The fuzzer of image files begins, and finds nothing in a few seconds."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("atheris", reason="atheris has no wheel for this Python")


def test_parsers_of_images_bear_what_a_guided_fuzzer_finds() -> None:
    command = [sys.executable, "-m", "tests.fuzz.image_parsers", "-runs=4000", "-seed=1", "-max_len=4096"]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    done = re.search(r"Done (\d+) runs", ran.stderr)
    assert done is not None
    assert int(done[1]) >= 4000

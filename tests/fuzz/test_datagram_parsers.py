"""The fuzzers begin, and find nothing in a few seconds; `tests/fuzz/datagram_parsers.py` says how to let them run."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("atheris", reason="atheris has no wheel for this Python")


def test_parsers_of_the_datagram_transport_bear_what_a_guided_fuzzer_finds() -> None:
    command = [sys.executable, "-m", "tests.fuzz.datagram_parsers", "-runs=20000", "-seed=1", "-max_len=4096"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Done 20000 runs" in ran.stderr

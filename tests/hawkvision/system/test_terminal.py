"""Output where the terminal takes ASCII only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hawkvision
from hawkvision.system.terminal import plain
from tests.hawkvision.client.client_node import Start


@given(st.text())
def test_any_text_becomes_ascii(text: str) -> None:
    assert plain(text).isascii()


def test_signs_are_spelt_out_and_accents_dropped() -> None:
    assert plain("drop ≤ 1% … crème 猫") == "drop <= 1% ... creme ?"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii:strict"])
def test_a_table_of_answers_is_written_in_any_encoding(start: Start, tmp_path: Path, encoding: str) -> None:
    image = tmp_path / "crème.jpg"
    image.write_bytes(b"x")
    ran = subprocess.run(
        [sys.executable, "-m", "hawkvision.cli", "classify", str(image), "--url", start().url],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "200"},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout.decode(encoding.partition(":")[0])
    assert "tabby" in shown
    assert ("drop ≤ 1%" if encoding == "utf-8" else "drop <= 1%") in shown


def test_public_names_are_exported_and_nothing_is_imported_for_them_before_use() -> None:
    assert all(getattr(hawkvision, name) is not None for name in hawkvision.__all__)
    script = "import hawkvision, sys; print('aiohttp' in sys.modules, 'numpy' in sys.modules); hawkvision.Answer"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]

"""Options and commands of earlier releases are refused with the name that they have now."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hawkvision.cli.options import RENAMED_OPTIONS, renamed_option


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [(command, *pair) for command in RENAMED_OPTIONS for pair in RENAMED_OPTIONS[command].items()],
)
def test_an_old_name_is_answered_with_the_new_one(command: str, old: str, new: str) -> None:
    for words in ([command, old, "x"], ["--log-level", "info", command, "x", f"{old}=y"]):
        said = renamed_option(words)
        assert said is not None
        assert said.startswith(f"{old}: ")
        assert new in said


@pytest.mark.parametrize("words", [["classify", "--datagram", "lossy"], ["calibrate", "--lossy"], ["up"], []])
def test_other_words_are_left_alone(words: list[str]) -> None:
    assert renamed_option(words) is None


def test_the_program_ends_with_the_status_of_a_wrong_command_line() -> None:
    command = [sys.executable, "-m", "hawkvision.cli", "classify", "--lossy", "cat.jpg"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "error: --lossy: this option of `classify` is called --datagram since 0.2\n"


@pytest.mark.parametrize(
    ("command", "now"),
    [
        ("behind", "link-proxy"),
        ("rivals", "python -m tests.bench.policies"),
        ("peers", "python -m tests.bench.servers"),
    ],
)
def test_an_old_command_of_load_tests_is_answered_with_the_new_one(command: str, now: str) -> None:
    ran = subprocess.run([sys.executable, "-m", "loadgen", command], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"error: {command}: ")
    assert now in ran.stderr

"""Commands whose output nobody reads to its end, as in `hawkvision … | head -1`: they end without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from hawkvision.system.child_server import ServerProcess, running

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "hawkvision.cli"]


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    with running("edge", "--backend", "noop", "--port", "0") as node:
        yield node


@pytest.mark.parametrize(
    "command",
    [
        [*COMMAND, "doctor", "--json"],
        [sys.executable, "-m", "loadgen", "run", "--help"],
        [sys.executable, "-m", "hawkvision.datacenter", "--help"],
    ],
    ids=lambda command: " ".join(command[2:]),
)
def test_output_without_a_reader_ends_a_command_quietly(command: list[str]) -> None:
    read, written = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            command,
            stdout=written,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(written)
    assert done.returncode == 1
    assert done.stderr == ""


def test_a_reader_that_leaves_ends_a_batch_quietly(node: ServerProcess, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    image = tmp_path / "image.jpg"
    cv2.imwrite(str(image), pixels)
    command = [*COMMAND, "classify", "--json", "--url", node.url, *[str(image)] * 200]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("{")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


def test_a_connection_that_breaks_is_not_taken_for_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    from hawkvision.system.terminal import quiet_without_reader

    with pytest.raises(BrokenPipeError), quiet_without_reader():
        raise BrokenPipeError(32, "the server has closed the connection")
    assert capfd.readouterr() == ("", "")

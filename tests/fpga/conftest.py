"""The small model as a file, and a device that emulates it, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hawkvision.integer.onnx_writer import write
from tests.fpga.small_model import GRAPH, emulated


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    path.write_bytes(write(GRAPH))
    return path


@pytest.fixture(scope="module")
def udp(model: Path) -> Iterator[str]:
    with emulated(model, "--window", "3") as process:
        yield process.url

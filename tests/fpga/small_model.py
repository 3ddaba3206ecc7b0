"""A small model, images for it, what they give, and a device on which it is emulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hawkvision.integer import reference
from hawkvision.system.child_server import ServerProcess, running
from tests.fpga.designs import CASES

FIRST = next(iter(CASES.values()))
"""A design that is built for the simulation's own tests as well."""
GRAPH, FOLDING = FIRST.graph, FIRST.folding


def images(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)


def expected(planes: np.ndarray) -> np.ndarray:
    return reference.logits(GRAPH, planes).astype(np.float32) * np.float32(GRAPH.logit_scale)


@contextlib.contextmanager
def emulated(model: Path, *line: str) -> Iterator[ServerProcess]:
    with running("fpga.device.emulator", "--model", str(model), *line) as process:
        yield process

"""An edge node whose models take as many milliseconds as the variable `EDGE_MS` says; they wait without a processor."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from edge.inference.edge_stage import LoadedModel
from edge.run import run
from hawkvision.core.types import Pixels, Tensors

EDGE_MS: Final = "HAWKVISION_BENCH_EDGE_MS"


def slow_down(seconds: float) -> None:
    """Let every run of a model in this process take at least so long."""
    fast = LoadedModel.infer

    def infer(self: LoadedModel, whole: Sequence[Pixels], alone: Callable[[], bool]) -> Tensors:
        ends = time.monotonic() + seconds
        found = fast(self, whole, alone)
        time.sleep(max(0.0, ends - time.monotonic()))
        return found

    LoadedModel.infer = infer  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(os.environ[EDGE_MS]) * 1e-3)
    sys.exit(run(sys.argv[1:]))

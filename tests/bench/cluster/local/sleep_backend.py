"""The backend `sleep`: an accelerator that takes a fixed time per batch and no processor time.

A tier that is started with `with_sleep()` in its environment finds it by the entry point in `installed`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backend_registry import NoopBackend
from hawkvision.models.manifest import InputSpec

ROOT: Final = Path(__file__).resolve().parents[4]
"""The checkout."""
INSTALLED: Final = Path(__file__).with_name("installed")
"""A folder that holds the entry point as an installer would have written it."""
BATCH_MS: Final = "HAWKVISION_SLEEP_MS"
"""The variable with the duration of a batch; 100 if it is not set."""


def with_sleep(batch_ms: float, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a tier finds the backend."""
    found = [str(INSTALLED), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(found), BATCH_MS: f"{batch_ms:g}"}


class SleepBackend(NoopBackend):
    """The logits of the no-op backend, after the time of a batch."""

    def __init__(self, model: Path | bytes, spec: InputSpec, classes: int, threads: int) -> None:
        super().__init__((spec.height, spec.width, 3), classes)
        self._batch_s = float(os.environ.get(BATCH_MS, "100")) / 1e3

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`."""
        tensors = super().infer(batch)
        time.sleep(self._batch_s)
        return tensors

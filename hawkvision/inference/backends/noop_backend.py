"""A backend that never looks: fixed logits at once, so that what is measured is the serving path and nothing else."""

from __future__ import annotations

import numpy as np

from hawkvision.core.types import LOGITS, Logits, Pixels, Tensors
from hawkvision.inference.backends.interface import Outputs, check_batch, check_open


class NoopBackend:
    """Answers every image with the same logits, drawn once from a seed."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int, seed: int = 0) -> None:
        self._shape = input_shape
        self._logits: Logits = np.random.default_rng(seed).normal(0.0, 2.0, classes).astype(np.float32)
        self._closed = False

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return {LOGITS: self._logits.shape}

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`."""
        check_open("noop", self._closed)
        check_batch(batch, self._shape)
        return {LOGITS: np.tile(self._logits, (len(batch), 1))}

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True

"""Triton's Python backend (the only one in the wheel): one instance, a JPEG as one UINT8 tensor, no batching.

The C++ server in front of it is all of Triton's HTTP server, queue and shared memory. Tensors pass by DLPack, which
copies nothing; and the stub of that wheel, built for NumPy 1, hands NumPy 2 arrays of garbage.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

from tests.bench.servers.handlers import work


class TritonPythonModel:
    """What the backend's stub process instantiates."""

    def initialize(self, _: dict[str, Any]) -> None:
        """Load the model, in the stub."""
        self._classify = work.classifier()
        # Triton renames the capsules that it consumes, which NumPy complains of on standard error, at every request.
        sys.unraisablehook = lambda _: None

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        jpeg = np.from_dlpack(triton.get_input_tensor_by_name(request, "image")).tobytes()
        index = np.array([self._classify(jpeg)], np.int32)
        return triton.InferenceResponse([triton.Tensor.from_dlpack("index", index)])

"""ONNX Runtime, imported after its reports have been forbidden. Nothing else of ours imports it."""

from __future__ import annotations

import hawkvision.system.telemetry  # noqa: F401  first: ONNX Runtime reads the environment when it is imported

import onnxruntime as ort  # isort: skip

__all__ = ["ort"]

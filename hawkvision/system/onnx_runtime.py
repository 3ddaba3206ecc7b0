"""ONNX Runtime, imported after its reports have been forbidden. Nothing else of ours imports it."""

from __future__ import annotations

from typing import Any

import hawkvision.system.library_environment  # noqa: F401  first: ONNX Runtime reads the environment when it is imported

import onnxruntime as ort  # isort: skip

__all__ = ["ort", "quantiser"]


def quantiser() -> Any:
    """ONNX Runtime's module for quantisation, which needs the package onnx."""
    import onnxruntime.quantization

    return onnxruntime.quantization

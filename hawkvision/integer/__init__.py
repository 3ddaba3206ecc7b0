"""Quantised networks as exact integers, which the zoo writes, ONNX Runtime serves and FPGAs compute alike."""

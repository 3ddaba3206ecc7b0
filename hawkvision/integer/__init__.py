"""Quantised networks as exact integers: what the zoo trains, ONNX Runtime serves and FPGAs compute alike."""

"""Quantised networks as exact integers: the model zoo writes them, ONNX Runtime and FPGAs run them."""

"""Detected boxes: as rows of an array, fused, and compared with true ones."""

"""Measurements behind the design's choices, each a module that runs by itself and prints its table."""

"""Backends that run networks, and how they use the cores."""

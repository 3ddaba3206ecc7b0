"""Kinds of tasks: what a prediction is, how sure it is, and how wrong."""

"""Backends: what runs a model, behind one interface."""

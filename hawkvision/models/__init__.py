"""Manifests, model files and labelled images."""

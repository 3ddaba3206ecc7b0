"""Scaling images, as libraries do or faster."""

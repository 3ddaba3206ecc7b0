"""Readers of labelled images, one module per form."""

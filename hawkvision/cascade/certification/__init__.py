"""Thresholds with certificates: how they are searched, tested and kept in a profile."""

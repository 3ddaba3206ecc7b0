"""Moved to `hawkvision.artifacts`, where serving may import it."""

from hawkvision.artifacts import load_variant, load_verified, sha256_of, write_atomic

__all__ = ["load_variant", "load_verified", "sha256_of", "write_atomic"]

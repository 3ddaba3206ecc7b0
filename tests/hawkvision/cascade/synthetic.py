"""A small ladder with known behaviour, for tests that need a profile."""

from __future__ import annotations

import functools

import numpy as np

from hawkvision.cascade.profile import Profile, ProfileData
from hawkvision.cascade.profiling import profile_pair, profile_rung, split_indices
from hawkvision.types import Logits

SHA = "a" * 64


def make_logits(rng: np.random.Generator, labels: np.ndarray, strength: float, classes: int = 10) -> Logits:
    """Logits whose arg max is right more often the larger `strength`, and surer when right."""
    logits = rng.normal(size=(len(labels), classes))
    logits[np.arange(len(labels)), labels] += strength * rng.gamma(2.0, 0.5, len(labels))
    return (2.0 * logits).astype(np.float32)


@functools.cache
def make_profile(seed: int = 7, n: int = 3_000) -> Profile:
    """A profile of two rungs, `small` (about 75 % right) and `large` (about 95 %)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, n)
    split = split_indices(np.where(np.arange(n) % 3 == 0, "a", "b"), seed)
    small, edge = profile_rung("small", {"small": SHA}, SHA, make_logits(rng, labels, 3.0), labels, split, SHA)
    large, best = profile_rung("large", {"large": SHA}, SHA, make_logits(rng, labels, 8.0), labels, split, SHA)
    return Profile(
        format=1,
        task="digits",
        data=ProfileData(
            name="synthetic",
            sha256=SHA,
            seed=seed,
            profile=len(split.profile),
            certify=len(split.certify),
            held_out=len(split.held_out),
        ),
        rungs=(small, large),
        pairs=(profile_pair("small", "large", edge, best, labels, split),),
    )

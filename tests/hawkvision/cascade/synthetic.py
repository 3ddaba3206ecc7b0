"""A small ladder with known behaviour, for tests that need a profile."""

from __future__ import annotations

import functools

import numpy as np

from hawkvision.cascade.profile import Profile, ProfileData, RungProfile
from hawkvision.cascade.profiling import Looked, profile_pair, profile_rung, split_indices
from hawkvision.types import Logits

SHA = "a" * 64


def make_logits(rng: np.random.Generator, labels: np.ndarray, strength: float, classes: int = 10) -> Logits:
    """Logits whose arg max is right more often the larger `strength`, and surer when right."""
    logits = rng.normal(size=(len(labels), classes))
    logits[np.arange(len(labels)), labels] += strength * rng.gamma(2.0, 0.5, len(labels))
    return (2.0 * logits).astype(np.float32)


@functools.cache
def make_profile(seed: int = 7, n: int = 3_000, middle: bool = False) -> Profile:
    """A profile of two rungs, `small` (about 75 % right) and `large` (about 95 %); with `medium` between, if asked."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, n)
    split = split_indices(np.where(np.arange(n) % 3 == 0, "a", "b"), seed)

    def rung(name: str, strength: float, cost_ms: float) -> tuple[RungProfile, Looked]:
        return profile_rung(
            name, {name: SHA}, SHA, make_logits(rng, labels, strength), labels, split, SHA, cost_ms
        )  # fmt: skip

    small, edge = rung("small", 3.0, 1.0)
    large, best = rung("large", 8.0, 20.0)
    medium, between = rung("medium", 6.0, 4.0)
    return Profile(
        format=3,
        task="digits",
        data=ProfileData(
            name="synthetic",
            sha256=SHA,
            seed=seed,
            profile=len(split.profile),
            certify=len(split.certify),
            held_out=len(split.held_out),
        ),
        rungs=(small, medium, large) if middle else (small, large),
        pairs=(profile_pair(edge, best, labels, split, between if middle else None),),
    )

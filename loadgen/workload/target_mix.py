"""The mix of targets in a run: `--targets max_drop:0.01=0.2,quality:fast=0.5,…`.

Each part is `FIELD:VALUE[=SHARE]`, or `default[=SHARE]` for requests that name no target. A share that is not given is
1. Shares are weights: they are divided by their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import OnMiss, Quality
from loadgen.workload.record import TargetClass

DEFAULT: Final = "default"
MAX_CLASSES: Final = 100
DRAWN_AT_ONCE: Final = 1000
"""Classes: to draw many together takes hardly longer than to draw one."""
FIELDS: Final = {
    "max_drop": "max_accuracy_drop",
    "max_accuracy_drop": "max_accuracy_drop",
    "min_accuracy": "min_accuracy",
    "min_confidence": "min_confidence",
}
"""What may be written for the fields that take a fraction."""


def parse(text: str, deadline_ms: float | None = None, on_miss: str | None = None) -> list[TargetClass]:
    """The classes, each with the deadline and with what to do when it passes.

    Raises:
        ConfigError: naming the part that is none.
    """
    common = _common(deadline_ms, on_miss)
    weights: dict[tuple[str, str] | None, float] = {}
    for part in text.split(","):
        target, weight = _part(part.strip())
        if target in weights:
            raise ConfigError(f"--targets: {part.strip()!r} is given twice")
        weights[target] = weight
    if len(weights) > MAX_CLASSES:
        raise ConfigError(f"--targets: {len(weights)} classes; expected at most {MAX_CLASSES}")
    total = math.fsum(weights.values())
    if not 0.0 < total < math.inf:
        raise ConfigError("--targets: expected at least one share above 0")
    return [
        TargetClass({**({} if target is None else dict([target])), **common}, weight / total)
        for target, weight in weights.items()
    ]


def deal(classes: Sequence[TargetClass], n: int, seed: int) -> NDArray[np.intp]:
    """The class of each of `n` requests: every class as often as its share says, but for rounding, in random order.

    A shuffled deck has less variance than independent draws, so that two runs differ in what they measure alone.
    """
    bounds = np.rint(np.cumsum([each.share for each in classes]) * n).astype(np.intp)
    bounds[-1] = n
    deck = np.repeat(np.arange(len(classes)), np.diff(bounds, prepend=0))
    return np.random.default_rng(seed).permutation(deck)


def draws(classes: Sequence[TargetClass], seed: int) -> Iterator[int]:
    """The class of one request after another, without end: each drawn for itself, with its share as its chance.

    For an unknown number of requests. One seed gives the same classes, however many are taken.
    """
    rng = np.random.default_rng(seed)
    shares = np.array([each.share for each in classes])
    while True:
        yield from rng.choice(len(classes), DRAWN_AT_ONCE, p=shares / shares.sum()).tolist()


def _common(deadline_ms: float | None, on_miss: str | None) -> dict[str, str]:
    common: dict[str, str] = {}
    if deadline_ms is not None:
        if not 0.0 < deadline_ms < math.inf:
            raise ConfigError(f"--deadline-ms: expected a number above 0, got {deadline_ms!r}")
        common["deadline_ms"] = f"{deadline_ms:g}"
    if on_miss is not None:
        if on_miss not in tuple(OnMiss):
            raise ConfigError(f"--on-miss: expected {', '.join(OnMiss)}, got {on_miss!r}")
        common["on_miss"] = on_miss
    return common


def _part(part: str) -> tuple[tuple[str, str] | None, float]:
    """The field with its value (None for no target), and its weight."""
    written, equals, share = part.partition("=")
    weight = _weight(part, share) if equals else 1.0
    if written.strip() == DEFAULT:
        return None, weight
    name, value = (word.strip() for word in written.partition(":")[::2])
    if name == "quality" and value in tuple(Quality):
        return ("quality", value), weight
    if name in FIELDS and _is_fraction(value):
        return (FIELDS[name], repr(float(value))), weight  # as nodes read it: without blanks, in few digits
    raise ConfigError(
        f"--targets: expected FIELD:VALUE=SHARE such as max_drop:0.01=0.2 or quality:fast; FIELD is quality, max_drop, "
        f"min_accuracy or min_confidence (with a fraction from 0 to 1), or `{DEFAULT}` alone; got {part!r}"
    )


def _weight(part: str, share: str) -> float:
    try:
        weight = float(share)
    except ValueError:
        weight = math.nan
    if not 0.0 <= weight < math.inf:
        raise ConfigError(f"--targets: {part!r}: expected a share of 0 or more after '=', got {share!r}")
    return weight


def _is_fraction(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False

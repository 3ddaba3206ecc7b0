"""What the caller's link alone takes of each request: about the least that any server behind it could have had.

A request waits while the link is down, and takes the link's delay there and back. Neither bytes nor losses count, nor
what others have left in a queue, so nobody is that quick; but a tail that is no longer than this is the weather's.
"""

from __future__ import annotations

import math

import numpy as np

from loadgen.bootstrap import Floats, quantiles
from loadgen.counted import counted_of
from loadgen.record import CLIENT_EDGE, LinkSample, Run


def link_alone_ms(run: Run, level: float) -> float | None:
    """A percentile (0..1) over the counted requests; None if the run's record has no link between client and edge.

    The way back is taken to be like the way up, which is what a record has.

    Raises:
        ConfigError: if no request of the run counts.
    """
    samples = sorted((each for each in run.links if each.link == CLIENT_EDGE), key=lambda each: each.at_s)
    if not samples:
        return None
    link = _Link(samples)
    due = np.array([each.due_s for each in counted_of(run).outcomes])
    return float(quantiles((link.passed(link.passed(due)) - due) * 1e3, [level])[0])


class _Link:
    """The samples of one link, in order of time, as columns."""

    def __init__(self, samples: list[LinkSample]) -> None:
        self._at = np.array([each.at_s for each in samples])
        # When what is sent within each sample's time leaves at the earliest, and the delay that it meets then.
        self._leaves = np.full(len(samples), math.inf)
        self._delay_s = np.full(len(samples), 0.0)
        for number, each in reversed(list(enumerate(samples))):
            if each.up:
                self._leaves[number], self._delay_s[number] = each.at_s, each.delay_ms / 1e3
            elif number + 1 < len(samples):
                self._leaves[number], self._delay_s[number] = self._leaves[number + 1], self._delay_s[number + 1]

    def passed(self, sent_s: Floats) -> Floats:
        """When what is sent at these moments is at the other end."""
        number = np.maximum(np.searchsorted(self._at, sent_s, side="right") - 1, 0)
        passed: Floats = np.maximum(sent_s, self._leaves[number]) + self._delay_s[number]
        return passed

"""The last answers of a task, for people who watch the node. Nothing of them is written anywhere.

An answer costs two appends. Percentiles and shares are computed when somebody asks. Images are remembered only where
the operator bounds those that are kept (`review_max_bytes` and `review_max_days`), and only while somebody watches.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

import msgspec
import numpy as np

from hawkvision.core.types import Answer

WINDOW_S: Final = 60.0
MOST_COUNTED: Final = 4096
"""Requests of the last `WINDOW_S` that count, 90 bytes each; of more than 68 a second, the last ones."""
MOST_SHOWN: Final = 24
"""Answers and images that are remembered."""
MOST_IMAGE_BYTES: Final = 16_000_000
"""Bytes of these images together, if `review_max_bytes` is not less."""


class Shown(NamedTuple):
    """An answer, and who asked."""

    at: float
    """Clock time at which it was ready."""
    answer: Answer
    stream: str | None
    """As the request names it."""
    caller: str


class LastMinute(msgspec.Struct, frozen=True):
    """The requests of the last `WINDOW_S`, or the last `MOST_COUNTED`. Shares are fractions of all of them."""

    per_s: float = 0.0
    answers: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    edge: float = 0.0
    escalated: float = 0.0
    degraded: float = 0.0
    refused: float = 0.0


class RecentAnswers:
    """The last answers of one task. For one event loop."""

    def __init__(self, since: float, most_bytes: int = 0, most_age_s: float = 0.0) -> None:
        """Begin.

        Args:
            since: clock time, in seconds.
            most_bytes: of the images that are remembered together; 0 for none.
            most_age_s: after which an image is forgotten; 0 keeps none.
        """
        self._since = since
        self._most_bytes = min(most_bytes, MOST_IMAGE_BYTES) if most_age_s else 0
        self._most_age_s = most_age_s
        self._counted: deque[float] = deque(maxlen=3 * MOST_COUNTED)
        """Of each when, the milliseconds or NaN for a refusal, and 1 if it was escalated, 2 more if it is degraded."""
        self.shown: deque[Shown] = deque(maxlen=MOST_SHOWN)
        self._images: deque[tuple[float, str, bytes]] = deque()
        """When, the answer's id, and the image; the oldest first."""
        self._held = 0
        self._watched = False

    def add(self, answer: Answer, started: float, stream: str | None, caller: str, image: bytes) -> None:
        """Note an answer to a request that came at `started`."""
        total_ms = answer.timing_ms.total
        at = started + total_ms * 1e-3
        self._counted.extend((at, total_ms, answer.escalated + 2 * answer.degraded))
        self.shown.append(Shown(at, answer, stream, caller))
        if self._watched:
            self._images.append((at, answer.id, image))
            self._held += len(image)
            self._drop_images(at)

    def refused(self, now: float) -> None:
        """Note a request that got an error."""
        self._counted.extend((now, math.nan, 0))

    def watch(self, *, watched: bool) -> None:
        """Begin to remember images, or forget them."""
        self._watched = watched and self._most_bytes > 0
        if not self._watched:
            self._images.clear()
            self._held = 0

    def images(self, now: float) -> dict[str, bytes]:
        """The images of the last answers, by the answers' ids."""
        self._drop_images(now)
        return {name: image for _, name, image in self._images}

    def last_minute(self, now: float) -> LastMinute:
        """What became of the last requests."""
        since = max(self._since, now - WINDOW_S)
        if len(self._counted) == self._counted.maxlen:
            since = max(since, self._counted[0])
        kept = np.fromiter(self._counted, np.float64).reshape(-1, 3)
        counted = kept[kept[:, 0] >= since]
        if not len(counted):
            return LastMinute()
        _, ms, flags = counted.T
        times = ms[~np.isnan(ms)]
        p50_ms, p99_ms = np.percentile(times, (50, 99)).round(3).tolist() if len(times) else (None, None)
        n, escalated = len(counted), int((flags % 2).sum())
        return LastMinute(
            per_s=round(n / max(now - since, 1.0), 3),
            answers=len(times),
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            edge=(len(times) - escalated) / n,
            escalated=escalated / n,
            degraded=int((flags >= 2).sum()) / n,
            refused=(n - len(times)) / n,
        )

    def _drop_images(self, now: float) -> None:
        images = self._images
        while images and (
            self._held > self._most_bytes or len(images) > MOST_SHOWN or images[0][0] < now - self._most_age_s
        ):
            self._held -= len(images.popleft()[2])

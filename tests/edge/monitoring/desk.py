"""A log of audits, and people who review it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edge.monitoring.evidence_log import EvidenceLog
from edge.monitoring.labelling import Review, ReviewItem, ReviewQuery, Showing
from edge.monitoring.review import DELTA, AuditReview
from hawkvision.guarantee.review import WHOLE_PART, share_of_delta
from hawkvision.tasks.kind import TaskKind
from tests.clocks import ManualClock
from tests.hawkvision.cascade.synthetic import KIND, make_logits, make_profile

T = TypeVar("T")
PROFILE = make_profile()
PAIR = PROFILE.pair("small", "large")
VERSIONS = "1"


class Desk:
    """A log of audits of the synthetic cascade, whose true classes are known, and its review."""

    def __init__(self, folder: Path, *, certificates: bool = True, kind: TaskKind[Any] = KIND) -> None:
        self.file = folder / "certificates.json"
        self.truths: list[int] = []
        self.clock = ManualClock()
        self.alarm = -math.inf
        self.open(folder, 0.02, kind, certificates=certificates)

    def open(self, folder: Path, share: float, kind: TaskKind[Any] = KIND, *, certificates: bool = True) -> None:
        """Start, with this share of audits; another one than before begins a block."""
        self.log = EvidenceLog(folder / "audits", share, most_bytes=10_000_000, most_days=1.0)
        self.reviewer = AuditReview(
            "digits", kind, self.log, lambda: (PROFILE, PAIR), lambda: VERSIONS,
            self.file if certificates else None, self.clock, alarm_raised=lambda: self.alarm,
        )  # fmt: skip

    def audit(
        self, n: int, *, missing: int = 0, versions: str = VERSIONS, u: float = 0.0, stream: bytes = b"\x01"
    ) -> None:
        """Audits of images like those of the profile, of which the first are missing."""
        rng = np.random.default_rng(len(self.truths) + 1)
        labels = rng.integers(0, 10, n)
        temperature = PROFILE.stage("small").temperature
        edge = KIND.calibrated(list(make_logits(rng, labels, 3.0)), temperature)
        best = make_logits(rng, labels, 8.0).argmax(1)
        scores = KIND.score_all(edge, PAIR.score)
        for place, (output, reference, score) in enumerate(zip(edge, best.tolist(), scores.tolist(), strict=True)):
            image, said = f"{len(self.truths)}".encode(), int(np.argmax(output))
            self.truths.append(int(labels[place]))
            number = self.log.draw(u, stream, versions, image, score, {"index": said})
            assert number == len(self.truths)
            answer = None if place < missing else {"index": reference}
            self.log.settle(number, image, answer, float(said != reference))

    async def page(self, **asked: Any) -> Review:
        return await self.reviewer.show(ReviewQuery(**{"limit": 100, **asked}))

    async def label_all(self, say: Callable[[int, Any], Any], pages: int = 99) -> int:
        """Label what waits by `say`, which gets the true class and the image. How many were labelled."""
        done, page = 0, await self.page()
        while page.items and pages:
            pages -= 1
            for item in page.items:
                done += not Showing.read(item.id).again
                await self.reviewer.label(item.id, say(self.truths[number_of(item) - 1], item))
            page = await self.page()
        return done


def number_of(item: ReviewItem) -> int:
    return Showing.read(item.id).number


def truly(truth: int, _: Any) -> str:
    return KIND.labels[truth]


def by_clicks(truth: int, item: Any) -> str:
    """Who only says which answer is right."""
    names = [answer.label for answer in item.answers]
    if KIND.labels[truth] in names:
        return "right" if len(names) == 1 else ("first", "second")[names.index(KIND.labels[truth])]
    return "wrong" if len(names) == 1 else "neither"


def at_desk(folder: Path, scenario: Callable[[Desk], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        desk = Desk(folder, **options)
        try:
            return await scenario(desk)
        finally:
            await desk.log.close()

    return asyncio.run(run())


def parts(*places: int) -> list[float]:
    """What the exact test of the j-th opened block may spend."""
    return [share_of_delta(WHOLE_PART * DELTA, [False] * (j - 1)) for j in places]


def to_best(review: Any) -> dict[float, float]:
    return {target.max_accuracy_drop: target.to_best for target in review.targets}

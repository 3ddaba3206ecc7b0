"""MLPerf LoadGen's system under test and sample library, on an event loop."""

from __future__ import annotations

import array
import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from loadgen.clients.base import ClientReply, RequestClient, RequestTimes
from loadgen.commands.mlperf.accuracy import AnswerJudge
from loadgen.commands.options import Setup
from loadgen.workload import target_mix

PERFORMANCE_SAMPLES: Final = 1024
"""Images of a performance run at most, as the rules have it for ResNet-50 (inference_rules.adoc)."""


class ClassTally(msgspec.Struct):
    """What came of the queries of one target class."""

    target: str
    asked: int = 0
    answered: int = 0
    right: int | float | None = None
    """How right the answers are, summed over all that were asked; None without labels."""

    @property
    def accuracy(self) -> float | None:
        """Right answers over all requests; None without labels or requests."""
        return None if self.right is None or not self.asked else self.right / self.asked


class LoadGenBridge:
    """LoadGen's system under test on the running event loop."""

    def __init__(self, loadgen: Any, asker: RequestClient, setup_: Setup, judge: AnswerJudge) -> None:
        self.judge = judge
        self.completed = 0
        self.failed = 0
        self.errors: dict[str, int] = {}
        unlabelled = setup_.dataset.labels is None
        self.tallies = [ClassTally(each.name, right=None if unlabelled else 0) for each in setup_.classes]
        """By target class."""
        self._loadgen = loadgen
        self._asker = asker
        self._bodies = setup_.dataset.bodies
        self._limit = setup_.max_in_flight
        self._fields = [each.fields for each in setup_.classes]
        # Other draws than the warm-up's, so that a server does not see the same requests again.
        self._targets = target_mix.draws(setup_.classes, setup_.seed + 2)
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, int, int]] = deque()
        """Identity, image and class of queries that LoadGen issued and no caller has taken yet."""
        self._active = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def drive(self, settings: Any, folder: Path) -> None:
        """Run LoadGen to its end. It cannot be stopped: an interrupt ends the process."""
        outputs = self._loadgen.LogOutputSettings()
        outputs.outdir = str(folder)
        outputs.copy_summary_to_stdout = False
        logs = self._loadgen.LogSettings()
        logs.log_output = outputs
        logs.enable_trace = False
        total = len(self._bodies)
        system = self._loadgen.ConstructSUT(self._issue, lambda: None)
        library = self._loadgen.ConstructQSL(total, min(total, PERFORMANCE_SAMPLES), lambda _: None, lambda _: None)

        def test() -> None:
            self._loadgen.StartTestWithLogSettings(system, library, settings, logs)
            self._loop.call_soon_threadsafe(self._finish)

        threading.Thread(target=test, name="mlperf-loadgen", daemon=True).start()
        try:
            await self._over
        except asyncio.CancelledError:
            sys.stderr.write(f"interrupted; LoadGen cannot be stopped: its logs in {folder} are incomplete\n")
            sys.stderr.flush()
            os._exit(130)
        self._loadgen.DestroyQSL(library)
        self._loadgen.DestroySUT(system)

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _issue(self, samples: Sequence[Any]) -> None:
        """Called by LoadGen, on its thread."""
        self._loop.call_soon_threadsafe(self._take, [(sample.id, sample.index) for sample in samples])

    def _take(self, samples: list[tuple[int, int]]) -> None:
        self._waiting.extend((identity, image, next(self._targets)) for identity, image in samples)
        for _ in range(min(len(samples), self._limit - self._active)):
            self._active += 1
            task = self._loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _work(self) -> None:
        """Ask as long as there is something to ask."""
        while self._waiting:
            identity, image, target = self._waiting.popleft()
            replied = await self._asker.ask(self._bodies[image], self._fields[target], RequestTimes())
            self._count(replied, image, self.tallies[target])
            self._complete(identity, self.judge.logged(replied, image))
        self._active -= 1

    def _count(self, replied: ClientReply, image: int, tally: ClassTally) -> None:
        self.completed += 1
        tally.asked += 1
        if not self.judge.answered(replied):
            self.failed += 1
            self.errors[replied.error] = self.errors.get(replied.error, 0) + 1
            return
        tally.answered += 1
        if tally.right is not None:
            tally.right += self.judge.right(replied, image) or 0

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What breaks here must not leave LoadGen waiting for an answer for ever."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)

    def _complete(self, identity: int, logged: bytes) -> None:
        answer = array.array("B", logged)
        address, length = answer.buffer_info()
        response = self._loadgen.QuerySampleResponse(identity, address, length * answer.itemsize)
        self._loadgen.QuerySamplesComplete([response])

"""The monitor of a node, with its file, its metrics and its lines in the log.

    a caller's image ─► the log of the stream that it names ─► its caller's log ─► the node's log

An alarm in one of the three suspends all targets of the image (`hawkvision.guarantee.monitor`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, NamedTuple

from edge.monitoring.kept_written import KeptWritten
from edge.monitoring.state_store import StateError, StateFile, encode_state
from edge.monitoring.stream_keys import stream_key
from hawkvision.cascade.route import StageClaims
from hawkvision.core.clock import Clock
from hawkvision.core.logs import Transitions
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.guarantee.monitor import NODE, UNWATCHED, Dates, Monitor, Stream, StreamState, Watched

log = logging.getLogger("hawkvision.edge")

MOST_ENDED: Final = 20
"""Alarms that are remembered after their end, until the node ends."""
BATCH: Final = 64
"""States encoded at once, so that the event loop is held for a millisecond at most."""


class EndedAlarm(NamedTuple):
    """An alarm that stands no more; times are seconds since 1970."""

    stream: bytes
    raised: float
    ended: float
    cause: str


class Streams:
    """All streams of a node. Made and used on one event loop."""

    def __init__(
        self,
        task: str,
        limit: int,
        audit_share: float,
        metrics: EdgeMetrics,
        file: StateFile | None,
        clock: Clock,
        draws: random.Random,
        in_force: Collection[str] | None = None,
        dates: Dates = Dates(),  # noqa: B008 - immutable
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start with what the file knows.

        Args:
            task: for metrics.
            limit: see `Monitor`.
            audit_share: of all images, 0..1.
            metrics: where to count.
            file: where states are kept.
            clock: for the time that audits wait.
            draws: random numbers that choose the images to audit.
            in_force: see `Monitor`.
            dates: of the images behind the certificates.
            wall: seconds since 1970.
        """
        self.wall = wall
        self._task = task
        self._metrics = metrics
        self._file = file
        self._transitions = Transitions(log)
        self._complaint = ""
        self._changed: dict[bytes, Stream | None] = {}
        """What is to be written to the file; None is to be deleted from it."""
        self.ended_alarms: deque[EndedAlarm] = deque(maxlen=MOST_ENDED)
        """The oldest first."""
        self.monitor = Monitor(
            limit, audit_share, clock.now, draws.random, on_change=self._note, on_turn=self._turned, in_force=in_force,
            dates=dates, states=self._read(), wall=wall,
        )  # fmt: skip
        suspended = sum(stream.alarm for stream in self.monitor.all())
        if suspended:
            log.warning("guarantee suspended: %d streams have been since before this start", suspended)
        metrics.streams.labels(task).set_function(self.monitor.__len__)
        metrics.streams_suspended.labels(task).set_function(lambda: sum(stream.alarm for stream in self.monitor.all()))
        self._kept = None if file is None else KeptWritten(self.write)
        """A crash loses the evidence of two seconds, and no alarm."""

    def watched(
        self, stream: str | None, claims: StageClaims | None, caller: str = "", counted_as: str | None = None
    ) -> Watched:
        """What watches a request.

        Args:
            stream: that the request names.
            claims: of its certificate; None without one.
            caller: who sent it.
            counted_as: see `Route.counted_as`.
        """
        if claims is None:
            return UNWATCHED
        key = stream_key(None, caller)
        logs = self.monitor.logs(key, None if stream is None else stream_key(stream, caller))
        window = None if counted_as is None else (key.hex()[:16], counted_as)
        return Watched(self.monitor, logs, claims.edge, claims.intermediate, window)

    def watching(self, stream: Stream, claims: StageClaims | None, counted_as: str | None) -> Watched:
        """As `watched`, by the log of a stream and the node's alone: a log does not say whose stream it is."""
        if claims is None:
            return UNWATCHED
        node, named = self.monitor.node, stream.state.named
        logs = (stream,) if stream is node else (stream, node)
        window = None if counted_as is None or named or stream is node else (stream.key.hex()[:16], counted_as)
        return Watched(self.monitor, logs, claims.edge, claims.intermediate, window)

    async def write(self) -> None:
        """Write what has changed, a batch at a time. What cannot be written is tried again the next time."""
        file, changed = self._file, self._changed
        if file is None:
            return
        for _ in range(1 + len(changed) // BATCH):
            batch = dict(islice(changed.items(), BATCH))
            if not batch:
                return
            for key in batch:
                del changed[key]
            states = {key: self._encoded(stream) for key, stream in batch.items()}
            try:
                await asyncio.to_thread(file.write, states, file.next())
            except StateError as error:
                # What could not be deleted is deleted after the next start: memory is bounded.
                self._changed = {key: stream for key, stream in (batch | changed).items() if stream is not None}
                self._failed("write", error)
                return
            self._complaint = ""

    async def close(self) -> None:
        """Write what is not written yet, and close the file."""
        self._transitions.close()
        if self._file is not None and self._kept is not None:
            await self._kept.close()
            await asyncio.to_thread(self._file.close)

    def _read(self) -> dict[bytes, StreamState]:
        if self._file is None:
            return {}
        try:
            states, broken = self._file.read()
        except StateError as error:
            self._failed("read", error)
            return {NODE: StreamState(carried=True)}  # there may have been an alarm
        if broken:
            self._failed("read", StateError(f"{broken} states of streams cannot be read: these begin suspended"))
        return states

    def _note(self, key: bytes, stream: Stream | None) -> None:
        if self._file is not None:
            self._changed[key] = stream

    def _turned(self, stream: Stream) -> None:
        """Write an alarm before any answer says so; count and log it, or its end."""
        if stream.alarm:
            self._metrics.alarms.labels(self._task).inc()
            if self._file is not None:
                try:
                    self._file.write({stream.key: self._encoded(stream)}, self._file.next(), sync=True)
                except StateError as error:
                    self._failed("write", error)
        else:
            self.ended_alarms.append(EndedAlarm(stream.key, stream.state.raised, self.wall(), stream.state.cause))
        whose = (
            "of the node itself" if stream is self.monitor.node else "named" if stream.state.named else "of a caller"
        )
        logs = stream.state.logs.values()
        # Any number of callers and names must not fill the log: they are one subject each.
        self._transitions.note(
            whose,
            (stream.key, stream.alarm, sum(each.alarms for each in logs)),
            logging.WARNING if stream.alarm and not stream.state.named else logging.INFO,
            "guarantee %s: stream %s %s is %s certified, after %d audits of which %g disagreed",
            "suspended" if stream.alarm else "restored",
            stream.key.hex(),
            whose,
            "not as" if stream.alarm else "as",
            sum(each.audits for each in logs),
            sum(each.disagreements for each in logs),
        )

    def _encoded(self, stream: Stream | None) -> bytes | None:
        return None if stream is None else encode_state(self.monitor.kept(stream))

    def _failed(self, operation: str, error: Exception) -> None:
        # Logged once, not for every write while a disk is full. The metric counts them all.
        if self._complaint != str(error):
            self._complaint = str(error)
            log.error("%s", error)
        self._metrics.state_failures.labels(self._task, operation).inc()

"""Keeps the states of streams: of those that are evicted, in memory, and of all that change, in a file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Collection
from itertools import islice
from typing import Final

from edge.monitoring.state_store import StateError, StateFile, StreamState, encode_state
from edge.monitoring.stream import Stream
from edge.monitoring.stream_keys import DEFAULT_STREAM
from hawkvision.core.metrics import EdgeMetrics

log = logging.getLogger("hawkvision.edge")

WRITE_INTERVAL_S: Final = 2.0
"""A crash loses as much."""
BATCH: Final = 64
"""States encoded at once, so that the event loop is held for a millisecond at most."""


class StateKeeper:
    """Without a file, it keeps only suspended streams. Made and used on one event loop."""

    def __init__(self, task: str, limit: int, metrics: EdgeMetrics, file: StateFile | None) -> None:
        """Begin to write, if there is a file.

        Args:
            task: for metrics.
            limit: of the evicted streams in memory.
            metrics: where to count.
            file: where states are kept.
        """
        self._task = task
        self._limit = limit
        self._metrics = metrics
        self._file = file
        self._unwritten: dict[bytes, Stream] = {}
        self._evicted: OrderedDict[bytes, StreamState] = OrderedDict()
        """Streams that are not in the file yet, which lags by `WRITE_INTERVAL_S`. Without a file, suspended ones."""
        self._full = file is not None and file.full
        """Whether an alarm had to be forgotten. From then on, unknown streams begin suspended."""
        self._complaint = ""
        self._stopping = asyncio.Event()
        if file is not None and file.suspended:
            log.warning("guarantee suspended: %d streams have been since before this start", file.suspended)
        self._writer = asyncio.create_task(self._keep_writing()) if file else None

    def open(self, key: bytes, profiles: Collection[str] | None) -> Stream:
        """A stream with its past, as far as it is known; `profiles`: see `Stream`."""
        state = self._evicted.pop(key, None)
        if state is not None:
            stream = Stream(key, state, profiles)
            if self._file is not None:
                self._unwritten[key] = stream
            return stream
        if self._file is not None:
            try:
                state = self._file.read(key)
            except StateError as error:
                self._failed("read", error)
                state = StreamState(suspended_before=True)  # it may have been
        if state is None:
            state = StreamState(suspended_before=self._full and key != DEFAULT_STREAM)
        return Stream(key, state, profiles)

    def changed(self, stream: Stream) -> None:
        """Mark a stream to be written."""
        if self._file is not None:
            self._unwritten[stream.key] = stream

    def evict(self, stream: Stream) -> None:
        """Keep a stream that leaves memory. What requests under way still report to it is lost."""
        unwritten = self._unwritten.pop(stream.key, None) is not None
        if not (stream.suspended if self._file is None else unwritten):
            return
        if len(self._evicted) >= self._limit:  # streams come faster than the file takes them
            self._drop_one()
        self._evicted[stream.key] = stream.state

    async def write(self) -> None:
        """Write what is unwritten now, a batch at a time. What cannot be written is tried again the next time."""
        file = self._file
        if file is None:
            return
        rounds = 1 + (len(self._unwritten) + len(self._evicted)) // BATCH
        for _ in range(rounds):
            evicted = dict(islice(self._evicted.items(), BATCH))
            changed = dict(islice(self._unwritten.items(), BATCH - len(evicted)))
            if not evicted and not changed:
                return
            for key in changed:
                del self._unwritten[key]
            states = evicted | {key: stream.state for key, stream in changed.items()}
            rows = [(key, encode_state(state), state.suspended) for key, state in states.items()]
            try:
                await asyncio.to_thread(file.write, rows, full=self._full)
            except StateError as error:
                self._unwritten = changed | self._unwritten
                self._failed("write", error)
                return
            self._full = self._full or file.full
            self._complaint = ""
            for key, written in evicted.items():
                if self._evicted.get(key) is written:
                    del self._evicted[key]

    async def close(self) -> None:
        """Write what is not written yet, and close the file."""
        if self._file is None or self._writer is None:
            return
        self._stopping.set()
        await self._writer
        await self.write()
        await asyncio.to_thread(self._file.close)

    def _drop_one(self) -> None:
        for key, state in self._evicted.items():
            if not state.suspended:
                del self._evicted[key]
                break
        else:
            self._evicted.popitem(last=False)
            if not self._full:
                log.error(
                    "more than %d suspended streams had to make room: from now on, streams that are not known begin "
                    "suspended", self._limit,
                )  # fmt: skip
            self._full = True
        self._metrics.state_failures.labels(self._task, "dropped").inc()

    async def _keep_writing(self) -> None:
        while not self._stopping.is_set():
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_INTERVAL_S):
                    await self._stopping.wait()
            await self.write()

    def _failed(self, operation: str, error: Exception) -> None:
        # Logged once, not for every stream that comes while a disk is full. The metric counts them all.
        if self._complaint != str(error):
            self._complaint = str(error)
            log.error("%s", error)
        self._metrics.state_failures.labels(self._task, operation).inc()

"""The streams of a node: who is controlled, what is remembered of it, and for how long.

A stream is what a caller names with the field `stream`, or the node's own default stream. Each certificate that a
stream uses has a controller (`hawkvision.cascade.online`). Names come from callers, so memory is bounded: they are
hashed, and beyond `limit` controllers the one that was used longest ago makes room. The default stream's are not among
those: there are as many as there are certificates, and nothing that a caller sends moves them out.

With a state file, what makes room is written to it and taken up again when its stream comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from edge.state import Place, StateError, StateFile, encode_state
from hawkvision.cascade.online import State, StreamControl, Terms
from hawkvision.logs import Transitions
from hawkvision.metrics import EdgeMetrics

log = logging.getLogger("hawkvision.edge")

DEFAULT_STREAM: Final = bytes(16)
"""Place of the node's own stream; a hash of 128 bits does not meet it."""
ROWS_PER_STREAM: Final = 4
"""The file remembers more than memory holds: a stream that comes back within a day of many others is still known."""
WRITE_INTERVAL_S: Final = 2.0
"""A crash forgets as much; a controller changes its mind over hundreds of requests."""
BATCH: Final = 256
"""States encoded at once: 2 µs each, so that the event loop is held for half a millisecond."""


def stream_place(stream: str | None) -> bytes:
    """The 16 bytes that stand for a stream's name."""
    return DEFAULT_STREAM if stream is None else hashlib.blake2b(stream.encode(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Kept:
    """A controller in its place: feeding it through here is remembered and counted."""

    place: Place
    control: StreamControl
    _streams: Streams

    @property
    def void(self) -> bool:
        """Whether traffic was found to be other than certified."""
        return self.control.void

    def accepted(self, score: float, probability: float, differs: bool | None) -> None:
        """See `StreamControl.accepted`."""
        void = self.control.void
        self.control.accepted(score, probability, differs)
        self._streams.changed(self, void)

    def escalated(self, score: float, differs: bool | None) -> None:
        """See `StreamControl.escalated`."""
        void = self.control.void
        self.control.escalated(score, differs)
        self._streams.changed(self, void)

    def fell_short(self, score: float) -> None:
        """See `StreamControl.fell_short`."""
        void = self.control.void
        self.control.fell_short(score)
        self._streams.changed(self, void)


class Streams:
    """All controllers of a node. Made and used on one event loop."""

    def __init__(self, task: str, limit: int, audit_share: float, metrics: EdgeMetrics, file: StateFile | None) -> None:
        """Start with none; `limit` bounds the controllers of named streams."""
        self._task = task
        self._limit = limit
        self._audit_share = audit_share
        self._metrics = metrics
        self._file = file
        self._own: dict[Place, Kept] = {}
        self._named: OrderedDict[Place, Kept] = OrderedDict()
        self._unwritten: dict[Place, Kept] = {}
        # What made room and is not in the file yet; the file may lag behind by `WRITE_INTERVAL_S`.
        self._leaving: OrderedDict[Place, State] = OrderedDict()
        self._complaint = ""
        self._reported = Transitions(log)
        self._stopping = asyncio.Event()
        self._writer = asyncio.create_task(self._keep_writing()) if file else None
        metrics.streams.labels(task).set_function(self.__len__)
        metrics.streams_void.labels(task).set_function(lambda: sum(kept.void for kept in self._all()))
        metrics.accuracy_debt.labels(task).set_function(lambda: sum(k.control.state.debt for k in self._all()))

    def __len__(self) -> int:
        return len(self._own) + len(self._named)

    def find(self, stream: str | None, terms: Terms) -> Kept:
        """The controller of a stream under a certificate: in memory, from the file, or new."""
        place = Place(stream_place(stream), terms.key)
        if stream is None:
            found = self._own.get(place)
        else:
            found = self._named.get(place)
            if found is not None:
                self._named.move_to_end(place)
        return found or self._open(place, terms)

    def changed(self, kept: Kept, was_void: bool) -> None:
        """Remember to write, and count what the change was."""
        if self._file is not None and kept is (self._own.get(kept.place) or self._named.get(kept.place)):
            self._unwritten[kept.place] = kept
        if kept.void != was_void:
            counter = self._metrics.alarms if kept.void else self._metrics.returns
            counter.labels(self._task).inc()
            self._report(kept)

    async def close(self) -> None:
        """Write what is not written yet, and close the file."""
        self._reported.close()
        if self._file is None or self._writer is None:
            return
        self._stopping.set()
        await self._writer
        await self._write_all(self._file)
        await asyncio.to_thread(self._file.close)

    def _report(self, kept: Kept) -> None:
        state, own = kept.control.state, kept.place.stream == DEFAULT_STREAM
        # Callers may name any number of streams, and must not fill the log with them: they are one subject.
        self._reported.note(
            f"own {kept.place.certificate}" if own else "named",
            kept.void if own else (kept.place, kept.void, state.alarms),
            logging.WARNING if own and kept.void else logging.INFO,
            "guarantee %s: stream %s is %s certified, after %d requests with %d of %d audits disagreeing",
            "suspended" if kept.void else "restored",
            "of the node itself" if own else kept.place.stream.hex(),
            "not as" if kept.void else "as",
            state.requests,
            state.disagreements,
            state.audits,
        )

    def _all(self) -> Iterator[Kept]:
        return chain(self._own.values(), self._named.values())

    def _open(self, place: Place, terms: Terms) -> Kept:
        kept = Kept(place, StreamControl(terms, self._audit_share), self)
        self._take_up(kept)
        if place.stream == DEFAULT_STREAM:
            self._own[place] = kept
            return kept
        while len(self._named) >= self._limit:
            _, oldest = self._named.popitem(last=False)
            self._let_go(oldest)
        self._named[place] = kept
        return kept

    def _take_up(self, kept: Kept) -> None:
        if self._file is None:
            return
        try:
            state = self._leaving.pop(kept.place, None) or self._file.read(kept.place)
        except StateError as error:
            self._failed("read", error)  # and the stream begins anew
            return
        if state is not None and kept.control.restore(state):
            self._unwritten[kept.place] = kept
            if kept.void and kept.place.stream == DEFAULT_STREAM:
                self._report(kept)

    def _let_go(self, kept: Kept) -> None:
        """Requests under way may still feed what has made room; that is lost, as what a crash would lose."""
        if self._file is None or self._unwritten.pop(kept.place, None) is None:
            return
        if len(self._leaving) >= self._limit:  # streams come faster than the file takes them
            self._leaving.popitem(last=False)
            self._metrics.state_failures.labels(self._task, "dropped").inc()
        self._leaving[kept.place] = kept.control.state

    async def _keep_writing(self) -> None:
        assert self._file is not None
        while not self._stopping.is_set():
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_INTERVAL_S):
                    await self._stopping.wait()
            await self._write_all(self._file)

    async def _write_all(self, file: StateFile) -> None:
        """One pass over what is unwritten, a batch at a time; what cannot be written is tried again at the next."""
        rounds = 1 + (len(self._unwritten) + len(self._leaving)) // BATCH
        for _ in range(rounds):
            left = dict(islice(self._leaving.items(), BATCH))
            changed = dict(islice(self._unwritten.items(), BATCH - len(left)))
            if not left and not changed:
                return
            for place in changed:
                del self._unwritten[place]
            states = left | {place: kept.control.state for place, kept in changed.items()}
            try:
                await asyncio.to_thread(file.write, [(place, encode_state(state)) for place, state in states.items()])
            except StateError as error:
                self._unwritten = changed | self._unwritten
                self._failed("write", error)
                return
            self._complaint = ""
            for place, written in left.items():
                if self._leaving.get(place) is written:
                    del self._leaving[place]

    def _failed(self, operation: str, error: Exception) -> None:
        # Said once, not for every stream that comes while a disk is full; the metric counts them all.
        if self._complaint != str(error):
            self._complaint = str(error)
            log.error("%s", error)
        self._metrics.state_failures.labels(self._task, operation).inc()

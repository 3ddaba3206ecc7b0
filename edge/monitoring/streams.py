"""The streams of a node: whose evidence counts for whom.

                       ┌─► its own stream: the one it names, or the caller's ── suspends itself alone
    a caller's image ──┤
                       └─► (no stream named) the node's own, shared by these callers ── suspends them all; that takes
                           three callers (`hawkvision.cascade.drift.monitor`)

A stream has one log of audited outcomes per stage (`Monitor`). An alarm in any log of a stream suspends all of its
targets.

Callers name streams, so memory is bounded: beyond `limit` streams, the least recently used one is evicted. With a state
file, its state is written there, and read again when the stream comes back. An alarm is never forgotten: without a
file, suspended streams stay in memory, at most `limit` more. If there are more, unknown streams begin suspended.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Final

from edge.monitoring.request_streams import UNMONITORED, StreamControllers
from edge.monitoring.state_keeper import StateKeeper
from edge.monitoring.state_store import StateFile
from edge.monitoring.stream import Stream
from edge.monitoring.stream_keys import DEFAULT_STREAM, stream_key
from hawkvision.cascade.drift.monitor import Claims, Coverage
from hawkvision.cascade.route import Controls
from hawkvision.core.logs import Transitions
from hawkvision.core.metrics import EdgeMetrics

log = logging.getLogger("hawkvision.edge")

ROWS_PER_STREAM: Final = 4
"""The file keeps more streams than memory does: one that comes back a day later is still known."""


class Streams:
    """All streams of a node. Made and used on one event loop."""

    def __init__(
        self,
        task: str,
        limit: int,
        audit_share: float,
        metrics: EdgeMetrics,
        file: StateFile | None,
        profiles: Collection[str] | None = None,
    ) -> None:
        """Start with what the file knows.

        Args:
            task: for metrics.
            limit: of the streams in memory, beside the node's own.
            audit_share: of the images that stages score, 0..1.
            metrics: where to count.
            file: where states are kept.
            profiles: names of the node's certificates (`Policy.profiles`); None restores logs about any.
        """
        self.audit_share = audit_share
        self.coverage = Coverage()
        """Of the audits of all streams together."""
        self._profiles = profiles
        self._task = task
        self._limit = limit
        self._metrics = metrics
        self._keeper = StateKeeper(task, limit, metrics, file)
        self._streams: OrderedDict[bytes, Stream] = OrderedDict()
        """Beside the node's own."""
        self._transitions = Transitions(log)
        self._shared = self._keeper.open(DEFAULT_STREAM, profiles)
        metrics.streams.labels(task).set_function(self.__len__)
        metrics.streams_suspended.labels(task).set_function(lambda: sum(stream.suspended for stream in self.all()))

    def __len__(self) -> int:
        return len(self._streams)

    def all(self) -> Iterator[Stream]:
        """The node's own stream, and the others in memory."""
        return chain((self._shared,), self._streams.values())

    def controllers(
        self, stream: str | None, controls: Controls | None, caller: str = "", counted_as: str | None = None
    ) -> StreamControllers:
        """The controllers of a request.

        Args:
            stream: that the request names.
            controls: of its certificate; None without one.
            caller: who sent it.
            counted_as: see `Route.counted_as`.
        """
        if controls is None:
            return UNMONITORED
        key = stream_key(stream, caller)
        own = self._streams.get(key)
        if own is None:
            own = self._open(key, named=stream is not None)
        else:
            self._streams.move_to_end(key)
        window = None if counted_as is None else (stream_key(None, caller).hex()[:16], counted_as)
        return StreamControllers(self, own, self._shared if stream is None else None, controls, window)

    def late(self, caller: str, target: str) -> bool:
        """Whether too few requests of a caller for a target were answered as routed."""
        return not self._shared.answered.enough(caller, target)

    def answered(self, caller: str, target: str, *, as_routed: bool) -> None:
        """Count a request of a caller for a target."""
        self._shared.answered.add(caller, target, as_routed=as_routed)
        self._keeper.changed(self._shared)

    def takes(self, claims: Claims) -> bool:
        """Whether these are claims of the certificates in force."""
        return self._profiles is None or claims.profile in self._profiles

    def adopt(self, profiles: Collection[str]) -> None:
        """Put other certificates in force: logs about others are forgotten."""
        self._profiles = profiles
        for stream in self.all():
            stream.keep_only(profiles)

    def live(self, stream: Stream) -> Stream:
        """The stream as it is now: it may have been evicted, and opened again, while an audit was under way."""
        if stream is self._shared:
            return stream
        return self._streams.get(stream.key) or self._open(stream.key, named=stream.named)

    def audited(self, stream: Stream) -> None:
        """Count and log what new outcomes have changed about a stream."""
        before = stream.suspended
        stream.update()
        self._keeper.changed(stream)
        if stream.suspended == before:
            return
        if stream.suspended:
            self._metrics.alarms.labels(self._task).inc()
        self._report(stream)

    async def close(self) -> None:
        """Write what is not written yet, and close the file."""
        self._transitions.close()
        await self._keeper.close()

    def _report(self, stream: Stream) -> None:
        whose = "of the node itself" if stream is self._shared else "named" if stream.named else "of a caller"
        alarms = sum(monitor.state.alarms for monitor in stream.monitors.values())
        # Any number of callers and names must not fill the log: they are one subject each.
        self._transitions.note(
            whose,
            (stream.key, stream.suspended, alarms),
            logging.WARNING if stream.suspended and not stream.named else logging.INFO,
            "guarantee %s: stream %s %s is %s certified, after %d audits of which %g disagreed",
            "suspended" if stream.suspended else "restored",
            stream.key.hex(),
            whose,
            "not as" if stream.suspended else "as",
            sum(monitor.state.audits for monitor in stream.monitors.values()),
            sum(monitor.state.disagreements for monitor in stream.monitors.values()),
        )

    def _open(self, key: bytes, *, named: bool) -> Stream:
        stream = self._keeper.open(key, self._profiles)
        stream.named = named
        while len(self._streams) >= self._limit:
            _, oldest = self._streams.popitem(last=False)
            self._keeper.evict(oldest)
        self._streams[key] = stream
        return stream

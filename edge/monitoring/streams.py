"""The streams of a node: whose evidence counts for whom, what is remembered of it, and for how long.

                       ┌─► its own stream: the one it names, or the caller's ── suspends itself alone
    a caller's image ──┤
                       └─► (no stream named) the node's own, which all these callers share ── suspends them all; that
                           takes three callers (`hawkvision.cascade.drift.monitor`)

A stream has one log of audited outcomes per stage (`Monitor`), and a controller per certificate that it uses
(`DriftController`). Where an alarm stands in any log of a stream, all of its targets are suspended.

Names come from callers, so memory is bounded: they are hashed, and beyond `limit` streams the one that was used longest
ago makes room. With a state file, what makes room is written to it and taken up again when its stream comes back. An
alarm is never forgotten to make room: without a file, suspended streams stay in memory, at most `limit` more; if there
are more than that, streams that the node does not know begin suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from edge.monitoring.state_store import StateError, StateFile, StreamState, encode_state
from hawkvision.cascade.drift.monitor import Claims, Coverage, Monitor
from hawkvision.cascade.drift.online import ControllerSpec, DriftController
from hawkvision.cascade.route import Controls
from hawkvision.core.logs import Transitions
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.servers.keyfile import ANYBODY, SINGLE
from hawkvision.transport.protocol.handshake_limits import network_of

log = logging.getLogger("hawkvision.edge")

DEFAULT_STREAM: Final = bytes(16)
"""Place of the node's own stream; a hash of 128 bits does not meet it."""
ROWS_PER_STREAM: Final = 4
"""The file remembers more than memory holds: a stream that comes back within a day of many others is still known."""
WRITE_INTERVAL_S: Final = 2.0
"""A crash forgets as much; a controller changes its mind over hundreds of requests."""
BATCH: Final = 64
"""States encoded at once, so that the event loop is held for a millisecond at most."""
KEY: Final = "key "
"""Begins the name of a caller that is known by its API key; others are known by their addresses."""
LEAST_SHARE: Final = 0.25
"""Of completed audits, in an audit's weight: with fewer, nothing is claimed anyway."""


@functools.lru_cache(4096)
def caller_of(key: str, address: str) -> str:
    """Whose evidence a request is: an API key's that a key file names; else its address's, of IPv6 the /64."""
    if key not in (ANYBODY, SINGLE):
        return f"{KEY}{key}"
    try:
        return network_of(address)
    except ValueError:  # none of the Internet's
        return address


def stream_place(stream: str | None, caller: str = "") -> bytes:
    """The 16 bytes that stand for a caller's own stream, or for the one it names; a key's streams are its own."""
    if stream is None:
        return hashlib.blake2b(caller.encode(), digest_size=16, person=b"caller").digest()
    salt = hashlib.blake2b(caller.encode(), digest_size=16).digest() if caller.startswith(KEY) else b""
    return hashlib.blake2b(stream.encode(), digest_size=16, salt=salt).digest()


class StageScore(NamedTuple):
    """What one stage said of an image: how sure it was, and which class it found."""

    claims: Claims
    score: float
    answered: int


class Stream:
    """All that is known of one stream."""

    def __init__(self, place: bytes, state: StreamState, profiles: Collection[str] | None) -> None:
        """Take up what was kept of the logs about these profiles; None: about any."""
        self.place = place
        self.named = False
        """Whether a caller gave it its name."""
        if profiles is not None:  # certificates that are no longer this node's say nothing of those that are
            _forget(state.monitors, profiles)
        self.coverage = Coverage()
        self.monitors: dict[str, Monitor] = {}
        self.controls: dict[str, DriftController] = {}
        self.suspended = state.suspended
        """Whether an alarm stands in any of its logs."""
        self._kept = state
        """Of logs and controllers that nobody has asked for since."""

    @property
    def shared(self) -> bool:
        """Whether several callers' images are in it."""
        return self.place == DEFAULT_STREAM

    def monitor(self, claims: Claims) -> Monitor:
        """The log of a stage."""
        found = self.monitors.get(claims.key)
        if found is None:
            found = self.monitors[claims.key] = Monitor(claims, shared=self.shared)
            kept = self._kept.monitors.pop(claims.key, None)
            restored = kept is not None and found.restore(kept)
            alarm = self._kept.suspended_before or (kept is not None and not restored and kept.failed is not None)
            if alarm and not found.suspended:
                found.suspend()  # of which claim is not known
            self._kept.suspended_before = False
            self.update()
        return found

    def control(self, spec: ControllerSpec, audit_share: float) -> DriftController:
        """The controller of a certificate."""
        found = self.controls.get(spec.key)
        if found is None:
            found = self.controls[spec.key] = DriftController(spec, audit_share)
            kept = self._kept.controls.pop(spec.key, None)
            if kept is not None:
                found.restore(kept)
        return found

    def keep_only(self, profiles: Collection[str]) -> None:
        """Forget the logs about other certificates."""
        _forget(self._kept.monitors, profiles)
        _forget(self.monitors, profiles)
        self.update()

    def update(self) -> None:
        """Find out anew whether an alarm stands."""
        kept = any(state.failed is not None for state in self._kept.monitors.values())
        self.suspended = (
            self._kept.suspended_before or kept or any(monitor.suspended for monitor in self.monitors.values())
        )

    @property
    def state(self) -> StreamState:
        """What a store keeps."""
        monitors = self._kept.monitors | {key: monitor.state for key, monitor in self.monitors.items()}
        controls = self._kept.controls | {key: control.state for key, control in self.controls.items()}
        return StreamState(monitors, controls, self._kept.suspended_before)


def _forget(logs: dict[str, Any], profiles: Collection[str]) -> None:
    for key in [key for key in logs if key.partition("/")[0] not in profiles]:
        del logs[key]


class Kept:
    """A controller in its place: feeding it through here is remembered."""

    __slots__ = ("_watched", "control")

    def __init__(self, control: DriftController, watched: Watched) -> None:
        self.control = control
        self._watched = watched

    def accepted(self, score: float, differs: bool | None) -> None:
        """See `DriftController.accepted`."""
        self.control.follow(self._watched.suspended)
        self.control.accepted(score, self._watched.weight, differs)
        self._watched.changed()

    def unseen(self) -> None:
        """See `DriftController.unseen`."""
        self.control.unseen()
        self._watched.changed()

    def escalated(self, score: float, differs: bool | None) -> None:
        """See `DriftController.escalated`."""
        self.control.follow(self._watched.suspended)
        self.control.escalated(score, differs)
        self._watched.changed()

    def fell_short(self, score: float) -> None:
        """See `DriftController.fell_short`."""
        self.control.fell_short(score)
        self._watched.changed()


class Watched:
    """One request's streams and controllers; `UNWATCHED` where no certificate stands behind its target."""

    __slots__ = ("_own", "_pool", "_streams", "edge", "edge_claims", "intermediate", "intermediate_claims")

    def __init__(
        self, streams: Streams | None, own: Stream | None, pool: Stream | None, controls: Controls | None
    ) -> None:
        self._streams = streams
        self._own = own
        self._pool = pool
        self.edge: Kept | None = None
        self.intermediate: Kept | None = None
        self.edge_claims: Claims | None = None
        self.intermediate_claims: Claims | None = None
        if streams is None or own is None or controls is None:
            return
        self.edge_claims, self.intermediate_claims = controls.edge_claims, controls.intermediate_claims
        if controls.edge is not None:
            self.edge = Kept(own.control(controls.edge, streams.audit_share), self)
        if controls.intermediate is not None:
            self.intermediate = Kept(own.control(controls.intermediate, streams.audit_share), self)

    @property
    def suspended(self) -> bool:
        """Whether an alarm stands for this request's streams."""
        return (self._own is not None and self._own.suspended) or (self._pool is not None and self._pool.suspended)

    @property
    def monitored(self) -> bool:
        """Whether enough of the audits that were due took place, in its stream and in the node's traffic."""
        streams = self._streams
        if streams is None or self._own is None:
            return True
        return streams.audit_share > 0.0 and streams.coverage.enough and self._own.coverage.enough

    @property
    def _owner(self) -> str:
        """Whose evidence this is in a shared log: a hash, for the file is not to say who calls."""
        return "" if self._own is None else self._own.place.hex()[:16]

    @property
    def weight(self) -> float:
        """Inverse of the probability with which an answer's audit takes place."""
        if self._streams is None or self._own is None or not self._streams.audit_share:
            return 1.0
        return 1.0 / (self._streams.audit_share * max(LEAST_SHARE, self._own.coverage.share))

    def changed(self) -> None:
        """Remember to write."""
        if self._streams is not None and self._own is not None:
            self._streams.changed(self._own)

    def not_due(self) -> None:
        """No audit was drawn for this request."""
        self._count(Coverage.NOT_DUE)

    def missed(self, *, refused: bool = False) -> None:
        """An audit was due, and did not take place; `refused` if that was for what this caller sent."""
        self._count(Coverage.MISSED, everybody=not refused)

    def audited(self, scores: Sequence[StageScore], reference: int) -> None:
        """An audit took place: what each stage had said, and what the reference stage says."""
        self._count(Coverage.COMPLETED)
        streams = self._streams
        if streams is None:
            return
        scores = [score for score in scores if streams.takes(score.claims)]
        for stream in (self._own, self._pool):
            if stream is not None:
                live = streams.live(stream)
                for claims, score, answered in scores:
                    live.monitor(claims).record(score, answered != reference, self._owner)
                streams.audited(live)

    def _count(self, outcome: int, *, everybody: bool = True) -> None:
        if self._streams is not None and self._own is not None:
            self._own.coverage.add(outcome)
            if everybody:
                self._streams.coverage.add(outcome)


UNWATCHED: Final = Watched(None, None, None, None)


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
            task: whose.
            limit: of the streams in memory, beside the node's own.
            audit_share: of the images that stages score.
            metrics: where to count.
            file: where states are kept.
            profiles: what the node's certificates are named (`Policy.profiles`); None takes up logs about any.
        """
        self._profiles = profiles
        self._task = task
        self._limit = limit
        self.audit_share = audit_share
        self.coverage = Coverage()
        """Of all streams together."""
        self._metrics = metrics
        self._file = file
        self._named: OrderedDict[bytes, Stream] = OrderedDict()
        self._unwritten: dict[bytes, Stream] = {}
        # What made room and is not in the file yet; the file may lag behind by `WRITE_INTERVAL_S`. Without a file, only
        # suspended streams are here, for good.
        self._leaving: OrderedDict[bytes, StreamState] = OrderedDict()
        self._full = file is not None and file.full
        """Whether an alarm had to be forgotten: then whoever is unknown begins suspended."""
        self._complaint = ""
        self._reported = Transitions(log)
        self._stopping = asyncio.Event()
        self._pool = self._opened(DEFAULT_STREAM)
        if file is not None and file.suspended:
            log.warning("guarantee suspended: %d streams have been since before this start", file.suspended)
        self._writer = asyncio.create_task(self._keep_writing()) if file else None
        metrics.streams.labels(task).set_function(self.__len__)
        metrics.streams_suspended.labels(task).set_function(lambda: sum(stream.suspended for stream in self._all()))
        metrics.accuracy_debt.labels(task).set_function(
            lambda: sum(control.state.debt for stream in self._all() for control in stream.controls.values())
        )

    def __len__(self) -> int:
        return len(self._named)

    def watched(self, stream: str | None, controls: Controls | None, caller: str = "") -> Watched:
        """What watches a request with this stream, certificate and caller."""
        if controls is None:
            return UNWATCHED
        place = stream_place(stream, caller)
        own = self._named.get(place)
        if own is None:
            own = self._open(place, named=stream is not None)
        else:
            self._named.move_to_end(place)
        return Watched(self, own, self._pool if stream is None else None, controls)

    def takes(self, claims: Claims) -> bool:
        """Whether these are claims of the certificates that are in force."""
        return self._profiles is None or claims.profile in self._profiles

    def adopt(self, profiles: Collection[str]) -> None:
        """Other certificates are in force from now on: logs about others are forgotten, as at a start."""
        self._profiles = profiles
        for stream in self._all():
            stream.keep_only(profiles)

    def live(self, stream: Stream) -> Stream:
        """The stream as it is now: it may have made room, and come back, while an audit was under way."""
        if stream is self._pool:
            return stream
        return self._named.get(stream.place) or self._open(stream.place, named=stream.named)

    def changed(self, stream: Stream) -> None:
        """Remember to write."""
        if self._file is not None and (stream is self._pool or self._named.get(stream.place) is stream):
            self._unwritten[stream.place] = stream

    def audited(self, stream: Stream) -> None:
        """Outcomes were recorded: count and log what they changed."""
        before = stream.suspended
        stream.update()
        self.changed(stream)
        if stream.suspended == before:
            return
        counter = self._metrics.alarms if stream.suspended else self._metrics.returns
        counter.labels(self._task).inc()
        self._report(stream)

    def _report(self, stream: Stream) -> None:
        whose = "of the node itself" if stream is self._pool else "named" if stream.named else "of a caller"
        alarms = sum(monitor.state.alarms for monitor in stream.monitors.values())
        # There may be any number of callers and names, which must not fill the log: they are one subject each.
        self._reported.note(
            whose,
            (stream.place, stream.suspended, alarms),
            logging.WARNING if stream.suspended and not stream.named else logging.INFO,
            "guarantee %s: stream %s %s is %s certified, after %d audits of which %d disagreed",
            "suspended" if stream.suspended else "restored",
            stream.place.hex(),
            whose,
            "not as" if stream.suspended else "as",
            sum(monitor.state.audits for monitor in stream.monitors.values()),
            sum(monitor.state.disagreements for monitor in stream.monitors.values()),
        )

    async def close(self) -> None:
        """Write what is not written yet, and close the file."""
        self._reported.close()
        if self._file is None or self._writer is None:
            return
        self._stopping.set()
        await self._writer
        await self._write_all(self._file)
        await asyncio.to_thread(self._file.close)

    def _all(self) -> Iterator[Stream]:
        return chain((self._pool,), self._named.values())

    def _open(self, place: bytes, *, named: bool) -> Stream:
        stream = self._opened(place)
        stream.named = named
        while len(self._named) >= self._limit:
            _, oldest = self._named.popitem(last=False)
            self._let_go(oldest)
        self._named[place] = stream
        return stream

    def _opened(self, place: bytes) -> Stream:
        """A stream with its past, as far as that is known."""
        state = self._leaving.pop(place, None)
        if state is None and self._file is not None:
            try:
                state = self._file.read(place)
            except StateError as error:
                self._failed("read", error)
                state = StreamState(suspended_before=True)  # nobody knows that it was not
        elif state is not None and self._file is not None:
            stream = Stream(place, state, self._profiles)
            self._unwritten[place] = stream
            return stream
        unknown = StreamState(suspended_before=self._full and place != DEFAULT_STREAM)
        return Stream(place, unknown if state is None else state, self._profiles)

    def _let_go(self, stream: Stream) -> None:
        """Requests under way may still feed what has made room; that is lost, as what a crash would lose."""
        unwritten = self._unwritten.pop(stream.place, None) is not None
        if not (stream.suspended if self._file is None else unwritten):
            return
        if len(self._leaving) >= self._limit:  # streams come faster than the file takes them
            self._forget_one()
        self._leaving[stream.place] = stream.state

    def _forget_one(self) -> None:
        for place, state in self._leaving.items():
            if not state.suspended:
                del self._leaving[place]
                break
        else:
            self._leaving.popitem(last=False)
            if not self._full:
                log.error(
                    "more than %d suspended streams had to make room: from now on, streams that are not known begin "
                    "suspended", self._limit,
                )  # fmt: skip
            self._full = True
        self._metrics.state_failures.labels(self._task, "dropped").inc()

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
            states = left | {place: stream.state for place, stream in changed.items()}
            rows = [(place, encode_state(state), state.suspended) for place, state in states.items()]
            try:
                await asyncio.to_thread(file.write, rows, full=self._full)
            except StateError as error:
                self._unwritten = changed | self._unwritten
                self._failed("write", error)
                return
            self._full = self._full or file.full
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

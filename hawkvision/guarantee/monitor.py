"""Does a certificate still hold for this traffic? Audits bet against it, and an alarm suspends it.

Each stage of a stream has a log, whose audits bet against its claims (`hawkvision.guarantee.bets`).

*Whose evidence.* An audit counts in the logs of the stream that the request names, of its caller, and of the node. What
is in alarm adds nothing to the logs around it, so that one bad camera suspends itself; where that is a tenth of the
traffic, the node is in alarm. The logs share δ: a half, a quarter, an eighth. So an inner log is in alarm first.

*Share of audits.* It grows with the evidence of each log, up to `MOST_SHARE`. An image is drawn by one random number u,
before anything else is known of it, if u is below the share of its stream, and counts in every log whose own share
exceeds u: in each log the images counted are a uniform sample, at a share that was known before.

*Order.* Audits may wait. Outcomes count in the order in which they were drawn, so that none of them overtakes those
that take longer, such as the images that the edge answered.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

import msgspec

from hawkvision.guarantee.answered import AnsweredRequests, WindowState
from hawkvision.guarantee.bets import LARGEST, MOST_SHARE, WINDOW, Claims, Log, LogState

LONGEST_WAIT_S: Final = 600.0
"""While an audit waits longer, nothing is certified."""
MOST_WAITING: Final = 1024
"""Due audits that wait for their outcome; further ones are missing."""
TRAFFIC: Final = 1000
"""The last scored requests, of which those in alarm are counted."""
CROWD: Final = 0.1
"""The share of them from which on the node is in alarm."""
MOST_FAILED: Final = 16
"""Logs about certificates not in force whose alarm a stream remembers."""
CLOCK_SET: Final = 1_767_225_600.0
"""1 January 2026. A clock that shows an earlier time was not set."""
CLOCK_SKEW_S: Final = 86_400.0
"""How much later than the node's clock images behind certificates may be."""
NODE: Final = bytes(16)
"""Key of the node's own log; the others are hashes."""


class Dates(NamedTuple):
    """When the images behind the certificates in force were taken, in seconds since 1970; −∞ where nobody can know."""

    since: float = -math.inf
    until: float = -math.inf
    stream: bytes = NODE
    """Key of the stream or caller that all of them are of; the node's if they are of several."""


class StreamState(msgspec.Struct):
    """The logs of a stream, as a file keeps them."""

    logs: dict[str, LogState] = msgspec.field(default_factory=dict)
    carried: bool = False
    """Whether an alarm stands that is about every stage: one that has no claims any more, or an unreadable state's."""
    failed: list[str] = msgspec.field(default_factory=list)
    """Logs about certificates that are not in force, and were in alarm when they were."""
    raised: float = 0.0
    """When the last alarm was raised, in seconds since 1970; not before the newest image of the certificates that were
    in force then, whatever the clock said."""
    cause: str = ""
    """Why it was, in a sentence."""
    lost: bool = False
    """Of the node: whether an alarm was forgotten. Audits cannot tell whose it was, so they do not lift this one."""
    named: bool = False
    due: list[bool] = msgspec.field(default_factory=list)
    """Of the node: the last due audits, and whether each is missing, as those are that wait when it ends."""
    answered: dict[str, WindowState] = msgspec.field(default_factory=dict)
    """Of the node: how the requests of all callers were answered."""

    @property
    def alarm(self) -> bool:
        """Whether an alarm stands."""
        return self.lost or self.carried or any(log.alarm for log in self.logs.values())


class Stream:
    """The logs of a named stream, a caller or the node, by stage. Its alarm suspends all targets."""

    def __init__(self, key: bytes, part: float, state: StreamState | None = None) -> None:
        self.key = key
        self.state = state or StreamState()
        self._part = part
        self.logs: dict[str, Log] = {}
        """Those that requests have used; the others are in `state` alone."""
        self.due: deque[bool] = deque(self.state.due, maxlen=WINDOW)
        """The last due audits: whether each is missing."""
        self.missing = sum(self.due)
        self.alarm = self.state.alarm
        self.suspicion = math.inf if self.alarm else 1.0

    def log(self, claims: Claims) -> Log:
        """The log of a stage."""
        found = self.logs.get(claims.key)
        if found is None:
            found = self.logs[claims.key] = Log(claims, self._part, self.state.logs.get(claims.key))
            self.state.logs[claims.key] = found.state
        return found

    def record(self, claims: Claims, score: float, disagreement: float, now: float) -> None:
        """Count the outcome of an audit; `alarm` may change."""
        log = self.log(claims)
        if self.state.carried and not log.alarm:
            log.suspend()
        before = log.alarm
        cause = log.record(score, disagreement)
        if cause is not None:
            self.note_alarm(now, cause)
        if before and not log.alarm:  # the other logs that counted meanwhile are in alarm themselves
            self.state.carried = False
        self.update()

    def suspend(self, now: float, cause: str) -> None:
        """Raise the alarm for all stages."""
        self.state.carried = True
        self.note_alarm(now, cause)
        self.update()

    def note_alarm(self, now: float, cause: str) -> None:
        """Remember when an alarm was raised, and why."""
        self.state.raised, self.state.cause = max(self.state.raised, now), cause

    def lift(self, since: float) -> None:
        """End alarms that were raised before `since`, from when on the images behind the certificates in force are."""
        state = self.state
        if not self.alarm or since <= state.raised:
            return
        state.carried = state.lost = False
        for key, each in state.logs.items():
            if key in self.logs:
                self.logs[key].lift()
            elif each.alarm:
                state.logs[key] = LogState(alarms=each.alarms)
        self.update()

    def count(self, *, missing: bool) -> None:
        """Count a due audit."""
        if len(self.due) == WINDOW:
            self.missing -= self.due[0]
        self.due.append(missing)
        self.missing += missing

    def keep_only(self, in_force: frozenset[str]) -> None:
        """Go on with the logs of these names. Those about other claims of a stage pass to its present ones.

        Alarms stand, for those in force and if they come back.
        """
        state, successors = self.state, {_stage_of(key): key for key in in_force}
        for key in [key for key in state.logs if key not in in_force]:
            log, kept = self.logs.pop(key, None), state.logs.pop(key)
            before = kept if log is None else log.kept()
            if before.alarm:
                state.failed.append(key)
            successor = successors.get(_stage_of(key))
            now = None if successor is None else state.logs.setdefault(successor, before)
            state.carried |= before.alarm and (now is None or not now.alarm)
        for key in in_force.intersection(state.failed):
            alarms = state.logs[key].alarms if key in state.logs else 0
            state.logs[key] = LogState(alarm=True, alarms=max(1, alarms))
        state.failed = [key for key in state.failed if key not in in_force][-MOST_FAILED:]
        self.update()

    @property
    def remembered(self) -> bool:
        """Whether it may not be forgotten."""
        return self.alarm or bool(self.state.failed)

    def update(self) -> None:
        """Compute anew whether an alarm stands, and the share of audits."""
        self.alarm = self.state.alarm
        logs = self.logs.values()
        self.suspicion = math.inf if self.alarm else max((log.suspicion for log in logs), default=1.0)

    def kept(self) -> StreamState:
        """The state that a file keeps."""
        self.state.logs |= {key: log.kept() for key, log in self.logs.items()}
        return self.state


Outcome = tuple[Claims, float, float]
"""A stage's claims, its score of the image, and its disagreement with the reference stage."""


class Due:
    """An audit that was drawn, until its outcome counts."""

    __slots__ = ("at", "outcomes", "refused", "settled", "streams", "u")

    def __init__(self, streams: tuple[Stream, ...], at: float, u: float) -> None:
        self.streams = streams
        """In whose logs it counts, innermost first; none where nothing certified is watched."""
        self.u = u
        """The random number that it was drawn by."""
        self.at = at
        """When it was drawn."""
        self.settled = self.refused = False
        self.outcomes: Sequence[Outcome] | None = None


class Watched:
    """What watches a request: the logs of the stream that it names, of its caller and of the node."""

    __slots__ = ("_monitor", "_window", "edge_claims", "intermediate_claims", "logs")

    def __init__(
        self,
        monitor: Monitor | None,
        logs: tuple[Stream, ...],
        edge_claims: Claims | None = None,
        intermediate_claims: Claims | None = None,
        window: tuple[str, str] | None = None,
    ) -> None:
        self._monitor = monitor
        self._window = window
        """Caller and target by which the request is counted; None if nothing certified is given up."""
        self.logs = logs
        """Innermost first; the last is the node's."""
        self.edge_claims = edge_claims
        self.intermediate_claims = intermediate_claims

    @property
    def suspended(self) -> bool:
        """Whether an alarm stands for this request."""
        return any(log.alarm for log in self.logs) or (self._monitor is not None and self._monitor.crowded)

    def monitored(self, disagreement: float) -> bool:
        """Whether enough audits take place for a certificate of this disagreement."""
        if self._monitor is None:
            return True
        if not self._monitor.audit_share or self._monitor.overdue:
            return False
        return all(log.missing <= disagreement * len(log.due) for log in self.logs)

    @property
    def late(self) -> bool:
        """Whether too few requests of this caller and target were answered as routed."""
        return (
            self._monitor is not None and self._window is not None and not self._monitor.answered.enough(*self._window)
        )

    def answered(self, *, as_routed: bool) -> None:
        """Count the request, once it is known how it was answered, or that it was not."""
        if self._monitor is not None and self._window is not None:
            self._monitor.answered.add(*self._window, as_routed=as_routed)
            self._monitor.node_changed()


UNWATCHED: Final = Watched(None, ())
"""Of a request behind whose target no certificate stands."""


class Monitor:
    """All logs of a node: its own, those of callers and of the streams that they name. For one event loop.

    Memory is bounded: beyond `limit`, the stream or caller that was used longest ago is forgotten. Its evidence has
    counted in the node's log. What is in alarm is kept, up to `limit` more; beyond that the node is in alarm for good.
    """

    def __init__(
        self,
        limit: int,
        audit_share: float,
        clock: Callable[[], float],
        draw: Callable[[], float],
        *,
        on_change: Callable[[bytes, Stream | None], None],
        on_turn: Callable[[Stream], None],
        in_force: Collection[str] | None = None,
        dates: Dates = Dates(),  # noqa: B008 - immutable
        states: Mapping[bytes, StreamState] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Begin, or go on from states.

        Args:
            limit: of the streams and callers without an alarm, and of those with one.
            audit_share: of all images, without suspicion.
            clock: seconds.
            draw: random numbers in [0, 1).
            on_change: called with the key of a stream whose state has changed; None: it is forgotten.
            on_turn: called when an alarm begins or ends, before anybody else can see it.
            in_force: the claims of the certificates in force (`Claims.key`); None: any.
            dates: of the images behind them.
            states: by key.
            wall: seconds since 1970.
        """
        self.audit_share = audit_share
        self._limit = limit
        self._clock = clock
        self._draw = draw
        self._in_force = None if in_force is None else frozenset(in_force)
        self._dates = dates
        self._wall = wall
        self._on_change = on_change
        self._on_turn = on_turn
        self._quiet: OrderedDict[bytes, Stream] = OrderedDict()
        self._alarmed: OrderedDict[bytes, Stream] = OrderedDict()
        self._waiting: deque[Due] = deque()
        self._traffic: deque[tuple[Stream, ...]] = deque(maxlen=TRAFFIC)
        self._in_alarm = 0
        self.crowded = False
        """Whether what is in alarm carries a tenth of the traffic."""
        states = dict(states or {})
        self.node = Stream(NODE, 0.125, states.pop(NODE, None))
        self.answered = AnsweredRequests(self.node.state.answered)
        for stream in (self.node, *(Stream(key, _part(named=state.named), state) for key, state in states.items())):
            if stream.remembered and not stream.state.raised:  # by a state that could not be read
                stream.note_alarm(self._now, "what was known of it cannot be read, so it may have been in alarm")
                on_change(stream.key, stream)
            if self._in_force is not None:
                stream.keep_only(self._in_force)
            self._lift(stream)
            if stream is not self.node:
                (self._alarmed if stream.remembered else self._quiet)[stream.key] = stream

    def __len__(self) -> int:
        return len(self._quiet) + len(self._alarmed)

    def all(self) -> Iterator[Stream]:
        """The node's log, and the others in memory."""
        return chain((self.node,), self._quiet.values(), self._alarmed.values())

    def foremost(self, limit: int) -> list[Stream]:
        """The node's log, those in alarm, the latest first, and then those that were used last; `limit` at most."""
        others = chain(reversed(self._alarmed.values()), reversed(self._quiet.values()))
        return [self.node, *islice(others, limit - 1)]

    def waiting(self) -> Counter[bytes]:
        """How many due audits of each log wait for their outcome, by its key."""
        return Counter(stream.key for due in self._waiting for stream in due.streams)

    @property
    def overdue(self) -> bool:
        """Whether an audit has waited too long."""
        return bool(self._waiting) and self._waiting[0].at < self._clock() - LONGEST_WAIT_S

    def logs(self, caller: bytes, stream: bytes | None = None) -> tuple[Stream, ...]:
        """The logs of a request of this caller, which may name a stream; both are keys. Innermost first."""
        own = () if stream is None else (self._find(stream, named=True),)
        return (*own, self._find(caller, named=False), self.node)

    def takes(self, claims: Claims) -> bool:
        """Whether these are claims of the certificates in force."""
        return self._in_force is None or claims.key in self._in_force

    def adopt(self, in_force: Collection[str], dates: Dates = Dates()) -> None:  # noqa: B008 - immutable
        """Put other claims in force, by name; `dates` of the images behind them.

        That lifts the node's own alarm if it was raised before all of these images, and that of a stream or caller if
        all of them are its own, too. Other alarms stay: how these images fare says nothing about theirs.
        """
        self._in_force, self._dates = frozenset(in_force), dates
        for stream in list(self.all()):
            before = stream.alarm
            stream.keep_only(self._in_force)
            self._lift(stream)
            if stream.alarm == before:
                self._place(stream)
            else:
                self._turned(stream)

    def _lift(self, stream: Stream) -> None:
        """End alarms that are older than all images in force; those of days to come are of a wrong clock."""
        dates = self._dates
        if stream.key in {NODE, dates.stream} and dates.since <= self._wall() + CLOCK_SKEW_S:
            stream.lift(dates.since)

    @property
    def _now(self) -> float:
        """The time of an alarm that is raised now; the end of time if the clock is not set."""
        wall = self._wall()
        return max(wall, self._dates.until) if wall >= CLOCK_SET else LARGEST

    def node_changed(self) -> None:
        """Note that the node's state is to be written."""
        self._on_change(NODE, self.node)

    def kept(self, stream: Stream) -> StreamState:
        """The state of a stream that a file keeps."""
        if stream is self.node:
            stream.state.due = [*stream.due, *(True for due in self._waiting if stream in due.streams)][-WINDOW:]
            stream.state.answered = self.answered.state
        return stream.kept()

    def draw(self, watched: Watched) -> Due | None:
        """Draw whether to audit a request. What is returned must be settled."""
        if watched.logs:
            self._count_traffic(watched.logs[:-1])
        if not self.audit_share:
            return None
        u, share, counted = self._draw(), self.audit_share, []
        for stream in reversed(watched.logs):
            share = max(share, min(self.audit_share * stream.suspicion, max(self.audit_share, MOST_SHARE)))
            if u < share:
                counted.append(stream)
        if u >= share:
            return None
        due = Due(tuple(reversed(counted)), self._clock(), u)
        self._waiting.append(due)
        self.node_changed()
        if len(self._waiting) > MOST_WAITING:
            self._waiting.pop()
            due.settled = True
            self._count(due)
        return due

    def _count_traffic(self, inner: tuple[Stream, ...]) -> None:
        if len(self._traffic) == TRAFFIC:
            self._in_alarm -= _in_alarm(self._traffic[0])
        self._traffic.append(inner)
        self._in_alarm += _in_alarm(inner)
        self._note_crowd()

    def settle(self, due: Due, outcomes: Sequence[Outcome] | None, *, refused: bool = False) -> None:
        """Give the outcome of a due audit for each stage; None if it is missing.

        `refused`: because the datacenter refused the image; that is not missing in the node's log.
        """
        due.settled, due.outcomes, due.refused = True, outcomes, refused
        while self._waiting and self._waiting[0].settled:
            self._count(self._waiting.popleft())

    def _count(self, due: Due) -> None:
        # An outcome under certificates that were replaced meanwhile enters no log, so it is no outcome.
        missing = due.outcomes is None or (
            bool(due.outcomes) and not any(self.takes(each) for each, *_ in due.outcomes)
        )
        within = False
        for drawn in due.streams:
            live = self.node if drawn is self.node else self._alarmed.get(drawn.key) or self._quiet.get(drawn.key)
            stream = live or drawn  # it may have been forgotten meanwhile
            before = stream.alarm
            if not (due.refused and stream is self.node):
                stream.count(missing=missing)
                if not within or self.crowded:
                    self._record(stream, due)
            within = within or before or stream.alarm
            if live is not None:
                self._on_change(stream.key, stream)
            if stream.alarm != before:
                self._turned(stream)

    def _record(self, stream: Stream, due: Due) -> None:
        if due.outcomes is None:
            for log in list(stream.logs.values()):
                if log.alarm:
                    stream.record(log.claims, math.inf, 1.0, self._now)
            return
        for claims, score, disagreement in due.outcomes:
            if self.takes(claims):
                stream.record(claims, score, disagreement, self._now)

    def _turned(self, stream: Stream) -> None:
        """Note that an alarm begins or ends."""
        self._on_turn(stream)
        self._place(stream)
        if stream is not self.node:
            self._in_alarm = sum(map(_in_alarm, self._traffic))
            self._note_crowd()

    def _place(self, stream: Stream) -> None:
        """Keep a stream among those that may be forgotten, or those that may not."""
        self._on_change(stream.key, stream)
        if stream is not self.node:
            self._quiet.pop(stream.key, None)
            self._alarmed.pop(stream.key, None)
            (self._alarmed if stream.remembered else self._quiet)[stream.key] = stream
            self._evict()

    def _note_crowd(self) -> None:
        before, self.crowded = self.crowded, self._in_alarm >= CROWD * TRAFFIC
        if self.crowded and not before and not self.node.alarm:
            self.node.suspend(self._now, "streams and callers in alarm carry a tenth of the traffic")
            self._turned(self.node)

    def _find(self, key: bytes, *, named: bool) -> Stream:
        found = self._alarmed.get(key)
        if found is not None:
            return found
        found = self._quiet.get(key)
        if found is None:
            found = self._quiet[key] = Stream(key, _part(named=named), StreamState(named=named))
            self._evict()
        else:
            self._quiet.move_to_end(key)
        return found

    def _evict(self) -> None:
        while len(self._quiet) > self._limit:
            self._on_change(self._quiet.popitem(last=False)[0], None)
        while len(self._alarmed) > self._limit:
            key, lost = self._alarmed.popitem(last=False)
            self._on_change(key, None)
            self.node.state.lost = True
            self.node.note_alarm(max(self._now, lost.state.raised), "more streams are in alarm than can be remembered")
            self.node_changed()
            if not self.node.alarm:
                self.node.update()
                self._turned(self.node)


def _stage_of(key: str) -> str:
    """The stage in the name of a log."""
    return key.partition("/")[2]


def _part(*, named: bool) -> float:
    """The part of δ of a stream that a request names, or of a caller."""
    return 0.5 if named else 0.25


def _in_alarm(inner: tuple[Stream, ...]) -> bool:
    return any(stream.alarm for stream in inner)

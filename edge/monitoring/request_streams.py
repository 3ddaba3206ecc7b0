"""What a request knows of its streams: whether they are suspended, and the logs that it reports to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from edge.monitoring.stream import StageScore, Stream
from hawkvision.cascade.drift.monitor import Claims, Coverage
from hawkvision.cascade.route import Controls


class StreamRegistry(Protocol):
    """The streams of a node."""

    coverage: Coverage
    """Of the audits of all streams together."""

    @property
    def audit_share(self) -> float:
        """Share of the scored images that are audited, 0..1."""
        ...

    def takes(self, claims: Claims) -> bool:
        """Whether these are claims of the certificates in force."""
        ...

    def late(self, caller: str, target: str) -> bool:
        """Whether too few requests of a caller for a target were answered as routed."""
        ...

    def answered(self, caller: str, target: str, *, as_routed: bool) -> None:
        """Count a request of a caller for a target."""
        ...

    def live(self, stream: Stream) -> Stream:
        """The stream as it is now: it may have been evicted, and opened again, while an audit was under way."""
        ...

    def audited(self, stream: Stream) -> None:
        """Count and log what new outcomes have changed about a stream."""
        ...


class StreamControllers:
    """The streams of one request; `UNMONITORED` if no certificate stands behind its target."""

    __slots__ = ("_own", "_pool", "_streams", "_window", "edge_claims", "intermediate_claims")

    def __init__(
        self,
        streams: StreamRegistry | None,
        own: Stream | None,
        pool: Stream | None,
        controls: Controls | None,
        window: tuple[str, str] | None = None,
    ) -> None:
        self._streams = streams
        self._own = own
        self._pool = pool
        self._window = window
        """Caller and target by which the request is counted; None if nothing certified is given up."""
        self.edge_claims = None if controls is None else controls.edge_claims
        self.intermediate_claims = None if controls is None else controls.intermediate_claims

    @property
    def suspended(self) -> bool:
        """Whether an alarm stands for this request's streams."""
        return (self._own is not None and self._own.suspended) or (self._pool is not None and self._pool.suspended)

    @property
    def monitored(self) -> bool:
        """Whether enough of the audits that were due were completed, in its stream and in all of the node's traffic."""
        streams = self._streams
        if streams is None or self._own is None:
            return True
        return streams.audit_share > 0.0 and streams.coverage.enough and self._own.coverage.enough

    @property
    def late(self) -> bool:
        """Whether too few requests of this caller and target were answered as routed."""
        return self._streams is not None and self._window is not None and self._streams.late(*self._window)

    def answered(self, *, as_routed: bool) -> None:
        """Count the request, once it is known how it was answered, or that it was not."""
        if self._streams is not None and self._window is not None:
            self._streams.answered(*self._window, as_routed=as_routed)

    @property
    def _caller(self) -> str:
        """Whose evidence this is in a shared log; a hash, so that the file does not reveal callers."""
        return "" if self._own is None else self._own.key.hex()[:16]

    def not_due(self) -> None:
        """No audit was drawn for this request."""
        self._count(Coverage.NOT_DUE)

    def missed(self, *, refused: bool = False) -> None:
        """An audit was due and was not completed; `refused` if the datacenter refused this caller's image."""
        self._count(Coverage.MISSED, everybody=not refused)

    def audited(self, scores: Sequence[StageScore], disagreements: Sequence[float]) -> None:
        """An audit was completed: each stage's score, and its disagreement with the reference stage."""
        self._count(Coverage.COMPLETED)
        streams = self._streams
        if streams is None:
            return
        outcomes = [
            (score, disagreement)
            for score, disagreement in zip(scores, disagreements, strict=True)
            if streams.takes(score.claims)
        ]
        for stream in (self._own, self._pool):
            if stream is not None:
                live = streams.live(stream)
                for (claims, score, _), disagreement in outcomes:
                    live.monitor(claims).record(score, disagreement, self._caller)
                streams.audited(live)

    def _count(self, outcome: int, *, everybody: bool = True) -> None:
        if self._streams is not None and self._own is not None:
            self._own.coverage.add(outcome)
            if everybody:
                self._streams.coverage.add(outcome)


UNMONITORED: Final = StreamControllers(None, None, None, None)

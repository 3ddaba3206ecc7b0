"""What the servers of one node share, whatever their protocol: readiness, keys, memory for images, and counting.

    HTTP ──────────┐                                                 ┌─► EdgeNode.classify
    OIP over HTTP ─┼─► Frontend: ready_node, authorize, bodies ──────┤
    datagrams ─────┘                                                 └─► count, refusal

A server translates its protocol to and from a `ClassifyRequest` and an `Answer`, and leaves the rest to `Frontend`. All
servers share its bounds: images in memory together, and requests for each key.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from prometheus_client import Counter, Histogram

from edge.inference.admission import WorkFull
from edge.monitoring.stream_keys import caller_of
from edge.serving.node import EdgeNode
from hawkvision.core.clock import Clock
from hawkvision.core.errors import HawkVisionError, InternalError, NotReady, Overloaded
from hawkvision.core.escalation_api import Transports
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import Answer, Tier
from hawkvision.servers.bodies import Bodies, MemoryFull
from hawkvision.servers.keys import INFER, Caller, Keys, RateExceeded, Scopes

log = logging.getLogger("hawkvision.edge")


class Frontend:
    """The protocol-independent front of one node. Every server uses the same one."""

    def __init__(self, metrics: EdgeMetrics, clock: Clock, keys: Keys, max_body_bytes: int) -> None:
        """Prepare; requests for answers are refused until `mark_ready`.

        Args:
            metrics: where to count.
            clock: for the time of the last answer.
            keys: of all servers.
            max_body_bytes: the largest image or body accepted.
        """
        self.metrics = metrics
        self.clock = clock
        self.keys = keys
        self.bodies = Bodies(max_body_bytes, metrics.received_bytes)
        """The images and bodies of all servers in memory."""
        self.transports: Callable[[], Transports] = Transports
        """Gives the node's other transports."""
        self.in_flight = 0
        """Requests for answers under way."""
        self._node: EdgeNode | None = None
        self._last_answer: float | None = None
        """The clock's time of the last answer."""
        metrics.watch_keys(keys.counts)
        metrics.in_flight.set_function(lambda: self.in_flight)
        metrics.bodies_bytes.set_function(lambda: self.bodies.held)

    def mark_ready(self, node: EdgeNode) -> None:
        """Start answering: the models are loaded and warm."""
        self._node = node

    def start_draining(self) -> None:
        """Refuse new requests; those under way are still answered."""
        self._node = None

    def ready_node(self) -> EdgeNode:
        """The node.

        Raises:
            NotReady: before `mark_ready` and after `start_draining`.
        """
        if self._node is None:
            raise NotReady("the models are still loading, or the node is shutting down")
        return self._node

    def authorize(self, authorization: str | None, address: str, needed: Scopes) -> str:
        """The stream of evidence of a request with this Authorization header, see `caller_of`.

        Raises:
            Unauthorized, Forbidden, RateExceeded: if the key is missing, wrong or used too often.
        """
        return caller_of(self.keys.authorize(authorization, needed).name, address)

    def admit(self, caller: Caller, network: str) -> str:
        """As `authorize`, for a caller whose handshake proved the key.

        Raises:
            Forbidden, RateExceeded: if the key may not ask for answers, or is used too often.
        """
        self.keys.admit(caller, INFER)
        return caller_of(caller.name, network)

    def count(self, answer: Answer) -> None:
        """Count an answer and its time."""
        self._last_answer = self.clock.now()
        counted, observed = self._counters(answer.task, answer.model, answer.tier)
        counted.inc()
        observed.observe(answer.timing_ms.total * 1e-3)

    def refusal(self, error: Exception) -> HawkVisionError:
        """Count and log an error that ends a request; gives the error to report to the caller."""
        if not isinstance(error, HawkVisionError):
            error = internal_error(error)
        elif error.status >= 500 and error.status not in (503, 504):
            log.error("internal error: %s", error)
        if isinstance(error, Overloaded):
            self.metrics.shed.labels(_shed_by(error)).inc()
        task = self._node.task if self._node else "none"
        self.metrics.requests.labels(task, "none", "none", str(error.status)).inc()
        return error

    def last_answer_ms(self) -> int:
        """When the last answer was given, in milliseconds since 1970; 0 before the first."""
        if self._last_answer is None:
            return 0
        return round((time.time() - (self.clock.now() - self._last_answer)) * 1e3)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a front end lives as long as its process
    def _counters(self, task: str, model: str, tier: Tier) -> tuple[Counter, Histogram]:
        """The two metrics of an answer; a cascade has a handful of stages."""
        metrics = self.metrics
        return metrics.requests.labels(task, model, tier.value, "200"), metrics.duration.labels(task, tier.value)


def internal_error(error: Exception) -> InternalError:
    """Log a defect; gives the error to report to the caller, which does not repeat the defect's message."""
    log.error("internal error", exc_info=error)
    return InternalError("the node failed on this request; its log says why")


def _shed_by(error: Overloaded) -> str:
    """The bound that was reached."""
    if isinstance(error, MemoryFull):
        return "memory"
    if isinstance(error, RateExceeded):
        return "rate"
    return "work" if isinstance(error, WorkFull) else "queue_full"

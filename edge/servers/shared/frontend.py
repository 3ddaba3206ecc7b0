"""What the servers of one node share, whatever their protocol: readiness, keys, memory for images, and counting.

    HTTP ──────────┐                                                    ┌─► EdgeNode.infer
    OIP over HTTP ─┼─► Frontend: ready_tasks, authorize, bodies_of ─────┤
    datagrams ─────┘                                                    └─► count, refusal

A server translates its protocol to and from a `RequestFields` and an `Answer`, and leaves the rest to `Frontend`. All
servers share its bounds: images of each task in memory together, and requests for each key.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable

from prometheus_client import Counter, Histogram

from edge.monitoring.stream_keys import caller_of
from edge.serving.recent_answers import RecentAnswers
from edge.serving.tasks import ServedTasks
from hawkvision.core.clock import Clock
from hawkvision.core.errors import HawkVisionError, InternalError, NotReady, Overloaded
from hawkvision.core.escalation_api import Transports
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import Answer, Tier
from hawkvision.servers.bodies import Bodies, MemoryFull, bodies_limit
from hawkvision.servers.browsers import Browsers
from hawkvision.servers.keys import INFER, Caller, Keys, RateExceeded, Scopes
from hawkvision.system.admission import TooLateToBegin

log = logging.getLogger("hawkvision.edge")


class Frontend:
    """The protocol-independent front of one node. Every server uses the same one."""

    def __init__(
        self, metrics: EdgeMetrics, clock: Clock, keys: Keys, max_body_bytes: int, browsers: Browsers | None = None
    ) -> None:
        """Prepare; requests for answers are refused until `mark_ready`.

        Args:
            metrics: where to count.
            clock: for the time of the last answer.
            keys: of all servers.
            max_body_bytes: the largest image or body accepted.
            browsers: whose pages may send requests where no key is required; default: only the node's own.
        """
        self.metrics = metrics
        self.clock = clock
        self.keys = keys
        self.browsers = browsers or Browsers()
        self.bodies = Bodies(max_body_bytes)
        """The bodies in memory of the first task, of no task, and of a form before it is read, which may name its
        task."""
        self._bodies_of: dict[str, Bodies] = {}
        """Images and bodies in memory, by task."""
        self._recent: dict[str, RecentAnswers] = {}
        """Counts refusals, by task."""
        self.transports: Callable[[], Transports] = Transports
        """Gives the node's other transports."""
        self.in_flight = 0
        """Requests for answers under way."""
        self.tasks: ServedTasks | None = None
        """None before `mark_ready` and after `start_draining`."""
        self.started = clock.now()
        self.stopping = asyncio.Event()
        """Set when the node is told to stop: what would never end by itself ends."""
        self._last_answers: dict[str, float] = {}
        """The clock's time of the last answer of each task."""
        metrics.watch_keys(keys.counts)
        metrics.in_flight.set_function(lambda: self.in_flight)

    def divide_bodies(self, tasks: ServedTasks) -> None:
        """Give each task its own limit of bodies, out of its memory."""
        for node in tasks.nodes:
            bodies = Bodies(self.bodies.max_body_bytes) if self._bodies_of else self.bodies
            if node.limits.parts is not None:
                bodies.limit_bytes = bodies_limit(node.limits.parts)
            self._bodies_of[node.task] = bodies
            self._recent[node.task] = node.recent
            self.metrics.bodies_bytes.labels(node.task).set_function(functools.partial(_held, bodies))

    @property
    def bodies_limit_bytes(self) -> int:
        """Most bytes of the bodies of all tasks together."""
        return sum(bodies.limit_bytes for bodies in self._bodies_of.values())

    @property
    def bodies_held_bytes(self) -> int:
        """Bytes of the bodies of all tasks in memory."""
        return sum(bodies.held for bodies in self._bodies_of.values())

    def bodies_of(self, task: str) -> Bodies:
        """The images and bodies in memory of a task that is served."""
        return self._bodies_of[task]

    def mark_ready(self, tasks: ServedTasks) -> None:
        """Start answering: the models are loaded and warm."""
        if not self._bodies_of:
            self.divide_bodies(tasks)
        self.tasks = tasks

    def start_draining(self) -> None:
        """Refuse new requests; those under way are still answered."""
        self.tasks = None

    def ready_tasks(self) -> ServedTasks:
        """The tasks.

        Raises:
            NotReady: before `mark_ready` and after `start_draining`.
        """
        if self.tasks is None:
            raise NotReady("the models are still loading, or the node is shutting down")
        return self.tasks

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
        self._last_answers[answer.task] = self.clock.now()
        counted, observed = self._counters(answer.task, answer.model, answer.tier)
        counted.inc()
        observed.observe(answer.timing_ms.total * 1e-3)

    def refusal(self, error: Exception, task: str | None = None) -> HawkVisionError:
        """Count and log an error that ends a request for a task; gives the error to report to the caller."""
        if not isinstance(error, HawkVisionError):
            error = internal_error(error)
        elif error.status >= 500 and error.status not in (503, 504):
            log.error("internal error: %s", error)
        task = task or (self.tasks and self.tasks.only) or "none"
        if isinstance(error, Overloaded):
            self.metrics.shed.labels(task, _shed_by(error)).inc()
        self.metrics.requests.labels(task, "none", "none", str(error.status)).inc()
        if (recent := self._recent.get(task)) is not None:
            recent.refused(self.clock.now())
        return error

    def last_answer_ms(self, task: str) -> int:
        """When the last answer of a task was given, in milliseconds since 1970; 0 before the first."""
        answered = self._last_answers.get(task)
        return 0 if answered is None else round((time.time() - (self.clock.now() - answered)) * 1e3)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a front end lives as long as its process
    def _counters(self, task: str, model: str, tier: Tier) -> tuple[Counter, Histogram]:
        """The two metrics of an answer; a cascade has a handful of stages."""
        metrics = self.metrics
        return metrics.requests.labels(task, model, tier.value, "200"), metrics.duration.labels(task, tier.value)


def _held(bodies: Bodies) -> float:
    return bodies.held


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
    return "deadline" if isinstance(error, TooLateToBegin) else "queue_full"

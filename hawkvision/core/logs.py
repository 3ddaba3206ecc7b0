"""Logging: one line format for all loggers of a process, with the ids of the request and a bound on repeated lines.

    2026-11-27T04:51:20.123Z WARNING hawkvision.edge [7f3a…] datacenter lost: http://dc:8090
    {"time": "2026-11-27T04:51:20.123Z", "level": "WARNING", "logger": "hawkvision.edge", "request_id": "7f3a…",
     "trace_id": "7f3a…", "message": "datacenter lost: http://dc:8090"}

`configure` sets up a process. `bind_request` sets the request of the current task; tasks and threads started by it
(`asyncio.to_thread`) inherit it. `Transitions` reports changes of state. Processes started by Ray send their lines to
the launcher (`hawkvision.system.log_relay`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from hawkvision.core.trace_context import TraceContext

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["text", "json"]

REQUEST_ID_HEADER: Final = "X-Request-Id"
LINES_PER_WINDOW: Final = 20
"""Lines of one call site per window; further ones are only counted."""
WINDOW_S: Final = 60.0
MAX_PLACES: Final = 1024
"""Call sites that are counted; the least recent makes room."""
TRANSITIONS_PER_WINDOW: Final = 6
"""Changes of one subject that are reported per window; then one line per window gives their number."""
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_OURS: Final = "hawkvision"


class RequestIds(NamedTuple):
    """The ids of a request."""

    request_id: str
    trace_id: str


_about: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)


def bind_request(request_id: str | None, trace: TraceContext) -> str:
    """Set the request of the current task for its log lines. Returns the id of the request.

    The caller's id is kept if it has 1 to 128 of the characters `A-Z a-z 0-9 . _ ~ : / + = @ -`. Otherwise the trace id
    takes its place.
    """
    kept = request_id if request_id is not None and _SANE_ID.fullmatch(request_id) else trace.trace_id
    _about.set(RequestIds(kept, trace.trace_id))
    return kept


def current_request() -> RequestIds | None:
    """The ids that `bind_request` set in this task; None outside a request."""
    return _about.get()


def resume(request: RequestIds | None) -> None:
    """Set the request that another process works on, too, from its `current_request`."""
    _about.set(request)


# ------------------------------------------------------------------------------------------------------- lines


class _LineFormatter(logging.Formatter):
    """Base of both formats."""

    def time(self, record: logging.LogRecord) -> str:
        """ISO 8601, UTC, milliseconds."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"

    def message(self, record: logging.LogRecord) -> str:
        """The message on one line, with control characters escaped, and the number of lines left out before it."""
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.getMessage())
        left_out: int = getattr(record, "left_out", 0)
        return f"{text} ({left_out} lines like this were left out)" if left_out else text

    def trace(self, record: logging.LogRecord) -> str | None:
        """The traceback; None without one."""
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        return record.exc_text or None


class TextFormatter(_LineFormatter):
    """Text for people. Tracebacks follow on lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        request = _about.get()
        if request is None:
            ids = "-"
        elif request.request_id == request.trace_id:
            ids = request.request_id
        else:
            ids = f"{request.request_id} trace={request.trace_id}"
        line = f"{self.time(record)} {record.levelname} {record.name} [{ids}] {self.message(record)}"
        traceback = self.trace(record)
        return line if traceback is None else f"{line}\n{traceback}"


class JsonFormatter(_LineFormatter):
    """One JSON object per line, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        request = _about.get()
        written: dict[str, Any] = {
            "time": self.time(record),
            "level": record.levelname,
            "logger": record.name,
            "request_id": None if request is None else request.request_id,
            "trace_id": None if request is None else request.trace_id,
            "message": self.message(record),
        }
        traceback = self.trace(record)
        if traceback is not None:
            written["exception"] = traceback
        return json.dumps(written)


class FloodGuard(logging.Filter):
    """Passes `LINES_PER_WINDOW` lines of each call site per `WINDOW_S`, and counts the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: OrderedDict[tuple[str, int], _CallSite] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written. The first one after suppressed ones carries their number (`left_out`)."""
        now = self._clock()
        with self._lock:
            key = (record.pathname, record.lineno)
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = _CallSite(now)
                if len(self._places) > MAX_PLACES:
                    self._places.popitem(last=False)
            if now - place.since >= WINDOW_S:
                place.since, place.written = now, 0
            if place.written >= LINES_PER_WINDOW:
                place.left_out += 1
                return False
            place.written += 1
            if place.left_out:
                record.left_out = place.left_out
                place.left_out = 0
            return True


class _CallSite:
    __slots__ = ("left_out", "since", "written")

    def __init__(self, since: float) -> None:
        self.since = since
        self.written = 0
        self.left_out = 0


# ------------------------------------------------------------------------------------------------------- set-up


def configure(level: LogLevel = "info", form: LogFormat = "text", handler: logging.Handler | None = None) -> None:
    """Set one format for every logger of this process. A second call replaces the first.

    Args:
        level: of our own loggers. Other libraries log from WARNING on, or from INFO with `level="debug"`.
        form: text or JSON.
        handler: where lines go. None is the standard error that the process started with: Ray Serve replaces
            `sys.stderr`.
    """
    if handler is None:
        handler = logging.StreamHandler(sys.__stderr__ or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(FloodGuard())
    root = logging.getLogger()
    for before in root.handlers[:]:
        root.removeHandler(before)
    root.addHandler(handler)
    root.setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger(_OURS).setLevel(level.upper())
    logging.captureWarnings(capture=True)


def adopt(name: str, level: int = logging.WARNING) -> None:
    """Remove a library's own handlers from its logger, so that it logs like all others, from `level` on."""
    logger = logging.getLogger(name)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(level)


# ------------------------------------------------------------------------------------------------- transitions


class Transitions:
    """Logs each change of state once, on the event loop where it is noted.

    A subject that keeps changing is reported `TRANSITIONS_PER_WINDOW` times per window, then once per window with the
    number of changes and the current state.
    """

    def __init__(
        self,
        log: logging.Logger,
        usual: Mapping[str, Hashable] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        window_s: float = WINDOW_S,
    ) -> None:
        """Start with the `usual` states. The first state of any other subject is reported."""
        self._log = log
        self._clock = clock
        self._window_s = window_s
        self._subjects = {subject: _Subject(state) for subject, state in (usual or {}).items()}

    def note(self, subject: str, state: Hashable, level: int, message: str, *arguments: object) -> None:
        """Record the state of a subject, and log `message` if it had another one, or none, before.

        Subjects must come from a closed set, because all are remembered.
        """
        known = self._subjects.get(subject)
        if known is None:
            known = self._subjects[subject] = _Subject(None)
        elif known.state == state:
            return
        known.state = state
        now = self._clock()
        if known.timer is None and (
            len(known.reported) < TRANSITIONS_PER_WINDOW or now - known.reported[0] >= self._window_s
        ):
            known.reported.append(now)
            self._write(level, message, arguments)
            return
        known.unreported += 1
        known.latest = (level, message, arguments)
        if known.timer is None:
            wait_s = max(0.0, self._window_s - (now - known.reported[0]))
            known.timer = asyncio.get_running_loop().call_later(wait_s, self._summarise, known)

    def close(self) -> None:
        """Log the changes that are still unreported."""
        for known in self._subjects.values():
            if known.timer is not None:
                known.timer.cancel()
                self._summarise(known)

    def _summarise(self, known: _Subject) -> None:
        level, message, arguments = known.latest
        known.reported.append(self._clock())
        self._write(level, message + " (after %d more changes)", (*arguments, known.unreported - 1))
        known.timer, known.unreported = None, 0

    def _write(self, level: int, message: str, arguments: tuple[object, ...]) -> None:
        self._log.log(level, message, *arguments, stacklevel=3)


class _Subject:
    __slots__ = ("latest", "reported", "state", "timer", "unreported")

    def __init__(self, state: Hashable) -> None:
        self.state = state
        self.reported: deque[float] = deque(maxlen=TRANSITIONS_PER_WINDOW)
        self.timer: asyncio.TimerHandle | None = None
        self.unreported = 0
        self.latest: tuple[int, str, tuple[object, ...]] = (logging.INFO, "", ())

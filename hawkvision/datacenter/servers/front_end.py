"""What each server of the tier does around a request, whatever its protocol.

    server ── a request's headers ──► FrontEnd.request ── AdmittedRequest ──► the server reads the image ──► reply
                                        counts the request, names it in the log, maps exceptions

A protocol's module reads requests and writes replies; readiness, admission, keys, limits and metrics are here and in
`service`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from hawkvision.core.errors import HawkVisionError, InternalError, TooLarge
from hawkvision.core.logs import bind_request
from hawkvision.core.trace_context import TraceContext, start_trace
from hawkvision.datacenter.servers.service import TierService
from hawkvision.servers.keys import Keys

log = logging.getLogger(__name__)

CALLER_GONE: Final = 499
"""The metrics' status of a request whose caller is gone; nginx uses the same number."""


@dataclass(slots=True)
class ObservedRequest:
    """One request, as its server and the metrics see it. Made by `FrontEnd.observe`."""

    request_id: str
    span: TraceContext
    task: str | None = None
    """The task that the caller names; None is the first."""
    stage: str | None = None
    """The stage that the caller names; None is the best."""
    status: int = CALLER_GONE
    """The server sets it; an exception sets its own."""

    def use_trace(self, trace: TraceContext | None) -> None:
        """Take the caller's trace, if it is known only now, for the log as well."""
        if trace is not None:
            self.span = trace.child()
            self.request_id = bind_request(None, self.span)


class FrontEnd:
    """A tier, the keys of its callers and the limits of their requests."""

    def __init__(self, tier: TierService, keys: Keys, max_body_bytes: int) -> None:
        self.tier = tier
        self.keys = keys
        self.max_body_bytes = max_body_bytes

    @contextmanager
    def observe(
        self, path: str, trace: TraceContext | None = None, request_id: str | None = None
    ) -> Iterator[ObservedRequest]:
        """Log and count what happens in the block as one request.

        Args:
            path: the metrics' path.
            trace: the caller's trace context.
            request_id: the caller's own id.

        Raises:
            HawkVisionError: the block's.
            InternalError: for any other exception, which is logged: one request's defect must not reach the next.
        """
        span = trace.child() if trace else start_trace()
        observed = ObservedRequest(bind_request(request_id, span), span)
        started = time.perf_counter()
        try:
            yield observed
        except HawkVisionError as error:
            observed.status = error.status
            raise
        except Exception:
            observed.status = InternalError.status
            log.exception("unexpected failure")
            raise InternalError("internal error; the datacenter's log has the details") from None
        finally:
            self.tier.count(path, observed.task, observed.stage, observed.status, time.perf_counter() - started)

    def check_size(self, size: int) -> None:
        """Check an image whose bytes are here already.

        Raises:
            TooLarge: if it has more than `max_body_bytes`.
        """
        if size > self.max_body_bytes:
            raise TooLarge(f"the image has {size} bytes; at most {self.max_body_bytes} are read")

"""W3C trace context: the `traceparent` of a request, from caller to edge to datacenter.

Source: W3C Recommendation "Trace Context", level 1, §3.2. A malformed header is ignored and a new trace begins (§4.3).
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"^(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?$")


# Ids must be unique, not secret. A generator that is seeded once saves a system call per id.
_random = random.Random(os.urandom(32))  # noqa: S311
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def random_hex(digits: int) -> str:
    """A random lower-case hexadecimal number of `digits` digits, not all zero."""
    return f"{_random.getrandbits(4 * digits) or 1:0{digits}x}"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span in a trace, and the id of its request: what a request carries from process to process."""

    trace_id: str
    """Lower-case hex, as `span_id` and `flags`."""
    span_id: str
    flags: str = "01"
    """The last byte of `traceparent`."""
    own_request_id: str | None = None
    """The caller's own id of the request (`X-Request-Id`), if it gave one."""

    @property
    def request_id(self) -> str:
        """The id of the request: the caller's own, or the trace's."""
        return self.own_request_id or self.trace_id

    def named(self, request_id: str) -> TraceContext:
        """The same span, of a request with this id."""
        if request_id == self.request_id:
            return self
        return TraceContext(self.trace_id, self.span_id, self.flags, request_id)

    def header(self) -> str:
        """The value of `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def child(self) -> TraceContext:
        """A new span in the same trace."""
        return TraceContext(self.trace_id, random_hex(16), self.flags, self.own_request_id)


def parse_traceparent(header: str | None) -> TraceContext | None:
    """The caller's context, or None if the header is absent or malformed."""
    match = _TRACEPARENT.match(header.strip()) if header else None
    if match is None:
        return None
    trace_id, span_id, flags = match.groups()
    if trace_id == "0" * 32 or span_id == "0" * 16:
        return None
    return TraceContext(trace_id, span_id, flags)


def start_trace() -> TraceContext:
    """A new trace with random ids."""
    return TraceContext(random_hex(32), random_hex(16))

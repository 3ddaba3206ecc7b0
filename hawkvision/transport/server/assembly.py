"""One image while its fragments arrive, and the bounds of all images together."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from hawkvision.core.clock import Deadline
from hawkvision.transport.coding.image_coding import Arrived
from hawkvision.transport.protocol.image_format import Kind, WireImageFormat
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.response_delivery import Interims


@dataclass(slots=True)
class Budget:
    """The bytes that all sessions may hold together."""

    limit: int
    used: int = 0
    refused: Counter[Status] = field(default_factory=Counter)
    """Images of all sessions that were never handed over, by reason."""

    def take(self, size: int) -> bool:
        """Take `size` bytes; False if they would exceed the limit."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True


@dataclass(frozen=True, slots=True)
class ReceiveTimeouts:
    """How long an image with a deadline may take to arrive."""

    reserve_s: float = 0.01
    """An image is handed over this long before its deadline, so that the response arrives in time."""
    grace_s: float = 0.0
    """The least time that an image gets, however near its deadline."""
    hold_s: float = 0.0
    """More time for an image that cannot be decoded in part: waiting is quicker than another image."""

    def latest(self, assembly: Assembly) -> float:
        """When an image is handed over, however incomplete; +∞ without a deadline."""
        if assembly.deadline is None:
            return math.inf
        latest = max(assembly.deadline.at - self.reserve_s, assembly.started + self.grace_s)
        return latest + self.hold_s if assembly.format.kind is Kind.OPAQUE else latest


STRICT: Final = ReceiveTimeouts()


@dataclass(frozen=True, slots=True)
class ReceivedImage:
    """An image that is handed over."""

    number: int
    template: bytes
    meta: bytes
    arrived: Arrived
    started: float
    """When its first fragment arrived."""
    deadline: Deadline | None
    """When the response must leave to arrive in time."""
    final: bool
    """False while missing fragments have been requested: another event follows, unless the response comes first."""


@dataclass(slots=True)
class Assembly:
    """The fragments of one image."""

    format: WireImageFormat
    template: int
    meta: bytes
    started: float
    deadline: Deadline | None
    interims: Interims
    symbols: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    check_at: float = math.inf
    nacks: int = 0
    last_at: float = 0.0
    done: bool = False
    """The final event went out; further fragments are ignored."""

    def worth_decoding(self, share: float) -> bool:
        """Whether this share of its k fragments has arrived, or a whole coarse image."""
        arrived = len(self.symbols)
        return arrived >= share * self.format.k or arrived >= self.format.base_k > 0

"""One image while it is sent, and the state of its fragments."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hawkvision.core.clock import Deadline
from hawkvision.transport.coding.image_coding import Coded
from hawkvision.transport.protocol.frames import AnswerPart


@dataclass(frozen=True, slots=True)
class FragmentId:
    """The fragment that a datagram carries."""

    image: int
    index: int


@dataclass(slots=True)
class FragmentState:
    """What became of one fragment."""

    flying: int = 0
    delivered: bool = False
    sent: int = 0
    sent_at: float = -math.inf
    queued: bool = False


@dataclass(slots=True)
class OutgoingImage:
    """An image without a response."""

    number: int
    template: int
    coded: Coded
    meta: bytes
    deadline: Deadline | None
    expires: float
    """From when on nothing more of it is sent."""
    fragments: list[FragmentState]
    rounds: int = 0
    repair_at: float = -math.inf
    queued_bytes: int = 0
    last_at: float = -math.inf
    """Its last fragment does not leave before this."""
    parts: dict[int, AnswerPart] = field(default_factory=dict)
    latest_interim: int = -1
    """The number of the latest interim response."""

    @property
    def alive(self) -> int:
        """The fragments that are delivered, under way or queued."""
        return sum(f.delivered or f.flying > 0 or f.queued for f in self.fragments)

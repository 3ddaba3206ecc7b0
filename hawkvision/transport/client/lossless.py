"""Whether an encoded image can travel unchanged in time, and with how much parity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.encoding_plan import SMALL_FRAGMENTS, repairs
from hawkvision.transport.client.sender import BURSTY, PARITY_SPREAD_S
from hawkvision.transport.coding.fec import parity_count
from hawkvision.transport.coding.image_coding import Plan
from hawkvision.transport.coding.rate_fec_control import FINE, SELDOM, FecLinkState, incomplete_probability
from hawkvision.transport.protocol.frames import MAX_META, fragment_room
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS

LOSSLESS_SHARE: Final = 0.25
LOSSLESS_MAX_S: Final = 0.25
"""The most of the link's time that an unchanged image with its parity may take: a share of the deadline, and seconds.
It has two to three times the bytes of quality 80, and other images wait behind it. But the full accuracy is guaranteed
only for unchanged images, and only for them may an intermediate stage answer."""
PARITY_STEPS: Final = (0.1, 0.2, 0.3, 0.5)
"""The parity of an unchanged image: the first that suffices. If none does and there is time for repairs, the first;
after a burst of loss, plans have up to three times an image's bytes."""


@dataclass(frozen=True, slots=True)
class LosslessPlanner:
    """Finds the parity of unchanged images on one connection."""

    connection: ClientConnection
    answer_s: float
    """The part of a deadline that the peer's work takes."""

    def parity(self, plan: Plan, size: int, deadline_s: float, may_miss: float) -> float | None:
        """The parity with which an image of `size` bytes misses the deadline at most `SELDOM`, else `may_miss`.

        It reckons with the present loss, where a plan remembers earlier loss: if the attempt fails, the image can still
        be encoded anew.

        Returns:
            None if the image would take too long or does not fit, and while the loss is unknown.
        """
        seldom = self._parity(SELDOM, plan, size, deadline_s)
        if seldom is not None or may_miss <= SELDOM:
            return seldom
        return self._parity(may_miss, plan, size, deadline_s)

    def _parity(self, may_miss: float, plan: Plan, size: int, deadline_s: float) -> float | None:
        """One of `PARITY_STEPS`, or the plan's own; losses of different rounds count as independent."""
        link, rtt_s = link_state(self.connection), self.connection.rtt_s()
        if not link.known or rtt_s is None:
            return None
        k = -(-size // fragment_room(bytes(MAX_META)))
        left_s = deadline_s - rtt_s - self.answer_s
        max_s = min(left_s, LOSSLESS_SHARE * deadline_s, LOSSLESS_MAX_S)

        def suffices(parity: float) -> bool:
            incomplete = incomplete_probability(k, k + parity_count(k, parity), link)
            return self._transmission_s(k, size, parity) <= max_s and incomplete <= may_miss

        enough = next(filter(suffices, PARITY_STEPS), None)
        if enough is not None:
            return enough
        little = plan.parity if k <= SMALL_FRAGMENTS else PARITY_STEPS[0]
        transmission_s = self._transmission_s(k, size, little)
        if transmission_s <= max_s:
            spread_s = PARITY_SPREAD_S if link.burst > BURSTY else 0.0
            rounds = repairs(left_s - transmission_s - spread_s, self.connection.repair_s())
            if rounds and k * link.loss ** (1 + rounds) <= may_miss:
                return little
        return plan.parity if not plan.base and plan.quality >= FINE and suffices(plan.parity) else None

    def _transmission_s(self, k: int, size: int, parity: float) -> float:
        if math.ceil(k * (1.0 + parity)) > MAX_SYMBOLS:
            return math.inf
        return self.connection.spare_s(math.ceil(size * (1.0 + parity)) + self.connection.queued_bytes)


def link_state(connection: ClientConnection) -> FecLinkState:
    """The measured loss of a connection."""
    estimate = connection.loss()
    return FecLinkState(estimate.ratio, estimate.burst, estimate.known)

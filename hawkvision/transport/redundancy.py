"""How much quality to give up for parity, from what the link is known to lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hawkvision.transport.coding import Plan

QUALITIES: Final = (80, 70, 50, 27, 14)
"""The only qualities that are sent, best first: certificates are made for each."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """What a link loses.

    Attributes:
        loss: share of datagrams that are lost, 0..1.
        burst: mean length of a run of lost datagrams, at least 1.
        known: whether enough datagrams were reported for `loss` and `burst` to mean anything.
    """

    loss: float
    burst: float
    known: bool


def choose(state: LinkState, spare_ratio: float | None) -> Plan:
    """How to send the next picture over this link.

    `spare_ratio` says how many times the plain picture's bytes fit in the time that the sender may spend; None if
    that is unknown, which counts as once.
    """
    if not state.known:
        return Plan(50, 1.0)
    step = next((i for i, bound in enumerate((0.02, 0.1, 0.25, 0.4, 0.6)) if state.loss < bound), 5)
    quality, parity = ((80, 0.2), (80, 0.5), (70, 1.0), (50, 1.0), (27, 2.0), (14, 4.0))[
        min(step + (state.burst > 2), 5)
    ]
    return Plan(quality, max(parity, (spare_ratio or 1.0) - 1.0))

"""Where a path's datagrams go, while the peer's address may change, be forged, or be one that datagrams overtook.

    datagram ─┬─ from the address in use ───────────────────────────► it may be sent three times as much
              ├─ newest of its path, from elsewhere ─► a claim ──── challenge ──► echoed from there ─► in use
              └─ overtaken by others ─► says nothing of where the peer is

As RFC 9000 §9.3 has it, only the newest datagram of a path can say that the peer has moved; and nobody is believed to
be where he claims to be before he has echoed what was sent there (§8.2). Until then the address in use is kept, and the
claim is sent the same datagrams, at most three times the bytes that came from it (§8.1): a peer behind a NAT that
forgot it misses nothing, and who forges a source address gains nothing by it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Address: TypeAlias = Any
"""Of a socket; None where datagrams come from one place only."""

UNPROVEN_RATIO: Final = 3
"""Bytes sent per byte received before an address has proven that it receives (RFC 9000 §8.1)."""
CHALLENGE_S: Final = 0.1
"""Between challenges of an address, sent only when something comes from it."""
CLAIM_S: Final = 3.0
"""Of a claim that is not proven; three timeouts of a bad link (RFC 9000 §8.2.4)."""
TOKEN_BYTES: Final = 8


@dataclass(slots=True)
class PeerAddress:
    """An address, and what has been shown of it."""

    address: Address
    since: float = -math.inf
    proven: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    challenge: bytes | None = None
    """What it has to echo, once it was sent."""
    challenged_at: float = -math.inf

    def may_send(self, size: int) -> bool:
        """Whether it may be sent so much."""
        return self.proven or self.bytes_out + size <= UNPROVEN_RATIO * self.bytes_in

    def challenge_due(self, now: float, size: int) -> bytes | None:
        """What to challenge it with by a datagram of `size` bytes; None if not now."""
        if self.proven or now < self.challenged_at + CHALLENGE_S or not self.may_send(size):
            return None
        self.challenge, self.challenged_at = self.challenge or os.urandom(TOKEN_BYTES), now
        return self.challenge


class PathAddresses:
    """One path's address in use, and the one that claims its place."""

    __slots__ = ("claim", "used")

    def __init__(self, *, proven: bool) -> None:
        self.used = PeerAddress(None, proven=proven)
        self.claim: PeerAddress | None = None

    def on_datagram(self, address: Address, size: int, now: float, *, newest: bool) -> PeerAddress | None:
        """Note an authentic datagram, `newest` if it was sent after all others that came; from where it is, if that
        is known.
        """
        used, claim = self.used, self.claim
        if address == used.address or used.address is None:
            used.address = address
            used.bytes_in += size
            return used
        if claim is not None and claim.address == address and now < claim.since + CLAIM_S:
            claim.bytes_in += size
            return claim
        if not newest:
            return None
        self.claim = PeerAddress(address, now, bytes_in=size)
        return self.claim

    def on_response(self, token: bytes, place: PeerAddress | None) -> bool:
        """Note a response that came from there; whether the address in use is another one now."""
        if place is None or token != place.challenge:
            return False
        place.proven = True
        if place is self.used:
            return False
        self.used, self.claim = place, None
        return True

    def destinations(self, size: int, now: float) -> tuple[Address, ...]:
        """Where to send a datagram, which is counted where it is not counted already."""
        claim = self.claim
        if claim is None:
            return (self.used.address,)
        if now >= claim.since + CLAIM_S:
            self.claim = None
        elif claim.may_send(size):
            claim.bytes_out += size
            return (self.used.address, claim.address)
        return (self.used.address,)

"""Where a path's datagrams go while the peer's address may change, be forged, or be outdated.

    datagram ─┬─ from the address in use ───────────────────────────► allows three times its bytes in return
              ├─ newest of its path, from elsewhere ─► a claim ──── challenge ──► echoed from there ─► in use
              └─ older than others ─► tells nothing about the address

Only the newest datagram of a path can say that the peer has moved (RFC 9000 §9.3), and an address is proven once it has
echoed a challenge (§8.2). Until then the address in use stays, and the claim gets the same datagrams, at most three
times the bytes that came from it (§8.1). So a peer behind a rebound NAT misses nothing, and a forged source gains
nothing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Address: TypeAlias = Any
"""A socket address; None if the socket has one peer only."""

UNPROVEN_RATIO: Final = 3
"""Bytes sent per byte received before an address is proven (RFC 9000 §8.1)."""
CHALLENGE_S: Final = 0.1
"""Between challenges of an address, which are sent only in reply to datagrams from it."""
CLAIM_S: Final = 3.0
"""The life of an unproven claim; three timeouts of a bad link (RFC 9000 §8.2.4)."""
TOKEN_BYTES: Final = 8


@dataclass(slots=True)
class PeerAddress:
    """An address, its traffic and its proof."""

    address: Address
    since: float = -math.inf
    proven: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    challenge: bytes | None = None
    """What it must echo, once that was sent."""
    challenged_at: float = -math.inf

    def may_send(self, size: int) -> bool:
        """Whether `size` bytes may be sent to it."""
        return self.proven or self.bytes_out + size <= UNPROVEN_RATIO * self.bytes_in

    def challenge_due(self, now: float, size: int) -> bytes | None:
        """The challenge for a datagram of `size` bytes; None if none is due."""
        if self.proven or now < self.challenged_at + CHALLENGE_S or not self.may_send(size):
            return None
        self.challenge, self.challenged_at = self.challenge or os.urandom(TOKEN_BYTES), now
        return self.challenge


class PathAddresses:
    """One path's address in use, and the one that claims to replace it."""

    __slots__ = ("claim", "used")

    def __init__(self, *, proven: bool) -> None:
        self.used = PeerAddress(None, proven=proven)
        self.claim: PeerAddress | None = None

    def on_datagram(self, address: Address, size: int, now: float, *, newest: bool) -> PeerAddress | None:
        """Note an authentic datagram, and return its address if that is known.

        `newest` says that it was sent after all others that have arrived.
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
        """Note a response from `place`; whether that changes the address in use."""
        if place is None or token != place.challenge:
            return False
        place.proven = True
        if place is self.used:
            return False
        self.used, self.claim = place, None
        return True

    def destinations(self, size: int, now: float) -> tuple[Address, ...]:
        """Where to send a datagram; counts it for a claim."""
        claim = self.claim
        if claim is None:
            return (self.used.address,)
        if now >= claim.since + CLAIM_S:
            self.claim = None
        elif claim.may_send(size):
            claim.bytes_out += size
            return (self.used.address, claim.address)
        return (self.used.address,)

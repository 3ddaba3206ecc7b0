"""How many strangers are answered: what a datagram of nobody's may cost, so that a flood costs those inside little.

    first datagram, no token ─► Retry, stateless ────────────── `RETRIES_PER_S` in all
    forged or old token ──────► its refusal, stateless ──────── likewise
    token: the address is his ─► a handshake, some 5 ms ─────── `HANDSHAKES_PER_S` in all, `EACH_PER_S` from one network

Who forges addresses gets no token, and can use up Retries only; what is over is dropped, and honest clients try again.
No clock: `now` is seconds of one that never goes back.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Final

RETRIES_PER_S: Final = 4000.0
"""25 µs each, a tenth of a core; forged tokens cost three times as much."""
HANDSHAKES_PER_S: Final = 50.0
HANDSHAKES_AT_ONCE: Final = 256.0
"""After a restart all clients come at once; then a quarter of a core."""
EACH_PER_S: Final = 16.0
EACH_AT_ONCE: Final = 32.0
"""From one address, or one /64 of IPv6."""
MAX_NETWORKS: Final = 4096
"""Whose handshakes are counted by themselves; the one that came longest ago makes room."""


def network_of(address: str) -> str:
    """Whose an address is, as far as it tells: a host's of IPv4, and of IPv6 the /64 that hosts are given."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(ip), 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


class Bucket:
    """So many a second, and so many at once after a rest."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def take(self, now: float) -> bool:
        """Whether one more may be."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class HandshakeLimits:
    """Of one server."""

    def __init__(self, now: float) -> None:
        self._retries = Bucket(RETRIES_PER_S, RETRIES_PER_S / 10, now)
        self._handshakes = Bucket(HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE, now)
        self._each: OrderedDict[str, Bucket] = OrderedDict()

    def may_retry(self, now: float) -> bool:
        """Whether a stranger whose address is not known to be his is answered."""
        return self._retries.take(now)

    def may_begin(self, network: str, now: float) -> bool:
        """Whether a handshake may begin with somebody who receives in that network."""
        each = self._each.get(network)
        if each is None:
            each = self._each[network] = Bucket(EACH_PER_S, EACH_AT_ONCE, now)
            if len(self._each) > MAX_NETWORKS:
                self._each.popitem(last=False)
        self._each.move_to_end(network)
        return each.take(now) and self._handshakes.take(now)

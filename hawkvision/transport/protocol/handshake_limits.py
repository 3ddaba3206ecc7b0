"""Limits on replies to unknown senders, so that a flood costs open sessions little.

    first datagram, no token ─► Retry, stateless ────────────── `RETRIES_PER_S` in all
    forged or old token ──────► its refusal, stateless ──────── likewise
    token: address validated ─► a handshake, some 5 ms ──────── `HANDSHAKES_PER_S` in all, `EACH_PER_S` from one network

A sender of forged addresses gets no token and can use up Retries only. Datagrams above the limits are dropped, and
honest clients try again. No clock: `now` is in seconds of a monotonic clock.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Final

RETRIES_PER_S: Final = 4000.0
"""25 µs each, so a tenth of a core; forged tokens cost three times as much."""
HANDSHAKES_PER_S: Final = 50.0
HANDSHAKES_AT_ONCE: Final = 256.0
"""For a restart, after which all clients connect at once."""
EACH_PER_S: Final = 16.0
EACH_AT_ONCE: Final = 32.0
"""From one address, or one /64 of IPv6."""
MAX_NETWORKS: Final = 4096
"""Networks with a count of their own; the least recent makes room."""


def network_of(address: str) -> str:
    """The network of an address: the host for IPv4, its /64 for IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(ip), 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


class Bucket:
    """A token bucket: a rate per second and a burst."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take a token; False if there is none."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class HandshakeLimits:
    """The limits of one server."""

    def __init__(self, now: float) -> None:
        self._retries = Bucket(RETRIES_PER_S, RETRIES_PER_S / 10, now)
        self._handshakes = Bucket(HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE, now)
        self._each: OrderedDict[str, Bucket] = OrderedDict()

    def may_retry(self, now: float) -> bool:
        """Whether a sender with an unvalidated address gets a reply."""
        return self._retries.take(now)

    def may_begin(self, network: str, now: float) -> bool:
        """Whether a handshake may begin with a sender whose address in this network is validated."""
        each = self._each.get(network)
        if each is None:
            each = self._each[network] = Bucket(EACH_PER_S, EACH_AT_ONCE, now)
            if len(self._each) > MAX_NETWORKS:
                self._each.popitem(last=False)
        self._each.move_to_end(network)
        return each.take(now) and self._handshakes.take(now)

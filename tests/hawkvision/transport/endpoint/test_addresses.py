"""Where datagrams go: whatever comes from wherever, nobody is believed unproven or sent three times what he sent."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hawkvision.transport.protocol.addresses import CLAIM_S, PathAddresses, PeerAddress
from tests.fuzz.examples import examples

ADDRESSES = st.sampled_from([("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 1), ("192.0.2.3", 1)])
SMALL = 40


class Addresses(RuleBasedStateMachine):
    """Authentic datagrams from several addresses; some of these answer their challenges."""

    @initialize()
    def begin(self) -> None:
        self.where = PathAddresses(proven=False)
        self.now = 100.0
        self.got: Counter[object] = Counter()
        self.gave: Counter[object] = Counter()
        self.reported: dict[object, set[bytes]] = {}
        self.proven: set[object] = set()

    @rule(address=ADDRESSES, size=st.integers(40, 1200), newest=st.booleans())
    def came(self, address: object, size: int, newest: bool) -> None:
        before = (self.where.used, self.where.claim)
        place = self.where.on_datagram(address, size, self.now, newest=newest)
        self.gave[address] += size
        assert before[0].address is None or self.where.used is before[0], "nothing that comes moves the peer by itself"
        if not newest:
            assert self.where.claim is before[1], "an overtaken datagram makes no claim"
        if place is not None:
            self.challenge(place)

    def challenge(self, place: PeerAddress) -> None:
        token = place.challenge_due(self.now, SMALL)
        if token is not None:
            place.bytes_out += SMALL
            self.got[place.address] += SMALL
            self.reported.setdefault(place.address, set()).add(token)

    @rule(address=ADDRESSES, teller=ADDRESSES)
    def responded(self, address: object, teller: object) -> None:
        place = self.where.on_datagram(address, SMALL, self.now, newest=True)
        self.gave[address] += SMALL
        for token in (*self.reported.get(teller, ()), b"guessed!"):
            before = self.where.used
            moved = self.where.on_response(token, place)
            assert moved == (self.where.used is not before)
            if token not in self.reported.get(address, set()):
                assert not moved, "a token proves the address only that it was sent to"
            if place is not None and place.proven:
                assert token in self.reported[address] or place.address in self.proven
                self.proven.add(place.address)

    @rule(size=st.integers(SMALL, 1200), times=st.integers(1, 5))
    def sent(self, size: int, times: int) -> None:
        for _ in range(times):
            used = self.where.used
            if used.address is None or not used.may_send(size):
                return
            used.bytes_out += size
            for address in self.where.destinations(size, self.now):
                self.got[address] += size

    @rule(seconds=st.floats(0.0, 2 * CLAIM_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def amplifies_nothing(self) -> None:
        for address, size in getattr(self, "got", {}).items():
            assert address in self.proven or size <= 3 * self.gave[address]


TestAddresses = Addresses.TestCase
TestAddresses.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)

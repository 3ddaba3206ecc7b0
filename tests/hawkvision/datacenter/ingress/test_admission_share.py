"""How ingress replicas share one admission limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawkvision.datacenter.ingress.cluster_watch import AdmissionShare, share


@given(limit=st.integers(1, 10_000), replicas=st.integers(1, 256))
def test_shares_make_up_the_limit_and_at_most_one_request_per_replica_more(limit: int, replicas: int) -> None:
    each = share(limit, replicas)
    assert each >= 1
    assert limit <= each * replicas < limit + replicas


def test_a_replica_learns_its_share_at_once_and_with_each_new_limit() -> None:
    received: list[int] = []
    shared = AdmissionShare(100, 3, received.append, scales=False)
    shared.set_limit(7)
    assert received == [34, 3]

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


def test_a_replica_learns_its_share_at_once_and_with_each_new_limit_and_number() -> None:
    received: list[int] = []
    shared = AdmissionShare(100, 3, received.append)
    shared.set_limit(7)
    for replicas in (3, 0, 7):  # 0: Serve does not know
        shared.set_replicas(replicas)
    assert received == [34, 3, 1]

"""The round-trip estimate learns, forgets and never starves."""

from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.link import HALF_LIFE_S, LONGEST_RETRY_S, PRIOR_MS, LinkEstimate


def predicted(link: LinkEstimate, now: float) -> float:
    value = link.predict_ms(now)
    assert value is not None
    return value


def test_converges_to_a_steady_round_trip() -> None:
    link = LinkEstimate()
    for tick in range(200):
        link.succeeded(20.0, now=tick * 0.05)
    assert 20.0 <= predicted(link, 10.0) < 25.0


def test_one_bad_spell_does_not_starve_the_estimate() -> None:
    link = LinkEstimate()
    for tick in range(20):
        link.succeeded(5_000.0, now=tick * 0.1)
    assert predicted(link, 2.0) > 1_000.0
    # Nobody uploads any more, so nothing is learned; time alone must let the next request try.
    assert predicted(link, 2.0 + 12 * HALF_LIFE_S) < 3 * PRIOR_MS


def test_idle_time_does_not_make_a_good_link_look_worse() -> None:
    link = LinkEstimate()
    for tick in range(200):
        link.succeeded(5.0, now=tick * 0.01)
    assert predicted(link, 1_000.0) <= predicted(link, 2.0) + 1e-9


def test_failure_leaves_the_link_alone_then_lets_one_probe_through() -> None:
    link = LinkEstimate()
    link.failed(now=0.0)
    assert not link.up
    assert link.predict_ms(0.1) is None
    assert link.predict_ms(0.3) is not None, "the probe"
    assert link.predict_ms(0.3) is None, "the caller beside the probe"
    link.succeeded(10.0, now=0.4)
    assert link.predict_ms(0.4) is not None


@given(st.integers(1, 2_000))
def test_retry_interval_is_bounded(failures: int) -> None:
    link = LinkEstimate()
    for _ in range(failures):
        link.failed(now=0.0)
    assert link.predict_ms(LONGEST_RETRY_S) is not None


def test_a_late_answer_raises_the_prediction() -> None:
    link = LinkEstimate()
    before = predicted(link, 0.0)
    link.late(waited_ms=400.0, now=0.0)
    assert predicted(link, 0.0) > before

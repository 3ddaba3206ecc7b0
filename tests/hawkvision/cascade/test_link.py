"""The round-trip estimate learns, forgets and never starves."""

from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.link import HALF_LIFE_S, PRIOR_MS, LinkEstimate


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


def test_asking_for_a_prediction_changes_nothing() -> None:
    link = LinkEstimate()
    link.succeeded(80.0, now=0.0)
    assert [predicted(link, 1.0) for _ in range(100)] == [predicted(link, 1.0)] * 100


def test_a_failed_link_is_left_alone_until_a_probe_gets_through() -> None:
    link = LinkEstimate()
    link.failed()
    assert link.predict_ms(1e6) is None
    link.restored()
    assert link.predict_ms(1e6) is not None


def test_a_late_answer_raises_the_prediction() -> None:
    link = LinkEstimate()
    before = predicted(link, 0.0)
    link.late(waited_ms=400.0, now=0.0)
    assert predicted(link, 0.0) > before


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 100), st.booleans()), max_size=50))
def test_any_history_leaves_a_finite_prediction(history: list[tuple[float, float, bool]]) -> None:
    link, now = LinkEstimate(), 0.0
    for round_trip_ms, pause, late in history:
        now += pause
        (link.late if late else link.succeeded)(round_trip_ms, now)
    assert 0.0 <= predicted(link, now) < 1e7

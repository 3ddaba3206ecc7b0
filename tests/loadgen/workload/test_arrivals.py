"""Schedules: what is drawn from a seed, and which words are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from loadgen.workload.arrivals import (
    BurstyArrivals,
    ClosedLoop,
    ConstantArrivals,
    DiurnalArrivals,
    OpenLoop,
    PoissonArrivals,
    ReplayedArrivals,
    SteppedArrivals,
    parse,
    read_timestamps,
)

RATES = st.floats(0.5, 300.0)
SCHEDULES: st.SearchStrategy[OpenLoop] = st.one_of(
    st.builds(ConstantArrivals, RATES),
    st.builds(PoissonArrivals, RATES),
    st.builds(BurstyArrivals, RATES, st.floats(1.0, 50.0), st.floats(0.05, 20.0)),
    st.builds(DiurnalArrivals, RATES, st.floats(0.0, 1.0), st.none() | st.floats(0.1, 100.0)),
    st.builds(SteppedArrivals, st.lists(st.tuples(st.just(0.0) | RATES, st.floats(0.1, 9.0)), min_size=1).map(tuple)),
)


def dispersion(times: np.ndarray, duration_s: float, window_s: float) -> float:
    """Variance over mean of counts in windows: 1 for Poisson."""
    counts = np.histogram(times, bins=int(duration_s / window_s), range=(0, duration_s))[0]
    return float(counts.var() / counts.mean())


@given(SCHEDULES, st.floats(0.1, 30.0), st.integers(0, 1000))
def test_times_rise_stay_within_the_run_and_are_the_same_for_a_seed(schedule: OpenLoop, end: float, seed: int) -> None:
    times = schedule.due_times(end, seed)
    assert np.all(np.diff(times) >= 0)
    assert len(times) == 0 or (times[0] >= 0 and times[-1] < end)
    np.testing.assert_array_equal(times, schedule.due_times(end, seed))


@pytest.mark.parametrize("text", ["poisson:40", "constant:40", "diurnal:40", "diurnal:40,swing=1,period_s=100"])
def test_mean_rate_is_what_was_asked(text: str) -> None:
    schedule = parse(text)
    assert not isinstance(schedule, ClosedLoop)
    # 40,000 requests: the standard error of their number is 200, half a percent.
    assert len(schedule.due_times(1000.0, seed=3)) == pytest.approx(40_000, rel=0.025)


def test_each_step_has_its_rate_for_its_seconds() -> None:
    schedule = parse("steps:100:100,0:50,400:100")
    assert isinstance(schedule, SteppedArrivals)
    assert (schedule.rate, schedule.span_s) == (200.0, 250.0)
    counts = np.histogram(schedule.due_times(1000.0, seed=3), bins=[0, 100, 150, 250, 1000])[0]
    assert counts.tolist() == [pytest.approx(10_000, rel=0.04), 0, pytest.approx(40_000, rel=0.02), 0]


def test_bursty_keeps_the_mean_rate_and_disperses_as_its_formula_says() -> None:
    schedule = BurstyArrivals(20.0, ratio=8.0, dwell_s=2.0)
    times = schedule.due_times(40_000.0, seed=5)
    assert len(times) == pytest.approx(800_000, rel=0.03)
    quiet = 40.0 / 9.0
    assert dispersion(times, 40_000.0, 100.0) == pytest.approx(1.0 + 2.0 * (7.0 * quiet) ** 2 / 80.0, rel=0.25)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("poisson:8", PoissonArrivals(8.0)),
        ("constant:0.5", ConstantArrivals(0.5)),
        ("bursty:8", BurstyArrivals(8.0)),
        ("bursty:8,dwell_s=5,ratio=4", BurstyArrivals(8.0, 4.0, 5.0)),
        ("diurnal:8,swing=0.5", DiurnalArrivals(8.0, 0.5)),
        ("steps:8:30,0:0.5,64:30", SteppedArrivals(((8.0, 30.0), (0.0, 0.5), (64.0, 30.0)))),
        ("closed:4", ClosedLoop(4)),
    ],
)
def test_words_mean_schedules(text: str, meant: object) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:nan", "poisson:inf", "poisson:8,x=1",
        "bursty:8,ratio=0.5", "bursty:8,ratio=2,ratio=3", "bursty:8,swing=1", "bursty:8,ratio", "diurnal:8,swing=2",
        "closed:0", "closed:1.5", "closed:5000", "closed:²", "replay:", "uniform:8",
        "steps:", "steps:8", "steps:8:0", "steps:-1:5", "steps:8:5,", "steps:8:5,x=1", "steps:8:5:5",
    ],
)  # fmt: skip
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--arrivals"):
        parse(text)


def test_more_requests_than_fit_a_run_are_refused_before_they_are_drawn() -> None:
    with pytest.raises(ConfigError, match="5000000"):
        PoissonArrivals(1e6).due_times(1e6, 0)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50).map(sorted))
def test_recorded_times_come_back_counted_from_the_first(
    tmp_path_factory: pytest.TempPathFactory, times: list[float]
) -> None:
    path = tmp_path_factory.mktemp("replay") / "times.txt"
    path.write_text("# recorded\n\n" + "\n".join(map(repr, times)) + "\n")
    replay = parse(f"replay:{path}")
    assert isinstance(replay, ReplayedArrivals)
    assert replay.due_times(2e9, 0).tolist() == [each - times[0] for each in times]
    assert replay.rate > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\nx\n", ":2: expected a time"),
        ("2\n\n1", ":3: 1.0 is before 2.0"),
        ("1\nnan", ":2:"),
        ("#\n", "no timestamps"),
    ],
)
def test_broken_recordings_are_refused_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "times.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_timestamps(path)

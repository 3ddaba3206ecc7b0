"""How much slower than at their best processors are, of spinners whose every turn is known."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.host.cpu_slowdown import SpinnerBoard, SpinnerLap, SpinnerProgress, board_bytes, since


def test_a_processor_at_its_best_is_not_slowed() -> None:
    before, now = (
        SpinnerProgress((SpinnerLap(500.0, 1.0, 1000.0),)),
        SpinnerProgress((SpinnerLap(2500.0, 3.0, 1000.0),)),
    )
    assert now.slowed_since(before) == 0.0


def test_the_share_is_of_the_turns_that_were_possible() -> None:
    before, now = (
        SpinnerProgress((SpinnerLap(), SpinnerLap())),
        SpinnerProgress((SpinnerLap(600.0, 1.0, 1000.0), SpinnerLap(3000.0, 3.0, 1000.0))),
    )
    assert now.slowed_since(before) == pytest.approx(0.1), "one of four seconds at 0.6"


def test_each_processor_has_a_best_of_its_own() -> None:
    before, now = (
        SpinnerProgress((SpinnerLap(), SpinnerLap())),
        SpinnerProgress((SpinnerLap(1000.0, 1.0, 1000.0), SpinnerLap(500.0, 1.0, 500.0))),
    )
    assert now.slowed_since(before) == 0.0


def test_the_best_may_come_later_than_what_is_judged_by_it() -> None:
    assert SpinnerProgress((SpinnerLap(800.0, 1.0, 1000.0),)).slowed_since(
        SpinnerProgress((SpinnerLap(0.0, 0.0, 800.0),))
    ) == pytest.approx(0.2)


def test_of_processors_that_nobody_had_spinning_nothing_is_known() -> None:
    idle = SpinnerProgress((SpinnerLap(100.0, 1.0, 100.0), SpinnerLap()))
    assert idle.slowed_since(idle) is None
    assert since(None, idle) is None
    assert since(idle, None) is None


laps = st.builds(SpinnerLap, *(st.floats(0.0, 1e12) for _ in range(3)))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")
@given(st.lists(laps, min_size=1, max_size=8))
def test_what_spinners_write_is_read_by_others(written: list[SpinnerLap]) -> None:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, board_bytes(len(written)))
        writing, reading = SpinnerBoard(descriptor, len(written)), SpinnerBoard(descriptor, len(written))
    finally:
        os.close(descriptor)
    assert reading.read() == SpinnerProgress((SpinnerLap(),) * len(written))
    for number, lap in enumerate(written):
        writing.write(number, lap)
    assert reading.read() == SpinnerProgress(tuple(written))
    writing.close()
    reading.close()

"""What the machine's host takes: read from the kernel's own counters."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.host import cpu_steal
from loadgen.host.cpu_steal import ProcessorTime, parse

STAT = "cpu  100 20 30 400 5 1 2 42 7 0\ncpu0 50 10 15 200 2 0 1 21 3 0\nctxt 9\n"


def test_stolen_time_is_the_eighth_counter_and_idle_and_guests_time_are_not_wanted() -> None:
    assert parse(STAT) == ProcessorTime(wanted=195, stolen=42)


def test_a_share_is_of_the_time_that_was_wanted() -> None:
    before, after = ProcessorTime(1000, 10), ProcessorTime(1200, 60)
    assert after.stolen_since(before) == 0.25
    assert before.stolen_since(before) is None, "nothing was wanted"
    assert ProcessorTime(1200, 9).stolen_since(before) == 0.0, "a counter that a host moved back is no negative share"
    assert ProcessorTime(1200, 0).stolen_since(ProcessorTime(1000, 0)) is None, "a host that does not count"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_this_machines_counters_are_read() -> None:
    before = cpu_steal.read()
    assert before is not None
    assert before.wanted > before.stolen >= 0
    assert 0.0 <= (cpu_steal.since(before) or 0.0) <= 1.0
    assert cpu_steal.since(None) is None


@given(st.text(max_size=80).filter(lambda text: not text.startswith("cpu ")))
@example("cpu  1 2 3 4 5 6 7\n")
@example("cpu  1 2 3 4 5 6 7 -8 9 0\n")
def test_text_that_is_not_the_kernels_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="/proc/stat: expected 'cpu' and 8 counters or more"):
        parse(text)

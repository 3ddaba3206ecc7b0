"""What the machine's host takes: read from the kernel's own counters."""

from pathlib import Path

import pytest

from loadgen.commands.options import processor_time, stolen_share


def test_a_share_is_of_the_time_that_was_wanted_if_the_host_counts_it() -> None:
    assert stolen_share((1000, 10), (1200, 60)) == 0.25
    assert stolen_share((1000, 10), (1000, 10)) is None, "nothing was wanted"
    assert stolen_share((1000, 10), (1200, 9)) == 0.0, "a counter that a host moved back is no negative share"
    assert stolen_share((1000, 0), (1200, 0)) is None, "a host that does not count"
    assert stolen_share(None, (1200, 60)) is None


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("cpu  100 20 30 400 5 1 2 42 7 0\ncpu0 50 10 15 200 2 0 1 21 3 0\n", (195, 42)),
        ("cpu  1 2 3 4 5 6 7\n", None),
        ("intr 1 2 3 4 5 6 7 8\n", None),
        ("", None),
    ],
)
def test_counters_are_read_or_not_known(text: str, known: object, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(text)
    assert processor_time(tmp_path / "stat") == known

"""The file that holds a run: it is read back as it was, with its figures beside it or without."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from loadgen.analysis.summary import summarise
from loadgen.workload.record import load, save
from tests.loadgen.runs import answer, plausible, refusal, run_of


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_run_is_read_back_as_it_was_with_figures_or_without(tmp_path: Path, name: str) -> None:
    run, path = plausible("mine"), tmp_path / name
    save(run, path)
    bare = load(path)
    save(run, path, summarise(run))
    assert bare == load(path) == run
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")


def test_figures_are_found_by_name(tmp_path: Path) -> None:
    outcomes = [answer(k / 10, 10, escalated=k < 5, right=k > 1, image=k) for k in range(9)]
    run = run_of([*outcomes, refusal(1.0, 1)])
    save(run, tmp_path / "run.json", summarise(run))
    total = msgspec.json.decode((tmp_path / "run.json").read_bytes())["summary"]["total"]
    assert [(each["share"], each["at_least"]) for each in total["percentiles"]][2:] == [(0.99, True), (0.999, True)]
    assert total["effective"].keys() == {"value", "low", "high"}
    assert (total["shed"], total["shed_share"], total["escalated"]) == (1, 0.1, 5 / 9)


def test_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    save(plausible("mine"), path)
    body = bytearray(path.read_bytes())
    body[40:60] = b"\xff" * 20
    path.write_bytes(body)
    with pytest.raises(ConfigError, match=r"run\.json\.gz: not a load test's record: Error -3 while decompressing"):
        load(path)

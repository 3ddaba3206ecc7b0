"""The file that holds a run: it is read back as it was, with its figures beside it or without."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from loadgen.analysis.summary import RunSummary, summarise
from loadgen.workload.record import load, save
from tests.loadgen.runs import answer, plausible, refusal, run_of


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_run_is_read_back_as_it_was_with_figures_or_without(tmp_path: Path, name: str) -> None:
    run, path = plausible("mine", duration_s=15), tmp_path / name
    save(run, path)
    bare = load(path)
    save(run, path, summarise(run))
    assert bare == load(path) == run
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")


def test_record_of_an_earlier_version_knows_of_its_link_without_the_name(tmp_path: Path) -> None:
    run, path = msgspec.structs.replace(plausible("mine", duration_s=15), link="lte"), tmp_path / "run.json"
    save(run, path)
    assert load(path).link_words == "lte"
    fields = msgspec.json.decode(path.read_bytes())
    del fields["link"]
    path.write_bytes(msgspec.json.encode(fields))
    assert load(path).link_words == "a link"
    path.write_bytes(msgspec.json.encode({**fields, "links": []}))
    assert load(path).link_words == "no link"


def test_figures_are_in_the_file_as_they_are_computed(tmp_path: Path) -> None:
    run, path = plausible("mine", duration_s=15, shed=0.1), tmp_path / "run.json.gz"
    save(run, path, summarise(run))
    written = msgspec.json.decode(gzip.decompress(path.read_bytes()))
    assert msgspec.convert(written["summary"], RunSummary) == summarise(run)


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
    save(plausible("mine", duration_s=15), path)
    body = bytearray(path.read_bytes())
    body[40:60] = b"\xff" * 20
    path.write_bytes(body)
    with pytest.raises(ConfigError, match=r"run\.json\.gz: not a load test's record: Error -3 while decompressing"):
        load(path)


def test_record_of_another_format_is_refused(tmp_path: Path) -> None:
    save(msgspec.structs.replace(run_of([answer(1.0, 10)]), format=2), tmp_path / "run.json")
    with pytest.raises(ConfigError, match="format 2; this version reads 1"):
        load(tmp_path / "run.json")

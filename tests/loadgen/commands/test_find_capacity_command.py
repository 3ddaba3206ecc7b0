"""The command `find-capacity`: what it prints and writes, interrupted or not, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hawkvision.system.child_server import ServerProcess
from loadgen.__main__ import main
from tests.loadgen.command import against
from tests.loadgen.scripted import RecordedRequest, reply, scripted

# ------------------------------------------------------------------------------------------- the command


def test_command_finds_a_rate_confirms_it_and_writes_its_runs(
    null: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, page = tmp_path / "capacity.json", tmp_path / "capacity.html"
    words = [
        "find-capacity", "--url", null.url, "--p99-ms", "5000", "--from-rate", "100", "--probe-requests", "100",
        "--probe-s", "0.5", "--max-probes", "3", "--no-noise", "--json", str(report),
        "--html", str(page),
    ]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    found = json.loads(report.read_text())
    # A busy machine is unsteady now and then; then a lower rate is confirmed.
    assert 0.0 < found["low"] <= 400.0
    assert found["interrupted"] is False
    assert f"capacity: {found['low']:.4g} requests/s at P99 ≤ 5000 ms, confirmed" in said
    assert found["probes"][0]["confirming"] is False
    assert [found["probes"][-1][what] for what in ("rate", "confirming", "held")] == [found["low"], True, True]
    assert all(0.0 < each["p50_ms"] <= each["p99_ms"] for each in found["probes"] if each["held"])
    assert all(each["goodput"] == pytest.approx(each["rate"], rel=0.05) for each in found["probes"] if each["held"])
    drawn = ElementTree.fromstring(
        page.read_text().partition("<svg")[2].partition("</svg>")[0].join(("<svg", "</svg>"))
    )
    markers = [each for each in drawn.iter("polygon") if each.get("class", "").startswith(("solid", "hollow"))]
    assert len(markers) == 2 * len(found["probes"]) + 2, "P50 and P99 of each run, and of the legend"
    run = found["confirmation"]
    assert (run["n"], run["wanted"]) == (1000, 1000)
    assert 0.0 < run["p99_low"] <= run["p99_ms"] <= run["p99_high"]
    assert f"P99 {run['p99_ms']:.1f} ms (95 %: {run['p99_low']:.1f} to {run['p99_high']:.1f}" in said


class Amid:
    """Answers, and tells of the 450th request: the first probe has 200, with those that warm up, the second 400."""

    def __init__(self) -> None:
        self.seen = 0
        self.enough = asyncio.Event()

    async def __call__(self, _: RecordedRequest) -> bytes:
        self.seen += 1
        if self.seen == 450:
            self.enough.set()
        return reply(b'{"index": 1}')


SEARCH = ("find-capacity", "--p99-ms", "9000", "--probe-requests", "100", "--no-noise")


def test_interrupted_command_says_what_it_knows_and_writes_it(tmp_path: Path) -> None:
    report, amid = tmp_path / "capacity.json", Amid()
    words = ("--from-rate", "100", "--probe-s", "1", "--json", str(report))
    status, out, _ = against(scripted(amid), *SEARCH, *words, until=amid.enough)
    assert status == 130
    assert "interrupted, looking for P99 ≤ 9000 ms: 100 requests/s held in a probe and are not confirmed" in out
    found = json.loads(report.read_text())
    assert (found["interrupted"], found["bracketed"], found["low"], found["confirmation"]) == (True, 100.0, 0.0, None)
    assert [each["interrupted"] for each in found["probes"]] == [False, True]
    assert 0 < found["probes"][1]["n"] < 200


def test_server_that_goes_away_amid_the_search_leaves_what_probes_found(tmp_path: Path) -> None:
    report, amid = tmp_path / "capacity.json", Amid()
    words = ("--from-rate", "100", "--probe-s", "1", "--json", str(report))
    status, out, err = against(scripted(amid), *SEARCH, *words, until=amid.enough, server_leaves=True)
    assert status == 1
    assert "no rate was confirmed to keep P99 ≤ 9000 ms: 100 requests/s held in a probe and are not confirmed" in out
    assert "cannot be reached" in err
    held, failed = json.loads(report.read_text())["probes"]
    assert (held["held"], held["errors"], failed["held"]) == (True, {}, False)
    lost = failed["errors"]["unreachable"]
    assert lost > 0
    assert f"unreachable {lost}" in out


def test_server_that_answers_nothing_ends_the_search_with_its_codes() -> None:
    async def refuse(_: RecordedRequest) -> bytes:
        return reply(b'{"error": "no such path", "code": "not_found"}', status=404)

    status, out, err = against(scripted(refuse), *SEARCH, "--from-rate", "200", "--probe-s", "0.5")
    assert (status, err) == (1, "error: none of 100 requests was answered: not_found 100\n")
    # A generator that had to wait for its core says so, and may find a backlog.
    missed = r"not_found 100(, generator late [\d.]+ ms)?: failed: P99(, the backlog grew)?\n"
    assert len(re.findall(rf"requests/s: P99 none, n=100, not answered: {missed}", out)) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--p99-ms", "0"), ("--from-rate", "0"), ("--min-accuracy", "2"), ("--probe-requests", "9"), ("--max-probes", "0"),
     ("--probe-s", "-1"), ("--confirm-requests", "999"), ("--confirm-s", "0")],
)  # fmt: skip
def test_impossible_options_are_named(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-capacity", "--url", "http://127.0.0.1:1", "--p99-ms", "10", option, value]) == 1
    assert option in capsys.readouterr().err

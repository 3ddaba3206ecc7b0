"""Reports: other files are refused, and the figures that people read follow from those that programs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fpga.compiler.devices import devices
from fpga.reports.build_report import read
from fpga.reports.pages import markdown, summary
from hawkvision.core.errors import CompileError

REPORTS = Path(__file__).parents[3] / "fpga" / "reports"
COMMITTED = sorted(path for name in devices() for path in REPORTS.glob(f"*-{name}.json"))


def with_value(path: str, value: object) -> bytes:
    """A committed report with another value at a path of keys."""
    report = json.loads(COMMITTED[0].read_bytes())
    *outer, last = path.split(".")
    at = report
    for key in outer:
        at = at[key]
    at[last] = value
    return json.dumps(report).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format": 2}',
        with_value("simulated_cycles", 0),
        with_value("estimated_cycles", 0),
        with_value("median_mhz", 0),
        with_value("stage_cycles.another", 5),
        with_value("task", "?").replace(b'"?"', b'"\xff"'),
        with_value("more", "?").replace(b'"?"', b"[" * 100_000),
    ],
    ids=["empty", "another format", "no cycles", "no estimate", "no clock", "another stage", "no UTF-8", "deep"],
)
def test_reports_that_nothing_can_be_computed_from_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(CompileError, match=r"r\.json: not a report"):
        read(tmp_path / "r.json")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_page_is_that_of_its_data(path: Path) -> None:
    report = read(path)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == markdown(report)
    assert report.proof.differing == 0
    assert report.proof.images >= 100
    assert report.simulated_cycles == pytest.approx(report.estimated_cycles, rel=0.01)


def test_committed_index_is_that_of_the_reports() -> None:
    assert (REPORTS / "README.md").read_text(encoding="utf-8") == summary([read(path) for path in COMMITTED])

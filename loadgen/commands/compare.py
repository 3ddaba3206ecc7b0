"""`python -m loadgen compare`: recorded runs side by side."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hawkvision.core.command_line import ARGUMENT
from hawkvision.core.errors import ConfigError
from hawkvision.system.files import write_atomic
from loadgen.analysis.compare import RatioVerdict, RunComparison, compare_all, slower, written
from loadgen.commands.command_line import option
from loadgen.commands.terminal import terminal
from loadgen.workload.record import Run, check_files, load


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `python -m loadgen compare`."""

    runs: Annotated[list[Path], msgspec.Meta(description="Records to compare with the first.", extra=ARGUMENT)]
    html: Annotated[Path | None, option("Output", "Write the report page to this file.")] = None
    json: Annotated[Path | None, option("Output", "Write the ratios and their intervals to this file.")] = None
    fail_if_slower: Annotated[
        float | None,
        option(
            "Verdict",
            "Exit with status 1 if P50, P90 or P99 of a later run is shown to be slower by more than this many "
            "percent, or if more of its requests have no answer.",
        ),
    ] = None


async def run(given: CompareOptions) -> int:
    """Compare as the options say, print the table; the exit status.

    Raises:
        HawkVisionError: for files that hold no runs, or that cannot be written.
    """
    if given.fail_if_slower is not None and not 0.0 <= given.fail_if_slower < math.inf:
        raise ConfigError(f"--fail-if-slower: expected a number of percent from 0, got {given.fail_if_slower!r}")
    check_files(given.json, given.html)
    runs = named_apart(given.runs, [load(path) for path in given.runs])
    comparisons = compare_all(runs)
    if given.html is not None:
        # Pages need templates and charts, which a comparison on a terminal does not. Written first: whatever reads the
        # table may close it early.
        from loadgen.analysis.page import page

        write_atomic(given.html, page(runs).encode())
    if given.json is not None:
        # The files, the one that others are compared with first; what was not measured is null.
        body = msgspec.json.encode({"runs": [str(path) for path in given.runs], "comparisons": comparisons})
        write_atomic(given.json, msgspec.json.format(body) + b"\n")
    show(comparisons, terminal(160))
    if given.fail_if_slower is None:
        return 0
    found = slower(comparisons, given.fail_if_slower)
    for sentence in found:
        print(sentence, file=sys.stderr)  # noqa: T201
    return 1 if found else 0


def named_apart(paths: Sequence[Path], runs: Sequence[Run]) -> list[Run]:
    """The runs, those of one name named by their files: `main/a.json` beside `pr/a.json`."""
    times = Counter(run.name for run in runs)
    return [
        msgspec.structs.replace(run, name=str(path)) if times[run.name] > 1 else run
        for path, run in zip(paths, runs, strict=True)
    ]


def show(comparisons: Sequence[RunComparison], console: Console) -> None:
    """Print a table per comparison."""
    for one in comparisons:
        how = "same schedule, paired" if one.paired else "different requests, unpaired"
        table = Table(box=None, header_style="bold", title=escape(f"{one.other} against {one.first} ({how})"))
        table.add_column("")
        for title in (one.first, one.other, "ratio", "95 % interval"):
            table.add_column(escape(title), justify="right")
        table.add_column("")
        for ratio in one.ratios:
            table.add_row(
                ratio.figure,
                written(ratio.figure, ratio.first, at_least=ratio.first_at_least),
                written(ratio.figure, ratio.other, at_least=ratio.other_at_least),
                "" if ratio.ratio is None else f"{ratio.ratio:.2f}x{' ?' if ratio.few else ''}",
                "" if ratio.low is None else f"{ratio.low:.2f}–{ratio.high:.2f}",
                str(ratio.verdict),
                style=None if ratio.verdict in (RatioVerdict.SAME, RatioVerdict.UNKNOWN) else "bold",
            )
        console.print(table)
        if one.first_link != one.other_link:
            links = f"{one.first_link} and {one.other_link}"
            console.print(escape(f"not behind the same link ({links}), so differences are the links' as well"))
        if any(ratio.few for ratio in one.ratios):
            console.print("? rests on few requests or few occasions, so its interval is probably too narrow")

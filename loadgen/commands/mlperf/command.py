"""`python -m loadgen mlperf`: the system under test and the sample library of MLPerf LoadGen.

LoadGen (mlcommons-loadgen) decides when to send queries and whether a run is valid, and writes its own logs; its
queries become requests here. It calls from a thread of its own. Requests run on the event loop, at most
`--max-in-flight` at once; others wait, which LoadGen's latencies include. A request without an answer must be completed
too, so such a run is reported as INVALID whatever LoadGen says about its times.

The target class of each query is drawn from the seed. LoadGen cannot be stopped: after Ctrl-C its logs are incomplete,
and nothing else is written.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.system.files import check_writable, write_atomic
from loadgen.clients.engine import client_for
from loadgen.commands import options
from loadgen.commands.mlperf.accuracy import AnswerJudge
from loadgen.commands.mlperf.bridge import ClassTally, LoadGenBridge
from loadgen.commands.mlperf.logs import SUMMARY_LOG, figures, score, verdict
from loadgen.commands.mlperf.options import MlperfOptions
from loadgen.commands.mlperf.rules import ExpectedSpeed, deviations, expect, read_settings
from loadgen.commands.options import Setup
from loadgen.commands.terminal import terminal
from loadgen.workload.record import Origin, check_files


class MlperfReport(msgspec.Struct, frozen=True):
    """A test, as `--json` writes it."""

    url: str
    data: str
    scenario: str
    mode: str
    benchmark: str
    valid: bool
    """LoadGen's verdict, and whether all was answered; in accuracy mode the latter alone."""
    deviations: list[str]
    """From MLPerf's rules for the benchmark; empty in accuracy mode."""
    requests: int
    failed: int
    errors: dict[str, int]
    """Requests that were not answered, by code."""
    accuracy: float | None
    """In accuracy mode, by LoadGen's log; None without labels."""
    classes: list[ClassTally]
    figures: dict[str, Any]
    """LoadGen's own, by its names for them."""
    logs: str
    origin: Origin


async def run(given: MlperfOptions) -> int:
    """Test, and print LoadGen's verdict; 0 if it is VALID, or in accuracy mode if all was answered, else 1.

    Raises:
        HawkVisionError: if LoadGen is not installed, options do not fit, or no server answers.
    """
    loadgen = _load()
    if given.processes != 1:
        raise ConfigError(f"--processes: expected 1, for LoadGen drives one process; got {given.processes}")
    setup_ = options.read_setup(given)
    spec = setup_.dataset.kind
    judge = AnswerJudge(None if spec is None else spec.open(), setup_.dataset.labels)
    if given.scenario == "Server" and given.target_qps is None and given.user_conf is None:
        raise ConfigError("--target-qps: expected a rate for --scenario Server, here or in --user-conf")
    read_settings(loadgen, given, len(setup_.dataset), ExpectedSpeed(1.0, 1.0))  # refused before anything is asked
    _make_folder(given.out)
    check_files(given.json)
    console = terminal(160, highlight=False)
    started = options.origin(setup_.seed)
    asker = client_for(setup_.server, setup_.max_in_flight, judge.kind)
    await asker.open()
    bridge = LoadGenBridge(loadgen, asker, setup_, judge)
    try:
        expected = await expect(given, asker, setup_)
        settings = read_settings(loadgen, given, len(setup_.dataset), expected)
        await bridge.drive(settings, given.out)
    finally:
        await asker.close()
    result = _result(loadgen, given, setup_, settings, bridge)
    _show(given, bridge, result, console)
    if given.json is not None:
        report = _report(given, setup_, bridge, result, started)
        write_atomic(given.json, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0 if result.valid else 1


@dataclass(frozen=True, slots=True)
class MlperfResult:
    """The verdict on a finished run."""

    valid: bool
    accuracy: float | None = None
    deviations: list[str] = dataclasses.field(default_factory=list)
    summary: str = ""
    """LoadGen's own, in performance mode."""


def _result(loadgen: Any, given: MlperfOptions, setup_: Setup, settings: Any, bridge: LoadGenBridge) -> MlperfResult:
    if given.mode == "accuracy":
        labelled = setup_.dataset.labels is not None
        right = score(given.out / "mlperf_log_accuracy.json", bridge.judge) if labelled else None
        return MlperfResult(bridge.failed == 0, accuracy=right)
    text = (given.out / SUMMARY_LOG).read_text(encoding="utf-8")
    return MlperfResult(
        verdict(text) and bridge.failed == 0, deviations=deviations(loadgen, given, settings), summary=text
    )


def _show(given: MlperfOptions, bridge: LoadGenBridge, result: MlperfResult, console: Console) -> None:
    if given.mode == "accuracy":
        said = "without labels" if result.accuracy is None else f"{result.accuracy:.2%} right"
        if bridge.judge.kind is not None:
            said += f" (1 − the loss of {bridge.judge.kind.name})"
        console.print(f"{given.scenario}, accuracy: {bridge.completed} images, {said}, {bridge.failed} not answered")
    else:
        console.print(result.summary.strip(), markup=False)
        if result.deviations:
            console.print(f"other than MLPerf's rules for {given.benchmark}: {', '.join(result.deviations)}")
        console.print(
            f"{given.scenario}: {'VALID' if result.valid else 'INVALID'}; {bridge.completed} requests, "
            f"{bridge.failed} not answered{_reasons(bridge)}"
        )
    if len(bridge.tallies) > 1:
        for tally in bridge.tallies:
            console.print(f"  {_tally_line(tally)}", markup=False)
    console.print(f"LoadGen's logs are in {given.out}")


def _report(
    given: MlperfOptions, setup_: Setup, bridge: LoadGenBridge, result: MlperfResult, started: Origin
) -> MlperfReport:
    return MlperfReport(
        url=given.url,
        data=setup_.dataset.name,
        scenario=given.scenario,
        mode=given.mode,
        benchmark=given.benchmark,
        valid=result.valid,
        deviations=result.deviations,
        requests=bridge.completed,
        failed=bridge.failed,
        errors=bridge.errors,
        accuracy=result.accuracy,
        classes=bridge.tallies,
        figures=figures((given.out / "mlperf_log_detail.txt").read_text(encoding="utf-8", errors="replace")),
        logs=str(given.out),
        origin=started,
    )


def _tally_line(tally: ClassTally) -> str:
    accuracy = "" if tally.accuracy is None else f", {tally.accuracy:.2%} right"
    return f"{tally.target}: {tally.asked} requests{accuracy}, {tally.asked - tally.answered} not answered"


def _reasons(bridge: LoadGenBridge) -> str:
    return "".join(f", {code}: {n}" for code, n in sorted(bridge.errors.items()))


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out}: expected a folder, or where one can be made: {error.strerror}") from None
    check_writable(out / SUMMARY_LOG)


def _load() -> Any:
    try:
        return importlib.import_module("mlperf_loadgen")
    except ImportError:
        raise NotReady("this needs MLPerf LoadGen: pip install 'hawkvision[loadgen]'") from None

"""`python -m loadgen mlperf`: the system under test and the sample library of MLPerf LoadGen.

LoadGen (mlcommons-loadgen) decides when to send queries and whether a run is valid, and writes its own logs; its
queries become requests here. It calls from a thread of its own. Requests run on the event loop, at most
`--max-in-flight` at once; others wait, which LoadGen's latencies include. A request without an answer must be completed
too, so such a run is reported as INVALID whatever LoadGen says about its times.

The target class of each query is drawn from the seed. LoadGen cannot be stopped: after Ctrl-C its logs are incomplete,
and nothing else is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from rich.console import Console

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.system.files import check_writable, write_atomic
from loadgen.clients.base import RequestClient, RequestTimes
from loadgen.clients.engine import client_for
from loadgen.commands import options
from loadgen.commands.command_line import option
from loadgen.commands.mlperf_bridge import PERFORMANCE_SAMPLES, ClassTally, LoadGenBridge
from loadgen.commands.options import Setup
from loadgen.commands.terminal import terminal
from loadgen.workload import target_mix
from loadgen.workload.arrivals import MAX_RATE, MAX_REQUESTS
from loadgen.workload.record import Origin, check_files

Scenario: TypeAlias = Literal["SingleStream", "MultiStream", "Server", "Offline"]
Mode: TypeAlias = Literal["performance", "accuracy"]
IN_FLIGHT: Final = 64
"""Requests at once unless told otherwise: they saturate a server, and fit its queue; nodes shed beyond 256."""
WARM_UP_S: Final = 0.5
FASTER: Final = 1.5
"""Than in the warm-up, the server may turn out to be; more queries than needed cost LoadGen a little memory."""
SUMMARY_LOG: Final = "mlperf_log_summary.txt"
MOST_S: Final = 1e6
"""Twelve days. LoadGen counts nanoseconds in 64 bits, and draws all queries of a run before it."""
_VERDICT: Final = re.compile(r"^Result is : (VALID|INVALID)", re.MULTILINE)

_LOGGED: Final = ":::MLLOG "
_RESULTS: Final = ("result_", "early_stopping_", "num_errors", "num_warnings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlperfOptions(options.LoadOptions):
    """The options of `python -m loadgen mlperf`."""

    max_in_flight: Annotated[int, option("Load", "Most requests without an answer at a time.")] = IN_FLIGHT
    scenario: Annotated[Scenario, option("MLPerf", "MLPerf scenario.")]
    mode: Annotated[Mode, option("MLPerf", "Measure performance, or the accuracy over all images.")] = "performance"
    benchmark: Annotated[
        str, option("MLPerf", "Name of the benchmark in LoadGen's configuration, whose rules apply.")
    ] = "resnet50"
    user_conf: Annotated[
        Path | None, option("MLPerf", "LoadGen's user.conf: overrides the rules; options override it.", metavar="FILE")
    ] = None
    min_duration_s: Annotated[float | None, option("MLPerf", "Shortest run, in seconds. Default: the rules', 600.")] = (
        None
    )
    min_queries: Annotated[int | None, option("MLPerf", "Fewest queries. Default: the rules'.")] = None
    target_qps: Annotated[
        float | None,
        option("MLPerf", "Queries per second: of Server, the rate to send; of Offline, the rate to expect."),
    ] = None
    target_latency_ms: Annotated[
        float | None,
        option(
            "MLPerf",
            "Latency in milliseconds: of Server, the bound (default: the rules', 15); of SingleStream and "
            "MultiStream, what to expect.",
        ),
    ] = None
    out: Annotated[Path, option("Output", "Folder for LoadGen's logs.")] = Path("mlperf_logs")
    json: Annotated[
        Path | None, option("Output", "Write the verdict, figures and counts to this file.", metavar="FILE")
    ] = None


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
    kind = setup_.dataset.kind
    if kind is not None and "index" not in kind.open().wire_tensors:
        raise ConfigError(f"--task: MLPerf's accuracy log has one class per image; got a task of kind {kind.name!r}")
    if given.scenario == "Server" and given.target_qps is None and given.user_conf is None:
        raise ConfigError("--target-qps: expected a rate for --scenario Server, here or in --user-conf")
    read_settings(loadgen, given, len(setup_.dataset), ExpectedSpeed(1.0, 1.0))  # refused before anything is asked
    _make_folder(given.out)
    check_files(given.json)
    console = terminal(160, highlight=False)
    started = options.origin(setup_.seed)
    asker = client_for(setup_.server, setup_.max_in_flight)
    await asker.open()
    bridge = LoadGenBridge(loadgen, asker, setup_)
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
        right = score(given.out / "mlperf_log_accuracy.json", setup_.dataset.labels)
        return MlperfResult(bridge.failed == 0, accuracy=right)
    text = (given.out / SUMMARY_LOG).read_text(encoding="utf-8")
    return MlperfResult(
        verdict(text) and bridge.failed == 0, deviations=deviations(loadgen, given, settings), summary=text
    )


def _show(given: MlperfOptions, bridge: LoadGenBridge, result: MlperfResult, console: Console) -> None:
    if given.mode == "accuracy":
        said = "without labels" if result.accuracy is None else f"{result.accuracy:.2%} right"
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


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """What the warm-up saw: LoadGen draws its queries before the run, from what it is told to expect."""

    fastest_s: float
    per_s: float


def read_settings(loadgen: Any, given: MlperfOptions, images: int, expected: ExpectedSpeed) -> Any:
    """LoadGen's `TestSettings`: the rules it carries for the benchmark, then what the warm-up saw, the user's conf, and
    the options.

    A server that is faster than expected answers all queries before the least duration is over, which is INVALID; so
    it is expected to be `FASTER` than it was.

    Raises:
        ConfigError: naming the option or file that does not fit.
    """
    settings = rules(loadgen, given)
    settings.mode = loadgen.TestMode.AccuracyOnly if given.mode == "accuracy" else loadgen.TestMode.PerformanceOnly
    settings.performance_sample_count_override = min(images, PERFORMANCE_SAMPLES)
    expected_ns = max(1, round(1e9 * expected.fastest_s / FASTER))
    settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = expected_ns
    settings.offline_expected_qps = FASTER * expected.per_s
    if given.user_conf is not None:
        if not given.user_conf.is_file():
            raise ConfigError(f"--user-conf: {given.user_conf}: no such file")
        if settings.FromConfig(str(given.user_conf), given.benchmark, given.scenario, 1) != 0:
            raise ConfigError(f"--user-conf: {given.user_conf}: LoadGen cannot read it")
    for named, value, most in (
        ("--min-duration-s", given.min_duration_s, MOST_S),
        ("--target-qps", given.target_qps, MAX_RATE),
        ("--target-latency-ms", given.target_latency_ms, 1e3 * MOST_S),
        ("--min-queries", given.min_queries, MAX_REQUESTS),
    ):
        if value is not None and not 0 < value <= most:
            raise ConfigError(f"{named}: expected a number above 0, at most {most:g}, got {value!r}")
    if given.min_duration_s is not None:
        settings.min_duration_ms = round(1e3 * given.min_duration_s)
    if given.min_queries is not None:
        settings.min_query_count = given.min_queries
    if given.target_qps is not None:
        settings.server_target_qps = settings.offline_expected_qps = given.target_qps
    if given.target_latency_ms is not None:
        target_ns = max(1, round(1e6 * given.target_latency_ms))
        settings.server_target_latency_ns = target_ns
        settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = target_ns
    return settings


def rules(loadgen: Any, given: MlperfOptions) -> Any:
    """The settings that LoadGen's own mlperf.conf has for the benchmark and scenario.

    Raises:
        ConfigError: if it has nothing for that benchmark. LoadGen would take a name that it does not know without a
            word, and keep to no rules.
    """
    settings = _conf(loadgen, given.benchmark, given.scenario)
    if _values(settings) == _values(_conf(loadgen, "", given.scenario)):
        raise ConfigError(f"--benchmark: expected one of LoadGen's conf, such as resnet50; got {given.benchmark!r}")
    return settings


def _conf(loadgen: Any, benchmark: str, scenario: str) -> Any:
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, scenario)
    if settings.FromConfig("", benchmark, scenario, 0) != 0:
        raise ConfigError(f"--benchmark: LoadGen's conf cannot be read for {benchmark!r}")
    return settings


def _values(settings: Any) -> dict[str, Any]:
    names = (name for name in dir(settings) if not name.startswith("_") and name != "FromConfig")
    return {name: getattr(settings, name) for name in names}


def deviations(loadgen: Any, given: MlperfOptions, settings: Any) -> list[str]:
    """In which settings a run is no run by the rules, whatever LoadGen says of it."""
    ruled = rules(loadgen, given)
    names = ["min_duration_ms", "min_query_count"]
    if given.scenario == "Server":
        names.append("server_target_latency_ns")
    return [
        f"{name} {getattr(settings, name)} (rules: {getattr(ruled, name)})"
        for name in names
        if getattr(settings, name) != getattr(ruled, name)
    ]


async def expect(given: MlperfOptions, asker: RequestClient, setup_: Setup) -> ExpectedSpeed:
    """Warm up, with all classes by their shares: one request after another, or for Offline as many at once as may be.

    Raises:
        NotReady: if the server refuses.
    """
    together = setup_.max_in_flight if given.scenario == "Offline" else 1
    fastest_s, done = math.inf, 0
    bodies, targets = itertools.cycle(setup_.dataset.bodies), target_mix.draws(setup_.classes, setup_.seed + 1)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def caller() -> None:
        nonlocal fastest_s, done
        while (asked := loop.time()) < began + WARM_UP_S:
            target = setup_.classes[next(targets)]
            replied = await asker.ask(next(bodies), target.fields, RequestTimes())
            if replied.status != 200:
                raise NotReady(f"the server does not answer images, {target.name}: {replied.error}")
            fastest_s, done = min(fastest_s, loop.time() - asked), done + 1

    await asyncio.gather(*(caller() for _ in range(together)))
    return ExpectedSpeed(fastest_s, done / (loop.time() - began))


def verdict(summary: str) -> bool:
    """LoadGen's verdict in its summary.

    Raises:
        NotReady: if there is none, because the run ended before it.
    """
    found = _VERDICT.search(summary)
    if found is None:
        raise NotReady(f"LoadGen wrote no verdict: expected 'Result is : VALID' or INVALID in {SUMMARY_LOG}")
    return found[1] == "VALID"


class _LogLine(msgspec.Struct):
    key: str
    value: Any = None


def figures(detail: str) -> dict[str, Any]:
    """LoadGen's results in its detailed log, by its names for them; what is no line of that log is passed over."""
    found: dict[str, Any] = {}
    for line in detail.splitlines():
        if line.startswith(_LOGGED):
            with contextlib.suppress(msgspec.DecodeError):
                read = msgspec.json.decode(line.removeprefix(_LOGGED).encode(), type=_LogLine)
                if read.key.startswith(_RESULTS):
                    found[read.key] = read.value
    return found


class _LogEntry(msgspec.Struct):
    qsl_idx: int
    data: str
    """Hexadecimal, little-endian int32."""


def score(log: Path, labels: Sequence[int] | None) -> float | None:
    """The share of right answers in LoadGen's accuracy log; None without labels.

    Raises:
        ConfigError: if the log is not one.
    """
    if labels is None:
        return None
    try:
        entries = msgspec.json.decode(log.read_bytes(), type=list[_LogEntry])
        right = [struct.unpack("<i", bytes.fromhex(each.data))[0] == labels[each.qsl_idx] for each in entries]
    except (OSError, msgspec.DecodeError, ValueError, struct.error, IndexError) as error:
        raise ConfigError(f"{log}: not LoadGen's accuracy log: {error}") from None
    return sum(right) / len(right) if right else None


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

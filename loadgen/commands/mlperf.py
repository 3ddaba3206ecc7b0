"""`python -m loadgen mlperf`: the system under test and the sample library of MLPerf LoadGen.

LoadGen (mlcommons-loadgen) decides when to send queries and whether a run is valid, and writes its own logs; its
queries become requests here. It calls from a thread of its own. Requests run on the event loop, at most
`--max-in-flight` at once; others wait, which LoadGen's latencies include. A request without an answer must be completed
too, so such a run is reported as INVALID whatever LoadGen says about its times.

The target class of each query is drawn from the seed. LoadGen cannot be stopped: after Ctrl-C its logs are incomplete,
and nothing else is written.
"""

from __future__ import annotations

import array
import asyncio
import importlib
import itertools
import math
import os
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.system.files import check_writable
from hawkvision.tasks.kind import TaskKind, Truth
from loadgen.clients.base import ClientReply, RequestClient, RequestTimes
from loadgen.clients.engine import client_for
from loadgen.commands import options
from loadgen.commands.command_line import option
from loadgen.commands.options import LoadOptions, Setup
from loadgen.commands.terminal import terminal
from loadgen.workload import target_mix
from loadgen.workload.arrivals import MAX_RATE, MAX_REQUESTS
from loadgen.workload.judging import rightness

Scenario: TypeAlias = Literal["SingleStream", "MultiStream", "Server", "Offline"]
Mode: TypeAlias = Literal["performance", "accuracy"]
IN_FLIGHT: Final = 64
"""Requests at once unless told otherwise: they saturate a server, and fit its queue; nodes shed beyond 256."""
PERFORMANCE_SAMPLES: Final = 1024
"""Images of a performance run at most, as the rules have it for ResNet-50 (inference_rules.adoc)."""

WARM_UP_S: Final = 0.5
FASTER: Final = 1.5
"""Than in the warm-up, the server may turn out to be; more queries than needed cost LoadGen a little memory."""
MOST_S: Final = 1e6
"""Twelve days. LoadGen counts nanoseconds in 64 bits, and draws all queries of a run before it."""
EXPECTED_NS: Final = ("single_stream_expected_latency_ns", "multi_stream_expected_latency_ns")
NO_CLASS: Final = -1
"""What the accuracy log holds of a request that was not answered."""
SUMMARY_LOG: Final = "mlperf_log_summary.txt"


class MlperfOptions(LoadOptions, frozen=True, kw_only=True):
    """The options of `python -m loadgen mlperf`."""

    max_in_flight: Annotated[int, option("Load", "Most requests without an answer at a time.")] = IN_FLIGHT
    scenario: Annotated[Scenario, option("MLPerf", "MLPerf scenario.")]
    mode: Annotated[Mode, option("MLPerf", "Measure performance, or the accuracy over all images.")] = "performance"
    benchmark: Annotated[str, option("MLPerf", "Benchmark in LoadGen's configuration, whose rules apply.")] = "resnet50"
    user_conf: Annotated[Path | None, option("MLPerf", "LoadGen's user.conf: above the rules, below options.")] = None
    min_duration_s: Annotated[float | None, option("MLPerf", "Shortest run, in seconds. Default: 600, the rules'.")] = (
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
            "Latency in milliseconds: of Server, the bound (default: the rules', 15); of the streams, what to expect.",
        ),
    ] = None
    out: Annotated[Path, option("Output", "Folder for LoadGen's logs.")] = Path("mlperf_logs")


async def run(given: MlperfOptions) -> int:
    """Test, and print LoadGen's verdict; 0 if it is VALID, or in accuracy mode if all was answered, else 1.

    Raises:
        HawkVisionError: if options do not fit, or no server answers.
        ModuleNotFoundError: if LoadGen is not installed.
    """
    loadgen: Any = importlib.import_module("mlperf_loadgen")
    if given.processes != 1:
        raise ConfigError(f"--processes: expected 1, for LoadGen drives one process; got {given.processes}")
    setup_ = options.read_setup(given)
    kind, images = judging_kind(setup_), len(setup_.dataset)
    if given.scenario == "Server" and given.target_qps is None and given.user_conf is None:
        raise ConfigError("--target-qps: expected a rate for --scenario Server, here or in --user-conf")
    read_settings(loadgen, given, images, 1.0, 1.0)  # refused before anything is asked
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {given.out}: expected a folder that can be made: {error.strerror}") from None
    check_writable(given.out / SUMMARY_LOG)
    asker = client_for(setup_.server, setup_.max_in_flight, kind)
    await asker.open()
    bridge = LoadGenBridge(loadgen, asker, setup_, kind)
    try:
        settings = read_settings(loadgen, given, images, *await warm_up(given, asker, setup_))
        await bridge.drive(settings, given.out)
    finally:
        await asker.close()
    valid, lines = conclusion(loadgen, given, settings, bridge)
    console = terminal(160, highlight=False)
    console.print("\n".join([*lines, f"LoadGen's logs are in {given.out}"]), markup=False)
    return 0 if valid else 1


def conclusion(loadgen: Any, given: MlperfOptions, settings: Any, bridge: LoadGenBridge) -> tuple[bool, list[str]]:
    """Whether a run is valid (LoadGen's verdict, and whether all was answered), and what is printed of it."""
    failed, completed = bridge.errors.total(), bridge.asked.total()
    valid, labelled = failed == 0, bridge.labels is not None
    if given.mode == "accuracy":
        right = f"{sum(bridge.right) / max(1, completed):.2%} right" if labelled else "without labels"
        loss = "" if bridge.kind is None else f" (1 − the loss of {bridge.kind.name})"
        lines = [f"{given.scenario}, accuracy: {completed} images, {right}{loss}, {failed} not answered"]
    else:
        summary = (given.out / SUMMARY_LOG).read_text(encoding="utf-8")
        valid = verdict(summary) and valid
        others = deviations(loadgen, given, settings)
        lines = [summary.strip()]
        lines += [f"other than MLPerf's rules for {given.benchmark}: {', '.join(others)}"] if others else []
        reasons = "".join(f", {code}: {n}" for code, n in sorted(bridge.errors.items()))
        lines.append(
            f"{given.scenario}: {'VALID' if valid else 'INVALID'}; {completed} requests, {failed} not answered{reasons}"
        )
    for place, each in enumerate(bridge.classes if len(bridge.classes) > 1 else ()):
        asked = bridge.asked[place]
        right = f", {bridge.right[place] / asked:.2%} right" if labelled and asked else ""
        lines.append(f"  {each.name}: {asked} requests{right}, {asked - bridge.answered[place]} not answered")
    return valid, lines


def judging_kind(setup_: Setup) -> TaskKind[Any] | None:
    """The kind whose loss judges answers; None where the index of a class does, or the task is not known here."""
    kind = None if setup_.dataset.kind is None else setup_.dataset.kind.open()
    return None if kind is None or "index" in kind.wire_tensors else kind


def judged(kind: TaskKind[Any] | None, truth: Truth | None, reply: ClientReply) -> tuple[bool, float, array.array[Any]]:
    """Whether a reply is an answer, how right it is (0 without a label), and what LoadGen's accuracy log holds of it:
    the class, or for kinds with a loss of their own 1 − the loss.
    """
    answered = reply.status == 200 and (reply.index if kind is None else reply.prediction) is not None
    right = rightness(kind, reply.prediction, reply.index, truth) if answered and truth is not None else None
    if kind is None:
        return answered, right or 0.0, array.array("i", [NO_CLASS if reply.index is None else reply.index])
    return answered, right or 0.0, array.array("f", [math.nan if answered and right is None else right or 0.0])


class LoadGenBridge:
    """LoadGen's system under test on the running event loop."""

    def __init__(self, loadgen: Any, asker: RequestClient, setup_: Setup, kind: TaskKind[Any] | None) -> None:
        self.kind, self.labels, self.classes = kind, setup_.dataset.labels, setup_.classes
        self.errors = Counter[str]()
        self.asked, self.answered = Counter[int](), Counter[int]()
        """By target class."""
        self.right = [0.0] * len(self.classes)
        """How right the answers are, summed over all that were asked, by target class."""
        self._loadgen = loadgen
        self._asker = asker
        self._bodies = setup_.dataset.bodies
        self._limit = setup_.max_in_flight
        # Other draws than the warm-up's, so that a server does not see the same requests again.
        self._targets = target_mix.draws(setup_.classes, setup_.seed + 2)
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, int, int]] = deque()
        """Identity, image and class of queries that LoadGen issued and no caller has taken yet."""
        self._active = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def drive(self, settings: Any, folder: Path) -> None:
        """Run LoadGen to its end. It cannot be stopped: an interrupt ends the process."""
        outputs = self._loadgen.LogOutputSettings()
        outputs.outdir = str(folder)
        outputs.copy_summary_to_stdout = False
        logs = self._loadgen.LogSettings()
        logs.log_output = outputs
        logs.enable_trace = False
        total = len(self._bodies)
        system = self._loadgen.ConstructSUT(self._issue, lambda: None)
        library = self._loadgen.ConstructQSL(total, min(total, PERFORMANCE_SAMPLES), lambda _: None, lambda _: None)

        def test() -> None:
            self._loadgen.StartTestWithLogSettings(system, library, settings, logs)
            self._loop.call_soon_threadsafe(self._over.set_result, None)

        threading.Thread(target=test, name="mlperf-loadgen", daemon=True).start()
        try:
            await self._over
        except asyncio.CancelledError:
            sys.stderr.write(f"interrupted; LoadGen cannot be stopped: its logs in {folder} are incomplete\n")
            sys.stderr.flush()
            os._exit(130)
        self._loadgen.DestroyQSL(library)
        self._loadgen.DestroySUT(system)

    def _issue(self, samples: Sequence[Any]) -> None:
        """Called by LoadGen, on its thread."""
        self._loop.call_soon_threadsafe(self._take, [(sample.id, sample.index) for sample in samples])

    def _take(self, samples: list[tuple[int, int]]) -> None:
        self._waiting.extend((identity, image, next(self._targets)) for identity, image in samples)
        for _ in range(min(len(samples), self._limit - self._active)):
            self._active += 1
            task = self._loop.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _work(self) -> None:
        """Ask as long as there is something to ask."""
        while self._waiting:
            identity, image, target = self._waiting.popleft()
            replied = await self._asker.ask(self._bodies[image], self.classes[target].fields, RequestTimes())
            truth = None if self.labels is None else self.labels[image]
            answered, right, logged = judged(self.kind, truth, replied)
            self.asked[target] += 1
            self.answered[target] += answered
            self.right[target] += right
            self.errors.update(() if answered else (replied.error,))
            address, length = logged.buffer_info()
            response = self._loadgen.QuerySampleResponse(identity, address, length * logged.itemsize)
            self._loadgen.QuerySamplesComplete([response])
        self._active -= 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What breaks here must not leave LoadGen waiting for an answer for ever."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)


def read_settings(loadgen: Any, given: MlperfOptions, images: int, fastest_s: float, per_s: float) -> Any:
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
    expected_ns = max(1, round(1e9 * fastest_s / FASTER))
    for name in EXPECTED_NS:
        setattr(settings, name, expected_ns)
    settings.offline_expected_qps = FASTER * per_s
    if given.user_conf is not None:
        if not given.user_conf.is_file():
            raise ConfigError(f"--user-conf: {given.user_conf}: no such file")
        if settings.FromConfig(str(given.user_conf), given.benchmark, given.scenario, 1) != 0:
            raise ConfigError(f"--user-conf: {given.user_conf}: LoadGen cannot read it")
    for named, value, most, scale, names in (
        ("--min-duration-s", given.min_duration_s, MOST_S, 1e3, ("min_duration_ms",)),
        ("--min-queries", given.min_queries, MAX_REQUESTS, 1, ("min_query_count",)),
        ("--target-latency-ms", given.target_latency_ms, 1e3 * MOST_S, 1e6, ("server_target_latency_ns", *EXPECTED_NS)),
        ("--target-qps", given.target_qps, MAX_RATE, None, ("server_target_qps", "offline_expected_qps")),
    ):
        if value is None:
            continue
        if not 0 < value <= most:
            raise ConfigError(f"{named}: expected a number above 0, at most {most:g}, got {value!r}")
        for name in names:
            setattr(settings, name, value if scale is None else max(1, round(scale * value)))
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
    names = ["min_duration_ms", "min_query_count", *["server_target_latency_ns"] * (given.scenario == "Server")]
    return [
        f"{name} {getattr(settings, name)} (rules: {getattr(ruled, name)})"
        for name in names
        if getattr(settings, name) != getattr(ruled, name)
    ]


async def warm_up(given: MlperfOptions, asker: RequestClient, setup_: Setup) -> tuple[float, float]:
    """Send all classes by their shares, one request after another, or for Offline as many at once as may be.

    LoadGen draws its queries before the run, from what it is told to expect: the shortest time of a request in seconds,
    and requests per second.

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
    return fastest_s, done / (loop.time() - began)


def verdict(summary: str) -> bool:
    """LoadGen's verdict in its summary.

    Raises:
        NotReady: if there is none, because the run ended before it.
    """
    found = re.search(r"^Result is : (VALID|INVALID)", summary, re.MULTILINE)
    if found is None:
        raise NotReady(f"LoadGen wrote no verdict: expected 'Result is : VALID' or INVALID in {SUMMARY_LOG}")
    return found[1] == "VALID"

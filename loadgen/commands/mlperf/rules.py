"""LoadGen's settings: MLPerf's rules for a benchmark, what a warm-up saw, a user's conf, and options."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

from hawkvision.core.errors import ConfigError, NotReady
from loadgen.clients.base import RequestClient, RequestTimes
from loadgen.commands.mlperf.bridge import PERFORMANCE_SAMPLES
from loadgen.commands.mlperf.options import MlperfOptions
from loadgen.commands.options import Setup
from loadgen.workload import target_mix
from loadgen.workload.arrivals import MAX_RATE, MAX_REQUESTS

WARM_UP_S: Final = 0.5
FASTER: Final = 1.5
"""Than in the warm-up, the server may turn out to be; more queries than needed cost LoadGen a little memory."""
MOST_S: Final = 1e6
"""Twelve days. LoadGen counts nanoseconds in 64 bits, and draws all queries of a run before it."""


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

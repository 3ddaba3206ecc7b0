"""The options of `python -m loadgen mlperf`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from loadgen.commands.command_line import option
from loadgen.commands.options import LoadOptions

Scenario: TypeAlias = Literal["SingleStream", "MultiStream", "Server", "Offline"]
Mode: TypeAlias = Literal["performance", "accuracy"]
IN_FLIGHT: Final = 64
"""Requests at once unless told otherwise: they saturate a server, and fit its queue; nodes shed beyond 256."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlperfOptions(LoadOptions):
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

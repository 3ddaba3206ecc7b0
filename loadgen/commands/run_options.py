"""The options of `python -m loadgen run`, and the goals among them that a test may miss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from hawkvision.core.errors import ConfigError
from loadgen.commands import options
from loadgen.commands.command_line import option
from loadgen.network.profiles import names
from loadgen.workload import target_mix

WARM_UP_S: Final = 2.0
ARRIVALS: Final = "poisson:8"
EVALUATION_ARRIVALS: Final = "closed:1"
EVALUATION_TARGETS: Final = "quality:best,quality:balanced,quality:fast,max_drop:0.01,max_drop:0.05"

if TYPE_CHECKING:
    from loadgen.analysis.summary import RunSummary


class RunOptions(options.LoadOptions, frozen=True, kw_only=True):
    """The options of `python -m loadgen run`."""

    arrivals: Annotated[
        str | None,
        option(
            "Load",
            "When requests are sent: poisson:RATE, constant:RATE, bursty:RATE[,ratio=8,dwell_s=2], "
            "diurnal:RATE[,swing=0.8,period_s=…], steps:RATE:SECONDS[,RATE:SECONDS…], replay:FILE or closed:CALLERS; "
            "rates in requests per second. "
            f"Default: {ARRIVALS}, or {EVALUATION_ARRIVALS} with --evaluate.",
        ),
    ] = None
    duration_s: Annotated[
        float | None,
        option(
            "Load",
            "Seconds of sending, warm-up included. Default: 60, the length of the replayed file or of the steps, or "
            "with --evaluate as long as it takes.",
        ),
    ] = None
    warm_up_s: Annotated[
        float | None,
        option(
            "Load",
            f"Seconds at the start whose requests are not counted. Default: {WARM_UP_S:g}, or 0 with --evaluate.",
        ),
    ] = None
    link: Annotated[
        str | None,
        option(
            "Load",
            f"Put the server behind an emulated link: {', '.join(names())}, or a TOML file. Needs root.",
        ),
    ] = None
    evaluate: Annotated[
        bool,
        option(
            "Measurement",
            "Send every image once for each target, whatever its share, in a closed loop, after the reference. "
            f"Default of the targets then: {EVALUATION_TARGETS}.",
        ),
    ] = False
    reference: Annotated[
        bool,
        option(
            "Measurement",
            "First ask for every image with quality=best, so that accuracy drops can be judged.",
        ),
    ] = False
    no_noise: Annotated[bool, option("Measurement", "Do not measure the load generator first.")] = False
    name: Annotated[
        str | None,
        option("Output", "Name of the run in reports. Default: that of the record, else run."),
    ] = None
    json: Annotated[Path | None, option("Output", "Write the record to this file (.json or .json.gz).")] = None
    html: Annotated[Path | None, option("Output", "Write the report page to this file.")] = None
    p99_ms: Annotated[
        float | None,
        option("Verdict", "Exit with status 1 if the P99 is above this many milliseconds."),
    ] = None
    min_effective: Annotated[
        float | None,
        option(
            "Verdict",
            "Exit with status 1 if a smaller share of requests is answered right within the deadline.",
        ),
    ] = None


def completed(given: RunOptions) -> RunOptions:
    """The options with the defaults of the mode filled in, but for the duration.

    Raises:
        ConfigError: for an evaluation by another schedule than the closed loop, or with a warm-up.
    """
    if not given.evaluate:
        return msgspec.structs.replace(
            given,
            arrivals=ARRIVALS if given.arrivals is None else given.arrivals,
            warm_up_s=WARM_UP_S if given.warm_up_s is None else given.warm_up_s,
        )
    arrivals = EVALUATION_ARRIVALS if given.arrivals is None else given.arrivals
    if not arrivals.startswith("closed:"):
        raise ConfigError(f"--arrivals: expected closed:CALLERS with --evaluate, got {arrivals!r}")
    if given.warm_up_s:
        raise ConfigError(
            f"--warm-up-s: expected none with --evaluate, which counts every image; got {given.warm_up_s!r}"
        )
    targets = EVALUATION_TARGETS if given.targets == target_mix.DEFAULT else given.targets
    return msgspec.structs.replace(given, arrivals=arrivals, warm_up_s=0.0, reference=True, targets=targets)


def check_goals(given: RunOptions) -> None:
    """Refuse goals that cannot be.

    Raises:
        ConfigError: naming the option.
    """
    if given.p99_ms is not None:
        options.positive("--p99-ms", given.p99_ms)
    if given.min_effective is not None and not 0.0 < given.min_effective <= 1.0:
        raise ConfigError(f"--min-effective: expected a share above 0 and at most 1, got {given.min_effective!r}")


def missed_goals(
    summary: RunSummary, p99_ms: float | None, min_effective: float | None, *, evaluate: bool = False
) -> list[str]:
    """The goals that a test missed, each with what was measured; a test without answers misses one, too, and an
    evaluation that lacks some.
    """
    total, missed = summary.total, []
    if evaluate and 0 < total.answered < total.n:
        missed.append(f"{total.n - total.answered} of {total.n} requests have no answer: {_codes(total.errors)}")
    if not total.answered:
        missed.append(f"none of {total.n} requests was answered: {_codes(total.errors)}")
    p99 = total.percentile(0.99)
    if p99_ms is not None and (p99.at_least or p99.ms > p99_ms):
        missed.append(f"P99 {'≥ ' * p99.at_least}{p99.ms:.1f} ms; expected at most {p99_ms:g} ms")
    if min_effective is not None and total.effective is not None and total.effective.value < min_effective:
        missed.append(f"{total.effective.value:.1%} right and in time; expected at least {min_effective:.1%}")
    return missed


def _codes(errors: dict[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in errors.items())

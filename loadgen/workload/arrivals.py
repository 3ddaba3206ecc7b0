"""When requests are due: open-loop schedules, drawn before the run from a seed, and the closed loop's callers.

    poisson:RATE                        exponential gaps: many independent users
    constant:RATE                       a camera
    bursty:RATE[,ratio=8,dwell_s=2]     busy and quiet spells (a Markov-modulated Poisson process)
    diurnal:RATE[,swing=0.8,period_s=…] a day, by default as long as the run
    steps:RATE:SECONDS[,RATE:SECONDS…]  one rate after the other, each with exponential gaps
    replay:FILE                         one timestamp in seconds a line
    closed:CALLERS                      each sends again when it was answered

RATE is the mean over the run, in requests per second. An open schedule does not wait for answers, as users do not, so a
server that falls behind is seen (Schroeder, Wierman, Harchol-Balter, "Open versus closed: a cautionary tale", NSDI
2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.core.text_files import read_text

MAX_REQUESTS: Final = 5_000_000
"""Of one run: five hours at 250 per second, and some 2 GB of outcomes."""
MAX_RATE: Final = 1e6
MAX_CALLERS: Final = 4096
"""A node takes no more connections."""
MAX_REPLAY_BYTES: Final = 256 << 20
DEFAULT_RATIO: Final = 8.0
DEFAULT_DWELL_S: Final = 2.0
DEFAULT_SWING: Final = 0.8

Times: TypeAlias = NDArray[np.float64]


class OpenLoop(Protocol):
    """A schedule that does not depend on answers."""

    @property
    def rate(self) -> float:
        """Requests per second, in the mean."""

    def due_times(self, duration_s: float, seed: int) -> Times:
        """When requests are due, in seconds from 0, rising and below `duration_s`; the same for the same seed.

        Raises:
            ConfigError: if they are more than `MAX_REQUESTS`.
        """


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """Equal gaps."""

    rate: float

    def due_times(self, duration_s: float, seed: int) -> Times:  # noqa: ARG002 - nothing is random here
        """See `OpenLoop`."""
        _check_count(self.rate * duration_s)
        times: Times = np.arange(math.ceil(self.rate * duration_s)) / self.rate
        return times[times < duration_s]


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Exponential gaps."""

    rate: float

    def due_times(self, duration_s: float, seed: int) -> Times:
        """See `OpenLoop`."""
        return _poisson(self.rate, duration_s, np.random.default_rng(seed))


@dataclass(frozen=True, slots=True)
class BurstyArrivals:
    """A Markov-modulated Poisson process of two states, busy and quiet (Fischer and Meier-Hellstern, "The
    Markov-modulated Poisson process (MMPP) cookbook", Performance Evaluation 18, 1993).

    Spells of both kinds last `dwell_s` in the mean, exponentially distributed, and the busy rate is `ratio` times the
    quiet one; so with b and q for them, (b + q) / 2 = rate gives q = 2 rate / (1 + ratio), b = ratio q. The index of
    dispersion of counts, 1 for Poisson, tends to 1 + dwell_s (b - q)^2 / (4 rate): the cookbook's formula with both
    rates of leaving a state equal to 1 / dwell_s. The first spell is either with equal chance.
    """

    rate: float
    ratio: float = DEFAULT_RATIO
    dwell_s: float = DEFAULT_DWELL_S

    def due_times(self, duration_s: float, seed: int) -> Times:
        """See `OpenLoop`."""
        _check_count(self.rate * duration_s + duration_s / self.dwell_s)
        rng = np.random.default_rng(seed)
        quiet = 2.0 * self.rate / (1.0 + self.ratio)
        rates = (quiet, self.ratio * quiet)
        state = int(rng.integers(2))
        parts: list[Times] = []
        start = 0.0
        while start < duration_s:
            end = start + rng.exponential(self.dwell_s)
            parts.append(start + _poisson(rates[state], min(end, duration_s) - start, rng))
            start, state = end, 1 - state
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class DiurnalArrivals:
    """A Poisson process of rate · (1 − swing · cos(2πt / period)): night, day, night.

    Drawn by thinning a homogeneous process of the highest rate (Lewis and Shedler, "Simulation of nonhomogeneous
    Poisson processes by thinning", Naval Research Logistics Quarterly 26, 1979). The mean is `rate` over whole periods.
    """

    rate: float
    swing: float = DEFAULT_SWING
    period_s: float | None = None
    """None: the run is one period."""

    def due_times(self, duration_s: float, seed: int) -> Times:
        """See `OpenLoop`."""
        rng = np.random.default_rng(seed)
        peak = self.rate * (1.0 + self.swing)
        times = _poisson(peak, duration_s, rng)
        period_s = duration_s if self.period_s is None else self.period_s
        wanted = self.rate * (1.0 - self.swing * np.cos(2.0 * np.pi * times / period_s))
        return times[rng.random(len(times)) * peak < wanted]


@dataclass(frozen=True, slots=True)
class SteppedArrivals:
    """Poisson processes one after the other: pairs of a rate, which may be 0, and its seconds."""

    steps: tuple[tuple[float, float], ...]

    @property
    def rate(self) -> float:
        """Requests per second, in the mean."""
        return sum(rate * seconds for rate, seconds in self.steps) / self.span_s

    @property
    def span_s(self) -> float:
        """Of all steps."""
        return sum(seconds for _, seconds in self.steps)

    def due_times(self, duration_s: float, seed: int) -> Times:
        """See `OpenLoop`."""
        _check_count(self.rate * self.span_s)
        rng = np.random.default_rng(seed)
        ends = np.cumsum([seconds for _, seconds in self.steps])
        parts = [
            end - seconds + _poisson(rate, seconds, rng) for (rate, seconds), end in zip(self.steps, ends, strict=True)
        ]
        times = np.concatenate(parts)
        return times[times < duration_s]


@dataclass(frozen=True, slots=True)
class ReplayedArrivals:
    """Recorded times. The first request is due at once, whatever clock its timestamp is of."""

    path: Path
    times: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Requests per second between the first timestamp and the last; 1 if they are all the same."""
        return (len(self.times) - 1) / self.span_s if self.span_s > 0 else 1.0

    @property
    def span_s(self) -> float:
        """From the first timestamp to the last."""
        return self.times[-1] - self.times[0]

    def due_times(self, duration_s: float, seed: int) -> Times:  # noqa: ARG002 - nothing is random here
        """See `OpenLoop`."""
        times = np.array(self.times, np.float64) - self.times[0]
        return times[times < duration_s]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Callers that each wait for an answer before they ask again."""

    callers: int


Arrivals: TypeAlias = (
    ConstantArrivals
    | PoissonArrivals
    | BurstyArrivals
    | DiurnalArrivals
    | SteppedArrivals
    | ReplayedArrivals
    | ClosedLoop
)


def parse(text: str) -> Arrivals:
    """The schedule that the module's docstring spells.

    Raises:
        ConfigError: saying what was expected; with the line's number for a file of timestamps.
    """
    kind, _, rest = text.partition(":")
    first, *others = rest.split(",")
    match kind:
        case "replay" if rest:
            return ReplayedArrivals(Path(rest), read_timestamps(Path(rest)))
        case "closed":
            _no_options(text, others)
            return ClosedLoop(_callers(text, first))
        case "poisson" | "constant":
            _no_options(text, others)
            rate = _number(text, "RATE", first, _is_rate, f"above 0, at most {MAX_RATE:g}")
            return PoissonArrivals(rate) if kind == "poisson" else ConstantArrivals(rate)
        case "steps" if rest:
            return SteppedArrivals(tuple(_step(text, word) for word in rest.split(",")))
        case "bursty" | "diurnal":
            rate = _number(text, "RATE", first, _is_rate, f"above 0, at most {MAX_RATE:g}")
            return _modulated(text, kind, rate, _options(text, others))
    raise ConfigError(
        f"--arrivals: expected poisson:RATE, constant:RATE, bursty:RATE, diurnal:RATE, steps:RATE:SECONDS,…, "
        f"replay:FILE or closed:CALLERS; got {text!r}"
    )


def read_timestamps(path: Path) -> tuple[float, ...]:
    """One timestamp in seconds a line, never falling; empty lines and those that begin with `#` are passed over.

    Raises:
        ConfigError: naming the line.
    """
    try:
        if path.stat().st_size > MAX_REPLAY_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_REPLAY_BYTES} bytes; take a part of it")
        lines = read_text(path).splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read timestamps: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected text, one timestamp in seconds a line") from None
    times: list[float] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{path}:{number}: expected a time in seconds, got {text[:40]!r}")
        if times and value < times[-1]:
            raise ConfigError(f"{path}:{number}: {value!r} is before {times[-1]!r} of an earlier line")
        times.append(value)
    if not times:
        raise ConfigError(f"{path}: no timestamps; expected one in seconds a line")
    _check_count(len(times))
    return tuple(times)


def _poisson(rate: float, duration_s: float, rng: np.random.Generator) -> Times:
    """A homogeneous process: a Poisson number of uniform points, in order."""
    _check_count(rate * duration_s)
    times: Times = np.sort(rng.random(rng.poisson(rate * duration_s))) * duration_s
    return times[times < duration_s]  # rounding may reach the end


def _check_count(expected: float) -> None:
    if expected > MAX_REQUESTS:
        raise ConfigError(f"--arrivals: {expected:.0f} requests; at most {MAX_REQUESTS} in one run, make it shorter")


def _modulated(text: str, kind: str, rate: float, options: Mapping[str, str]) -> Arrivals:
    known = {"bursty": ("ratio", "dwell_s"), "diurnal": ("swing", "period_s")}[kind]
    for name in options:
        if name not in known:
            raise ConfigError(f"--arrivals: {text!r}: unknown option {name!r}; expected {' or '.join(known)}")
    found = {name: _number(text, name, value, *_RANGES[name]) for name, value in options.items()}
    if kind == "bursty":
        return BurstyArrivals(rate, found.get("ratio", DEFAULT_RATIO), found.get("dwell_s", DEFAULT_DWELL_S))
    return DiurnalArrivals(rate, found.get("swing", DEFAULT_SWING), found.get("period_s"))


def _step(text: str, word: str) -> tuple[float, float]:
    rate, _, seconds = word.partition(":")
    return (
        _number(text, "RATE", rate, lambda value: value == 0.0 or _is_rate(value), f"from 0, at most {MAX_RATE:g}"),
        _number(text, "SECONDS", seconds, lambda value: 0.0 < value <= 1e6, "above 0, at most 1e6"),
    )


def _is_rate(value: float) -> bool:
    return 0.0 < value <= MAX_RATE


_RANGES: Final[Mapping[str, tuple[Callable[[float], bool], str]]] = {
    "ratio": (lambda value: 1.0 <= value <= 1e6, "from 1 to 1e6"),
    "dwell_s": (lambda value: 0.001 <= value <= 1e6, "from 0.001 to 1e6"),
    "swing": (lambda value: 0.0 <= value <= 1.0, "from 0 to 1"),
    "period_s": (lambda value: 0.001 <= value <= 1e9, "from 0.001 to 1e9"),
}


def _number(text: str, name: str, written: str, within: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not within(value):  # also refuses NaN
        raise ConfigError(f"--arrivals: {text!r}: {name}: expected a number {expected}, got {written!r}")
    return value


def _callers(text: str, written: str) -> int:
    if not written.isascii() or not written.isdigit() or not 1 <= int(written) <= MAX_CALLERS:
        raise ConfigError(
            f"--arrivals: {text!r}: CALLERS: expected a whole number from 1 to {MAX_CALLERS}, got {written!r}"
        )
    return int(written)


def _options(text: str, words: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in options:
            raise ConfigError(f"--arrivals: {text!r}: expected NAME=NUMBER once each, got {word!r}")
        options[name] = value
    return options


def _no_options(text: str, words: list[str]) -> None:
    if words:
        raise ConfigError(f"--arrivals: {text!r}: expected nothing after the number, got {words[0]!r}")

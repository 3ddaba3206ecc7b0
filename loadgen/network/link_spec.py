"""The specification of a link: rate, queue, delay, jitter, loss, outages, duplication, reordering, and their trace.

LinkSpec.parse("rate=20mbit,delay=20ms,loss=5%,burst=4,seed=1")
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from hawkvision.core.errors import ConfigError

MAX_SEED: Final = 2**53
DEFAULT_QUEUE_BYTES: Final = 100_000
"""The bandwidth-delay product of 20 Mbit/s and 40 ms, the usual size of a router's buffer and that of our study."""
MAX_TRACE_STEPS: Final = 360_000
"""An hour in steps of 10 ms."""


class IidLoss(msgspec.Struct, frozen=True, tag="iid"):
    """Every packet is lost with probability `ratio` (0..1), whatever happened to others."""

    ratio: float

    def __post_init__(self) -> None:
        _within("loss", self.ratio, 0.0, 1.0)


class GilbertElliott(msgspec.Struct, frozen=True, tag="gilbert_elliott"):
    """Bursts counted in packets: a two-state chain that steps once per packet and loses all of them while bad.

    Packets are lost with probability `ratio` in runs of `mean_burst` on average, at least `ratio / (1 - ratio)`, below
    which the good state would be left more than surely. A sender that stops after a loss freezes the chain, so TCP
    may hang in one burst for minutes: compare with TCP under `Outages`.
    """

    ratio: float
    mean_burst: float

    def __post_init__(self) -> None:
        _within("loss", self.ratio, 0.0, 0.99)
        _within("burst", self.mean_burst, max(1.0, self.ratio / (1.0 - self.ratio)), 1e6)


class Outages(msgspec.Struct, frozen=True, tag="outages"):
    """Bursts counted in time: the link is dead for a share `ratio` of the time, `mean_ms` at a stretch.

    Both states last exponentially long, so knowing the state of the last packet is knowing all there is.
    """

    ratio: float
    mean_ms: float

    def __post_init__(self) -> None:
        _within("loss", self.ratio, 0.0, 0.99)
        _within("outage (ms)", self.mean_ms, 0.01, 600_000.0)


Loss: TypeAlias = IidLoss | GilbertElliott | Outages | None
"""What is lost in the air; None: nothing."""


class TraceStep(msgspec.Struct, frozen=True, array_like=True):
    """A link's state for some time. A rate of 0 sends nothing and lets packets queue; None is unlimited."""

    seconds: float
    rate_bit_s: float | None
    delay_ms: float
    loss_ratio: float

    def __post_init__(self) -> None:
        _within("seconds", self.seconds, 0.001, 1e7)
        if self.rate_bit_s is not None and self.rate_bit_s != 0:
            _within("rate_bit_s", self.rate_bit_s, 1e3, 1e11)
        _within("delay_ms", self.delay_ms, 0.0, 60_000.0)
        _within("loss_ratio", self.loss_ratio, 0.0, 1.0)


class LinkTrace(msgspec.Struct, frozen=True):
    """Steps one after another from the first packet on; then again from the start (`loop`), or the last one for ever.

    As a file: one step a line, `seconds rate_bit_s delay_ms loss_ratio`, the rate `-` where unlimited; `#` begins a
    comment. `seconds` is how long the line holds, so that a loop has a length.
    """

    steps: tuple[TraceStep, ...]
    loop: bool = True
    source: str = "trace"

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= MAX_TRACE_STEPS:
            raise ConfigError(f"{self.source}: {len(self.steps)} steps; expected 1 to {MAX_TRACE_STEPS}")
        if all(step.rate_bit_s == 0 for step in (self.steps if self.loop else self.steps[-1:])):
            raise ConfigError(f"{self.source}: its rate stays 0 and packets queue for ever; end with another rate")

    @classmethod
    def read(cls, path: Path, loop: bool = True) -> LinkTrace:
        """The trace in a file.

        Raises:
            ConfigError: naming file and line.
        """
        steps: list[TraceStep] = []
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    words = line.partition("#")[0].split()
                    if words and len(steps) == MAX_TRACE_STEPS:
                        raise ConfigError(f"{path}:{number}: more than {MAX_TRACE_STEPS} steps")
                    if words:
                        steps.append(_read_step(words, f"{path}:{number}"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        return cls(tuple(steps), loop, str(path))


def _read_step(words: list[str], where: str) -> TraceStep:
    try:
        seconds, rate, delay, loss = words
        return TraceStep(float(seconds), None if rate == "-" else float(rate), float(delay), float(loss))
    except ValueError:
        raise ConfigError(
            f"{where}: {' '.join(words)!r}; expected 'seconds rate_bit_s delay_ms loss_ratio', rate '-' if unlimited"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One direction of a link. The default is a perfect one.

    As text (`parse`, `str`) and as a mapping of TOML values (`from_mapping`) it has the keys
    `rate=20mbit delay=20ms jitter=5ms jitter_reorders=no loss=5% burst=4 | outage=10ms reorder=1% reorder_delay=5ms
    duplicate=1% queue=100kB trace=FILE trace_end=loop|hold seed=1`.
    """

    rate_bit_s: float | None = None
    delay_ms: float = 0.0
    """One way."""
    jitter_ms: float = 0.0
    """Uniform between 0 and this, on top of the delay."""
    jitter_reorders: bool = False
    """Whether jitter may let a packet overtake another. If not, one that would waits for the other."""
    loss: Loss = None
    reorder_ratio: float = 0.0
    """Probability that a packet is held back while those behind it go on."""
    reorder_delay_ms: float = 5.0
    duplicate_ratio: float = 0.0
    """Probability that a packet that got through arrives twice, at the same time."""
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    """Bytes waiting for or in transmission beyond which a packet is dropped; an idle link takes any one packet."""
    trace: LinkTrace | None = None
    """A trace in the place of rate, delay and loss."""
    seed: int = 0
    """0 to 2^53, which also a float holds exactly."""

    def __post_init__(self) -> None:
        if self.rate_bit_s is not None:
            _within("rate (bit/s)", self.rate_bit_s, 1e3, 1e11)
        _within("delay (ms)", self.delay_ms, 0.0, 60_000.0)
        _within("jitter (ms)", self.jitter_ms, 0.0, 60_000.0)
        _within("reorder", self.reorder_ratio, 0.0, 1.0)
        _within("reorder_delay (ms)", self.reorder_delay_ms, 0.0, 60_000.0)
        _within("duplicate", self.duplicate_ratio, 0.0, 1.0)
        _within("queue (bytes)", self.queue_bytes, 0, 100_000_000)
        _within("seed", self.seed, 0, MAX_SEED)
        if self.trace is not None and (self.rate_bit_s is not None or self.delay_ms or self.loss is not None):
            raise ConfigError("trace: it says rate, delay and loss itself; leave those out")

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """A link from `key=value,key=value`; empty text is a perfect link.

        Raises:
            ConfigError: for an unknown, doubled or contradictory key or a value without its unit.
        """
        values: dict[str, object] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            key, equals, value = map(str.strip, part.partition("="))
            if not equals or not value:
                raise ConfigError(f"link {text!r}: {part!r}; expected key=value")
            if key in values:
                raise ConfigError(f"link {text!r}: {key} is given twice")
            values[key] = value
        return cls.from_mapping(values, f"link {text!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], where: str = "link") -> LinkSpec:
        """A link from TOML values: text with a unit, or a number where there is none (ratios, burst, seed).

        Raises:
            ConfigError: as `parse`, beginning with `where`.
        """
        try:
            return _from_mapping(values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None

    def __str__(self) -> str:
        """The text that `parse` reads back."""
        return ",".join(f"{key}={value}" for key, value in _shown(self))


_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "rate": {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9},
    "time": {"us": 1e-3, "ms": 1.0, "s": 1e3},
    "size": {"b": 1.0, "kb": 1e3, "mb": 1e6, "kib": 1024.0, "mib": 1048576.0},
    "ratio": {"": 1.0, "%": 0.01},
    "number": {"": 1.0},
}
_KINDS: Final[Mapping[str, str]] = {
    "rate": "rate",
    "delay": "time",
    "jitter": "time",
    "jitter_reorders": "yes or no",
    "loss": "ratio",
    "burst": "number",
    "outage": "time",
    "reorder": "ratio",
    "reorder_delay": "time",
    "duplicate": "ratio",
    "queue": "size",
    "trace": "file",
    "trace_end": "loop or hold",
    "seed": "number",
}
_QUANTITY: Final = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z%]*)", re.IGNORECASE)
_FIELDS: Final[Mapping[str, str]] = {
    "rate": "rate_bit_s",
    "delay": "delay_ms",
    "jitter": "jitter_ms",
    "reorder": "reorder_ratio",
    "reorder_delay": "reorder_delay_ms",
    "duplicate": "duplicate_ratio",
}


def _from_mapping(values: Mapping[str, object]) -> LinkSpec:
    unknown = sorted(values.keys() - _KINDS.keys())
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r}; expected one of {', '.join(_KINDS)}")
    given = {key: _quantity(key, value) for key, value in values.items() if _KINDS[key] in _UNITS}
    plain = LinkSpec()
    trace = None
    if "trace" in values:
        trace = LinkTrace.read(Path(str(values["trace"])), _choice(values, "trace_end", "loop", "hold"))
    elif "trace_end" in values:
        raise ConfigError("trace_end says how a trace ends, and there is none")
    return LinkSpec(
        **{field: given[key] for key, field in _FIELDS.items() if key in given},
        jitter_reorders=not _choice(values, "jitter_reorders", "no", "yes"),
        loss=_loss(given),
        queue_bytes=_whole("queue", given.get("queue", plain.queue_bytes)),
        trace=trace,
        seed=_whole("seed", given.get("seed", plain.seed)),
    )


def _loss(given: Mapping[str, float]) -> Loss:
    burst, outage = given.get("burst"), given.get("outage")
    if burst is not None and outage is not None:
        raise ConfigError("burst (in packets) and outage (in time) contradict each other")
    if "loss" not in given:
        if burst is not None or outage is not None:
            raise ConfigError("burst and outage say how losses come together; loss says how many and is missing")
        return None
    if burst is not None:
        return GilbertElliott(given["loss"], burst)
    if outage is not None:
        return Outages(given["loss"], outage)
    return IidLoss(given["loss"])


def _quantity(key: str, value: object) -> float:
    units = _UNITS[_KINDS[key]]
    found = _QUANTITY.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if found is None or found[2].lower() not in units:
        wanted = " or ".join(unit or "no unit" for unit in units)
        raise ConfigError(f"{key} = {value!r}; expected a {_KINDS[key]}: a number with {wanted}")
    return float(found[1]) * units[found[2].lower()]


def _choice(values: Mapping[str, object], key: str, first: str, second: str) -> bool:
    """Whether the first of two words was chosen; it is the default."""
    value = values.get(key, first)
    word = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    if word not in (first, second):
        raise ConfigError(f"{key} = {value!r}; expected {first} or {second}")
    return word == first


def _whole(key: str, value: float) -> int:
    if not math.isfinite(value) or abs(value - round(value)) > 1e-6:
        raise ConfigError(f"{key} = {value}; expected a whole number")
    return round(value)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # not a number is not within either
        raise ConfigError(f"{name} = {value:g}; expected {low:g} to {high:g}")


def _shown(spec: LinkSpec) -> list[tuple[str, str]]:
    plain = LinkSpec()
    units = {"rate": "bit", "time": "ms", "ratio": ""}
    shown = [
        (key, _number(value) + units[_KINDS[key]])
        for key, field in _FIELDS.items()
        if (value := getattr(spec, field)) != getattr(plain, field)
    ]
    match spec.loss:
        case IidLoss(ratio=ratio):
            shown.append(("loss", _number(ratio)))
        case GilbertElliott(ratio=ratio, mean_burst=burst):
            shown += [("loss", _number(ratio)), ("burst", _number(burst))]
        case Outages(ratio=ratio, mean_ms=mean):
            shown += [("loss", _number(ratio)), ("outage", f"{_number(mean)}ms")]
        case None:
            pass
    if spec.jitter_reorders:
        shown.append(("jitter_reorders", "yes"))
    if spec.queue_bytes != plain.queue_bytes:
        shown.append(("queue", f"{spec.queue_bytes}B"))
    if spec.trace is not None:
        shown += [("trace", spec.trace.source), ("trace_end", "loop" if spec.trace.loop else "hold")]
    if spec.seed != plain.seed:
        shown.append(("seed", str(spec.seed)))
    return shown


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")

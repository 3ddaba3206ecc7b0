"""Named link profiles: files that describe a kind of link, and the link traces that follow from them.

A profile is a way up, a way down and phases that follow one another by chance. A seed gives the same link trace to
every test, so servers that are tested one after another meet the same bad seconds. A trace has a round of `length_s`
that repeats. In a round each phase has exactly its share of the time, and a bursty phase is dead for exactly its loss
ratio; only order and lengths are random.

Bursts are counted in time (`loss = "2%", outage = "40ms"`: the two states of Gilbert and Elliott, loss-free and dead,
each exponentially long), never in packets. A burst that packets end would favour those who send many, and would freeze
TCP (`loadgen.network.link_spec.GilbertElliott`).

    length_s = 60                                   # optional, and seed
    description = "one line"
    sources = ["where each figure comes from, or 'assumption: …'"]

    [up]                                            # from client to server; [down] is the way back
    rate = "6mbit"                                  # keys and units of `loadgen.network.link_spec`:
    delay = "25ms"                                  # rate, delay, jitter, loss, outage, queue

    [[phase]]                                       # none: always as above
    name = "poor"
    share = 0.2                                     # of the time; all together 1
    mean_s = 3.0                                    # mean length
    dead = "held"                                   # or "lost": nothing gets through, and what is sent waits or is lost
    up = { rate = "1mbit", delay = "50ms" }         # what differs: rate, delay, loss, outage
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.errors import ConfigError
from hawkvision.core.text_files import read_text
from loadgen.network.link_spec import IidLoss, LinkSpec, LinkTrace, Loss, Outages, TraceStep
from loadgen.workload.record import LinkSample

Way: TypeAlias = Literal["up", "down"]
Dead: TypeAlias = Literal["held", "lost"]

FOLDER: Final = Path(__file__).parent
MAX_STRETCHES: Final = 10_000
"""Stretches of phases in a round; with their bursts they stay below the steps that a trace may have."""
SHORTEST_S: Final = 0.001
"""What a step lasts at least."""
_WAY_KEYS: Final = ("rate", "delay", "jitter", "loss", "outage", "queue")
_PHASE_KEYS: Final = ("rate", "delay", "loss", "outage")


class _PhaseTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    share: Annotated[float, Meta(gt=0.0, le=1.0)]
    mean_s: Annotated[float, Meta(ge=0.05, le=3600.0)]
    dead: Dead | None = None
    up: dict[str, Any] = {}
    down: dict[str, Any] = {}


class _ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    description: Annotated[str, Meta(min_length=1)]
    sources: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]
    up: dict[str, Any]
    down: dict[str, Any]
    phase: Annotated[tuple[_PhaseTable, ...], Meta(max_length=32)] = ()
    length_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 60.0
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 1


@dataclass(frozen=True, slots=True)
class LinkPhase:
    """One kind of link state. `up` and `down` are what the link does meanwhile, unless it is dead."""

    name: str
    share: float
    mean_s: float
    dead: Dead | None
    up: LinkSpec
    down: LinkSpec

    def way(self, way: Way) -> LinkSpec:
        """One direction."""
        return self.up if way == "up" else self.down


@dataclass(frozen=True, slots=True)
class PhaseStretch:
    """A phase from a moment of the round on, for some time."""

    at_s: float
    seconds: float
    phase: LinkPhase


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A kind of link. `offset` chooses among the traces of a profile: two links, or two rounds, take two numbers."""

    name: str
    up: LinkSpec
    """As the file's own section says; `down` likewise."""
    down: LinkSpec
    phases: tuple[LinkPhase, ...]
    length_s: float
    seed: int

    @property
    def steady(self) -> bool:
        """Whether it never changes."""
        return len(self.phases) == 1

    def schedule(self, offset: int = 0) -> tuple[PhaseStretch, ...]:
        """One round of phases. Each appears about `share × length_s / mean_s` times, at least once."""
        chance = random.Random(f"{self.seed + offset} phases")  # noqa: S311 - a link trace, no secret
        lengths = [
            (seconds, phase)
            for phase in self.phases
            for seconds in _parts(phase.share * self.length_s, phase.mean_s, chance)
        ]
        chance.shuffle(lengths)
        stretches = []
        at_s = 0.0
        for seconds, phase in lengths:
            stretches.append(PhaseStretch(at_s, seconds, phase))
            at_s += seconds
        return tuple(stretches)

    def calm(self) -> tuple[LinkSpec, LinkSpec]:
        """(up, down) before anything happens: the usual rates and delays, and no loss."""
        return msgspec.structs.replace(self.up, loss=None), msgspec.structs.replace(self.down, loss=None)

    def specs(self, offset: int = 0) -> tuple[LinkSpec, LinkSpec]:
        """(up, down) for the emulator. Both ways have the same phases, and bursts of their own."""
        round_ = self.schedule(offset)
        return self._spec("up", round_, offset), self._spec("down", round_, offset)

    def samples(self, link: str, duration_s: float, offset: int = 0, at_s: float = 0.0) -> list[LinkSample]:
        """What the way up is like, phase by phase, in `duration_s` from when a round begins at `at_s`."""
        round_ = self.schedule(offset)
        rounds = math.ceil(duration_s / self.length_s)
        begun = ((n * self.length_s + stretch.at_s, stretch.phase) for n in range(rounds) for stretch in round_)
        return [_sample(link, at_s + after_s, phase) for after_s, phase in begun if after_s < duration_s]

    def average(self, way: Way) -> tuple[float | None, float]:
        """(rate in Mbit/s, share lost) that the profile claims of a direction, and its rounds give.

        The rate is None if it is unlimited at any time.
        """
        rates, lost = [], 0.0
        for phase in self.phases:
            spec = phase.way(way)
            rates.append((phase.share, 0.0 if phase.dead is not None else spec.rate_bit_s))
            lost += phase.share * _lost(phase, spec.loss)
        limited = [(share, rate) for share, rate in rates if rate is not None]
        return sum(s * r for s, r in limited) / 1e6 if len(limited) == len(rates) else None, lost

    def _spec(self, way: Way, round_: tuple[PhaseStretch, ...], offset: int) -> LinkSpec:
        chance = random.Random(f"{self.seed + offset} bursts {way}")  # noqa: S311 - a link trace, no secret
        steps = tuple(step for stretch in round_ for step in _steps(stretch, way, chance))
        plain = self.up if way == "up" else self.down
        return LinkSpec(
            jitter_ms=plain.jitter_ms,
            queue_bytes=plain.queue_bytes,
            trace=LinkTrace(steps, loop=True, source=f"profile {self.name}"),
            seed=self.seed + offset,
        )


def _lost(phase: LinkPhase, loss: Loss) -> float:
    if phase.dead is not None:
        return 1.0 if phase.dead == "lost" else 0.0
    return 0.0 if loss is None else loss.ratio


def _sample(link: str, at_s: float, phase: LinkPhase) -> LinkSample:
    rate = phase.up.rate_bit_s
    return LinkSample(
        at_s=at_s,
        link=link,
        rate_mbit_s=None if rate is None else rate / 1e6,
        delay_ms=phase.up.delay_ms + phase.up.jitter_ms / 2,
        loss=_lost(phase, phase.up.loss),
        up=phase.dead is None,
    )


def _steps(stretch: PhaseStretch, way: Way, chance: random.Random) -> Iterator[TraceStep]:
    """A stretch as steps of a trace; bursts of loss are steps of their own, in which everything is lost."""
    phase = stretch.phase
    spec = phase.way(way)
    if phase.dead is not None:
        lost = phase.dead == "lost"
        yield TraceStep(stretch.seconds, spec.rate_bit_s if lost else 0.0, spec.delay_ms, 1.0 if lost else 0.0)
        return
    match spec.loss:
        case Outages(ratio=ratio, mean_ms=mean_ms):
            bursts = _parts(stretch.seconds * ratio, mean_ms / 1e3, chance)
            # One gap more than bursts, since a stretch begins and ends alive.
            alive_s = stretch.seconds - sum(bursts)
            gaps = _split(alive_s, len(bursts) + 1, chance)
            if len(gaps) <= len(bursts):  # a stretch of a few milliseconds has no room for them
                yield TraceStep(stretch.seconds, spec.rate_bit_s, spec.delay_ms, ratio)
                return
            yield TraceStep(gaps[0], spec.rate_bit_s, spec.delay_ms, 0.0)
            for burst, gap in zip(bursts, gaps[1:], strict=True):
                yield TraceStep(burst, spec.rate_bit_s, spec.delay_ms, 1.0)
                yield TraceStep(gap, spec.rate_bit_s, spec.delay_ms, 0.0)
        case IidLoss(ratio=ratio):
            yield TraceStep(stretch.seconds, spec.rate_bit_s, spec.delay_ms, ratio)
        case _:
            yield TraceStep(stretch.seconds, spec.rate_bit_s, spec.delay_ms, 0.0)


def _parts(total: float, mean: float, chance: random.Random) -> list[float]:
    """A total in parts of about this mean, at least one part."""
    return _split(total, max(1, round(total / mean)), chance)


def _split(total: float, n: int, chance: random.Random) -> list[float]:
    """A total in `n` exponentially long parts, none shorter than a step may be; fewer if it is not enough for `n`."""
    n = max(1, min(n, int(total / (2 * SHORTEST_S))))
    weights = [chance.expovariate(1.0) for _ in range(n)]
    spare = max(0.0, total - n * SHORTEST_S) / sum(weights)
    return [SHORTEST_S + spare * weight for weight in weights]


def names() -> tuple[str, ...]:
    """The profiles that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_profile(name: str | Path) -> LinkProfile:
    """The profile of a name, or in a file whose name ends in `.toml`.

    Raises:
        ConfigError: for an unknown name; for a file that is missing or malformed, naming it and the key.
    """
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in names():
            raise ConfigError(f"link {str(name)!r}: expected one of {', '.join(names())}, or a file NAME.toml")
        path = FOLDER / f"{name}.toml"
    try:
        document = tomllib.loads(read_text(path))
        given = msgspec.convert(document, _ProfileFile)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such link profile") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    ways = []
    for way, values in (("up", given.up), ("down", given.down)):
        _check_keys(values, _WAY_KEYS, f"{path}: {way}")
        ways.append(LinkSpec.from_mapping(values, f"{path}: {way}"))
    up, down = ways
    return LinkProfile(
        name=path.stem,
        up=up,
        down=down,
        phases=_phases(given, path),
        length_s=given.length_s,
        seed=given.seed,
    )


def _phases(given: _ProfileFile, path: Path) -> tuple[LinkPhase, ...]:
    whole = (_PhaseTable("always", 1.0, given.length_s),)
    phases = tuple(_phase(phase, given, path) for phase in given.phase or whole)
    shares = sum(phase.share for phase in phases)
    if abs(shares - 1.0) > 1e-6:
        raise ConfigError(f"{path}: phase: the shares add up to {shares:g}; expected 1")
    if sum(phase.share * given.length_s / phase.mean_s for phase in phases) > MAX_STRETCHES:
        raise ConfigError(f"{path}: phase: more than {MAX_STRETCHES} stretches in {given.length_s:g} s")
    if all(phase.dead == "held" for phase in phases):
        raise ConfigError(f"{path}: phase: every one is dead and holds what is sent; nothing would ever arrive")
    return phases


def _phase(phase: _PhaseTable, given: _ProfileFile, path: Path) -> LinkPhase:
    where = f"{path}: phase {phase.name!r}"
    specs = []
    for way, usual, other in (("up", given.up, phase.up), ("down", given.down, phase.down)):
        _check_keys(other, _PHASE_KEYS, f"{where}: {way}")
        specs.append(LinkSpec.from_mapping({**usual, **other}, f"{where}: {way}"))
    return LinkPhase(phase.name, phase.share, phase.mean_s, phase.dead, *specs)


def _check_keys(values: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; expected one of {', '.join(known)}")

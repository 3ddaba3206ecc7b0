"""What `python -m tests.bench.policies` is told: who is tested, over which links, how long."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from hawkvision.core.errors import ConfigError
from loadgen.clients.engine import Protocol
from loadgen.commands.options import positive
from loadgen.network.profiles import LinkProfile, load_profile, names
from loadgen.workload import target_mix
from loadgen.workload.record import TargetClass

Transport: TypeAlias = Literal["tcp", "datagram", "uplink"]
"""Of a policy: TCP everywhere, datagrams everywhere, or HTTP to the edge and from there what it finds best."""
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)
POLICIES: Final = ("hawkvision", "infaas", "static", "split", "all-dc", "all-edge")
FALLBACK: Final = "+fallback"
"""After a policy, and its setting: its edge answers just before a deadline that the datacenter misses."""
DEFAULT_POLICIES: Final = (
    "hawkvision", "infaas+fallback", "static+fallback", "static", "split+fallback", "all-dc+fallback", "all-edge"
)  # fmt: skip
"""All with what ours has; `static` as it usually is beside that; and the ablation, our edge stage alone."""
ADJUSTABLE: Final = "static"
"""The policy that may be tested with thresholds: `static@0.55`. Any may be with another edge model: `split@NAME`."""
VARIANT: Final = re.compile(r"[a-z0-9][a-z0-9_.-]*")
"""A model's name, as manifests have it."""
DEFAULT_TARGETS: Final = "max_drop:0.01,max_drop:0.02,max_drop:0.04,quality:fast,quality:balanced"


@dataclass(frozen=True, slots=True)
class PolicyContender:
    """A policy, its setting if it has one, and how images travel."""

    name: str
    policy: str
    transport: Transport
    static_threshold: float | None = None
    """Of `static`; None is the policy's own."""
    variant: str | None = None
    """Of the edge; None is the policy's own."""
    fallback: bool = False
    """Whether the edge answers just before a deadline that the datacenter misses."""

    @property
    def protocol(self) -> Protocol:
        """That callers speak."""
        return "datagram" if self.transport == "datagram" else "http"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of `hawkvision edge up`."""
        setting = () if self.static_threshold is None else ("--static-threshold", f"{self.static_threshold:g}")
        model = () if self.variant is None else ("--variant", self.variant)
        server = ("--datagram-port", "0") if self.transport == "datagram" else ()
        uplink = () if self.transport == "tcp" else ("--datacenter-transport", "auto")
        fallback = ("--deadline-fallback", "true") if self.fallback else ()
        return ("--policy", self.policy, *setting, *model, *fallback, *server, *uplink)


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """What is tested, where, and how long."""

    contenders: tuple[PolicyContender, ...]
    links: tuple[LinkProfile, ...]
    client_link: LinkProfile | None
    """Between client and edge, in the place of the link that is tested."""
    rate: float
    classes: list[TargetClass]
    deadline_ms: float
    duration_s: float
    warm_up_s: float
    rounds: int
    seed: int
    out: Path

    def profiles(self, link: LinkProfile) -> tuple[LinkProfile, LinkProfile]:
        """Between client and edge, and between edge and datacenter, while a link is tested."""
        return (link if self.client_link is None else self.client_link), link


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tests.bench.policies`."""
    parser.add_argument("--data", required=True, help="labelled images: npz file, or a directory per class")
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--limit", type=int, help="use only so many images, evenly spread")
    parser.add_argument("--links", default="lte-drive,wifi-busy,lan", help=f"{', '.join(names())}, or TOML files")
    parser.add_argument("--client-link", metavar="LINK", help="between client and edge, in the place of --links")
    parser.add_argument(
        "--policies",
        default=",".join(DEFAULT_POLICIES),
        help=f"{ADJUSTABLE}@0.55 has that threshold, POLICY@NAME that model at the edge, and with {FALLBACK} after it "
        "the edge answers just before a deadline that the datacenter misses; a policy may come several times so "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--transport",
        default="hawkvision=datagram",
        help="POLICY=tcp, POLICY=datagram or POLICY=uplink (datagrams, if the edge finds them better, from edge to "
        "datacenter alone), comma-separated; the others go by TCP (default: %(default)s)",
    )
    parser.add_argument("--targets", default=DEFAULT_TARGETS)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second, at random; default: %(default)s")
    parser.add_argument("--deadline-ms", type=float, default=100.0)
    parser.add_argument("--duration-s", type=float, default=60.0, help="per policy and round, warm-up included")
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--backend", choices=("auto", "onnxruntime", "noop"), default="auto", help=argparse.SUPPRESS)


def read_plan(given: argparse.Namespace) -> PolicyPlan:
    """What the options say.

    Raises:
        ConfigError: naming the option that does not fit.
    """
    positive("--deadline-ms", given.deadline_ms)
    positive("--rate", given.rate)
    if not 0.0 <= given.warm_up_s < given.duration_s:
        raise ConfigError(f"--warm-up-s: expected 0 or more and less than the duration, got {given.warm_up_s!r}")
    if given.rounds < 1 or given.seed < 0:
        raise ConfigError(f"--rounds {given.rounds}, --seed {given.seed}: expected at least 1 and 0")
    return PolicyPlan(
        contenders=contenders(_words(given.policies), given.transport),
        links=tuple(load_profile(name) for name in _words(given.links)),
        client_link=None if given.client_link is None else load_profile(given.client_link),
        rate=given.rate,
        classes=target_mix.parse(given.targets, given.deadline_ms),
        deadline_ms=given.deadline_ms,
        duration_s=given.duration_s,
        warm_up_s=given.warm_up_s,
        rounds=given.rounds,
        seed=given.seed,
        out=given.out,
    )


def contenders(words: Sequence[str], transports: str) -> tuple[PolicyContender, ...]:
    """Who is tested. HawkVision with datagrams comes with a second contender that is without.

    Args:
        words: policies, `static@0.55` or `split@NAME` with a setting, `static+fallback` with an edge that stands by; a
            transport is its policy's, whatever that is.
        transports: as `--transport` says.

    Raises:
        ConfigError: for an unknown policy, setting or transport, or one that comes twice.
    """
    chosen: dict[str, Transport] = {}
    for part in _words(transports):
        policy, _, transport = part.partition("=")
        known = next((name for name in TRANSPORTS if name == transport), None)
        if known is None or policy not in POLICIES:
            raise ConfigError(f"--transport: expected POLICY= and one of {', '.join(TRANSPORTS)}, got {part!r}")
        chosen[policy] = known
    found = []
    for word in words:
        one = _contender(word, chosen)
        found.append(one)
        if one.name == "hawkvision" and one.transport != "tcp":
            found.append(replace(one, name="hawkvision-tcp", transport="tcp"))
    if not found or len({each.name for each in found}) < len(found):
        raise ConfigError(f"--policies: expected some of {', '.join(POLICIES)}, each once; got {', '.join(words)!r}")
    return tuple(found)


def _contender(word: str, transports: Mapping[str, Transport]) -> PolicyContender:
    """What a word of `--policies` says.

    Raises:
        ConfigError: for an unknown policy, a threshold of one without, or a fallback of HawkVision.
    """
    plain = word.removesuffix(FALLBACK)
    policy, at, setting = plain.partition("@")
    try:
        threshold = float(setting) if setting else None
    except ValueError:
        threshold = None
    if threshold is None:
        usable = not at or VARIANT.fullmatch(setting) is not None
    else:
        usable = policy == ADJUSTABLE and 0.0 <= threshold <= 1.0
    if policy not in POLICIES or not usable:
        raise ConfigError(
            f"--policies: expected some of {', '.join(POLICIES)}, {ADJUSTABLE}@THRESHOLD with 0 to 1, or POLICY@NAME "
            f"of an edge model, got {word!r}"
        )
    fallback = word != plain
    if fallback and policy == "hawkvision":
        raise ConfigError(f"--policies: hawkvision has a way of its own; expected {FALLBACK} after another")
    name = policy + (f"@{setting if threshold is None else f'{threshold:g}'}" if setting else "") + FALLBACK * fallback
    variant = setting if setting and threshold is None else None
    return PolicyContender(name, policy, transports.get(policy, "tcp"), threshold, variant, fallback)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())

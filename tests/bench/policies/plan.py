"""What `python -m tests.bench.policies` is told: who is tested, over which links, how long."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.system.files import write_atomic
from loadgen.commands.options import positive
from loadgen.network.profiles import LinkProfile, load_profile, names
from loadgen.workload import target_mix
from loadgen.workload.record import TargetClass
from tests.bench.cascade import DATA
from tests.bench.policies.baselines.settings import write_thresholds

CLIENT_LINK: Final = "lan"
"""Between callers and edge, whatever lies between edge and datacenter."""
TARGETS: Final = "max_drop:0.01,max_drop:0.02,max_drop:0.05,quality:best=3"
UPLINK: Final = ("--datacenter-transport", "auto")
"""From the edge on, datagrams where it finds them better."""
CONTENDERS: Final = {
    "hawkvision": ("--policy", "hawkvision", *UPLINK),
    "hawkvision-tcp": ("--policy", "hawkvision"),
    "threshold": ("--policy", "threshold"),
    "all-dc": ("--policy", "threshold", "--thresholds", write_thresholds({0.0: math.inf})),
    "infaas": ("--policy", "infaas"),
    "all-edge": ("--policy", "threshold", "--thresholds", write_thresholds({0.0: -math.inf})),
}
"""Who may be tested, with arguments of `hawkvision edge up`. `all-edge` is the ablation."""
OURS: Final = "hawkvision"


class Conditions(msgspec.Struct, frozen=True):
    """What all rounds in a folder have in common."""

    task: str
    edge: str
    rate: float
    targets: list[TargetClass]
    deadline_ms: float
    duration_s: float
    warm_up_s: float
    seed: int
    backend: str
    shared_cores: bool = False


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """What is tested, where, and how long."""

    conditions: Conditions
    contenders: tuple[str, ...]
    links: tuple[LinkProfile, ...]
    client_link: LinkProfile
    rounds: int
    minutes: float
    data: Path
    out: Path

    def arguments(self, contender: str, thresholds: dict[float, float]) -> tuple[str, ...]:
        """Of `hawkvision edge up`; thresholds are those of the policy that takes them, by accuracy drop."""
        given = self.conditions
        common = ("--task", given.task, "--variant", given.edge, "--backend", given.backend)
        tuned = ("--thresholds", write_thresholds(thresholds)) if contender == "threshold" else ()
        return (*common, *CONTENDERS[contender], *tuned)

    @property
    def drops(self) -> list[float]:
        """The accuracy drops that targets allow, of which `quality=best` allows none."""
        asked = [target.fields.get("max_accuracy_drop") for target in self.conditions.targets]
        return sorted({0.0, *(float(drop) for drop in asked if drop is not None)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m tests.bench.policies`."""
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the images; default: %(default)s")
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--edge", default="edge_ensemble", help="the stage at the edge; default: %(default)s")
    parser.add_argument("--links", default="wifi-busy,lte,satellite", help=f"{', '.join(names())}, or TOML files")
    parser.add_argument("--policies", default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--targets", default=TARGETS, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second, at random; default: %(default)s")
    parser.add_argument("--deadline-ms", type=float, default=100.0)
    parser.add_argument("--duration-s", type=float, default=60.0, help="per policy and round, warm-up included")
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared-cores", action="store_true", help="both tiers on all cores, not each on half of them")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no round that would end later; default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder; rounds that it holds already are read, not repeated"
    )
    parser.add_argument("--backend", choices=("auto", "noop"), default="auto", help=argparse.SUPPRESS)


def read_plan(given: argparse.Namespace) -> PolicyPlan:
    """What the options say. The folder is made, and says what its rounds have in common.

    Raises:
        ConfigError: naming the option that does not fit, the folder too if its rounds were made otherwise.
    """
    for name in ("deadline_ms", "rate", "minutes"):
        positive(f"--{name.replace('_', '-')}", getattr(given, name))
    if not 0.0 <= given.warm_up_s < given.duration_s:
        raise ConfigError(f"--warm-up-s: expected 0 or more and less than the duration, got {given.warm_up_s!r}")
    if given.rounds < 1 or given.seed < 0:
        raise ConfigError(f"--rounds {given.rounds}, --seed {given.seed}: expected at least 1 and 0")
    contenders = _words(given.policies)
    if not contenders or len({*contenders} & CONTENDERS.keys()) < len(contenders):
        raise ConfigError(f"--policies: expected some of {', '.join(CONTENDERS)}, each once; got {given.policies!r}")
    conditions = Conditions(
        given.task, given.edge, given.rate, target_mix.parse(given.targets, given.deadline_ms), given.deadline_ms,
        given.duration_s, given.warm_up_s, given.seed, given.backend, given.shared_cores,
    )  # fmt: skip
    links = tuple(load_profile(name) for name in _words(given.links))
    (given.out / "rounds").mkdir(parents=True, exist_ok=True)
    _keep(conditions, given.out / "conditions.json")
    return PolicyPlan(
        conditions, contenders, links, load_profile(CLIENT_LINK), given.rounds, given.minutes, given.data, given.out
    )


def _keep(conditions: Conditions, path: Path) -> None:
    written = msgspec.json.format(msgspec.json.encode(conditions)) + b"\n"
    if path.exists() and path.read_bytes() != written:
        raise ConfigError(f"{path}: rounds in this folder were made otherwise; name another one with --out")
    write_atomic(path, written)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())

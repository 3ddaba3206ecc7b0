"""`python -m tests.bench.cascade.drift --task cifar10 --data …`: is the guarantee kept while traffic changes?

For each seed, the images that trained nothing and chose no threshold are divided again: `--certify` of them certify,
the others are the stream's pool. Thirty thousand requests are drawn from it: 8,000 clean, 14,000 with noise, blur or
lower contrast, 8,000 clean again. The same stream goes through three nodes, one with fixed and two with controlled
thresholds:

    static      no control
    written     the product's control: the larger of ε and the certified disagreement, and ε after an alarm
    strict      ε at all times

Targets are half and a quarter of the gap between edge and reference stage. Exit status 1 if under control the true
drop, mean over seeds, exceeds ε after the first 2,000 shifted requests, or audits exceed 2 % of requests.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hawkvision.cascade.certification.certificate import Method
from hawkvision.cascade.certification.profile import Pair, Profile, ProfileData
from hawkvision.cascade.certification.profiling import (
    certify_condition,
    costs_of,
    paths_of,
    profile_pair,
    profile_stage,
)
from hawkvision.cascade.drift.online import DriftController
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import Route
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import Quality, Tier
from hawkvision.model_zoo.calibration.calibrate import intermediate_stage
from hawkvision.model_zoo.calibration.corruption import SHIFT_SEVERITY, mixed, mixture_name
from hawkvision.model_zoo.calibration.drift_replay import (
    SETTLING,
    LabelledPredictions,
    MakeControl,
    Replay,
    Summary,
    alarm_delays,
    replay,
    subset,
    summarise,
)
from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_images
from hawkvision.model_zoo.reports.report import labelled_predictions
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import cache_dir, load_labels, load_manifest, models_dir
from hawkvision.system.files import write_atomic
from hawkvision.tasks.registry import load_kind

DELTA: Final = 0.05
MOST_AUDITS: Final = 0.02
DECIDED: Final = "shifted, rest"


class StrictControl(DriftController):
    """The variant that aims at a disagreement of ε at all times."""

    def _move(self, estimate: float) -> None:
        self.state.suspended, before = True, self.state.suspended
        super()._move(estimate)
        self.state.suspended = before


CONTROLS: Final[dict[str, MakeControl | None]] = {
    "static": None, "written": DriftController, "strict": StrictControl,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cascade:
    """A profile of one pair, and what its stages said of the images that it did not choose its path by."""

    profile: Profile
    clean: LabelledPredictions
    shifted: LabelledPredictions
    """Of the same images, corrupted."""

    @property
    def pair(self) -> Pair:
        """The only one."""
        return self.profile.pairs[0]

    @property
    def gap(self) -> float:
        """What never escalating gives up on these images."""
        edge, best = accuracies(self.pair, self.clean)
        return best - edge


@dataclass(frozen=True, slots=True)
class DriftCell:
    """One target under one control: all runs, and what came of them."""

    max_drop: float
    control: str
    runs: tuple[Replay, ...]
    summaries: tuple[Summary, ...]

    @property
    def false_alarms(self) -> int:
        """Runs in which the alarm came before the shift."""
        return sum(delay is not None and delay < 0 for delay in alarm_delays(self.runs))

    @property
    def delays(self) -> list[int]:
        """Requests from shift to alarm, of the runs whose alarm was not false."""
        return sorted(delay for delay in alarm_delays(self.runs) if delay is not None and delay >= 0)

    def failures(self) -> list[str]:
        """What this cell owes and does not keep."""
        if CONTROLS[self.control] is None:
            return []
        decided = next(s for s in self.summaries if s.name == DECIDED)
        everything = self.summaries[-1]
        found = []
        if decided.drop > self.max_drop:
            found.append(f"drop {decided.drop:.4f} > {self.max_drop:.4f} after {SETTLING:,} shifted requests")
        if everything.audits > MOST_AUDITS:
            found.append(f"audits {everything.audits:.4f} > {MOST_AUDITS}")
        return [f"{self.control}, ε = {self.max_drop:.4f}: {one}" for one in found]


def main() -> int:
    """Run the study; see the module's text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--task", default="cifar10")
    parser.add_argument("--data", type=Path, required=True, help="labelled images, as `hawkvision calibrate` takes")
    parser.add_argument("--edge", help="default: the cascade's default edge stage")
    parser.add_argument("--best", help="default: the cascade's reference stage")
    parser.add_argument("--intermediate", default="none", help="a stage between them; default: none, two levels")
    parser.add_argument("--certify", type=int, default=1_000, help="images that certify; default 1000")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--severity", type=int, default=SHIFT_SEVERITY, help="of the corruptions, 1 to 5")
    parser.add_argument("--images", type=int, default=20_000, help="to look at corrupted, at most")
    parser.add_argument("--out", type=Path, help="folder for drift.csv and drift.json")
    given = parser.parse_args()
    try:
        cascade = look_at(given)
        cells = study(cascade, tuple(cascade.gap * share for share in (0.5, 0.25)), given.certify, given.seeds)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(cascade, cells, Console(width=None if sys.stdout.isatty() else 140))
    if given.out is not None:
        write(cells, given.out)
    failures = [failure for cell in cells if cell.control == "written" for failure in cell.failures()]
    print("\n".join(failures) or "kept: the drop after the shift is within ε, and audits are within 2 %")
    return 1 if failures else 0


def accuracies(pair: Pair, seen: LabelledPredictions) -> tuple[float, float]:
    """Of the edge stage and of the best."""
    everything = np.arange(len(seen.truths))
    sample = seen.sample(pair, everything)
    return 1.0 - float(sample.edge.losses.mean()), 1.0 - float(sample.reference_losses.mean())


def look_at(given: argparse.Namespace) -> Cascade:
    """Run the stages over clean and corrupted images, or take from the cache what they said."""
    models, cache = models_dir(), cache_dir()
    manifest = load_manifest(given.task, models)
    images = read_images(given.data, load_labels(manifest, models))
    split = split_images(manifest, images, SPLIT_SEED)
    edge, best = given.edge or manifest.cascade.default_edge, given.best or manifest.best
    between = intermediate_stage(manifest, best, given.intermediate)
    kind, remote = load_kind(manifest, models), tuple(stage for stage in (best, between) if stage is not None)
    clean = run_stages(kind, manifest, images, edge=(edge,), datacenter=remote, cache=cache, chosen=split.used())
    usable = np.sort(np.concatenate([split.certify, split.held_out]))
    usable = np.sort(np.random.default_rng(SPLIT_SEED).permutation(usable)[: given.images])
    corruption, name = mixed(given.severity), mixture_name(given.severity)
    shifted = run_stages(
        kind,
        manifest,
        subset(images, usable),
        edge=(edge,),
        datacenter=remote,
        cache=cache,
        corruption=corruption,
        name=name,
    )
    truths = images.labels.tolist()
    measured = [
        profile_stage(
            kind,
            stage,
            {},
            manifest.fingerprint(stage),
            clean.raw(stage, tier),
            truths,
            split,
            images.sha256,
            clean.cost_ms(stage, tier),
        )
        for stage, tier in ((edge, Tier.EDGE), *((stage, Tier.DATACENTER) for stage in remote))
    ]
    profile = Profile(
        format=3,
        task=given.task,
        data=ProfileData(
            name=images.name, sha256=images.sha256, seed=SPLIT_SEED, profile=len(split.profile),
            certify=len(split.certify), held_out=len(split.held_out),
        ),
        stages=tuple(stage for stage, _ in measured),
        pairs=(
            profile_pair(
                kind, measured[0][1], clean.served(best), truths, split, clean.served(between) if between else None
            ),
        ),
    )  # fmt: skip
    of_usable = [truths[i] for i in usable]
    return Cascade(
        profile,
        labelled_predictions(profile, clean.part(usable), of_usable),
        labelled_predictions(profile, shifted, of_usable),
    )


def study(cascade: Cascade, drops: tuple[float, ...], certify: int, seeds: int) -> list[DriftCell]:
    """All targets under all controls; a seed's division, certificate and stream are the same for each control."""
    runs: dict[tuple[float, str], list[Replay]] = {(drop, name): [] for drop in drops for name in CONTROLS}
    images = len(cascade.clean.truths)
    if images < 2 * certify:
        certify = images // 2
    for seed in track(range(seeds), "replaying", transient=True):
        order = np.random.default_rng(seed).permutation(images)
        clean, shifted = (seen.sample(cascade.pair, order[certify:]) for seen in (cascade.clean, cascade.shifted))
        for drop in drops:
            route = certified_route(cascade, order[:certify], drop)
            for name, control in CONTROLS.items():
                runs[drop, name].append(replay(clean, shifted, route, seed=seed, control=control))
    return [DriftCell(drop, name, tuple(found), summarise(found)) for (drop, name), found in runs.items()]


def certified_route(cascade: Cascade, chosen: NDArray[np.intp], max_drop: float) -> Route:
    """What a node that was certified for exactly this drop, on these images, would do."""
    pair, profile = cascade.pair, cascade.profile
    costs = costs_of(profile, pair)
    condition = certify_condition(
        cascade.clean.sample(pair, chosen), paths_of(pair), costs, max_drop, DELTA, Method.EXACT
    )
    certified = msgspec.structs.replace(pair, conditions=(condition,))
    return Policy(msgspec.structs.replace(profile, pairs=(certified,)), pair.edge, pair.best).route(Quality.BALANCED)


def show(cascade: Cascade, cells: list[DriftCell], console: Console) -> None:
    """Print one table for each target."""
    stages = " → ".join(f"{stage.name} {stage.accuracy.value:.3f}" for stage in cascade.profile.stages)
    edge, best = accuracies(cascade.pair, cascade.shifted)
    console.print(f"{stages}; gap {cascade.gap:.4f}; corrupted {edge:.3f} → {best:.3f}")
    for max_drop in dict.fromkeys(cell.max_drop for cell in cells):
        table = Table(title=f"ε = {max_drop:.4f}", box=None, title_justify="left", header_style="bold")
        table.add_column("traffic")
        for title in ("control", "escalated %", "audits %", "sent %", "true drop", "± s.e.", "void %"):
            table.add_column(title, justify="right")
        for cell in (cell for cell in cells if cell.max_drop == max_drop):
            for summary in cell.summaries:
                table.add_row(
                    summary.name, cell.control, f"{summary.escalation:.1%}", f"{summary.audits:.2%}",
                    f"{summary.traffic:.1%}", f"{summary.drop:.4f}", f"{summary.drop_error:.4f}",
                    f"{summary.suspended:.0%}", style="red" if summary.drop > max_drop else None,
                )  # fmt: skip
            table.add_section()
        console.print(table)
        for cell in (cell for cell in cells if cell.max_drop == max_drop and CONTROLS[cell.control] is not None):
            late = f"requests to the alarm: {cell.delays}" if cell.delays else "no alarm"
            console.print(f"{cell.control}: {late}; false alarms {cell.false_alarms} of {len(cell.runs)} runs")


def write(cells: list[DriftCell], folder: Path) -> None:
    """Write the summaries as a table and everything as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"max_drop": cell.max_drop, "control": cell.control, **asdict(summary), "traffic": summary.traffic}
        for cell in cells
        for summary in cell.summaries
    ]
    with (folder / "drift.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    document = [
        {
            "max_drop": cell.max_drop, "control": cell.control, "false_alarms": cell.false_alarms,
            "runs": len(cell.runs), "requests_to_alarm": cell.delays, "failures": cell.failures(),
            "traffic": [asdict(summary) for summary in cell.summaries],
        }
        for cell in cells
    ]  # fmt: skip
    write_atomic(folder / "drift.json", msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())

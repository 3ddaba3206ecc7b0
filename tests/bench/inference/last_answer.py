"""`python -m tests.bench.inference.last_answer`: the answer at the deadline, if only some members of the datacenter's
ensemble have replied by then.

For each pair of stages, and each set of views that may have replied: right answers of the edge alone, of the members
alone, and of both as `hawkvision.tasks.last_answer` combines them from what travels; on all images, and on those that
the edge escalates for an accuracy drop. Differences are paired, with 95 % intervals. Exit status 1 if together they are
worse than the edge beyond chance.

With `--received QUALITY …`, the datacenter sees what a lossy link leaves of every fourth image, encoded at these
qualities, and the edge the whole; then all members may have replied, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.cascade.policy import Policy
from hawkvision.core.escalation_api import PartialEnsemble
from hawkvision.core.types import MaxAccuracyDrop, Tier
from hawkvision.imaging.downscale import useful_side
from hawkvision.model_zoo.calibration.certification import edge_predictions
from hawkvision.model_zoo.calibration.evidence import clean_images
from hawkvision.model_zoo.calibration.loss_simulation import received_images
from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.model_zoo.calibration.splits import split_again
from hawkvision.model_zoo.predictions import CascadePredictions
from hawkvision.models.datasets import read_annotated
from hawkvision.models.manifest import Manifest, cache_dir, load_manifest, models_dir
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind
from hawkvision.tasks.last_answer import last_answer
from hawkvision.tasks.registry import load_kind
from loadgen.analysis.accuracy import IntervalEstimate, mean_difference
from tests.bench.cascade import DATA

PAIRS: Final = ("imagenet:edge_ensemble", "imagenet:mobilenet_v2_int8", "imagenet:squeezenet1_1_int8", "cifar10:small",
                "cifar10:tiny", "coco:", "coco_labels:", "coco_count:")  # fmt: skip
FILES: Final = {"cifar10": "cifar10.npz", "imagenet": "imagenet_eval.npz"}
BOXES: Final = "coco_eval.npz"
"""Its photographs of val2017. SSD learned from most of them, which favours the edge; the clean ones count, too."""
DROPS: Final = (0.01, 0.03)
SEED: Final = 54


@dataclass(frozen=True, slots=True)
class Row:
    """One set of images and of replies."""

    images: str
    n: int
    replied: str
    edge: float
    members: float
    together: float
    gain: IntervalEstimate
    """Of both together over the edge, in shares of right answers."""
    over_members: IntervalEstimate


class Tiers:
    """What both tiers compute of a task's images."""

    def __init__(self, task: str, edge: str, data: Path) -> None:
        self.manifest: Manifest = load_manifest(task, models_dir())
        self.kind: TaskKind[Any] = load_kind(self.manifest, models_dir())
        self.edge = edge or self.manifest.cascade.default_edge
        self.profile = load_profile_of(self.manifest, models_dir(), None)
        path = data / FILES.get(task, BOXES)
        self.images = images = read_annotated(path, self.kind.labels)
        used = clean = clean_images(images)
        if self.manifest.training is not None:
            used = split_again(self.manifest, images, self.profile.data).held_out
        elif path.name == BOXES:
            used = np.flatnonzero(np.load(path)["split"] == "val2017")
        self.clean = np.isin(used, clean)
        self.ran: CascadePredictions = run_stages(
            self.kind, self.manifest, images, edge=[self.edge], datacenter=[self.manifest.best],
            shrink=self.profile.shrinks_images, cache=cache_dir(), chosen=used,
        )  # fmt: skip
        truths = self.kind.truths(images.annotated())
        self.truths = [truths[index] for index in used]
        stage = edge_predictions(self.profile, self.edge, self.ran)
        self.edge_outputs: list[Output] = [stage.outputs[index] for index in used.tolist()]

    def own(self) -> list[dict[str, tuple[Output, float]]]:
        """Of each image, the outputs of the edge's models that ran."""
        members = self.manifest.members(self.edge)
        ensemble = self.manifest.ensemble(self.edge)
        single = [self.views(each.name, Tier.EDGE)[0] for each in members]
        if ensemble is None:
            return [{members[0].name: (each, 1.0)} for each in self.edge_outputs]
        bar = np.float32(ensemble.accept_confidence or np.inf)
        scores = self.kind.score_all(single[0], self.kind.scores[0])
        return [
            {members[0].name: (alone, 1.0)} if score >= bar else
            {member.name: (output, 1.0) for member, output in zip(members, outputs, strict=True)}
            for alone, score, outputs in zip(self.edge_outputs, scores, zip(*single, strict=True), strict=True)
        ]  # fmt: skip

    def views(self, member: str, tier: Tier, ran: CascadePredictions | None = None) -> list[Sequence[Output]]:
        """A member's outputs for the upright images, and for the mirror images if there are some."""
        found, temperature = (ran or self.ran).view(member, tier), self.manifest.variant(member).temperature
        both = [found.upright, *(() if found.mirrored is None else (found.mirrored,))]
        return [self.kind.calibrated(each, temperature) for each in both]

    def replies(self, ran: CascadePredictions, *, all_too: bool = False) -> Iterator[tuple[str, list[PartialEnsemble]]]:
        """What some of the datacenter's views make, as it travels: of each image, for each set of views.

        `all_too`: what all of them make, as well.
        """
        ensemble = self.manifest.ensemble(self.manifest.best)
        assert ensemble is not None, "only an ensemble has parts"
        of = {member: self.views(member, Tier.DATACENTER, ran) for member in ensemble.members}
        most = 2 if ensemble.horizontal_flip else 1
        for count, seen in itertools.product(range(1, len(of) + 1), range(1, most + 1)):
            for members in itertools.combinations(of, count):
                if all_too or (count, seen) != (len(of), most):
                    name = " + ".join(members) + (" mirrored" if seen == 2 else "")
                    yield name, list(self._parts({each: of[each][:seen] for each in members}, ensemble.temperature))

    def _parts(
        self, members: Mapping[str, Sequence[Sequence[Output]]], temperature: float
    ) -> Iterator[PartialEnsemble]:
        kind, names = self.kind, tuple(members)
        for views in zip(*(zip(*each, strict=True) for each in members.values()), strict=True):
            found = [each[0] if len(each) == 1 else kind.combine(each, (1.0, 1.0), 1.0) for each in views]
            output = kind.combine(found, (1.0,) * len(found), temperature)
            yield PartialEnsemble(names, kind.unpack(kind.pack(output)))


def rows(tiers: Tiers, drops: Sequence[float]) -> Iterator[Row]:
    """Of all images, and of those that are escalated for each drop."""
    kind, truths, own = tiers.kind, tiers.truths, tiers.own()
    pair = tiers.profile.pair(tiers.edge, tiers.manifest.best)
    policy = Policy(tiers.profile, pair.edge, pair.best, agreement_bounds_drop=kind.agreement_bounds_drop)
    scores = kind.score_all(tiers.edge_outputs, pair.score)
    bars = {f"for a drop of {drop:.0%}": policy.route(MaxAccuracyDrop(drop)).threshold for drop in drops}
    sets = {"all": np.ones(len(truths), np.bool_), "clean": tiers.clean}
    sets |= {name: scores < bar for name, bar in bars.items()}
    edge = 1.0 - kind.losses(tiers.edge_outputs, truths)
    for replied, parts in tiers.replies(tiers.ran):
        combined = [last_answer(kind, mine, part, whole=True) for mine, part in zip(own, parts, strict=True)]
        outputs = [each for each in combined if each is not None]
        together = 1.0 - kind.losses(outputs, truths)
        members = 1.0 - kind.losses([part.output for part in parts], truths)
        for name, some in sets.items():
            if some.any() and (name == "all" or not some.all()):
                right, by_members, by_both = (float(each[some].mean()) for each in (edge, members, together))
                differences = _difference(together - edge, some), _difference(together - members, some)
                yield Row(name, int(some.sum()), replied, right, by_members, by_both, *differences)


def received(tiers: Tiers, qualities: Sequence[int]) -> Iterator[Row]:
    """Of every fourth image, in each condition that a lossy link leaves them in at these qualities."""
    kind, used, own = tiers.kind, tiers.ran.chosen, tiers.own()
    side = useful_side(member.input for member in tiers.manifest.members(tiers.manifest.best))
    for arrived in received_images(tiers.images, used[::4], SEED, side, qualities):
        name = f"quality {arrived.quality}, from {arrived.band.low:.0%} on"
        ran = run_stages(
            kind, tiers.manifest, arrived.images, datacenter=[tiers.manifest.best], cache=cache_dir(),
            shrink=tiers.profile.shrinks_images, chosen=arrived.reached, name=name,
        )  # fmt: skip
        at = np.searchsorted(used, arrived.reached).tolist()
        truths, every = [tiers.truths[i] for i in at], np.ones(len(at), np.bool_)
        edge = 1.0 - kind.losses([tiers.edge_outputs[i] for i in at], truths)
        for replied, parts in tiers.replies(ran, all_too=True):
            combined = [last_answer(kind, own[i], part, whole=False) for i, part in zip(at, parts, strict=True)]
            outputs = [tiers.edge_outputs[i] if each is None else each for i, each in zip(at, combined, strict=True)]
            together = 1.0 - kind.losses(outputs, truths)
            members = 1.0 - kind.losses([part.output for part in parts], truths)
            means = float(edge.mean()), float(members.mean()), float(together.mean())
            differences = _difference(together - edge, every), _difference(together - members, every)
            yield Row(name, len(at), replied, *means, *differences)


def _difference(differences: Floats, some: Any) -> IntervalEstimate:
    found = mean_difference(differences, np.arange(len(differences)), some)
    assert found is not None, "there are images"
    return found


def show(title: str, found: Sequence[Row]) -> None:
    """A table of one pair, in Markdown."""
    print(f"\n**{title}**\n\n| images | replied | edge | members | both | both − edge | both − members |\n"
          "|---|---|---|---|---|---|---|")  # fmt: skip
    for row in sorted(found, key=lambda each: list(dict.fromkeys(r.images for r in found)).index(each.images)):
        mark = " **worse**" if row.gain.high < 0.0 else ""
        print(f"| {row.images} ({row.n:,}) | {row.replied} | {row.edge:.1%} | {row.members:.1%} | {row.together:.1%} "
              f"| {_points(row.gain)}{mark} | {_points(row.over_members)} |")  # fmt: skip


def _points(found: IntervalEstimate) -> str:
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def main() -> int:
    """Print a table for each pair."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.inference.last_answer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the images; default: %(default)s")
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="TASK:EDGE")
    parser.add_argument(
        "--received", nargs="+", type=int, metavar="QUALITY", default=(), help="images as a lossy link leaves them"
    )
    given, worse = parser.parse_args(), False
    for name in given.pairs:
        task, _, edge = name.partition(":")
        tiers = Tiers(task, edge, given.data)
        found = list(received(tiers, given.received) if given.received else rows(tiers, DROPS))
        show(f"{task}, {tiers.edge} below {tiers.manifest.best}", found)
        worse |= any(row.gain.high < 0.0 for row in found)
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())

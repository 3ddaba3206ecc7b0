"""`python -m tests.bench.detection.confidence --data …/coco_eval.npz`: which score should escalate an image?

Images are escalated in the order of a score of the edge's boxes, the least sure first. An escalated image gets the
reference stage's boxes. Figures are mAP, AP50 and mean F1 against the escalated share. `random` is the mean over many
orders with its spread, `perfect` the order by the true gain in F1, which no score can know.

The share of what is possible: the area between the curve of F1 and the straight line of random order, relative to that
of the perfect order. Its interval is the bootstrap's over images, paired where scores are compared.

Scores: `expected_f1` under calibrated box probabilities, 1 / (1 + summed `ambiguity`), `lowest` box predicted,
`agreement` of a stage with itself on the mirror image (which runs it twice), and ridge regressions on six statistics of
the boxes, fitted on train2017, to the gain (needs labels) and to the disagreement with the reference (needs none).
Temperatures and the threshold were fitted on train2017, too. Nothing was fitted on val2017.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from hawkvision.tasks.boxes.average_precision import detection_quality
from hawkvision.tasks.boxes.confidence import expected_f1
from hawkvision.tasks.boxes.rows import MEMBERS, SCORE
from hawkvision.tasks.kind import Output, TaskKind
from tests.bench.detection.outputs import CocoImages, CocoOutputs, add_data_option, read_coco_images

Floats: TypeAlias = NDArray[np.float64]
Part: TypeAlias = NDArray[np.intp]
Statistic: TypeAlias = Callable[[Output, float], float]

SHARES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SEED: Final = 20_261_127
LEAST: Final = 0.1
RIDGE: Final = 5.0
"""In units of the number of images, after standardising."""


def ambiguity(output: Output, threshold: float) -> float:
    """The sum of min(score, 1 − score)."""
    scores = output[output[:, SCORE] >= LEAST, SCORE].astype(np.float64)
    return float(np.minimum(scores, 1 - scores).sum())


def predicted(output: Output, threshold: float) -> float:
    """The number of boxes predicted."""
    return float((output[:, SCORE] >= threshold).sum())


def lowest(output: Output, threshold: float) -> float:
    """The lowest score of a box predicted; 1 if there is none."""
    return float(output[output[:, SCORE] >= threshold, SCORE].min(initial=1.0))


def runner_up(output: Output, threshold: float) -> float:
    """The highest score of a box not predicted."""
    return float(output[output[:, SCORE] < threshold, SCORE].max(initial=0.0))


def small(output: Output, threshold: float) -> float:
    """The number of boxes predicted that cover less than a hundredth of the image."""
    kept = output[output[:, SCORE] >= threshold, :4].astype(np.float64)
    return float(((kept[:, 2] - kept[:, 0]) * (kept[:, 3] - kept[:, 1]) < 0.01).sum())


STATISTICS: Final[Mapping[str, Statistic]] = {
    "expected F1": expected_f1,
    "ambiguity": ambiguity,
    "predicted": predicted,
    "lowest": lowest,
    "runner-up": runner_up,
    "small": small,
}


def agreement(output: Output, threshold: float) -> float:
    """F1 of both members' predictions with one another; they found the same object where their boxes were fused."""
    found = output[:, MEMBERS:] >= np.float32(threshold)
    total = int(found.sum())
    return 2.0 * int(found.all(axis=1).sum()) / total if total else 1.0


def ridge(statistics: Floats, target: Floats, fit: Part) -> Floats:
    """The regression's values for all images, with coefficients from `fit`."""
    standard = (statistics - statistics[fit].mean(axis=0)) / (statistics[fit].std(axis=0) + 1e-9)
    rows = np.c_[standard, np.ones(len(standard))]
    normal = rows[fit].T @ rows[fit] + RIDGE * np.eye(rows.shape[1])
    values: Floats = rows @ np.linalg.solve(normal, rows[fit].T @ target[fit])
    return values


def escalated_first(score: Floats, part: Part) -> Part:
    """The images of a part, the least sure first."""
    ordered: Part = part[np.argsort(score[part], kind="stable")]
    return ordered


def area(score: Floats, gain: Floats, part: Part) -> float:
    """Mean gain over random order, over all escalated shares."""
    curve = np.r_[0.0, np.cumsum(gain[escalated_first(score, part)])] / len(part)
    return float((curve - np.linspace(0.0, curve[-1], len(curve))).mean())


class Study:
    """The edge's and the reference's outputs, losses, and the scores of all images."""

    def __init__(self, images: CocoImages, outputs: CocoOutputs) -> None:
        self.images = images
        self.kind: TaskKind[Any] = outputs.kind
        self.threshold = float(outputs.manifest.options["threshold"])
        edge = outputs.manifest.cascade.default_edge
        self.edge, self.reference = outputs.of(edge), outputs.of(outputs.manifest.best)
        pairs = zip(self.edge, outputs.of(edge, mirrored=True), strict=True)
        mirrored = [outputs.kind.combine(pair, (1.0, 1.0), 1.0) for pair in pairs]
        self.edge_loss, self.reference_loss = self._losses(self.edge), self._losses(self.reference)
        self.gain = self.edge_loss - self.reference_loss
        self.disagreement = self.kind.disagreements(self.edge, self.reference)
        self.scores = self._scores(mirrored)

    def _losses(self, outputs: Sequence[Output]) -> Floats:
        return self.kind.losses(outputs, self.images.truths)

    def _of(self, statistic: Statistic, outputs: Sequence[Output]) -> Floats:
        return np.array([statistic(each, self.threshold) for each in outputs])

    def _scores(self, mirrored: Sequence[Output]) -> dict[str, Floats]:
        found = {name: self._of(statistic, self.edge) for name, statistic in STATISTICS.items()}
        table, fit = np.stack(list(found.values()), axis=1), self.images.train
        return {
            "expected F1": found["expected F1"],
            "unambiguous": 1 / (1 + found["ambiguity"]),
            "lowest box": found["lowest"],
            "mirror agreement": self._of(agreement, mirrored),
            "regression to gain": -ridge(table, self.gain, fit),
            "regression to disagreement": -ridge(table, self.disagreement, fit),
            "the edge's true F1": -self.edge_loss,
            "perfect": -self.gain,
        }

    def quality(self, score: Floats, part: Part, share: float) -> tuple[float, float, float]:
        """mAP, AP50 and mean F1 in percent with a share of a part escalated."""
        order = escalated_first(score, part)
        count = round(share * len(order))
        chosen = [(self.reference if i < count else self.edge)[image] for i, image in enumerate(order)]
        found = detection_quality(chosen, [self.images.truths[image] for image in order], self.threshold)
        loss = (self.reference_loss[order[:count]].sum() + self.edge_loss[order[count:]].sum()) / len(order)
        return found.ap * 100, found.ap50 * 100, (1 - float(loss)) * 100


def frontier(study: Study, part: Part, draws: int, console: Console) -> None:
    """Print quality against the escalated share."""
    rng = np.random.default_rng(SEED)
    console.print("| order | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |")
    console.print("|---" * (len(SHARES) + 1) + "|")
    for name in ("expected F1", "mirror agreement", "regression to disagreement", "unambiguous", "perfect"):
        cells = [study.quality(study.scores[name], part, share) for share in SHARES]
        console.print(f"| {name} | " + " | ".join("/".join(f"{v:.1f}" for v in cell) for cell in cells) + " |")
    orders = [rng.random(len(study.gain)) for _ in range(draws)]
    drawn = []
    for share in SHARES:
        found = np.array([study.quality(order, part, share) for order in orders])
        spread = found.std(axis=0)
        drawn.append("/".join(f"{m:.1f}±{s:.1f}" for m, s in zip(found.mean(axis=0), spread, strict=True)))
    console.print("| random | " + " | ".join(drawn) + " |")


def shares_of_possible(study: Study, part: Part, draws: int, console: Console) -> None:
    """Print each score's share of what is possible, with the bootstrap's interval, and its lead over expected F1."""
    rng = np.random.default_rng(SEED)
    samples = [rng.choice(part, len(part)) for _ in range(draws)]
    random = [area(rng.random(len(study.gain)), study.gain, part) for _ in range(draws)]
    perfect = area(study.scores["perfect"], study.gain, part)
    console.print(f"random order: 0 ± {np.std(random) / perfect:.2f}")
    console.print("| score | share of the possible | 95 % | lead over expected F1 | 95 % |\n|---|---|---|---|---|")
    by_name = {
        name: np.array(
            [area(s, study.gain, each) / area(study.scores["perfect"], study.gain, each) for each in samples]
        )
        for name, s in study.scores.items()
    }
    for name, found in by_name.items():
        lead = found - by_name["expected F1"]
        limits, lead_limits = np.quantile(found, [0.025, 0.975]), np.quantile(lead, [0.025, 0.975])
        value = area(study.scores[name], study.gain, part) / perfect
        console.print(
            f"| {name} | {value:.2f} | {limits[0]:.2f}–{limits[1]:.2f} | {lead.mean():+.2f} "
            f"| {lead_limits[0]:+.2f} to {lead_limits[1]:+.2f} |"
        )


def main() -> None:
    """Print the tables of `docs/benchmarks/detection.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser)
    parser.add_argument("--draws", type=int, default=1000, help="random orders and bootstrap samples")
    options = parser.parse_args()
    images = read_coco_images(options.data)
    study = Study(images, CocoOutputs("coco", images.bodies))
    console = Console(width=200, highlight=False, markup=False)
    for name, part in images.parts().items():
        f1 = (1 - study.edge_loss[part].mean(), 1 - study.reference_loss[part].mean())
        better = ((study.gain[part] > 0).mean(), (study.gain[part] < 0).mean())
        console.print(
            f"\n{name}: {len(part)} images; mean F1 of the edge {f1[0]:.3f}, of the reference {f1[1]:.3f}; the "
            f"reference is better for {better[0]:.0%}, worse for {better[1]:.0%}; mean disagreement "
            f"{study.disagreement[part].mean():.3f}"
        )
        if name != "train2017":
            shares_of_possible(study, part, options.draws, console)
            frontier(study, part, math.ceil(options.draws / 50), console)


if __name__ == "__main__":
    main()

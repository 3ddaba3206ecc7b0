"""`python -m tests.bench.detection.views --data …/coco_eval.npz`: counts and labels from the detectors' boxes.

Counts. Their confidence is either the expected loss under the reference's calibrated box probabilities (`spread`), or
the disagreement of both detectors, which look in different ways (after CHS-Net: two heads that check each other where
they differ). The table gives the error of all images, of those where both count the same, and the mean loss over all
shares that could be accepted in that order (lower is better).

Thresholds. `order` uses photographs without labels (after S2FPR: a crop holds no more than the whole): with k labelled
images, thresholds minimise the error on those plus the mean excess of the count in a crop over that in the whole, of
unlabelled images. Each k is drawn often; images of train2017 fit, of val2017 measure.

Weights. Members are fused with weights by their average precision per label on train2017, shrunk towards their mean
(after Road++), and compared with equal weights; also fitted on one half of train2017 and measured on the other.

Labels. F1 over all labels and images (micro), mean loss, and average precision of the ranked labels.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from hawkvision.tasks.boxes.average_precision import detection_quality
from hawkvision.tasks.boxes.rows import CLASS, MEMBERS, SCORE, TrueBoxes
from hawkvision.tasks.kind import Output, TaskKind
from hawkvision.tasks.registry import task_kind
from tests.bench.detection.outputs import CocoImages, CocoOutputs, add_data_option, read_coco_images

Floats: TypeAlias = NDArray[np.float64]
Part: TypeAlias = NDArray[np.intp]

SEED: Final = 20_261_127
THRESHOLDS: Final = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
LABELLED: Final = (5, 10, 20, 50)
DRAWS: Final = 200
CROP: Final = 0.7
"""Side of a crop, as a share of the image's."""
SHRINK: Final = 10.0
"""Objects of a label at which its own strength counts as much as the mean."""


def counts(outputs: Sequence[Output], classes: Part, threshold: float, column: int = SCORE) -> Floats:
    """Of each image, the boxes of some classes from a threshold on."""
    return np.array(
        [((each[:, column] >= threshold) & np.isin(each[:, CLASS], classes)).sum() for each in outputs], np.float64
    )


def true_counts(truths: Sequence[TrueBoxes], classes: Part) -> Floats:
    """Of each image, the true boxes of some classes."""
    return np.array([np.isin(each.classes, classes).sum() for each in truths], np.float64)


def accepted_loss(loss: Floats, score: Floats) -> float:
    """Mean loss of what is accepted, over all shares accepted, the surest first."""
    ordered = loss[np.argsort(-score, kind="stable")]
    return float((np.cumsum(ordered) / np.arange(1, len(ordered) + 1)).mean())


class Counting:
    """The view `coco_count`, with the outputs of its stages."""

    def __init__(self, images: CocoImages, outputs: CocoOutputs) -> None:
        self.images, self.kind, self.manifest = images, outputs.kind, outputs.manifest
        self.reference = outputs.of(outputs.manifest.best)
        self.edge = outputs.of(outputs.manifest.cascade.default_edge)
        options: Mapping[str, Any] = outputs.manifest.options
        labels = list(outputs.kind.labels)
        self.max_error = float(options["max_error"])
        self.groups = {g: np.array([labels.index(n) for n in names]) for g, names in options["groups"].items()}
        self.thresholds: Mapping[str, float] = options["threshold"]

    def table(self, console: Console) -> None:
        """Print errors and confidences."""
        console.print(
            "| part | group | mean count | error, edge | error, reference | detectors agree | error there | elsewhere |"
        )
        console.print("|---" * 8 + "|")
        for part_name in ("val2017", "clean"):
            part = self.images.parts()[part_name]
            for group, classes in self.groups.items():
                threshold, truth = self.thresholds[group], true_counts(self.images.truths, classes)[part]
                edge, reference, first, second = (
                    counts(outputs, classes, threshold, column)[part]
                    for outputs, column in (
                        (self.edge, SCORE),
                        (self.reference, SCORE),
                        (self.reference, MEMBERS),
                        (self.reference, MEMBERS + 1),
                    )
                )
                error, same = np.abs(reference - truth), first == second
                console.print(
                    f"| {part_name} | {group} | {truth.mean():.2f} | {np.abs(edge - truth).mean():.2f} "
                    f"| {error.mean():.2f} | {same.mean():.0%} | {error[same].mean():.2f} | {error[~same].mean():.2f} |"
                )

    def confidences(self, console: Console) -> None:
        """Print what each confidence would have accepted, and its lead over `spread` with the bootstrap's interval."""
        console.print("| part | stage | confidence | of the accepted, over all shares | less than by spread, 95 % |")
        console.print("|---" * 5 + "|")
        for part_name in ("val2017", "clean"):
            part = self.images.parts()[part_name]
            for stage, outputs in (("edge", self.edge), ("reference", self.reference)):
                of_part = [outputs[i] for i in part]
                loss = self.kind.losses(of_part, [self.images.truths[i] for i in part])
                console.print(f"| {part_name} | {stage} | none | {loss.mean():.4f} | |")
                for name, score in self._scores(of_part).items():
                    value = f"{part_name} | {stage} | {name} | {accepted_loss(loss, score):.4f}"
                    console.print(f"| {value} | {self._lead(loss, score, self._scores(of_part)['spread'])} |")
                console.print(f"| {part_name} | {stage} | perfect | {accepted_loss(loss, -loss):.4f} | |")

    def _scores(self, outputs: Sequence[Output]) -> dict[str, Floats]:
        spread = np.array([self.kind.score(each, "spread") for each in outputs])
        if outputs[0].shape[1] == MEMBERS:
            return {"spread": spread}
        both = np.array([self.kind.score(each, "agreement") for each in outputs])
        alone = np.round(2 * both - spread, 5)
        return {
            "spread": spread,
            "agreement alone": alone,
            "agreement, then spread": alone + 1e-6 * spread,
            "mean of both": both,
        }

    @staticmethod
    def _lead(loss: Floats, score: Floats, spread: Floats) -> str:
        rng = np.random.default_rng(SEED)
        samples = rng.integers(len(loss), size=(1000, len(loss)))
        leads = [accepted_loss(loss[each], spread[each]) - accepted_loss(loss[each], score[each]) for each in samples]
        return f"{np.mean(leads):+.4f} ({np.quantile(leads, 0.025):+.4f} to {np.quantile(leads, 0.975):+.4f})"

    def order(self, crops: Sequence[Output], console: Console) -> None:
        """Print what order in unlabelled images adds to few labels; `crops` are of the images of train2017."""
        rng = np.random.default_rng(SEED)
        train, val = self.images.train, self.images.val
        console.print("| group | labelled | labels only: error | with order: error | difference | order alone |")
        console.print("|---|---|---|---|---|---|")
        for group, classes in self.groups.items():
            truth = true_counts(self.images.truths, classes)
            whole = np.array([counts(self.reference, classes, t) for t in THRESHOLDS])
            excess = np.array([np.maximum(counts(crops, classes, t) - whole[i][train], 0.0).mean()
                               for i, t in enumerate(THRESHOLDS)])  # fmt: skip
            error = np.abs(whole - truth)
            alone = error[excess.argmin()][val].mean()
            for k in LABELLED:
                drawn = [rng.choice(train, k, replace=False) for _ in range(DRAWS)]
                fitted = np.array([error[:, each].mean(axis=1) for each in drawn])
                plain = error[fitted.argmin(axis=1)][:, val].mean(axis=1)
                ordered = error[(fitted + excess).argmin(axis=1)][:, val].mean(axis=1)
                lead = ordered - plain
                console.print(
                    f"| {group} | {k} | {plain.mean():.3f} ± {plain.std():.3f} "
                    f"| {ordered.mean():.3f} ± {ordered.std():.3f} "
                    f"| {lead.mean():+.3f} ± {lead.std() / np.sqrt(DRAWS):.3f} | {alone:.3f} |"
                )
            best = error[:, train].mean(axis=1).argmin()
            console.print(
                f"| {group} | all {len(train)} | {error[best][val].mean():.3f} | | threshold {THRESHOLDS[best]} | |"
            )


def cropped(images: CocoImages) -> list[bytes]:
    """The middle of each image of train2017, as JPEG."""
    found = []
    for index in images.train:
        image = Image.open(io.BytesIO(images.bodies[index])).convert("RGB")
        width, height = round(image.width * CROP), round(image.height * CROP)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        made = io.BytesIO()
        image.crop((left, top, left + width, top + height)).save(made, "JPEG", quality=95)
        found.append(made.getvalue())
    return found


class Fusion:
    """Members of the reference stage, fused in several ways."""

    def __init__(self, images: CocoImages, outputs: CocoOutputs) -> None:
        self.images, self.kind = images, outputs.kind
        ensemble = outputs.manifest.ensemble(outputs.manifest.best)
        assert ensemble is not None
        self.members = [outputs.of(name) for name in ensemble.members]

    def strengths(self, fit: Part) -> list[Floats]:
        """The average precision of each member for each label, shrunk towards the member's mean."""
        truths = self.images.truths
        labels = len(self.kind.labels)
        number = np.bincount(np.concatenate([truths[i].classes for i in fit]), minlength=labels)
        found = []
        for outputs in self.members:
            own = np.zeros(labels)
            for label in np.flatnonzero(number):
                of_label = [(outputs[i][outputs[i][:, CLASS] == label], truths[i]) for i in fit]
                true = [(t.boxes[t.classes == label], t.classes[t.classes == label]) for _, t in of_label]
                own[label] = detection_quality([boxes for boxes, _ in of_label], true)["mAP"]
            mean = own[number > 0].mean()
            found.append((own * number + mean * SHRINK) / (number + SHRINK))
        return found

    def quality(self, weights: Sequence[Floats], part: Part, kind: TaskKind[Any]) -> str:
        """mAP, AP50 and mean F1 in percent."""
        rows = tuple(tuple(each.tolist()) for each in weights)
        fused = [kind.combine([member[i] for member in self.members], rows, 1.0) for i in part]
        truths = [self.images.truths[i] for i in part]
        found = detection_quality(fused, truths)
        f1 = 1 - kind.losses(fused, truths).mean()
        return f"{found['mAP'] * 100:.1f} / {found['AP50'] * 100:.1f} / {f1 * 100:.1f}"

    def table(self, console: Console) -> None:
        """Print what weights bring."""
        halves = np.array_split(np.random.default_rng(SEED).permutation(self.images.train), 2)
        strengths, of_halves = self.strengths(self.images.train), [self.strengths(half) for half in halves]
        console.print("| weights | other half of train2017 (mAP / AP50 / F1) | val2017 | clean |\n|---|---|---|---|")
        for name, power in (("equal", 0), ("by strength", 1), ("by its square", 2), ("by its fourth power", 4)):
            crossed = [
                self.quality([w**power for w in fitted], halves[1 - i], self.kind) for i, fitted in enumerate(of_halves)
            ]
            weights = [w**power for w in strengths]
            cells = [self.quality(weights, part, self.kind) for part in (self.images.val, self.images.clean)]
            console.print(f"| {name} | {crossed[0]}; {crossed[1]} | {cells[0]} | {cells[1]} |")


def labels_table(images: CocoImages, outputs: CocoOutputs, console: Console) -> None:
    """Print figures of the view `coco_labels`, and the threshold that train2017 prefers."""
    kind, manifest = outputs.kind, outputs.manifest
    stages = {"edge": outputs.of(manifest.cascade.default_edge), "reference": outputs.of(manifest.best)}
    truth = np.zeros((len(images.bodies), len(kind.labels)), np.bool_)
    for row, each in zip(truth, images.truths, strict=True):
        row[each.classes] = True
    by_threshold = {
        t: task_kind(kind.name, kind.labels, {**kind.options, "threshold": t})
        .losses([stages["reference"][i] for i in images.train], [images.truths[i] for i in images.train])
        .mean()
        for t in THRESHOLDS
    }
    console.print(f"threshold preferred on train2017: {min(by_threshold, key=lambda t: by_threshold[t])}")
    console.print("| part | stage | micro F1 | mean loss | average precision |\n|---|---|---|---|---|")
    threshold = float(manifest.options["threshold"])
    for part_name in ("val2017", "clean"):
        part = images.parts()[part_name]
        for stage, found in stages.items():
            p = np.stack([found[i] for i in part])
            right = (p >= threshold) & truth[part]
            f1 = 2 * right.sum() / ((p >= threshold).sum() + truth[part].sum())
            loss = kind.losses([found[i] for i in part], [images.truths[i] for i in part]).mean()
            ap = np.mean(
                [_ranked(p[:, label], truth[part][:, label]) for label in np.flatnonzero(truth[part].any(axis=0))]
            )
            console.print(f"| {part_name} | {stage} | {f1:.3f} | {loss:.3f} | {ap:.3f} |")


def _ranked(score: NDArray[np.float32], truth: NDArray[np.bool_]) -> float:
    """Average precision of images ranked for one label."""
    hits = truth[np.argsort(-score, kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean())


def main() -> None:
    """Print the tables of `docs/benchmarks/detection.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser)
    options = parser.parse_args()
    images = read_coco_images(options.data)
    console = Console(width=200, highlight=False, markup=False)
    counting = Counting(images, CocoOutputs("coco_count", images.bodies))
    counting.table(console)
    counting.confidences(console)
    of_crops = CocoOutputs("coco_count", cropped(images))
    counting.order(of_crops.of(of_crops.manifest.best), console)
    Fusion(images, CocoOutputs("coco", images.bodies)).table(console)
    labels_table(images, CocoOutputs("coco_labels", images.bodies), console)


if __name__ == "__main__":
    main()

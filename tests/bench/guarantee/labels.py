"""What wrong labels do: refused by `certify`, or certified, and what is then really given up.

    python -m tests.bench.guarantee labels [--draws 10] [--images 1500]

Folders of so many of CIFAR-10's test images are drawn, their labels are spoilt, and `hawkvision certify` runs on them
(`certify_site`, with the shipped profile) in two ways: with a label of every image, and with labels of the images that
`--to-label` lists for the same folder without labels: 30 at random, and the disagreements that would help. Where it
asks for a second look at the labels, it is run again with `--labels-checked`: somebody looked, and saw nothing.

What is certified is compared with the truth: CIFAR-10's certification and test images with right labels. *Violated*: of
all draws and ε, the share whose true drop is 0.95 ε or more. *Worst*: the largest true drop as a multiple of its ε.
*Never from*: the smallest ε at which nothing is escalated, in the median of the draws. Exit status 1 if right labels
are refused, or a shift, a permutation or labels of other images are not.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.profile import Certificate, Condition, threshold_value
from hawkvision.core.errors import ConfigError
from hawkvision.guarantee.answered import USED_SHARE, stated_drop
from hawkvision.guarantee.evidence import Evidence, Thresholds, sweep
from hawkvision.model_zoo.calibration.certify import certify_site
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import cache_dir, load_labels, load_manifest, models_dir
from tests.bench.cascade import DATA, FILES
from tests.bench.guarantee.certificates import images_of

SUMMARY: Final = "what wrong labels do: refused or certified, and what is then given up"
TASK: Final = "cifar10"
EDGE: Final = "small"

Labels = NDArray[np.int64]
Spoil = Callable[[Labels, np.random.Generator], Labels]


def right(labels: Labels, _: np.random.Generator) -> Labels:
    """The labels as they are."""
    return labels


def shifted(by: int) -> Spoil:
    """Each class is called by the name of another, so many places further."""
    return lambda labels, _: (labels + by) % 10


def permuted(labels: Labels, rng: np.random.Generator) -> Labels:
    """No class has its own name."""
    while True:
        names = rng.permutation(10)
        if (names != np.arange(10)).all():
            return np.asarray(names[labels], np.int64)


def exchanged(labels: Labels, _: np.random.Generator) -> Labels:
    """Cats are called dogs, and dogs cats."""
    return np.where(labels == 3, 5, np.where(labels == 5, 3, labels))


def errors(share: float) -> Spoil:
    """So many labels are another class, at random."""

    def spoil(labels: Labels, rng: np.random.Generator) -> Labels:
        wrong = rng.random(len(labels)) < share
        return np.where(wrong, (labels + rng.integers(1, 10, len(labels))) % 10, labels)

    return spoil


def others(labels: Labels, rng: np.random.Generator) -> Labels:
    """The labels of other images of the folder."""
    return rng.permutation(labels)


def another_task(labels: Labels, rng: np.random.Generator) -> Labels:
    """Labels that have nothing to do with the images: those of another task, of which three classes are frequent."""
    return rng.choice(10, len(labels), p=[0.4, 0.2, 0.2, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02, 0.02]).astype(np.int64)


SPOILT: Final[dict[str, Spoil]] = {
    "right": right,
    "shifted by one class": shifted(1),
    "shifted by three": shifted(3),
    "all classes exchanged": permuted,
    "labels of other images": others,
    "labels of another task": another_task,
    "cat and dog exchanged": exchanged,
    "10 % errors": errors(0.1),
    "30 % errors": errors(0.3),
    "50 % errors": errors(0.5),
}
MUST_REFUSE: Final = tuple(SPOILT)[1:6]
REFUSALS: Final = {
    "if the labels were not": "refused: explained", "no oftener than by chance": "refused: by chance",
    "which is below it": "refused: reference worse", "look at those labels again": "second look",
}  # fmt: skip


@dataclass
class Found:
    """What became of one kind of labels, over all draws."""

    outcomes: Counter[str] = field(default_factory=Counter)
    labels: list[int] = field(default_factory=list)
    drops: list[float] = field(default_factory=list)
    """True drops, as multiples of their ε; of what was certified at once, or after a second look."""
    never: list[float] = field(default_factory=list)
    fast: list[tuple[float, float]] = field(default_factory=list)
    """The bound of never escalating, and the true drop."""

    def certified(self, condition: Condition, truth: Evidence) -> None:
        """Compare certificates with the truth."""
        never = [
            stated_drop(each.max_drop)
            for each in condition.certificates
            if (each.threshold, each.basis) == ("never", "labelled")
        ]
        self.never.append(min(never, default=math.inf))
        for each in condition.certificates:
            if each.max_drop > 0.0 and each.threshold != "always":
                self.drops.append(drop_of(each, truth) / stated_drop(each.max_drop))
        self.fast.append((stated_drop(condition.fast.max_drop), drop_of(condition.fast, truth)))


def drop_of(certificate: Certificate, truth: Evidence) -> float:
    """What its thresholds give up in truth."""
    thresholds = Thresholds(threshold_value(certificate.threshold), threshold_value(certificate.intermediate_threshold))
    return next(sweep(truth, [thresholds])).drop


class Site:
    """A folder of images with spoilt labels."""

    def __init__(self, images: LabelledImages, chosen: NDArray[np.intp], folder: Path) -> None:
        self._folder = folder
        self._images = folder / "images"
        self._images.mkdir()
        self._names = [f"{row:05}.jpg" for row in range(len(chosen))]
        self.labels: Labels = images.labels[chosen].astype(np.int64)
        for name, index in zip(self._names, chosen.tolist(), strict=True):
            (self._images / name).write_bytes(images.bodies[index])
        self._asked = folder / "to-label.csv"
        self._certify(None)

    def asked(self) -> list[int]:
        """The images that `--to-label` lists."""
        with self._asked.open(newline="") as file:
            return [self._names.index(row["file"]) for row in csv.DictReader(file)]

    def certify(self, labels: Labels, rows: Sequence[int], *, confirmed: bool = False) -> Condition:
        """Certify with labels of these images.

        Raises:
            ConfigError: if labels are refused.
        """
        file = self._folder / "labels.csv"
        lines = ["file,label", *(f"{self._names[row]},{labels[row]}" for row in rows)]
        file.write_text("\n".join(lines) + "\n")
        return self._certify(file, confirmed=confirmed)

    def _certify(self, labels: Path | None, *, confirmed: bool = False) -> Condition:
        out = self._folder / "certificates.json"
        out.unlink(missing_ok=True)
        run = certify_site(
            TASK, self._images, out, labelled=labels is not None, labels=labels, labels_checked=confirmed,
            to_label=self._asked if labels is None else None, edges=[EDGE], models=models_dir(), cache=cache_dir(),
        )  # fmt: skip
        return run.certificates.pairs[0].conditions[0]


def outcome(site: Site, labels: Labels, rows: Sequence[int], truth: Evidence, found: Found) -> None:
    """Certify, with a second look if that is asked for, and note what came of it."""
    found.labels.append(len(rows))
    try:
        condition = site.certify(labels, rows)
    except ConfigError as error:
        said = next((short for words, short in REFUSALS.items() if words in str(error)), str(error))
        found.outcomes[said] += 1
        if said != REFUSALS["look at those labels again"]:
            return
        condition = site.certify(labels, rows, confirmed=True)
    else:
        found.outcomes["certified"] += 1
    found.certified(condition, truth)


def sites(draws: int, count: int) -> Iterator[Site]:
    """Folders of test images."""
    models = models_dir()
    images = read_images(DATA / FILES[TASK], load_labels(load_manifest(TASK, models), models))
    test = np.flatnonzero(images.is_test)
    for draw in range(draws):
        with tempfile.TemporaryDirectory() as folder:
            yield Site(images, np.random.default_rng(draw).permutation(test)[:count], Path(folder))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--images", type=int, default=1_500)


def run(given: argparse.Namespace) -> int:
    """Certify with all kinds of labels, and print the table in Markdown."""
    _, truth = images_of(f"{TASK}:{EDGE}")
    found = {(name, way): Found() for name in SPOILT for way in ("all", "asked for")}
    for draw, site in enumerate(sites(given.draws, given.images)):
        for name, spoil in SPOILT.items():
            labels = spoil(site.labels, np.random.default_rng([draw, 1]))
            outcome(site, labels, range(len(labels)), truth, found[name, "all"])
            outcome(site, labels, site.asked(), truth, found[name, "asked for"])
    print("| labels | of | outcome, draws | violated | worst | never from | `fast`: stated, true |")
    print("|---|---|---|---|---|---|---|")
    for (name, way), each in found.items():
        said = ", ".join(f"{what} {count}" for what, count in each.outcomes.items())
        last = [""] * 4
        if each.fast:
            violated, (stated, true) = np.mean(np.array(each.drops) >= USED_SHARE), min(each.fast)
            never = float(np.median(each.never))
            last = [f"{violated:.1%}", f"{max(each.drops):.2f} ε", f"{never:.1%}", f"{stated:.1%}, {true:.1%}"]
        print(f"| {name} | {way} ({np.mean(each.labels):.0f}) | {said} | {' | '.join(last)} |")
    wrong = [f"{name}, {way}" for (name, way), each in found.items() if _untrue(name, each)]
    print("\n" + ("; ".join(wrong) or "right labels are taken, and labels of something else are refused"))
    return int(bool(wrong))


def _untrue(name: str, found: Found) -> bool:
    refused = sum(count for said, count in found.outcomes.items() if said.startswith("refused"))
    return refused > 0 if name == "right" else name in MUST_REFUSE and refused < found.outcomes.total()

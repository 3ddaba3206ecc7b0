"""Measures the ImageNet cascade and writes what it finds into `manifest.toml` and `ranges/`.

    python models/imagenet/measure.py --data ../shared/data/imagenet_eval.npz [--ranges] [--wheels FOLDER]

The data are a labelled set as `hawkvision calibrate` takes it (`hawkvision.models.datasets`), split in the same way:
what is fitted, temperatures and with `--ranges` activation ranges, is fitted on the profile part; accuracies are
measured on the other two. So no image that certifies or tests has shaped an ensemble's votes or an int8 graph.
Prints the table of CARD.md. Two cores take about three minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from hawkvision.cascade.certification.predictions import Split, measure_accuracy, split_indices
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.types import Logits, Pixels
from hawkvision.model_zoo.building.measuring import Recipe, milliseconds, pixels_of, recipe_of, session_of
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import Ensemble, InputSpec, MeasuredAccuracy, Variant, load_labels
from hawkvision.tasks.class_scores import average, log_probabilities, softmax
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind

SEED = 2405
"""Seed of the split; the one that `hawkvision calibrate` uses unless told otherwise."""
HEADER = """What the ImageNet models are and how right they were measured to be. Accuracies, temperatures, hashes and
sizes are written by measure.py; the rest by hand. CARD.md says where the models come from and what the figures mean."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Labelled images and their split."""

    kind: TaskKind[Any]
    images: LabelledImages
    split: Split

    def inputs(self, spec: InputSpec) -> Pixels:
        """All images as (n, height, width, 3)."""
        return np.stack([pixels_of(body, spec) for body in self.images.bodies])

    def unseen(self) -> NDArray[np.intp]:
        """The images that nothing is fitted on."""
        return np.concatenate([self.split.certify, self.split.held_out])

    def accuracy(self, answers: NDArray[np.intp]) -> MeasuredAccuracy:
        """Top-1 of answers to all images (n,), on those that nothing is fitted on."""
        right = answers == self.images.labels
        return measure_accuracy(right[self.unseen()], self.images.sha256)

    def temperature(self, logits: Logits, among: NDArray[np.bool_] | None = None) -> float:
        """The temperature that fits logits of all images (n, classes) best on the profile part, or some of it."""
        fitting = self.split.profile if among is None else self.split.profile[among[self.split.profile]]
        return round(fit_temperature(self.kind, list(logits[fitting]), self.images.labels[fitting].tolist()), 4)


def load_evaluation(path: Path, labels: tuple[str, ...]) -> Evaluation:
    """Read the labelled set and split it."""
    images = read_images(path, labels)
    return Evaluation(task_kind("classification", labels, {}), images, split_indices(images.sources, SEED))


def logits_of(model: bytes, batch: Pixels, name: str) -> Logits:
    """Logits of all images, 16 at a time: more does not run faster on two cores."""
    session = session_of(model, threads=2)
    starts = track(range(0, len(batch), 16), description=f"{name:<24}", transient=True)
    return np.concatenate([session.run(None, {"image": batch[i : i + 16]})[0] for i in starts])


def measure_variants(recipe: Recipe, evaluation: Evaluation) -> tuple[list[Variant], dict[str, Logits], list[str]]:
    """Every variant with its measured fields, its logits by name, and a line of the table each."""
    measured: dict[str, Variant] = {}
    logits: dict[str, Logits] = {}
    speed: dict[str, float] = {}
    images = evaluation.images
    for variant, model in recipe.rebuilt([images.bodies[i] for i in evaluation.split.profile], images.sha256, SEED):
        batch = evaluation.inputs(variant.input)
        logits[variant.name] = found = logits_of(model, batch, variant.name)
        speed[variant.name] = milliseconds(session_of(model, threads=1).run, None, {"image": batch[:1]})
        measured[variant.name] = msgspec.structs.replace(
            variant, temperature=evaluation.temperature(found), accuracy=evaluation.accuracy(found.argmax(axis=1))
        )
    ordered = [measured[v.name] for v in recipe.manifest.variants]
    rows = [_row(v, speed[v.name], logits, evaluation.unseen()) for v in ordered]
    return ordered, logits, rows


def _row(variant: Variant, speed: float, logits: dict[str, Logits], unseen: NDArray[np.intp]) -> str:
    assert variant.accuracy is not None
    assert variant.bytes is not None
    agreement = ""
    base = variant.name.removesuffix("_int8")
    if base != variant.name and base in logits:
        same = (logits[base].argmax(axis=1) == logits[variant.name].argmax(axis=1))[unseen].mean()
        agreement = f"{same * 100:.1f} %"
    a = variant.accuracy
    return (
        f"| `{variant.name}` | {variant.input.width} | {variant.bytes / 1e6:.1f} | {speed:.1f} | {a.value * 100:.1f} "
        f"({a.low * 100:.1f}–{a.high * 100:.1f}) | {variant.temperature:.2f} | {agreement} |"
    )


def measure_ensemble(
    recipe: Recipe, ensemble: Ensemble, variants: list[Variant], evaluation: Evaluation, logits: dict[str, Logits]
) -> tuple[Ensemble, str]:
    """The ensemble with its measured fields and its line of the table.

    The temperature of a conditional one is fitted on what its first member is not sure of: no other average is used.
    """
    opinions = []
    for variant in (v for v in variants if v.name in ensemble.members):
        views = [logits[variant.name]]
        if ensemble.horizontal_flip:
            mirrored = np.ascontiguousarray(evaluation.inputs(variant.input)[:, :, ::-1])
            views.append(logits_of(recipe.file(variant).read_bytes(), mirrored, f"{variant.name} mirrored"))
        opinions.append(average([softmax(view, variant.temperature) for view in views]))
    mean = average(opinions)
    averaged = np.ones(len(mean), bool)
    if ensemble.accept_confidence is not None:
        averaged = opinions[0].max(axis=1) < np.float32(ensemble.accept_confidence)
    accuracy = evaluation.accuracy(np.where(averaged, mean.argmax(axis=1), opinions[0].argmax(axis=1)))
    temperature = evaluation.temperature(log_probabilities(mean), averaged)
    row = (
        f"| `{ensemble.name}` | | | | {accuracy.value * 100:.1f} ({accuracy.low * 100:.1f}–{accuracy.high * 100:.1f}) "
        f"| {temperature:.2f} | |"
    )
    return msgspec.structs.replace(ensemble, accuracy=accuracy, temperature=temperature), row


def main() -> None:
    """Measure everything and rewrite the manifest."""
    recipe, data = recipe_of(__file__, __doc__)
    evaluation = load_evaluation(data, load_labels(recipe.manifest, recipe.models))
    variants, logits, rows = measure_variants(recipe, evaluation)
    ensembles = []
    for ensemble in recipe.manifest.ensembles:
        measured, row = measure_ensemble(recipe, ensemble, variants, evaluation, logits)
        ensembles.append(measured)
        rows.append(row)
    done = msgspec.structs.replace(recipe.manifest, variants=tuple(variants), ensembles=tuple(ensembles))
    head = "| model | input | MB | ms | accuracy % (95 %) | temperature | agrees with fp32 |"
    recipe.write(done, HEADER, [head, "|---|---|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    main()

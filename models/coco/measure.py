"""Measures the COCO detectors and writes what it finds into `manifest.toml` and `ranges/`.

    python models/coco/measure.py --data ../shared/data/coco_eval.npz [--ranges] [--wheels FOLDER]

Everything that is fitted (temperatures, the threshold, with `--ranges` activation ranges) is fitted on images of
train2017, on which all these models were trained. Figures are of images of val2017 on which none was. Prints the table
of CARD.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from scipy.optimize import minimize_scalar

from hawkvision.cascade.certification.predictions import measure_accuracy
from hawkvision.core.types import Pixels
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import probe
from hawkvision.model_zoo.building.measuring import Recipe, milliseconds, pixels_of, recipe_of, session_of
from hawkvision.models.manifest import MeasuredAccuracy, Variant
from hawkvision.system.files import sha256_of
from hawkvision.tasks.boxes.average_precision import detection_quality
from hawkvision.tasks.boxes.rows import CLASS, SCORE, TrueBoxes, by_temperature, overlaps, tempered
from hawkvision.tasks.decoders.registry import open_decoder
from hawkvision.tasks.kind import Output, TaskKind, Tensors
from hawkvision.tasks.registry import load_kind, task_kind

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
HEADER = """The COCO detectors. Temperatures, the threshold, accuracies, hashes and sizes are written by measure.py, the
rest by hand. CARD.md says where the models come from and what the figures mean."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Images with boxes."""

    sha256: str
    bodies: list[bytes]
    truths: list[TrueBoxes]
    train: NDArray[np.intp]
    """Those of train2017, which fit."""
    clean: NDArray[np.intp]
    """Those of val2017 on which no model was trained, which measure."""


def load_evaluation(path: Path) -> Evaluation:
    """Read the set (`../shared/data/README.md`)."""
    with np.load(path, allow_pickle=False) as z:
        data, ends, at = z["data"], z["offsets"], z["box_offsets"]
        count = len(z["ids"])
        train = z["split"] == "train2017"
        return Evaluation(
            sha256_of(path.read_bytes()),
            [data[ends[i] : ends[i + 1]].tobytes() for i in range(count)],
            [TrueBoxes(z["boxes"][at[i] : at[i + 1]], z["classes"][at[i] : at[i + 1]]) for i in range(count)],
            np.flatnonzero(train),
            np.flatnonzero(z["clean"] & ~train),
        )


class Detector:
    """A variant on one thread of ONNX Runtime, and its decoder."""

    def __init__(self, variant: Variant, model: bytes, labels: int) -> None:
        self._session = session_of(model, threads=1)
        self._names = [each.name for each in self._session.get_outputs()]
        self._decoder = open_decoder(variant, labels)

    def __call__(self, pixels: Pixels) -> Tensors:
        """The decoded tensors of one image (height, width, 3)."""
        found = self._session.run(self._names, {"image": pixels[np.newaxis]})
        return self._decoder(dict(zip(self._names, found, strict=True)))


def outputs_of(detector: Detector, variant: Variant, kind: TaskKind[Any], evaluation: Evaluation) -> list[Output]:
    """The boxes of all images at temperature 1."""
    found = []
    for body in track(evaluation.bodies, description=f"{variant.name:<28}", transient=True):
        (output,) = kind.outputs(detector(pixels_of(body, variant.input)), 1.0)
        found.append(kind.place(output, placement(probe(body), variant.input).to_image))
    return found


def are_right(output: Output, truth: TrueBoxes) -> NDArray[np.bool_]:
    """Whether each box, best first, finds a true box of its class that is still free."""
    free = np.where(output[:, CLASS : CLASS + 1] == truth.classes, overlaps(output[:, :4], truth.boxes), -1.0)
    right = np.zeros(len(output), np.bool_)
    for i, row in enumerate(free if free.size else ()):
        best = int(row.argmax())
        right[i] = row[best] >= 0.5
        if right[i]:
            free[:, best] = -1.0
    return right


def fitted_temperature(outputs: Sequence[Output], evaluation: Evaluation) -> float:
    """The temperature with the least negative log likelihood of which boxes are right."""
    scores = np.concatenate([outputs[i][:, SCORE] for i in evaluation.train])
    right = np.concatenate([are_right(outputs[i], evaluation.truths[i]) for i in evaluation.train])

    def surprise(temperature: float) -> float:
        p = np.clip(tempered(scores, temperature).astype(np.float64), 1e-6, 1 - 1e-6)
        return -float(np.log(np.where(right, p, 1 - p)).sum())

    return round(float(minimize_scalar(surprise, bounds=(0.2, 5.0), method="bounded").x), 4)


def mean_f1(kind: TaskKind[Any], outputs: Sequence[Output], evaluation: Evaluation, images: NDArray[np.intp]) -> float:
    """Mean F1 of some images."""
    return 1.0 - float(kind.losses([outputs[i] for i in images], [evaluation.truths[i] for i in images]).mean())


def measured_accuracy(kind: TaskKind[Any], outputs: Sequence[Output], evaluation: Evaluation) -> MeasuredAccuracy:
    """Mean F1 of the images on which no model was trained."""
    found = [outputs[i] for i in evaluation.clean]
    return measure_accuracy(
        1.0 - kind.losses(found, [evaluation.truths[i] for i in evaluation.clean]), evaluation.sha256
    )


def fitted_threshold(kind: TaskKind[Any], reference: Sequence[Output], evaluation: Evaluation) -> float:
    """The threshold with the best mean F1 of the reference stage."""

    def score(threshold: float) -> float:
        of_threshold = task_kind(kind.name, kind.labels, {**kind.options, "threshold": threshold})
        return mean_f1(of_threshold, reference, evaluation, evaluation.train)

    return max(THRESHOLDS, key=score)


def measure_variants(
    recipe: Recipe, evaluation: Evaluation, kind: TaskKind[Any]
) -> tuple[list[Variant], dict[str, list[Output]], dict[str, float]]:
    """Every variant with its measured fields, its calibrated boxes by name, and its processor time."""
    measured: dict[str, Variant] = {}
    outputs: dict[str, list[Output]] = {}
    speed: dict[str, float] = {}
    for variant, model in recipe.rebuilt([evaluation.bodies[i] for i in evaluation.train], evaluation.sha256, 0):
        detector = Detector(variant, model, len(kind.labels))
        raw = outputs_of(detector, variant, kind, evaluation)
        temperature = fitted_temperature(raw, evaluation)
        outputs[variant.name] = [by_temperature(each, temperature) for each in raw]
        image = pixels_of(evaluation.bodies[0], variant.input)
        speed[variant.name] = milliseconds(detector, image)
        measured[variant.name] = msgspec.structs.replace(variant, temperature=temperature)
    return [measured[v.name] for v in recipe.manifest.variants], outputs, speed


def row(name: str, kind: TaskKind[Any], outputs: Sequence[Output], evaluation: Evaluation, cost: str) -> str:
    """The line of a stage in the table."""
    chosen = evaluation.clean
    found = detection_quality([outputs[i] for i in chosen], [evaluation.truths[i] for i in chosen])
    f1 = mean_f1(kind, outputs, evaluation, chosen)
    return f"| `{name}` | {cost} | {found['mAP'] * 100:.1f} | {found['AP50'] * 100:.1f} | {f1 * 100:.1f} |"


def main() -> None:
    """Measure everything and rewrite the manifest."""
    recipe, data = recipe_of(__file__, __doc__)
    evaluation, manifest = load_evaluation(data), recipe.manifest
    kind = load_kind(manifest, recipe.models)
    variants, outputs, speed = measure_variants(recipe, evaluation, kind)
    for ensemble in manifest.ensembles:
        members = zip(*(outputs[name] for name in ensemble.members), strict=True)
        outputs[ensemble.name] = [kind.combine(each, ensemble.weights, ensemble.temperature) for each in members]
    threshold = fitted_threshold(kind, outputs[manifest.best], evaluation)
    kind = task_kind(manifest.kind, kind.labels, {**manifest.options, "threshold": threshold})
    accuracy = {name: measured_accuracy(kind, of_stage, evaluation) for name, of_stage in outputs.items()}
    done = msgspec.structs.replace(
        manifest,
        options=kind.options,
        variants=tuple(msgspec.structs.replace(each, accuracy=accuracy[each.name]) for each in variants),
        ensembles=tuple(msgspec.structs.replace(each, accuracy=accuracy[each.name]) for each in manifest.ensembles),
    )
    found = f"threshold {threshold}; {len(evaluation.clean)} images of val2017 that trained no model"
    lines = [found, "| stage | MB | ms | mAP | AP50 | mean F1 |", "|---|---|---|---|---|---|"]
    by_name = {v.name: v for v in variants}
    for name, of_stage in outputs.items():
        size = by_name[name].bytes if name in by_name else None
        cost = f"{size / 1e6:.1f} | {speed[name]:.0f}" if size is not None else "|"
        lines.append(row(name, kind, of_stage, evaluation, cost))
    recipe.write(done, HEADER, lines)


if __name__ == "__main__":
    main()

"""Measures the ImageNet cascade and writes what it finds into `manifest.toml` and `ranges/`.

    python models/imagenet/measure.py --data ../shared/data/imagenet_eval.npz [--ranges] [--wheels FOLDER]

The data are a labelled set as `hawkvision calibrate` takes it (`hawkvision.models.datasets`), split in the same way:
what is fitted, temperatures and with `--ranges` activation ranges, is fitted on the profile part; accuracies are
measured on the other two. So no image that certifies or tests has shaped an ensemble's votes or an int8 graph.
Prints the table of CARD.md. Two cores take about three minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from hawkvision.cascade.certification.predictions import Split, measure_accuracy, split_indices
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.types import Logits, Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.model_zoo.building.architectures import emit
from hawkvision.model_zoo.building.build import emit_variant, weights_of
from hawkvision.model_zoo.building.checkpoint import parse_checkpoint
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.building.quantize import Ranges, measure_ranges, save_ranges
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import (
    Ensemble,
    InputSpec,
    Manifest,
    MeasuredAccuracy,
    Variant,
    artifact_path,
    cache_dir,
    load_labels,
    load_manifest,
)
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.class_scores import average, log_probabilities, softmax
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind

TASK = "imagenet"
SEED = 2405
"""Seed of the split; the one that `hawkvision calibrate` uses unless told otherwise."""
MAX_PIXELS = 50_000_000
HEADER = """What the ImageNet models are and how right they were measured to be. Accuracies, temperatures, hashes and
sizes are written by measure.py; the rest by hand. CARD.md says where the models come from and what the figures mean."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Labelled images and their split."""

    kind: TaskKind[Any]
    images: LabelledImages
    split: Split

    def inputs(self, spec: InputSpec) -> Pixels:
        """All images as (n, height, width, 3), made by the very code that serves."""
        return np.stack([load_input(body, spec, max_pixels=MAX_PIXELS)[0] for body in self.images.bodies])

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


def session_of(model: bytes, threads: int) -> ort.InferenceSession:
    """A CPU session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def logits_of(model: bytes, batch: Pixels, name: str) -> Logits:
    """Logits of all images, 16 at a time: more does not run faster on two cores."""
    session = session_of(model, threads=2)
    starts = track(range(0, len(batch), 16), description=f"{name:<24}", transient=True)
    return np.concatenate([session.run(None, {"image": batch[i : i + 16]})[0] for i in starts])


def milliseconds(model: bytes, image: Pixels) -> float:
    """Median of 50 runs of one image on one thread."""
    session = session_of(model, threads=1)
    times = []
    for _ in range(55):
        start = time.perf_counter()
        session.run(None, {"image": image[None]})
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[5:])


def measure_variants(
    manifest: Manifest, models: Path, cache: Path, evaluation: Evaluation, wheels: Path | None, new_ranges: bool
) -> tuple[list[Variant], dict[str, Logits], list[str]]:
    """Every variant with its measured fields, its logits by name, and a line of the table each."""
    measured: dict[str, Variant] = {}
    logits: dict[str, Logits] = {}
    speed: dict[str, float] = {}
    ranged: set[str] = set()
    for variant, weights in weights_of(TASK, manifest.variants, models, wheels, {}, lambda _name, _step: None):
        batch = evaluation.inputs(variant.input)
        if new_ranges and variant.precision == "int8" and variant.architecture not in ranged:
            ranged.add(variant.architecture)
            save_ranges(models, TASK, ranges_of(variant, weights, batch, evaluation))
        model = emit_variant(TASK, variant, models, weights)
        write_atomic(artifact_path(cache, TASK, variant.name), model)
        found = logits_of(model, batch, variant.name)
        logits[variant.name] = found
        speed[variant.name] = milliseconds(model, batch[0])
        measured[variant.name] = msgspec.structs.replace(
            variant,
            sha256=sha256_of(model),
            bytes=len(model),
            temperature=evaluation.temperature(found),
            accuracy=evaluation.accuracy(found.argmax(axis=1)),
        )
    ordered = [measured[v.name] for v in manifest.variants]
    rows = [_row(v, speed[v.name], logits, evaluation.unseen()) for v in ordered]
    return ordered, logits, rows


def ranges_of(variant: Variant, weights: bytes, batch: Pixels, evaluation: Evaluation) -> Ranges:
    """The architecture's activation ranges on the profile part."""
    chosen = evaluation.split.profile
    where = str(variant.source)
    graph = emit(variant.architecture, parse_checkpoint(weights, variant.source.reader, where), variant.input, where)
    return Ranges(
        format=1,
        architecture=variant.architecture,
        weights_sha256=variant.source.sha256,
        data_sha256=evaluation.images.sha256,
        images=len(chosen),
        seed=SEED,
        ranges=measure_ranges(graph, track(batch[chosen], description=f"{variant.architecture} ranges")),
    )


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
    ensemble: Ensemble, variants: list[Variant], cache: Path, evaluation: Evaluation, logits: dict[str, Logits]
) -> tuple[Ensemble, str]:
    """The ensemble with its measured fields and its line of the table.

    The temperature of a conditional one is fitted on what its first member is not sure of: no other average is used.
    """
    opinions = []
    for variant in (v for v in variants if v.name in ensemble.members):
        views = [logits[variant.name]]
        if ensemble.horizontal_flip:
            mirrored = np.ascontiguousarray(evaluation.inputs(variant.input)[:, :, ::-1])
            model = artifact_path(cache, TASK, variant.name).read_bytes()
            views.append(logits_of(model, mirrored, f"{variant.name} mirrored"))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ranges", action="store_true", help="measure activation ranges anew")
    parser.add_argument("--wheels", type=Path, help="folder of downloaded weight packages")
    options = parser.parse_args()
    here = Path(__file__).resolve().parent
    cache = cache_dir()
    manifest = load_manifest(TASK, here.parent)
    evaluation = load_evaluation(options.data, load_labels(manifest, here.parent))
    variants, logits, rows = measure_variants(manifest, here.parent, cache, evaluation, options.wheels, options.ranges)
    ensembles = []
    for ensemble in manifest.ensembles:
        measured, row = measure_ensemble(ensemble, variants, cache, evaluation, logits)
        ensembles.append(measured)
        rows.append(row)
    done = msgspec.structs.replace(manifest, variants=tuple(variants), ensembles=tuple(ensembles))
    write_atomic(here / "manifest.toml", format_manifest(done, HEADER).encode())
    console = Console(width=160)
    console.print("| model | input | MB | ms | accuracy % (95 %) | temperature | agrees with fp32 |")
    console.print("|---|---|---|---|---|---|---|")
    for row in rows:
        console.print(row, highlight=False, markup=False)


if __name__ == "__main__":
    main()

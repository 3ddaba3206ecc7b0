"""Measures what quantisation costs: test accuracy of a task's integer stages and of their float networks.

    python -m tests.bench.fpga.accuracy --task fashion_mnist --data /usr/share/datasets/fashion-mnist

Everything is computed from the committed weights, on test images that served no training, fit or certificate. ONNX
Runtime's logits of each integer stage are compared with `hawkvision.integer.reference`. Goal: no stage loses more than
one point, and no logit differs; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hawkvision.cascade.certification.predictions import measure_accuracy
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import LOGITS, Logits, Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.inference.backend_registry import open_backend
from hawkvision.integer import reference
from hawkvision.integer.artifact import graph_of
from hawkvision.model_zoo.building.build import emit_variant, weights_of
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import InputSpec, MeasuredAccuracy, Variant, load_labels, load_manifest, models_dir

WORST_POINTS: Final = 1.0
BATCH: Final = 500
MAX_PIXELS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage on the test images."""

    name: str
    precision: str
    file_bytes: int
    accuracy: MeasuredAccuracy
    of: str | None
    """The float network that it was quantised from."""
    lost_points: float
    """Accuracy points lost against that network, and half the 95 % interval of this paired difference."""
    lost_error: float
    differing: int
    """Logits that differ from the reference; 0 for a float network."""
    logits: int
    image_us: float
    """Median time of one image on one thread of ONNX Runtime."""


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", type=Path, required=True, help="labelled images, as calibrate takes them")
    parser.add_argument("--limit", type=int, help="only so many test images, the first")
    given = parser.parse_args()
    try:
        stages = measure(given.task, given.data, given.limit)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(stages, Console(width=None if sys.stdout.isatty() else 150))
    failures = missed(stages)
    print("\n".join(failures) or "every goal is met")
    return 1 if failures else 0


def missed(stages: Sequence[Stage]) -> list[str]:
    """Goals that are missed."""
    datagram = [f"{r.name} loses {r.lost_points:.2f} points" for r in stages if r.lost_points > WORST_POINTS]
    return datagram + [f"{r.name}: {r.differing} logits differ" for r in stages if r.differing]


def measure(task: str, data: Path, limit: int | None = None, models: Path | None = None) -> list[Stage]:
    """The edge stages of a task, in order."""
    models = models_dir(models)
    manifest = load_manifest(task, models)
    images = read_images(data, load_labels(manifest, models))
    chosen = np.flatnonzero(images.is_test)[:limit]
    labels = images.labels[chosen]
    bodies = [images.bodies[i] for i in chosen]
    recipe = tomllib.loads((models / task / "recipe.toml").read_text(encoding="utf-8"))
    of = {twin["name"]: twin["of"] for twin in recipe["quantised"]}
    variants = [variant for name in manifest.cascade.edge for variant in manifest.members(name)]
    right: dict[str, NDArray[np.bool_]] = {}
    stages = []
    # Float networks first, because the others are compared with them.
    for variant, weights in weights_of(
        task, sorted(variants, key=lambda v: v.name in of), models, None, {}, lambda *_: None
    ):
        model = emit_variant(task, variant, models, weights)
        inputs = _inputs(bodies, variant.input)
        logits, image_us = _infer(model, variant, manifest.classes, inputs)
        right[variant.name] = logits.argmax(axis=1) == labels
        parent = of.get(variant.name)
        lost = right[parent].astype(float) - right[variant.name] if parent else np.zeros(len(labels))
        stages.append(
            Stage(
                variant.name,
                variant.precision,
                len(weights),
                measure_accuracy(right[variant.name], images.sha256),
                parent,
                100 * float(lost.mean()),
                196 * float(lost.std(ddof=1)) / len(lost) ** 0.5,
                _differing(model, inputs, logits) if parent else 0,
                logits.size,
                image_us,
            )
        )
    return sorted(stages, key=lambda stage: manifest.cascade.edge.index(stage.name))


def _inputs(bodies: Sequence[bytes], spec: InputSpec) -> Pixels:
    return np.stack([load_input(body, spec, max_pixels=MAX_PIXELS)[0] for body in bodies])


def _infer(model: bytes, variant: Variant, classes: int, inputs: Pixels) -> tuple[Logits, float]:
    """Logits, and the median of 200 single images in microseconds."""
    with closing(open_backend("onnxruntime", model, variant.input, classes, threads=1)) as backend:
        logits = np.concatenate([backend.infer(inputs[i : i + BATCH])[LOGITS] for i in range(0, len(inputs), BATCH)])
        taken = []
        for _ in range(200):
            before = time.thread_time_ns()
            backend.infer(inputs[:1])
            taken.append((time.thread_time_ns() - before) / 1e3)
    return logits, float(np.median(taken))


def _differing(model: bytes, inputs: Pixels, logits: Logits) -> int:
    graph = graph_of(model)
    count = 0
    for i in range(0, len(inputs), BATCH):
        whole = reference.logits(graph, reference.planes(graph, inputs[i : i + BATCH]))
        count += int((whole.astype(np.float32) * np.float32(graph.logit_scale) != logits[i : i + BATCH]).sum())
    return count


def show(stages: Sequence[Stage], console: Console) -> None:
    """Print the results."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (
        "stage",
        "precision",
        "file KB",
        "test top-1 %",
        "95 %",
        "n",
        "points lost",
        "logits differing",
        "µs",
    ):
        table.add_column(title)
    for stage in stages:
        accuracy = stage.accuracy
        table.add_row(
            stage.name,
            stage.precision,
            f"{stage.file_bytes / 1e3:.0f}",
            f"{100 * accuracy.value:.2f}",
            f"{100 * accuracy.low:.2f}–{100 * accuracy.high:.2f}",
            str(accuracy.n),
            "" if stage.of is None else f"{stage.lost_points:+.2f} ± {stage.lost_error:.2f} against {stage.of}",
            "" if stage.of is None else f"{stage.differing} of {stage.logits}",
            f"{stage.image_us:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

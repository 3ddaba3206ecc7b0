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
from contextlib import closing
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
from hawkvision.models.manifest import Variant, load_labels, load_manifest, models_dir

WORST_POINTS: Final = 1.0
BATCH: Final = 500
MAX_PIXELS: Final = 1_000_000


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", type=Path, required=True, help="labelled images, as calibrate takes them")
    parser.add_argument("--limit", type=int, help="only so many test images, the first")
    given = parser.parse_args()
    try:
        table, failures = measure(given.task, given.data, given.limit)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    print("\n".join(failures) or "every goal is met")
    return 1 if failures else 0


def measure(task: str, data: Path, limit: int | None) -> tuple[Table, list[str]]:
    """The edge stages of a task, and the goals that they miss."""
    models = models_dir()
    manifest = load_manifest(task, models)
    images = read_images(data, load_labels(manifest, models))
    chosen = np.flatnonzero(images.is_test)[:limit]
    labels = images.labels[chosen]
    bodies = [images.bodies[i] for i in chosen]
    recipe = tomllib.loads((models / task / "recipe.toml").read_text(encoding="utf-8"))
    of = {twin["name"]: twin["of"] for twin in recipe["quantised"]}
    variants = [variant for name in manifest.cascade.edge for variant in manifest.members(name)]
    # Float networks first, because the others are compared with them.
    variants.sort(key=lambda variant: variant.name in of)
    right: dict[str, NDArray[np.bool_]] = {}
    failures: list[str] = []
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("stage", "precision", "file KB", "test top-1 %", "95 %", "n", "lost", "logits differing", "µs"):
        table.add_column(title)
    for variant, weights in weights_of(task, variants, models, None, {}, lambda *_: None):
        model = emit_variant(task, variant, models, weights)
        inputs = np.stack([load_input(body, variant.input, max_pixels=MAX_PIXELS)[0] for body in bodies])
        logits, image_us = _infer(model, variant, manifest.classes, inputs)
        right[variant.name] = logits.argmax(axis=1) == labels
        lost = differing = ""
        if parent := of.get(variant.name):
            points = 100 * (right[parent].astype(float) - right[variant.name])
            lost = f"{points.mean():+.2f} ± {1.96 * points.std(ddof=1) / len(points) ** 0.5:.2f} against {parent}"
            count = _differing(model, inputs, logits)
            differing = f"{count} of {logits.size}"
            if points.mean() > WORST_POINTS or count:
                failures.append(f"{variant.name} loses {points.mean():.2f} points, and {count} logits differ")
        top1 = measure_accuracy(right[variant.name], images.sha256)
        interval = f"{100 * top1.low:.2f}–{100 * top1.high:.2f}"
        size, accuracy = f"{len(weights) / 1e3:.0f}", f"{100 * top1.value:.2f}"
        figures = (size, accuracy, interval, str(top1.n), lost, differing, f"{image_us:.0f}")
        table.add_row(variant.name, variant.precision, *figures)
    return table, failures


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
    """Logits that differ from the reference."""
    graph = graph_of(model)
    count = 0
    for i in range(0, len(inputs), BATCH):
        whole = reference.logits(graph, reference.planes(graph, inputs[i : i + BATCH]))
        count += int((whole.astype(np.float32) * np.float32(graph.logit_scale) != logits[i : i + BATCH]).sum())
    return count


if __name__ == "__main__":
    sys.exit(main())

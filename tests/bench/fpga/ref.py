"""Compares `fpga-ref` on the CPU with ONNX Runtime on the same integers, the float network, and the float network in
int8.

    python -m tests.bench.fpga.ref --task cifar10 --data /path/to/cifar10.npz
    python -m tests.bench.fpga.ref --task cifar10 --random

Each backend runs in the calling thread alone; its CPU time is reported, so that other work on the machine matters less.
The backends take turns in short rounds; a figure is the median over rounds of a round's mean, beside the best round.
Goals: no logit differs from the reference, and `fpga-ref` takes no longer than int8; otherwise the exit status is 1.
`--random` uses random weights of the same shape and noise, without a float network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from fpga.backends.reference import ReferenceBackend
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import LOGITS, Logits, Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.inference.backends.interface import Backend
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.integer import reference
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.onnx_writer import write
from hawkvision.model_zoo.building.quantize import measure_ranges, quantise_model
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import cache_dir, load_labels, load_manifest, models_dir
from tests.hawkvision.integer.graphs import cifar_shape, fashion_shape

REF: Final = "fpga-ref"
TWIN: Final = "ONNX Runtime, the same integers"
FLOAT: Final = "ONNX Runtime, fp32 tiny"
INT8: Final = "ONNX Runtime, int8 tiny"
ROUND_S: Final = 0.03
RANGED: Final = 200
"""Images for the ranges of int8."""


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("cifar10", "fashion_mnist"), required=True)
    parser.add_argument("--variant", default="tiny_w4")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="labelled images, as calibrate takes them")
    source.add_argument("--random", action="store_true", help="random weights and noise")
    parser.add_argument("--images", type=int, default=2000, help="whose logits are compared")
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    try:
        backends, images = _random(given) if given.random else _built(given)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    ref = backends[REF]
    assert isinstance(ref, ReferenceBackend)
    differing = _differing(ref, backends[TWIN], images)
    times = {batch: _times(backends, images, batch, given.rounds) for batch in (1, 4)}
    for backend in backends.values():
        backend.close()
    _show(given, ref.kernel, times, differing, len(images) * ref.graph.classes)
    return int(bool(sum(differing)) or (INT8 in backends and times[1][REF][0] > times[1][INT8][0]))


def _random(given: argparse.Namespace) -> tuple[dict[str, Backend], Pixels]:
    bits = 8 if given.variant.endswith("w8") else 4
    graph = (cifar_shape if given.task == "cifar10" else fashion_shape)(weight_bits=bits)
    size = (given.images, graph.input.height, graph.input.width, 3)
    images = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return {REF: ReferenceBackend(graph), TWIN: OnnxRuntimeBackend(write(graph))}, images


def _built(given: argparse.Namespace) -> tuple[dict[str, Backend], Pixels]:
    models, cache = models_dir(), cache_dir()
    manifest = load_manifest(given.task, models)
    variant, twin = manifest.variant(given.variant), manifest.variant("tiny")
    found = read_images(given.data, load_labels(manifest, models))
    bodies = [found.bodies[index] for index in range(min(given.images, len(found)))]
    images = np.stack([load_input(body, variant.input, max_pixels=10**6)[0] for body in bodies])
    integers = load_variant(cache, given.task, variant)
    float_model = load_variant(cache, given.task, twin)
    parsed = onnx.load_from_string(float_model)
    int8 = quantise_model(parsed, measure_ranges(parsed, images[:RANGED]), "measured just now")
    return {
        REF: ReferenceBackend(graph_of(integers)),
        TWIN: OnnxRuntimeBackend(integers),
        FLOAT: OnnxRuntimeBackend(float_model),
        INT8: OnnxRuntimeBackend(int8.SerializeToString()),
    }, images


def _differing(ref: ReferenceBackend, twin: Backend, images: Pixels) -> tuple[int, int]:
    """Logits of `fpga-ref` that differ from the reference, and of ONNX Runtime that differ from `fpga-ref`."""
    graph = ref.graph
    ours, theirs, wrong = [], [], 0
    for start in range(0, len(images), 250):
        part = images[start : start + 250]
        found = ref.infer(part)[LOGITS]
        expected = reference.logits(graph, reference.planes(graph, part)).astype(np.float32)
        wrong += _count(found, expected * np.float32(graph.logit_scale))
        ours.append(found)
        theirs.append(twin.infer(part)[LOGITS])
    return wrong, _count(np.concatenate(ours), np.concatenate(theirs))


def _count(found: Logits, expected: Logits) -> int:
    return int((found != expected).sum())


def _times(backends: Mapping[str, Backend], images: Pixels, batch: int, rounds: int) -> dict[str, tuple[float, float]]:
    """CPU microseconds per image of each backend: the median round and the best."""
    taken: dict[str, list[float]] = {name: [] for name in backends}
    for each in range(rounds):
        for name, backend in backends.items():
            done, begun, now = 0, time.thread_time(), 0.0
            while now - begun < ROUND_S:
                at = (each * 97 + done * batch) % (len(images) - batch + 1)
                backend.infer(images[at : at + batch])
                done += 1
                now = time.thread_time()
            taken[name].append((now - begun) / done / batch * 1e6)
    return {name: (float(np.median(values)), min(values)) for name, values in taken.items()}


def _show(
    given: argparse.Namespace,
    how: str,
    times: Mapping[int, Mapping[str, tuple[float, float]]],
    differing: tuple[int, int],
    logits: int,
) -> None:
    what = f"{given.task} {given.variant}{' (random weights)' if given.random else ''}"
    table = Table("backend", "batch", "CPU µs an image", "best round", "images/s", title=f"{what}, one thread, {how}")
    for batch, by_name in times.items():
        for name, (median, best) in by_name.items():
            table.add_row(name, str(batch), f"{median:.1f}", f"{best:.1f}", f"{1e6 / median:,.0f}")
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{differing[0]} of {logits:,} logits of fpga-ref differ from the reference, {differing[1]} of ONNX Runtime's "
        "integer model from those."
    )


if __name__ == "__main__":
    sys.exit(main())

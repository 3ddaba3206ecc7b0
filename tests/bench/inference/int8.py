"""Our int8 kernels beside ONNX Runtime: the same networks and images, in turns.

    python -m tests.bench.inference.int8

Each turn is some runs of one of them, so that it finds its own weights in the cache, as where one model serves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack, closing

import numpy as np

from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.backend_registry import open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.inference.int8.backend import Int8Backend
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import cache_dir, load_manifest, models_dir
from hawkvision.native import library
from tests.hawkvision.inference.backend_conformance import random_images

NETWORKS = ("mobilenet_v2_int8", "efficientnet_lite0_int8", "efficientnet_lite1_int8", "efficientnet_lite2_int8")
RUNS = 20
"""Of a turn; the first is not counted."""


def turn(backend: Backend, image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> float:
    """Median milliseconds of a run."""
    took = []
    for _ in range(RUNS):
        before = time.perf_counter()
        backend.infer(image)
        took.append(time.perf_counter() - before)
    return statistics.median(took[1:]) * 1e3


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--no-tiles", action="store_true", help="as on processors without Intel AMX")
    given = parser.parse_args()
    tiles = library.has_tiles() and not given.no_tiles
    print(f"convolutions by {'tiles (Intel AMX)' if tiles else 'vectors (AVX-512 VNNI)'}")
    manifest = load_manifest(given.task, models_dir())
    print(f"{'network':26} threads  ONNX Runtime ms  int8 ms  times as quick (least to most of {given.turns} turns)")
    for name in given.networks.split(","):
        variant = manifest.variant(name)
        model = load_variant(cache_dir(), given.task, variant)
        for threads in range(1, min(2, usable_cores()) + 1):
            with ExitStack() as stack:
                theirs = stack.enter_context(
                    closing(open_backend("onnxruntime", model, variant.input, manifest.classes, threads=threads))
                )
                ours = stack.enter_context(closing(Int8Backend(model, threads, tiles)))
                image = random_images(ours, 1)
                pairs = [(turn(theirs, image), turn(ours, image)) for _ in range(given.turns)]
            ratios = [one / other for one, other in pairs]
            a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(
                f"{name:26} {threads:7}  {a:15.2f}  {b:7.2f}  {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()

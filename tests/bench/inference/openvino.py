"""OpenVINO's runtime beside ONNX Runtime and our kernels: milliseconds of one thread, and images a second.

    python -m tests.bench.inference.openvino [--avx2]

Turns of all backends follow one another. The bare loop decodes an image, scales it and infers, again and again, with
nothing around it: the most that one thread of any server could answer. `--avx2` shows a processor without AVX-512:
OpenVINO is kept from it by `ONEDNN_MAX_CPU_ISA`, our kernels do not run there, and ONNX Runtime, which knows no such
setting, is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack, closing

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.imaging.preprocessing import load_inputs
from hawkvision.inference.backend_registry import BackendKind, open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import cache_dir, load_manifest, models_dir
from tests.images import encoded

NETWORKS = ("mobilenet_v2_int8", "efficientnet_lite0_int8", "efficientnet_lite2_int8")
KINDS: tuple[BackendKind, ...] = ("onnxruntime", "openvino", "int8")
RUNS = 20
"""Of a turn."""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--avx2", action="store_true")
    given = parser.parse_args()
    if given.avx2:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # read when the runtime is imported, below
    manifest = load_manifest(given.task, models_dir())
    kinds: tuple[BackendKind, ...] = ("openvino",) if given.avx2 else KINDS
    height, width = 400, 500
    body, body_pixels = encoded(height=height, width=width), height * width
    print(f"{'network':26} {'backend':12} infer ms (least, median)  bare loop images/s (worst to best turn)")
    for name in given.networks.split(","):
        variant = manifest.variant(name)
        model = load_variant(cache_dir(), given.task, variant)
        with ExitStack() as stack:
            opened: dict[BackendKind, Backend] = {}
            for kind in kinds:
                try:
                    opened[kind] = stack.enter_context(
                        closing(open_backend(kind, model, variant.input, manifest.classes, threads=1))
                    )
                except BackendError as error:
                    print(f"{name:26} {kind:12} {error}")
            infer_ms: dict[BackendKind, list[float]] = {kind: [] for kind in opened}
            loop: dict[BackendKind, list[float]] = {kind: [] for kind in opened}
            for turn in range(given.turns + 1):
                for kind, backend in opened.items():
                    began = time.perf_counter()
                    for _ in range(RUNS):
                        (pixels,) = load_inputs(body, [variant.input], max_pixels=body_pixels)
                        before = time.perf_counter()
                        backend.infer(pixels[np.newaxis])
                        if turn:  # the first is slower, and counts for nothing
                            infer_ms[kind].append((time.perf_counter() - before) * 1e3)
                    if turn:
                        loop[kind].append(RUNS / (time.perf_counter() - began))
        for kind in opened:
            print(
                f"{name:26} {kind:12} {min(infer_ms[kind]):8.2f}, {statistics.median(infer_ms[kind]):6.2f}          "
                f"{statistics.median(loop[kind]):6.0f} ({min(loop[kind]):.0f} to {max(loop[kind]):.0f})"
            )


if __name__ == "__main__":
    main()

"""What the recipes of `models/` do for every task: they build its models anew and write down what was measured."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import track

from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.model_zoo.building.architectures import FLOAT_FROM
from hawkvision.model_zoo.building.build import emit_variant, float_model, weights_of
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.building.quantize import Ranges, measure_ranges, save_ranges
from hawkvision.models.manifest import MANIFEST, InputSpec, Manifest, Variant, artifact_path, cache_dir, load_manifest
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.system.onnx_runtime import ort

MAX_PIXELS: Final = 50_000_000
WARM_UP_RUNS: Final = 5
RUNS: Final = 50


class Recipe:
    """A task whose models are built anew and measured."""

    def __init__(self, manifest: Manifest, models: Path, wheels: Path | None = None, *, ranges: bool = False) -> None:
        """Prepare.

        Args:
            manifest: of the task.
            models: the folder of the task's folder.
            wheels: a folder of downloaded weight packages; None downloads them.
            ranges: whether to measure activation ranges anew.
        """
        self.manifest = manifest
        self.models = models
        self._wheels = wheels
        self._ranges = ranges

    def file(self, variant: Variant) -> Path:
        """Where its model is written."""
        return artifact_path(cache_dir(), self.manifest.task, variant.name)

    def rebuilt(self, bodies: Sequence[bytes], data_sha256: str, seed: int) -> Iterator[tuple[Variant, bytes]]:
        """Each variant with its hash and size, and its ONNX file, which is written; in any order.

        Args:
            bodies: the images that activation ranges are measured on.
            data_sha256: of the data set that they are of.
            seed: by which they were drawn; 0 if they were not.

        Raises:
            ArtifactError: if weights are missing or not the pinned ones.
        """
        task, variants, ranged = self.manifest.task, self.manifest.variants, set[str]()
        for variant, weights in weights_of(task, variants, self.models, self._wheels, {}, lambda _name, _step: None):
            architecture = variant.architecture
            if self._ranges and variant.precision == "int8" and architecture not in ranged:
                ranged.add(architecture)
                model = float_model(variant, weights, str(variant.source))
                shown = track(bodies, description=f"{architecture} ranges", transient=True)
                images = (pixels_of(body, variant.input) for body in shown)
                found = measure_ranges(model, images, FLOAT_FROM.get(architecture, ()))
                save_ranges(self.models, task, Ranges(
                    format=1, architecture=architecture, weights_sha256=variant.source.sha256, data_sha256=data_sha256,
                    images=len(bodies), seed=seed, ranges=found,
                ))  # fmt: skip
            built = emit_variant(task, variant, self.models, weights)
            write_atomic(self.file(variant), built)
            yield msgspec.structs.replace(variant, sha256=sha256_of(built), bytes=len(built)), built

    def write(self, manifest: Manifest, header: str, lines: Sequence[str]) -> None:
        """Write the manifest under its header, and print the lines of the card's table."""
        write_atomic(self.models / manifest.task / MANIFEST, format_manifest(manifest, header).encode())
        console = Console(width=160)
        for line in lines:
            console.print(line, highlight=False, markup=False)


def recipe_of(file: str, description: str | None) -> tuple[Recipe, Path]:
    """The recipe of the command `models/TASK/measure.py`, which is `file`, and its data, by its command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ranges", action="store_true", help="measure activation ranges anew")
    parser.add_argument("--wheels", type=Path, help="folder of downloaded weight packages")
    options, folder = parser.parse_args(), Path(file).resolve().parent
    manifest = load_manifest(folder.name, folder.parent)
    return Recipe(manifest, folder.parent, options.wheels, ranges=options.ranges), options.data


def pixels_of(body: bytes, spec: InputSpec) -> Pixels:
    """An image (height, width, 3), made by the very code that serves."""
    return load_input(body, spec, max_pixels=MAX_PIXELS)[0]


def session_of(model: bytes, threads: int) -> ort.InferenceSession:
    """A CPU session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def milliseconds(run: Callable[..., object], *args: object) -> float:
    """Median processor time of a call, on the thread of the caller."""
    times = []
    for _ in range(WARM_UP_RUNS + RUNS):
        start = time.thread_time()
        run(*args)
        times.append((time.thread_time() - start) * 1e3)
    return statistics.median(times[WARM_UP_RUNS:])

"""What a stage says of images: labels by which it is always right, for images that show nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.models.datasets import UnlabelledImages
from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.system.files import sha256_of
from hawkvision.tasks.registry import load_kind


def answers_of(task: str, stage: str, bodies: Sequence[bytes], cache: Path, models: Path | None = None) -> list[int]:
    """The class that a datacenter stage gives to each image."""
    models = models or models_dir()
    manifest = load_manifest(task, models)
    kind, images = load_kind(manifest, models), UnlabelledImages("images", sha256_of(b"".join(bodies)), bodies)
    served = run_stages(kind, manifest, images, datacenter=(stage,), cache=cache).served(stage)
    return [kind.predict(served.outputs[index], 1).index for index in range(len(bodies))]


def into_class_folders(bodies: Sequence[bytes], classes: Sequence[int], root: Path) -> None:
    """Write images to a directory per class."""
    for number, (body, index) in enumerate(zip(bodies, classes, strict=True)):
        (root / str(index)).mkdir(exist_ok=True, parents=True)
        (root / str(index) / f"{number:03}.jpg").write_bytes(body)

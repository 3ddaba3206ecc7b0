"""`python -m tests.bench.inference.downscale --data …`: does it show that large images are made smaller before
they travel?

Labelled images are enlarged, given some noise, and coded as a camera would; then the reference stage looks at them, and
at what edge nodes send of them, with the settings that are used and with others. Differences are paired: `lost` were
right before and wrong after, `won` the other way round.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import simplejpeg
from rich.console import Console
from rich.table import Table

from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import Logits, Tier
from hawkvision.imaging.downscale import DETAIL, QUALITY, Reducer
from hawkvision.imaging.preprocessing import decode, probe
from hawkvision.model_zoo.calibration.model_runner import MAX_PIXELS, run_stages
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import Manifest, cache_dir, load_labels, load_manifest, models_dir
from hawkvision.tasks.class_scores import softmax
from hawkvision.tasks.registry import load_kind
from tests.bench.cascade.certificates import logits_of

SETTINGS: Final = ((DETAIL, QUALITY), (2.0, 90), (1.5, 90), (1.0, 90), (1.0, 85))
"""Detail and quality."""
NOISE: Final = 4.0
"""Standard deviation of the levels, of a camera by daylight."""
CAMERA_QUALITY: Final = 85


def as_a_camera_sends_it(body: bytes, times: float, seed: int) -> bytes:
    """The image enlarged, noisy, and coded."""
    pixels = decode(body, probe(body), max_pixels=MAX_PIXELS, min_side=sys.maxsize)
    large = cv2.resize(pixels, None, fx=times, fy=times, interpolation=cv2.INTER_LANCZOS4).astype(np.float32)
    large += np.random.default_rng(seed).normal(0.0, NOISE, large.shape).astype(np.float32)
    coded: bytes = simplejpeg.encode_jpeg(np.clip(np.rint(large), 0, 255).astype(np.uint8), quality=CAMERA_QUALITY)
    return coded


def with_bodies(images: LabelledImages, bodies: Sequence[bytes]) -> LabelledImages:
    """The same images, coded otherwise."""
    return replace(images, bodies=bodies, sha256=hashlib.sha256(b"".join(bodies)).hexdigest())


def drawn(images: LabelledImages, most: int, times: float) -> LabelledImages:
    """So many of them at most, as a camera sends them."""
    chosen = np.sort(np.random.default_rng(0).choice(len(images), min(most, len(images)), replace=False))
    bodies = [as_a_camera_sends_it(images.bodies[int(i)], times, int(i)) for i in chosen]
    some = replace(images, labels=images.labels[chosen], sources=images.sources[chosen], is_test=images.is_test[chosen])
    return with_bodies(some, bodies)


def best_of(manifest: Manifest, images: LabelledImages) -> Logits:
    """What the reference stage says of the very images."""
    kind = load_kind(manifest, models_dir())
    looks = run_stages(kind, manifest, images, datacenter=[manifest.best], shrink=False, cache=cache_dir())
    return logits_of(looks, manifest.best, Tier.DATACENTER, len(images))


def study(manifest: Manifest, images: LabelledImages, console: Console) -> None:
    """One row for each setting, the images as they are first."""
    table = Table("detail", "quality", "kB", "ms", "accuracy", "lost", "won", "agreement", "mean change of p")
    whole = best_of(manifest, images)
    right, answered = whole.argmax(1) == images.labels, whole.argmax(1)
    everywhere = np.arange(len(images))
    size = np.mean([len(body) for body in images.bodies]) / 1e3
    table.add_row("as it is", "", f"{size:.1f}", "", f"{right.mean():.2%}", "", "", "", "")
    for detail, quality in SETTINGS:
        reducer = Reducer(manifest.datacenter_inputs, MAX_PIXELS, detail, quality)
        begun = time.thread_time()
        bodies = [reducer.reduced(body, probe(body)) for body in images.bodies]
        spent_ms = (time.thread_time() - begun) * 1e3 / len(bodies)
        after = best_of(manifest, with_bodies(images, bodies))
        now_right = after.argmax(1) == images.labels
        change = np.abs(softmax(after, 1.0)[everywhere, answered] - softmax(whole, 1.0)[everywhere, answered]).mean()
        table.add_row(
            f"{detail:g}", str(quality), f"{np.mean([len(body) for body in bodies]) / 1e3:.1f}", f"{spent_ms:.1f}",
            f"{now_right.mean():.2%}", str((right & ~now_right).sum()), str((~right & now_right).sum()),
            f"{(after.argmax(1) == answered).mean():.2%}", f"{change:.4f}",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    """Enlarge, look, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="labelled images of the task")
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--times", type=float, default=4.0, help="how much larger a side becomes")
    parser.add_argument("--images", type=int, help="how many at most, drawn at random; default: all")
    given = parser.parse_args()
    console = Console()
    try:
        manifest = load_manifest(given.task, models_dir())
        images = read_images(given.data, load_labels(manifest, models_dir()))
        study(manifest, drawn(images, given.images or len(images), given.times), console)
    except HawkVisionError as error:
        console.print(f"reduced: {error.message}", style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.bench.inference.downscale --data …`: does it show that large pictures are made smaller before
they travel?

Labelled pictures are enlarged, given some noise, and coded as a camera would; then the best rung looks at them, and at
what edge nodes send of them, with the settings that are used and with others. Differences are paired: `lost` were right
before and wrong after, `won` the other way round.
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
import msgspec
import numpy as np
import simplejpeg
from rich.console import Console
from rich.table import Table

from hawkvision.cascade.scores import softmax
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import Logits
from hawkvision.imaging.downscale import DETAIL, QUALITY, Reducer
from hawkvision.imaging.preprocessing import decode, probe
from hawkvision.model_zoo.calibration.model_runner import MAX_PIXELS, look
from hawkvision.models.datasets import LabelledPictures, read_pictures
from hawkvision.models.manifest import Manifest, cache_dir, load_labels, load_manifest, models_dir

SETTINGS: Final = ((DETAIL, QUALITY), (2.0, 90), (1.5, 90), (1.0, 90), (1.0, 85))
"""Detail and quality."""
NOISE: Final = 4.0
"""Standard deviation of the levels, of a camera by daylight."""
CAMERA_QUALITY: Final = 85


def as_a_camera_sends_it(body: bytes, times: float, seed: int) -> bytes:
    """The picture enlarged, noisy, and coded."""
    pixels = decode(body, probe(body), max_pixels=MAX_PIXELS, min_side=sys.maxsize)
    large = cv2.resize(pixels, None, fx=times, fy=times, interpolation=cv2.INTER_LANCZOS4).astype(np.float32)
    large += np.random.default_rng(seed).normal(0.0, NOISE, large.shape).astype(np.float32)
    coded: bytes = simplejpeg.encode_jpeg(np.clip(np.rint(large), 0, 255).astype(np.uint8), quality=CAMERA_QUALITY)
    return coded


def with_bodies(pictures: LabelledPictures, bodies: Sequence[bytes]) -> LabelledPictures:
    """The same pictures, coded otherwise."""
    return replace(pictures, bodies=bodies, sha256=hashlib.sha256(b"".join(bodies)).hexdigest())


def drawn(pictures: LabelledPictures, most: int, times: float) -> LabelledPictures:
    """So many of them at most, as a camera sends them."""
    chosen = np.sort(np.random.default_rng(0).choice(len(pictures), min(most, len(pictures)), replace=False))
    bodies = [as_a_camera_sends_it(pictures.bodies[int(i)], times, int(i)) for i in chosen]
    some = replace(
        pictures, labels=pictures.labels[chosen], sources=pictures.sources[chosen], is_test=pictures.is_test[chosen]
    )
    return with_bodies(some, bodies)


def best_of(manifest: Manifest, pictures: LabelledPictures) -> Logits:
    """What the best rung says of the very pictures."""
    # As if it ran at the edge: what runs in the datacenter is shown what is sent.
    local = msgspec.structs.replace(manifest.ladder, dc=manifest.ladder.edge[:1])
    return look(msgspec.structs.replace(manifest, ladder=local), [manifest.best], pictures, cache=cache_dir()).logits(
        manifest.best
    )


def study(manifest: Manifest, pictures: LabelledPictures, console: Console) -> None:
    """One row for each setting, the pictures as they are first."""
    table = Table("detail", "quality", "kB", "ms", "accuracy", "lost", "won", "agreement", "mean change of p")
    whole = best_of(manifest, pictures)
    right, answered = whole.argmax(1) == pictures.labels, whole.argmax(1)
    everywhere = np.arange(len(pictures))
    size = np.mean([len(body) for body in pictures.bodies]) / 1e3
    table.add_row("as it is", "", f"{size:.1f}", "", f"{right.mean():.2%}", "", "", "", "")
    for detail, quality in SETTINGS:
        reducer = Reducer(manifest.datacenter_inputs, MAX_PIXELS, detail, quality)
        begun = time.thread_time()
        bodies = [reducer.reduced(body, probe(body)) for body in pictures.bodies]
        spent_ms = (time.thread_time() - begun) * 1e3 / len(bodies)
        after = best_of(manifest, with_bodies(pictures, bodies))
        now_right = after.argmax(1) == pictures.labels
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
    parser.add_argument("--data", type=Path, required=True, help="labelled pictures of the task")
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--times", type=float, default=4.0, help="how much larger a side becomes")
    parser.add_argument("--pictures", type=int, help="how many at most, drawn at random; default: all")
    given = parser.parse_args()
    console = Console()
    try:
        manifest = load_manifest(given.task, models_dir())
        pictures = read_pictures(given.data, load_labels(manifest, models_dir()))
        study(manifest, drawn(pictures, given.pictures or len(pictures), given.times), console)
    except HawkVisionError as error:
        console.print(f"reduced: {error.message}", style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

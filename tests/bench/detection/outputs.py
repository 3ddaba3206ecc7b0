"""What the COCO task's models find in the images of a set, decoded as they are served, and kept between studies."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_input, probe
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import Manifest, Variant, cache_dir, load_manifest, models_dir
from hawkvision.system.files import sha256_of
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.boxes.rows import TrueBoxes
from hawkvision.tasks.decoders.registry import open_decoder
from hawkvision.tasks.kind import Output, TaskKind
from hawkvision.tasks.registry import load_kind

TASK: Final = "coco"
MAX_PIXELS: Final = 50_000_000


@dataclass(frozen=True, slots=True)
class CocoImages:
    """The images of `coco_eval.npz`, and which of them count for what."""

    sha256: str
    bodies: Sequence[bytes]
    truths: Sequence[TrueBoxes]
    train: NDArray[np.intp]
    """Of train2017: every model was trained on them."""
    val: NDArray[np.intp]
    """Of val2017: CenterNet was trained on none, SSD on four fifths."""
    clean: NDArray[np.intp]
    """Of val2017, those on which no model was trained."""

    def parts(self) -> dict[str, NDArray[np.intp]]:
        """The images by the name of the part."""
        return {"train2017": self.train, "val2017": self.val, "clean": self.clean}


def read_coco_images(path: Path) -> CocoImages:
    """Read the file (`../shared/data/README.md`)."""
    with np.load(path, allow_pickle=False) as z:
        data, ends, at, count = z["data"], z["offsets"], z["box_offsets"], len(z["ids"])
        train = z["split"] == "train2017"
        return CocoImages(
            sha256_of(path.read_bytes()),
            [data[ends[i] : ends[i + 1]].tobytes() for i in range(count)],
            [TrueBoxes(z["boxes"][at[i] : at[i + 1]], z["classes"][at[i] : at[i + 1]]) for i in range(count)],
            np.flatnonzero(train),
            np.flatnonzero(~train),
            np.flatnonzero(z["clean"] & ~train),
        )


class CocoOutputs:
    """The outputs of the task's stages for images, by index."""

    def __init__(self, task: str, bodies: Sequence[bytes]) -> None:
        """Take images; models run when an output is asked for first, and must be built."""
        self.manifest: Manifest = load_manifest(task, models_dir())
        self.kind: TaskKind[Any] = load_kind(self.manifest, models_dir())
        self._bodies = bodies

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for body in self._bodies:
            digest.update(hashlib.sha256(body).digest())
        return digest.hexdigest()

    def of(self, stage: str, *, mirrored: bool = False) -> list[Output]:
        """The outputs of a stage; of a variant also for the mirror images, turned back."""
        ensemble = self.manifest.ensemble(stage)
        if ensemble is None:
            variant = self.manifest.variant(stage)
            found = [self.kind.outputs(each, variant.temperature)[0] for each in self._tensors(variant, mirrored)]
            places = (placement(header, variant.input) for header in self._headers)
            if mirrored:
                found = [self.kind.unmirror(each) for each in found]
            return [self.kind.place(each, place.to_image) for each, place in zip(found, places, strict=True)]
        members = zip(*(self.of(member) for member in ensemble.members), strict=True)
        return [self.kind.combine(each, ensemble.weights, ensemble.temperature) for each in members]

    @cached_property
    def _headers(self) -> list[ImageHeader]:
        return [probe(body) for body in self._bodies]

    def _tensors(self, variant: Variant, mirrored: bool) -> list[dict[str, NDArray[np.float32]]]:
        facts = [variant.sha256, variant.input, variant.decoder, variant.decoder_options, self._digest, mirrored]
        name = sha256_of(msgspec.json.encode(facts, order="sorted"))[:20]
        path = cache_dir() / "looks" / TASK / f"boxes-{variant.name}-{name}.npz"
        if not path.is_file():
            made = self._run(variant, mirrored)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part.npz")
            arrays: dict[str, Any] = {f"{i}/{key}": t for i, each in enumerate(made) for key, t in each.items()}
            np.savez(part, **arrays)
            part.replace(path)
        found: list[dict[str, NDArray[np.float32]]] = [{} for _ in self._bodies]
        with np.load(path, allow_pickle=False) as z:
            for key in z.files:
                index, _, tensor = key.partition("/")
                found[int(index)][tensor] = z[key]
        return found

    def _run(self, variant: Variant, mirrored: bool) -> list[dict[str, NDArray[np.float32]]]:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        model = load_variant(cache_dir(), TASK, variant)
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_outputs()]
        decode = open_decoder(variant, len(self.kind.labels))
        found = []
        for body in track(self._bodies, description=f"{variant.name:<28}", transient=True):
            pixels, _ = load_input(body, variant.input, max_pixels=MAX_PIXELS)
            image = np.ascontiguousarray(pixels[:, ::-1] if mirrored else pixels)
            tensors = session.run(names, {"image": image[np.newaxis]})
            found.append(dict(decode(dict(zip(names, tensors, strict=True)))))
        return found


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """The option that all studies have."""
    parser.add_argument("--data", type=Path, required=True, help="coco_eval.npz")

"""A task of small random networks, one of them of integers: a bright square in one of three places on noise."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import safetensors.numpy

from hawkvision.model_zoo.building.architectures import CONVNETS
from hawkvision.model_zoo.building.build import emit_variant
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.own.qonnx_export import write_qonnx
from hawkvision.models.image_sets.idx_reader import grey_png
from hawkvision.models.manifest import Cascade, Ensemble, FileSource, InputSpec, Manifest, Precision, Variant
from hawkvision.system.files import sha256_of, write_atomic
from tests.hawkvision.integer.quantised_nets import random_net
from tests.hawkvision.model_zoo.tiny_states import convnet_state

LABELS = ("low", "intermediate", "high")
COUNT, TESTED, SIDE = 320, 64, 12


def write_cascade(root: Path, channels: tuple[int, ...] = (16, 32, 32)) -> tuple[Path, Path]:
    """A cascade of random weights below `root`/models, and labelled images in an npz file; both paths.

    `channels` are the quantised network's.
    """
    models, rng = root / "models", np.random.default_rng(5)
    folder = models / "shapes"
    folder.mkdir(parents=True)
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    (folder / "recipe.toml").write_text('quantised = [{ name = "tiny_w4", of = "tiny" }]')
    tiny, other = (
        safetensors.numpy.save(convnet_state(CONVNETS[architecture], rng, SIDE, len(LABELS)))
        for architecture in ("convnet_tiny", "convnet_tiny_grey")
    )
    twin = write_qonnx(random_net(side=SIDE, planes=3, channels=channels, classes=len(LABELS)), "shapes_tiny_w4")
    manifest = Manifest(
        format=1,
        task="shapes",
        labels="labels.txt",
        classes=len(LABELS),
        cascade=Cascade(edge=("tiny_w4", "tiny"), dc=("both",), default_edge="tiny", fpga="tiny_w4"),
        variants=(
            _variant(folder, "tiny", "convnet_tiny", "fp32", tiny),
            _variant(folder, "other", "convnet_tiny_grey", "fp32", other),
            _variant(folder, "tiny_w4", "convnet_tiny", "w4a8", twin),
        ),
        ensembles=(Ensemble(name="both", members=("tiny", "other"), horizontal_flip=True),),
    )
    write_atomic(folder / "manifest.toml", format_manifest(manifest, "made by a test").encode())
    return models, _write_images(root / "shapes.npz")


def _variant(folder: Path, name: str, architecture: str, precision: Precision, weights: bytes) -> Variant:
    file = f"weights/{name}.{'safetensors' if precision == 'fp32' else 'onnx'}"
    write_atomic(folder / file, weights)
    variant = Variant(
        name=name,
        architecture=architecture,
        precision=precision,
        license="Apache-2.0",
        source=FileSource(file=file, sha256=sha256_of(weights)),
        input=InputSpec(height=SIDE, width=SIDE, mean=(60.0, 60.0, 60.0), std=(50.0, 50.0, 50.0)),
    )
    graph = emit_variant("shapes", variant, folder.parent, weights)
    return msgspec.structs.replace(variant, sha256=sha256_of(graph), bytes=len(graph))


def _write_images(path: Path) -> Path:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, len(LABELS), COUNT)
    bodies = []
    for label in labels:
        pixels = rng.integers(0, 90, (SIDE, SIDE), dtype=np.uint8)
        pixels[1 + 4 * label : 4 + 4 * label, 4:8] += 120
        bodies.append(grey_png(pixels))
    np.savez(
        path,
        data=np.frombuffer(b"".join(bodies), np.uint8),
        offsets=np.cumsum([0, *map(len, bodies)]),
        labels=labels,
        is_test=np.arange(COUNT) >= COUNT - TESTED,
    )
    return path

"""Labelled images are evidence only if their labels are those of the images as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.model_zoo.calibration.calibrate import calibrate
from hawkvision.model_zoo.calibration.evidence import LabelReading, read_evidence
from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.tasks.registry import load_kind
from tests.images import encoded


@pytest.mark.parametrize(("width", "height", "fits"), [(80, 40, True), (40, 80, True), (800, 400, False)])
def test_boxes_are_of_images_of_the_size_that_annotations_state(
    width: int, height: int, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(height=40, width=80))
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": width, "height": height}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "val.json").write_text(json.dumps(document))
    models = models_dir(task="coco")
    manifest = load_manifest("coco", models)
    kind = load_kind(manifest, models)
    if fits:
        assert len(read_evidence(tmp_path / "val.json", kind, manifest, models, LabelReading()).images) == 1
        return
    with pytest.raises(ConfigError, match=r"a.jpg: the image has 80x40 pixels; its annotations are for 800x400"):
        read_evidence(tmp_path / "val.json", kind, manifest, models, LabelReading())


def test_images_of_one_class_alone_are_refused_before_any_work(tmp_path: Path) -> None:
    bodies = [encoded(height=8, width=8, seed=seed) for seed in range(100)]
    np.savez(
        tmp_path / "p.npz",
        data=np.frombuffer(b"".join(bodies), np.uint8),
        offsets=np.cumsum([0, *map(len, bodies)]),
        labels=np.full(100, 7),
    )
    with pytest.raises(ConfigError, match="all 100 images are of 'cock'; expected images of several classes"):
        calibrate(
            "imagenet", tmp_path / "p.npz", tmp_path / "out.json", seed=0, models=models_dir(), cache=tmp_path / "cache"
        )

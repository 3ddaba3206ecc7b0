"""A torchvision classifier as ONNX, with published or fine-tuned weights, which are read without running code.

It needs the `[models]` extra, imported only here and only on use. The result is the network alone, float NCHW to
logits; `hawkvision.model_zoo.own` makes a stage of it.
"""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.checkpoint import StateDict, parse_checkpoint
from hawkvision.models.manifest import InputSpec, Interpolation
from hawkvision.system.onnx_runtime import ort

_OPSET = 18
_PARITY = 1e-3  # largest difference of logits, relative to the largest logit; float32 sums in another order give 1e-6
_WRAPPED = "module."  # before each name of a network that was trained on several GPUs


@dataclass(frozen=True, slots=True)
class TorchvisionExport:
    """An exported network, and what torchvision's preset says of it."""

    model: bytes
    """ONNX: float32 `input` (n, 3, height, width), normalised, to `logits` (n, classes)."""
    preset: InputSpec
    labels: tuple[str, ...] | None
    """Of the published weights; None if the head has another number of classes."""


def export_torchvision(name: str, weights: Path | None = None) -> TorchvisionExport:
    """Export torchvision's model `name`.

    Args:
        name: as `torchvision.models.list_models` gives it.
        weights: a state dict (.pth), also of a head with another number of classes; None downloads torchvision's own.

    Raises:
        ArtifactError: if the `[models]` extra is missing, torchvision has no such model, the weights do not fit it,
            or the exported graph does not compute what the model computes.
    """
    torch, torchvision = _import("torch"), _import("torchvision")
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise ArtifactError(f"torchvision {torchvision.__version__} has no classification model {name!r}")
    published = torchvision.models.get_model_weights(name).DEFAULT
    preset = _input_spec(published.transforms())
    path = weights if weights is not None else _download(torch, published.url)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot read weights: {error.strerror}") from None
    model = _loaded(torch, torchvision, name, data, str(path))
    exported = _export(torch, model, preset)
    classes = _check_parity(torch, model, exported, preset, name)
    categories = tuple(published.meta["categories"])
    return TorchvisionExport(exported, preset, categories if len(categories) == classes else None)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ArtifactError(
            f"exporting from torchvision needs {module}, which is not installed: pip install 'hawkvision[models]'"
        ) from None


def _input_spec(transforms: Any) -> InputSpec:
    """torchvision's evaluation preset in the manifest's terms."""
    crop, resize = int(transforms.crop_size[0]), int(transforms.resize_size[0])
    kinds: dict[str, Interpolation] = {"bilinear": "pillow_bilinear", "bicubic": "pillow_bicubic"}
    mean, std = ([float(v) * 255.0 for v in values] for values in (transforms.mean, transforms.std))
    return InputSpec(
        height=crop,
        width=crop,
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
        interpolation=kinds.get(transforms.interpolation.value, "pillow_bilinear"),
        crop_fraction=min(1.0, crop / resize),
    )


def _download(torch: Any, url: str) -> Path:
    """torchvision's weight file, kept in torch's own cache. Its name ends in the first digits of its SHA-256."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = path.stem.rsplit("-", 1)[-1]
        try:
            torch.hub.download_url_to_file(url, str(path), hash_prefix=prefix, progress=False)
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"{url}: cannot download: {error}; give a state dict with `--weights`") from None
    return path


def _loaded(torch: Any, torchvision: Any, name: str, data: bytes, where: str) -> Any:
    arrays = _unwrapped(parse_checkpoint(data, "torch", where))
    state = {key: torch.from_numpy(np.array(value)) for key, value in arrays.items()}
    model = torchvision.models.get_model(name, weights=None)
    head = _head(torch, model)
    weight = state.get(f"{head}.weight")
    if weight is not None and weight.shape != model.state_dict()[f"{head}.weight"].shape:
        model = torchvision.models.get_model(name, weights=None, num_classes=int(weight.shape[0]))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ArtifactError(f"{where}: the weights do not fit {name}: {str(error)[:400]}") from None
    return model.eval()


def _unwrapped(state: StateDict) -> StateDict:
    wrapped = all(key.startswith(_WRAPPED) for key in state)
    return {key.removeprefix(_WRAPPED): value for key, value in state.items()} if wrapped else state


def _head(torch: Any, model: Any) -> str:
    """The name of the layer that gives the classes: the last linear layer or convolution."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return names[-1]


def _export(torch: Any, model: Any, spec: InputSpec) -> bytes:
    example = torch.zeros((2, 3, spec.height, spec.width))
    with tempfile.TemporaryDirectory(prefix="hawkvision-") as folder:
        target = Path(folder) / "model.onnx"
        torch.onnx.export(
            model,
            (example,),
            str(target),
            input_names=["input"],
            output_names=["logits"],
            dynamic_axes={"input": {0: "n"}, "logits": {0: "n"}},
            opset_version=_OPSET,
            dynamo=False,
        )
        return target.read_bytes()


def _check_parity(torch: Any, model: Any, exported: bytes, spec: InputSpec, name: str) -> int:
    """The number of classes, if graph and model agree on a batch of another size than the example's."""
    batch = np.random.default_rng(0).normal(size=(3, 3, spec.height, spec.width)).astype(np.float32)
    session = ort.InferenceSession(exported, providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {"input": batch})[0]
    with torch.no_grad():
        expected = model(torch.from_numpy(batch)).numpy()
    worst = float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))
    if found.shape != expected.shape or worst > _PARITY:
        raise ArtifactError(f"{name}: the exported graph differs from the model by {worst:.2g} of the largest logit")
    return int(expected.shape[1])

"""Any torchvision classifier as a variant: its weights read without running them, exported, checked, entered.

Needs the `[models]` extra, which is imported only here and only when called. The result obeys the zoo's convention
(uint8 NHWC RGB `image` in, float32 `logits` out), so nothing else has to know where it came from.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.build import Artifact
from hawkvision.model_zoo.building.checkpoint import parse_checkpoint
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.models.manifest import (
    Cascade,
    InputSpec,
    Interpolation,
    Manifest,
    PackageSource,
    Variant,
    artifact_path,
)
from hawkvision.models.manifest import load_manifest as read_manifest
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.system.onnx_runtime import ort

_OPSET = 18
_PARITY = 1e-3  # largest difference of logits, relative to the largest logit; float32 sums in another order give 1e-6


def export_torchvision(
    name: str,
    task: str,
    models: Path,
    cache: Path,
    weights: Path | None = None,
    license: str = "BSD-3-Clause",  # noqa: A002
) -> Artifact:
    """Export torchvision's model `name` and enter it in the manifest `models/<task>/manifest.toml`.

    `weights` is a state dict (.pth); without it torchvision's default weights are downloaded. The manifest is created
    if there is none, with this variant as its only stage; otherwise the variant is added or replaced and the cascade
    is left as it is.

    Raises:
        ArtifactError: if the `[models]` extra is missing, torchvision has no such model, the weights do not fit it,
            or the exported graph does not compute what the model computes.
    """
    torch, torchvision = _import("torch"), _import("torchvision")
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise ArtifactError(f"torchvision {torchvision.__version__} has no classification model {name!r}")
    published = torchvision.models.get_model_weights(name).DEFAULT
    spec = _input_spec(published.transforms())
    path = weights if weights is not None else _download(torch, published.url)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot read weights: {error.strerror}") from None
    model = _Normalised(torch, _loaded(torch, torchvision, name, data, str(path)), spec).module
    exported = _export(torch, model, spec)
    classes = _check_parity(torch, model, exported, spec, name)
    variant = Variant(
        name=name,
        architecture=name,
        precision="fp32",
        license=license,
        source=PackageSource(
            package="torchvision", version=torchvision.__version__, member=path.name, sha256=sha256_of(data)
        ),
        input=spec,
        sha256=sha256_of(exported),
        bytes=len(exported),
    )
    target = artifact_path(cache, task, name)
    write_atomic(target, exported)
    _enter(variant, task, models, classes, list(published.meta["categories"]))
    return Artifact(name, target, len(exported), sha256_of(exported), kept=False)


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
    kinds: dict[str, Interpolation] = {"bilinear": "bilinear", "bicubic": "bicubic"}
    mean, std = ([float(v) * 255.0 for v in values] for values in (transforms.mean, transforms.std))
    return InputSpec(
        height=crop,
        width=crop,
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
        interpolation=kinds.get(transforms.interpolation.value, "bilinear"),
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
    state = {key: torch.from_numpy(np.array(value)) for key, value in parse_checkpoint(data, "torch", where).items()}
    model = torchvision.models.get_model(name, weights=None)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ArtifactError(f"{where}: the weights do not fit {name}: {str(error)[:400]}") from None
    return model.eval()


class _Normalised:
    """The model behind the zoo's input convention. (A factory: the base class exists only once torch is imported.)"""

    def __init__(self, torch: Any, model: Any, spec: InputSpec) -> None:
        class Wrapped(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.register_buffer("mean", torch.tensor(spec.mean).reshape(1, 3, 1, 1))
                self.register_buffer("std", torch.tensor(spec.std).reshape(1, 3, 1, 1))

            def forward(self, image: Any) -> Any:
                return self.model((image.permute(0, 3, 1, 2).float() - self.mean) / self.std)

        self.module = Wrapped().eval()


def _export(torch: Any, model: Any, spec: InputSpec) -> bytes:
    example = torch.zeros((2, spec.height, spec.width, 3), dtype=torch.uint8)
    with tempfile.TemporaryDirectory(prefix="hawkvision-") as folder:
        target = Path(folder) / "model.onnx"
        torch.onnx.export(
            model,
            (example,),
            str(target),
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}},
            opset_version=_OPSET,
            dynamo=False,
        )
        return target.read_bytes()


def _check_parity(torch: Any, model: Any, exported: bytes, spec: InputSpec, name: str) -> int:
    """The number of classes, if graph and model agree on a batch of another size than the example's."""
    batch = np.random.default_rng(0).integers(0, 256, (3, spec.height, spec.width, 3), dtype=np.uint8)
    session = ort.InferenceSession(exported, providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {"image": batch})[0]
    with torch.no_grad():
        expected = model(torch.from_numpy(batch)).numpy()
    worst = float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))
    if found.shape != expected.shape or worst > _PARITY:
        raise ArtifactError(f"{name}: the exported graph differs from the model by {worst:.2g} of the largest logit")
    return int(expected.shape[1])


def _enter(variant: Variant, task: str, models: Path, classes: int, categories: list[str]) -> None:
    folder = models / task
    if (folder / "manifest.toml").is_file():
        manifest = read_manifest(task, models)
        if manifest.classes != classes:
            raise ArtifactError(f"{folder}: the task has {manifest.classes} classes, {variant.name} has {classes}")
        others = tuple(v for v in manifest.variants if v.name != variant.name)
        manifest = msgspec.structs.replace(manifest, variants=(*others, variant))
    else:
        only = (variant.name,)
        cascade = Cascade(edge=only, dc=only, default_edge=variant.name)
        manifest = Manifest(
            format=1, task=task, labels="labels.txt", classes=classes, cascade=cascade, variants=(variant,)
        )
        labels = categories if len(categories) == classes else [f"class {i}" for i in range(classes)]
        write_atomic(folder / "labels.txt", ("\n".join(labels) + "\n").encode())
    write_atomic(folder / "manifest.toml", format_manifest(manifest).encode())

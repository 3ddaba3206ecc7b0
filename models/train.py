"""Trains the networks of a recipe and writes their weights and the manifest. Needs torch (`pip install '.[models]'`).

    python models/train.py cifar10 --data cifar10.npz --out models
    python models/train.py cifar10 --data cifar10.npz --out /tmp/trial --epochs 1 --images 2000

The recipe is `models/<task>/recipe.toml`. The data are a labelled set (`hawkvision.models.datasets`); images marked as
test images never train. Each epoch draws its random numbers from (seed, epoch), so that a recipe gives the same weights
again on the same machine and number of threads. Temperatures are fitted on the profile part of what did not train,
accuracies measured on its certification and held-out parts, as `hawkvision calibrate` divides it.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import qat
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save
from torch import nn
from torch.nn import functional

from hawkvision.cascade.certification.predictions import Split, measure_accuracy
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.types import LOGITS, Logits, Pixels, Tier
from hawkvision.imaging.preprocessing import load_input
from hawkvision.inference.backend_registry import open_backend
from hawkvision.model_zoo.building.architectures import CONVNETS, EPSILON, LUMINANCE, ConvNet
from hawkvision.model_zoo.building.build import emit_variant, precision_of
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_after_training, training_mask
from hawkvision.model_zoo.own.qonnx_export import write_qonnx
from hawkvision.model_zoo.predictions import CascadePredictions, VariantInput, Views
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import FileSource, InputSpec, Manifest, Training, Variant
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.tasks.registry import task_kind

MODELS: Final = Path(__file__).parent
Images: TypeAlias = tuple[Pixels, NDArray[np.int64]]
"""Images (n, side, side, 3) and labels (n,) to train on."""
CONSOLE: Final = Console(highlight=False)
MAX_PIXELS: Final = 50_000_000
BATCH: Final = 64
"""Images per inference."""
WARM_UP: Final = 0.2
"""Share of the steps in which the learning rate rises."""
HEADER: Final = """Written by `python models/train.py {task}` from recipe.toml: change that one and train again.
Temperatures were fitted on the profile part, accuracies measured on the certification and held-out parts."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a network is trained. Stochastic gradient descent with Nesterov momentum and a one-cycle learning rate."""

    name: str
    architecture: str
    seed: int
    epochs: int
    batch: int = 256
    learning_rate: float = 0.2
    """At the peak."""
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    shift: int = 4
    """Pixels by which images are moved at most, their border mirrored."""
    flip: bool = True
    cutout: int = 0
    """Side of a square that is greyed out at a random place (DeVries and Taylor, arXiv 1708.04552); 0 for none."""


class TorchConvNet(nn.Module):
    """A `ConvNet` in torch. Parameters are named as `convnet_emitter` reads them."""

    def __init__(self, net: ConvNet, spec: InputSpec, classes: int) -> None:
        super().__init__()
        self.net = net
        channels = net.input_channels
        self.layers = nn.ModuleList()
        for layer in net.layers:
            conv = nn.Conv2d(channels, layer.channels, 3, padding=1, bias=False)
            norm = nn.BatchNorm2d(layer.channels, eps=EPSILON)
            self.layers.append(nn.ModuleDict({"conv": conv, "norm": norm}))
            channels = layer.channels
        self.head = nn.Linear(net.features(spec.height, spec.width), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of normalised planes (n, input channels, side, side)."""
        for layer, parts in zip(self.net.layers, self.layers, strict=True):
            made = functional.relu(parts["norm"](parts["conv"](x)))
            x = made + x if layer.residual else made
            if layer.pool:
                x = functional.max_pool2d(x, 2)
        x = x.mean(dim=(2, 3)) if self.net.head == "average" else x.flatten(1)
        return self.head(x)


def main() -> None:
    """Train every network of a recipe, float ones first, and write the cascade."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder of models to write into")
    parser.add_argument("--epochs", type=int, help="of every network, for a trial")
    parser.add_argument("--images", type=int, help="that train, for a trial")
    options = parser.parse_args()
    recipe = tomllib.loads((MODELS / options.task / "recipe.toml").read_text(encoding="utf-8"))
    labels_file = (MODELS / options.task / recipe["labels"]).read_bytes()
    labels = labels_file.decode().splitlines()
    side, mean, std = (recipe["input"][key] for key in ("side", "mean", "std"))
    spec = InputSpec(height=side, width=side, mean=tuple(mean), std=tuple(std))
    images = read_images(options.data, labels)
    trained, seed = options.images or recipe["images"]["train"], recipe["images"]["seed"]
    training = Training(data_sha256=images.sha256, images=trained, seed=seed)
    mask = training_mask(images.is_test, trained, seed)
    bodies = track(images.bodies, "decoding", transient=True)
    pixels = np.stack([load_input(body, spec, max_pixels=MAX_PIXELS)[0] for body in bodies])
    shown = pixels[mask], images.labels[mask].astype(np.int64)

    trial = {} if options.epochs is None else {"epochs": options.epochs}
    networks = {table["name"]: Network(**table | trial) for table in recipe["networks"]}
    weights = {name: train_network(each, spec, shown, len(labels)) for name, each in networks.items()}
    variants = [_variant(recipe, each, spec, weights[name], "fp32") for name, each in networks.items()]
    for table in recipe.get("quantised", ()):
        of, bits = networks[table.pop("of")], table.pop("weight_bits")
        twin = replace(of, **{"learning_rate": 0.002} | table | trial)
        net = qat.train_quantised(twin, bits, weights[of.name], spec, shown, len(labels), run_epochs)
        weights[twin.name] = write_qonnx(net, f"{options.task}_{twin.name}")
        variants.append(_variant(recipe, twin, spec, weights[twin.name], precision_of(bits)))
    facts = {"format": 1, "classes": len(labels), "training": training, "variants": variants, "options": {}}
    facts |= {key: recipe[key] for key in ("task", "labels", "cascade")} | {"ensembles": recipe.get("ensembles", ())}
    manifest = msgspec.convert(msgspec.to_builtins(facts), Manifest)
    manifest = measured(manifest, weights, images, pixels, split_after_training(training, images, SPLIT_SEED))
    folder = options.out / options.task
    write_atomic(folder / recipe["labels"], labels_file)
    for variant in manifest.variants:
        write_atomic(folder / variant.source.file, weights[variant.name])
    write_atomic(folder / "manifest.toml", format_manifest(manifest, HEADER.format(task=options.task)).encode())


def train_network(network: Network, spec: InputSpec, shown: Images, classes: int) -> bytes:
    """The weight file of a network trained on those images, drawn and shuffled by its seed."""
    torch.manual_seed(network.seed)
    net = CONVNETS[network.architecture]
    model = TorchConvNet(net, spec, classes).to(memory_format=torch.channels_last)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimiser = torch.optim.SGD(
        [{"params": decayed, "weight_decay": network.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=network.learning_rate, momentum=0.9, nesterov=True,
    )  # fmt: skip
    # Where the processor has bfloat16, products are quicker in it; elsewhere it would be emulated.
    fast = "bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)

    def forward(pixels: Pixels) -> torch.Tensor:
        x = (pixels.astype(np.float32) - mean) / std
        x = (x @ LUMINANCE)[..., None] if net.grey else x
        planes = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
            logits = model(planes.to(memory_format=torch.channels_last))
        return logits.float()

    run_epochs(model, optimiser, forward, network, shown)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    # Kernels and the linear layer as float16, normalisation as float32.
    types = {name: np.float16 if tensor.ndim > 1 else np.float32 for name, tensor in state.items()}
    arrays = {name: np.ascontiguousarray(state[name].numpy(), types[name]) for name in sorted(state)}
    assert all(np.isfinite(array).all() for array in arrays.values()), f"{network.name}: the training diverged"
    return save(arrays)


def run_epochs(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    forward: Callable[[Pixels], torch.Tensor],
    network: Network,
    shown: Images,
) -> None:
    """Train by cross entropy. `forward` gives logits (n, classes) of images (n, side, side, 3)."""
    batches = len(shown[0]) // network.batch
    assert batches, f"{network.name}: a batch has {network.batch} images, but only {len(shown[0])} train"
    model.train()
    for epoch in range(network.epochs):
        steps = track(_batches(shown, network, epoch), f"{network.name}: epoch {epoch + 1}", batches, transient=True)
        for index, (pixels, labels) in enumerate(steps):
            progress = (epoch + index / batches) / network.epochs
            rate = 0.2 + 0.8 * progress / WARM_UP if progress < WARM_UP else (1.0 - progress) / (1.0 - WARM_UP)
            for group in optimiser.param_groups:
                group["lr"] = network.learning_rate * rate
            loss = functional.cross_entropy(
                forward(pixels), torch.from_numpy(labels), label_smoothing=network.label_smoothing
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        CONSOLE.print(f"{network.name}: epoch {epoch + 1} of {network.epochs}, last loss {loss.item():.3f}")
    model.eval()


def _batches(shown: Images, network: Network, epoch: int) -> Iterator[tuple[Pixels, NDArray[np.int64]]]:
    """Shuffled, augmented batches of one epoch."""
    rng = np.random.default_rng((network.seed, epoch))
    order = rng.permutation(len(shown[0]))
    side, margin = shown[0].shape[1], network.shift
    place = np.arange(side)
    for start in range(0, len(order) - network.batch + 1, network.batch):
        chosen = order[start : start + network.batch]
        edges = ((0, 0), (margin, margin), (margin, margin), (0, 0))
        pixels = np.pad(shown[0][chosen], edges, mode="reflect")
        rows, columns = (offset[:, None] + place for offset in rng.integers(0, 2 * margin + 1, (2, network.batch)))
        if network.flip:
            mirrored = rng.random(network.batch) < 0.5
            columns[mirrored] = columns[mirrored, ::-1]
        pixels = pixels[np.arange(network.batch)[:, None, None], rows[:, :, None], columns[:, None, :]]
        if network.cutout:
            centres = rng.integers(0, side, (2, network.batch, 1))
            rows, columns = (np.abs(place - centre) <= network.cutout // 2 for centre in centres)
            pixels[rows[:, :, None] & columns[:, None, :]] = 127
        yield pixels, shown[1][chosen]


def _variant(recipe: dict[str, Any], network: Network, spec: InputSpec, weights: bytes, precision: str) -> Variant:
    kind = "safetensors" if precision == "fp32" else "onnx"
    variant = Variant(
        name=network.name,
        architecture=network.architecture,
        precision=precision,
        license=recipe["license"],
        source=FileSource(file=f"weights/{network.name}.{kind}", sha256=sha256_of(weights)),
        input=spec,
    )
    graph = emit_variant(recipe["task"], variant, MODELS, weights)
    return msgspec.structs.replace(variant, sha256=sha256_of(graph), bytes=len(graph))


def measured(manifest: Manifest, weights: dict[str, bytes], images: Any, pixels: Pixels, split: Split) -> Manifest:
    """The manifest with temperatures and accuracies; prints both. Ensembles use the temperatures of their members."""
    used = np.sort(np.concatenate([split.profile, split.certify, split.held_out]))
    fit, certify, held_out = (np.searchsorted(used, part) for part in (split.profile, split.certify, split.held_out))
    labels, inputs = images.labels[used], pixels[used]
    kind = task_kind(manifest.kind, [str(index) for index in range(manifest.classes)], manifest.options)

    def judged(stage: Any, logits: Logits) -> Any:
        right = logits.argmax(axis=1) == labels
        temperature = round(fit_temperature(kind, list(logits[fit]), labels[fit].tolist()), 4)
        parts = (fit, certify, held_out, np.concatenate([certify, held_out]))
        *each, unseen = (measure_accuracy(right[part], images.sha256) for part in parts)
        shares = ", ".join(f"{part.value:.4f}" for part in each)
        CONSOLE.print(
            f"{stage.name}: temperature {temperature}; right in profile, certification, held-out part: {shares}"
        )
        return msgspec.structs.replace(stage, temperature=temperature, accuracy=unseen)

    views, variants = {}, []
    for variant in manifest.variants:
        graph = emit_variant(manifest.task, variant, MODELS, weights[variant.name])
        backend = open_backend("onnxruntime", graph, variant.input, manifest.classes, threads=torch.get_num_threads())
        upright, mirrored = (_logits(backend, batch) for batch in (inputs, inputs[:, :, ::-1]))
        views[VariantInput(variant.name, False)] = Views(list(upright), list(mirrored), 0.0)
        variants.append(judged(variant, upright))
    manifest = msgspec.structs.replace(manifest, variants=tuple(variants))
    predictions = CascadePredictions(kind, manifest, np.arange(len(used)), views, reduced=False)
    ensembles = [
        judged(ensemble, np.stack(list(predictions.raw(ensemble.name, Tier.DATACENTER).values())))
        for ensemble in manifest.ensembles
    ]
    return msgspec.structs.replace(manifest, ensembles=tuple(ensembles))


def _logits(backend: Any, inputs: Pixels) -> Logits:
    batches = (np.ascontiguousarray(inputs[i : i + BATCH]) for i in range(0, len(inputs), BATCH))
    return np.concatenate([backend.infer(batch)[LOGITS] for batch in batches])


if __name__ == "__main__":
    main()

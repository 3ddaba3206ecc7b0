"""Training one network of a recipe: pixels in, a weight file out. Needs torch; resumes after an interruption.

Every epoch draws its random numbers from (seed, epoch) and saves its state at the end. So an interrupted training ends
with the same weights as an uninterrupted one, on the same machine and number of threads. Weights are stored as float16.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.numpy import save
from torch import nn
from torch.nn import functional

from hawkvision.core.errors import ArtifactError, ManifestError
from hawkvision.core.types import Logits, Pixels
from hawkvision.model_zoo.building.checkpoint import parse_checkpoint
from hawkvision.model_zoo.building.convnet import CONVNETS, EPSILON, LUMINANCE, ConvNet
from hawkvision.model_zoo.training.recipe import InputFacts, TrainedNetwork
from hawkvision.system.files import sha256_of, write_atomic

WARM_UP: Final = 0.2
"""Share of the steps in which the learning rate rises."""
MOMENTUM: Final = 0.9
EVALUATION_BATCH: Final = 500

Report = Callable[[int, int, float], None]
"""Called after each batch with the epoch (from 0), the batch, and the loss."""


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Images (n, side, side, 3) and labels (n,) to train on, and the hash of the set they come from.

    `views` (v, n, side, side, 3) are other versions of the same images, such as the parts that a lossy link delivered;
    a random half of every batch shows one of them. The hash must then differ as well.
    """

    pixels: Pixels
    labels: NDArray[np.int64]
    sha256: str
    views: Pixels | None = None


class TorchConvNet(nn.Module):  # type: ignore[misc]  # torch's types are not installed where types are checked
    """A `ConvNet` in torch. Parameters are named as `emit_convnet` reads them."""

    def __init__(self, net: ConvNet, facts: InputFacts, classes: int) -> None:
        super().__init__()
        self.net = net
        channels = net.input_channels
        self.layers = nn.ModuleList()
        for layer in net.layers:
            conv = nn.Conv2d(channels, layer.channels, 3, padding=1, bias=False)
            norm = nn.BatchNorm2d(layer.channels, eps=EPSILON)
            self.layers.append(nn.ModuleDict({"conv": conv, "norm": norm}))
            channels = layer.channels
        self.head = nn.Linear(net.features(facts.side, facts.side), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of normalised planes (n, input channels, side, side)."""
        for layer, parts in zip(self.net.layers, self.layers, strict=True):
            made = functional.relu(parts["norm"](parts["conv"](x)))
            x = made + x if layer.residual else made
            if layer.pool:
                x = functional.max_pool2d(x, 2)
        x = x.mean(dim=(2, 3)) if self.net.head == "average" else x.flatten(1)
        return self.head(x)


def planes(pixels: Pixels, net: ConvNet, facts: InputFacts) -> torch.Tensor:
    """Normalised float planes (n, input channels, side, side) of images (n, side, side, 3)."""
    x = (pixels.astype(np.float32) - np.array(facts.mean, np.float32)) / np.array(facts.std, np.float32)
    if net.grey:
        x = (x @ LUMINANCE)[..., None]
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2))).to(memory_format=torch.channels_last)


def train_network(
    network: TrainedNetwork,
    facts: InputFacts,
    data: TrainingSet,
    classes: int,
    folder: Path,
    report: Report,
    start: bytes | None = None,
) -> TorchConvNet:
    """Train one network. The state is saved in `folder` after every epoch, and training resumes from it.

    `start` is a weight file to begin from; without it the network's seed draws the weights.

    Raises:
        ManifestError: if there are fewer images than one batch.
        ArtifactError: if the saved state is damaged or cannot be written, or `start` holds another network's weights.
    """
    if len(data.pixels) < network.batch:
        raise ManifestError(f"{network.name}: a batch has {network.batch} images, but only {len(data.pixels)} train")
    torch.manual_seed(network.seed)
    net = CONVNETS[network.architecture]
    model: TorchConvNet = TorchConvNet(net, facts, classes).to(memory_format=torch.channels_last)
    if start is not None:
        load_weights(model, start, f"{network.name}: the weights to start from")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimiser = torch.optim.SGD(
        [{"params": decayed, "weight_decay": network.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=network.learning_rate, momentum=MOMENTUM, nesterov=True,
    )  # fmt: skip
    checkpoint = checkpoint_of(network, facts, data, classes, folder, start)

    def forward(pixels: Pixels) -> torch.Tensor:
        with _narrow():
            logits: torch.Tensor = model(planes(pixels, net, facts))
        return logits.float()

    run_epochs(model, optimiser, forward, network, data, checkpoint, report)
    return model


def run_epochs(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    forward: Callable[[Pixels], torch.Tensor],
    network: TrainedNetwork,
    data: TrainingSet,
    checkpoint: Path,
    report: Report,
) -> None:
    """Train by cross entropy for the epochs that `checkpoint` does not hold yet, and leave the model in evaluation
    mode.

    `forward` gives the logits (n, classes), in float32, of images (n, side, side, 3).

    Raises:
        ArtifactError: if the saved state is damaged or cannot be written.
    """
    first = 0
    if state := _kept(checkpoint):
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["sgd"])
        first = state["epoch"]
    batches = len(data.pixels) // network.batch
    for epoch in range(first, network.epochs):
        model.train()
        for index, (pixels, labels) in enumerate(_batches(data, network, epoch)):
            progress = (epoch * batches + index) / (network.epochs * batches)
            for group in optimiser.param_groups:
                group["lr"] = network.learning_rate * _one_cycle(progress)
            loss = functional.cross_entropy(
                forward(pixels), torch.from_numpy(labels), label_smoothing=network.label_smoothing
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            report(epoch, index, loss.item())
        _keep(checkpoint, {"epoch": epoch + 1, "model": model.state_dict(), "sgd": optimiser.state_dict()})
    model.eval()


def is_finished(network: TrainedNetwork, facts: InputFacts, data: TrainingSet, classes: int, folder: Path) -> bool:
    """Whether `train_network` has nothing left to do.

    Raises:
        ArtifactError: if the saved state is damaged.
    """
    return holds_epochs(checkpoint_of(network, facts, data, classes, folder), network.epochs)


def holds_epochs(checkpoint: Path, epochs: int) -> bool:
    """Whether a saved training is complete.

    Raises:
        ArtifactError: if the saved state is damaged.
    """
    state = _kept(checkpoint)
    return state is not None and state["epoch"] == epochs


def checkpoint_of(
    network: TrainedNetwork,
    facts: InputFacts,
    data: TrainingSet,
    classes: int,
    folder: Path,
    start: bytes | None = None,
) -> Path:
    """The folder of a training's state, which no other recipe, architecture, data set or start shares."""
    shape = CONVNETS[network.architecture]
    known = (network, shape, facts, classes, len(data.labels), data.sha256)
    key = sha256_of(repr(known if start is None else (*known, sha256_of(start))).encode())
    return folder / f"{network.name}-{key[:16]}.pt"


def infer(model: TorchConvNet, facts: InputFacts, pixels: Pixels) -> Logits:
    """Logits (n, classes) of images (n, side, side, 3), in full precision."""
    model.eval()
    with torch.no_grad():
        parts = [
            model(planes(pixels[i : i + EVALUATION_BATCH], model.net, facts)).numpy()
            for i in range(0, len(pixels), EVALUATION_BATCH)
        ]
    return np.concatenate(parts)


def weight_file(model: TorchConvNet) -> bytes:
    """The weights as safetensors: kernels and the linear layer float16, normalisation float32; always the same bytes.

    Raises:
        ArtifactError: if a weight does not fit float16.
    """
    tensors: dict[str, NDArray[Any]] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        array = tensor.detach().contiguous().numpy()
        tensors[name] = np.ascontiguousarray(array.astype(np.float16 if array.ndim > 1 else np.float32))
        if not np.isfinite(tensors[name]).all():
            raise ArtifactError(f"{name}: a weight is not finite or beyond float16; the training diverged")
    return save(tensors)


def load_weights(model: TorchConvNet, content: bytes, where: str) -> None:
    """Load the weights of a file by `weight_file` into a network; `where` names it in errors.

    Raises:
        ArtifactError: if it is another kind of file, or another network's.
    """
    state = parse_checkpoint(content, "safetensors", where)
    own = {name: t for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    for name in sorted(own.keys() | state.keys()):
        expected = tuple(own[name].shape) if name in own else None
        found = state[name].shape if name in state else None
        if expected != found:
            raise ArtifactError(f"{where}: {name}: expected shape {expected}, got {found} (None: no such weight)")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(state[name].astype(np.float32)))


@contextlib.contextmanager
def progress_reports(network: TrainedNetwork, images: int) -> Iterator[Report]:
    """A progress bar for the training of one network on that many images."""
    name, batches = network.name, images // network.batch
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        bar = bars.add_task(name, total=network.epochs * batches)
        smooth = 0.0

        def report(epoch: int, index: int, loss: float) -> None:
            nonlocal smooth
            smooth = loss if not smooth else 0.98 * smooth + 0.02 * loss
            text = f"{name} epoch {epoch + 1}/{network.epochs} loss {smooth:.3f}"
            bars.update(bar, completed=epoch * batches + index + 1, description=text)

        yield report


def _one_cycle(progress: float) -> float:
    """The learning rate over its peak: it rises from a fifth during `WARM_UP` of the steps, then falls linearly to
    zero.
    """
    if progress < WARM_UP:
        return 0.2 + 0.8 * progress / WARM_UP
    return (1.0 - progress) / (1.0 - WARM_UP)


def _narrow() -> Any:
    """bfloat16 if the processor has it, which is faster there; float32 if it would be emulated."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=_multiplies_bfloat16())


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Read from Linux's list of processor features, because torch's own function is private and changes its name."""
    try:
        features = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", features) is not None


def _batches(data: TrainingSet, network: TrainedNetwork, epoch: int) -> Iterator[tuple[Pixels, NDArray[np.int64]]]:
    """Shuffled, augmented batches of one epoch."""
    rng = np.random.default_rng((network.seed, epoch))
    order = rng.permutation(len(data.pixels))
    side, margin = data.pixels.shape[1], network.shift
    place = np.arange(side)
    for start in range(0, len(order) - network.batch + 1, network.batch):
        chosen = order[start : start + network.batch]
        pixels = data.pixels[chosen]
        if data.views is not None:
            swapped = rng.random(network.batch) < 0.5
            pixels[swapped] = data.views[rng.integers(len(data.views), size=swapped.sum()), chosen[swapped]]
        pixels = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin), (0, 0)), mode="reflect")
        offsets = rng.integers(0, 2 * margin + 1, (2, network.batch))
        rows, columns = (offset[:, None] + place for offset in offsets)
        if network.flip:
            mirrored = rng.random(network.batch) < 0.5
            columns[mirrored] = columns[mirrored, ::-1]
        pixels = pixels[np.arange(network.batch)[:, None, None], rows[:, :, None], columns[:, None, :]]
        if network.cutout:
            _cut_out(pixels, network.cutout, rng)
        yield pixels, data.labels[chosen]


def _cut_out(pixels: Pixels, side: int, rng: np.random.Generator) -> None:
    place = np.arange(pixels.shape[1])
    centres = rng.integers(0, pixels.shape[1], (2, len(pixels), 1))
    rows, columns = (np.abs(place - centre) <= side // 2 for centre in centres)
    pixels[rows[:, :, None] & columns[:, None, :]] = 127


def _kept(checkpoint: Path) -> dict[str, Any] | None:
    """The state after the last finished epoch, or None if there is none.

    Raises:
        ArtifactError: if the file is damaged.
    """
    if not checkpoint.is_file():
        return None
    try:
        state = torch.load(checkpoint, weights_only=True)
        return {"epoch": int(state["epoch"]), "model": state["model"], "sgd": state["sgd"]}
    except (RuntimeError, OSError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ArtifactError(f"{checkpoint}: the kept training is damaged, remove it to train anew: {reason}") from None


def _keep(checkpoint: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomic(checkpoint, buffer.getvalue())

"""`python -m tests.bench.inference.lossy_finetune --data …`: what does a network gain that has been trained on holes?

CIFAR-10 over a narrow radio link: every image is coded as the product codes large ones, in restart segments with
quality 80 and no parity, but with so little room in a datagram that even 32×32 pixels take up to four of them.
Fragments are lost, and what came is decoded with its holes filled. (In the product images this small travel as opaque
bytes, all or nothing: this shows the method and changes no cascade.)

Each network goes on training from its committed weights, on the training images alone, in two ways of equal length:

    control     half of each batch crossed the link and lost nothing: what the transcoding and more training bring
    tuned       half of each batch lost one to k − 1 of its k fragments, one by one or in bursts, half and half

Then committed, control and tuned judge the same arrivals of images that trained nothing. Differences are paired,
with standard errors over images; an image of which nothing came is a wrong answer of all three. Settings are to be
chosen with `--part profile`; `--part test`, the default, is for showing the result. Trainings are kept, so that both
use the same ones. Needs torch.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.model_zoo.building.convnet import CONVNETS
from hawkvision.model_zoo.calibration.loss_simulation import BURST, decoded, loss_order
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_after_training, training_mask
from hawkvision.model_zoo.training.measure import input_spec, training_of, weight_path
from hawkvision.model_zoo.training.recipe import (
    TrainedNetwork,
    TrainingRecipe,
    load_recipe,
    recipe_labels,
)
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import InputSpec, cache_dir, models_dir
from hawkvision.system.files import sha256_of
from hawkvision.transport.coding.image_coding import Coded, Plan, encode
from hawkvision.transport.protocol.wire import OVERHEAD
from tests.bench.inference.lossy_accuracy import DatagramLink

TASK: Final = "cifar10"
PLAN: Final = Plan(quality=80, parity=0.0)
ROOM: Final = 150
"""Bytes of a symbol. With less, some images have a block that fits no datagram; with 300, all take one or two."""
VIEWS: Final = 4
"""Losses of each training image. Of four fragments there are 14 that leave a part."""
EPOCHS: Final = 4
LEARNING_RATE: Final = 0.02
"""At the peak. Chosen on the profile part for `tiny`, where whole images cost 0.8 points so, 1.5 after 8 epochs and
1.8 after 4 at 0.06, while gains on images in part were alike within their errors."""
SEED: Final = 20_261_122
MAX_PIXELS: Final = 1 << 20

LINKS: Final = (
    *(DatagramLink(loss, bursty=False) for loss in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7)),
    DatagramLink(0.3, bursty=True),
)
CONTENDERS: Final = ("committed", "control", "tuned")

Judge: TypeAlias = Callable[[Pixels], NDArray[np.int64]]
"""TrainingImages (n, side, side, 3) to classes (n)."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """TrainingImages (n, side, side, 3) behind one link, or as they were stored if there is none.

    `fractions` (n) is how much of each came; where that is nothing, the image is black.
    """

    link: DatagramLink | None
    pixels: Pixels
    fractions: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gain:
    """A mean of paired differences between two contenders' top-1, and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Improved:
    """Top-1 of the committed and of the tuned network, and their difference."""

    before: float
    after: float
    gain: Gain


@dataclass(frozen=True, slots=True)
class GainRow:
    """One link: shares of images that came in part and not at all, top-1 of each contender, what tuning brings."""

    link: DatagramLink | None
    partial: float
    nothing: float
    top1: tuple[float, ...]
    over_committed: Gain
    over_control: Gain
    among_partial: Improved | None
    """Among images that came in part; None if none did."""


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the images that trained the cascade, as an npz file")
    parser.add_argument("--network", action="append", help="of the recipe; may be given again; default: tiny")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="at its peak")
    parser.add_argument("--part", choices=("profile", "test"), default="test", help="whose images are judged")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        recipe = load_recipe(TASK, models_dir())
        chosen = [_shortened(recipe.network(name), given) for name in given.network or ["tiny"]]
        torch_training = trainer()
        bench = Bench(recipe, given.data, given.part)
        console.print(bench.about())
        for network in chosen:
            rows = bench.compare(network, torch_training)
            show(network, rows, console)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(f"{time.process_time():.0f} s of processor time, one thread")
    return 0


def trainer() -> ModuleType:
    """`hawkvision.model_zoo.training.train`, on one thread.

    Raises:
        ConfigError: if torch is not installed, naming the extra.
    """
    try:
        import torch

        from hawkvision.model_zoo.training import train
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("fine-tuning needs torch: pip install 'hawkvision[models]'") from None
    torch.set_num_threads(1)
    return train


class Bench:
    """The images, coded once, and what the link leaves of them."""

    def __init__(self, recipe: TrainingRecipe, data: Path, part: str) -> None:
        images = read_images(data, recipe_labels(recipe, models_dir()))
        split = split_after_training(training_of(recipe, images), images, SPLIT_SEED)
        trains = np.flatnonzero(training_mask(images.is_test, recipe.images.train, recipe.images.seed))
        judged = split.profile if part == "profile" else split.held_out
        self._recipe, self._part, self._sha256 = recipe, part, images.sha256
        self._spec = input_spec(recipe)
        self._classes = len(recipe_labels(recipe, models_dir()))
        self._labels, self._judged_labels = images.labels[trains], images.labels[judged]
        self._train, judged_pixels = stored(images, trains, self._spec), stored(images, judged, self._spec)
        self._train_coded = [encode(pixels, PLAN, ROOM) for pixels in self._train]
        self._coded = [encode(pixels, PLAN, ROOM) for pixels in judged_pixels]
        self._stored_bytes = float(np.mean([len(images.bodies[number]) for number in judged]))
        self._arrivals = [Arrivals(None, judged_pixels, np.ones(len(judged)))]
        self._arrivals += [arrivals(link, self._coded, judged, self._spec) for link in LINKS]

    def about(self) -> str:
        """What is sent, in words."""
        coded = self._coded
        counts = np.bincount([one.format.k for one in coded])
        split = ", ".join(f"k = {k}: {share:.0%}" for k, share in enumerate(counts / len(coded)) if share)
        return (
            f"{self._part} part, n = {len(coded)}; quality {PLAN.quality}, no parity, room {ROOM} bytes; {split}\n"
            f"{np.mean([on_air(one) for one in coded]):.0f} bytes an image on the air, of which {OVERHEAD} in each "
            f"datagram are the transport's and {np.mean([sum(map(len, one.symbols)) for one in coded]):.0f} the "
            f"image's; stored {self._stored_bytes:.0f}"
        )

    def compare(self, network: TrainedNetwork, train: ModuleType) -> list[GainRow]:
        """Fine-tune a network in both ways and judge all arrivals with the three of it."""
        committed = (models_dir() / TASK / weight_path(network.name)).read_bytes()
        contents = [committed]
        folder = cache_dir() / "training" / "lossy_finetune"
        for views, views_sha256 in self._views:
            sha256 = sha256_of((self._sha256 + views_sha256).encode())
            data = train.TrainingSet(self._train, self._labels, sha256, views)
            model = train.train_network(network, self._recipe.input, data, self._classes, folder, _silent, committed)
            contents.append(train.weight_file(model))
        judges = [self._judge(network, content, train) for content in contents]
        return [row_of(arrived, self._judged_labels, judges) for arrived in self._arrivals]

    @functools.cached_property
    def _views(self) -> tuple[tuple[Pixels, str], ...]:
        """What control and tuned see of the training images, with its hash; the same for all networks."""
        both = whole_views(self._train_coded, self._spec), holed_views(self._train_coded, self._spec)
        return tuple((views, sha256_of(views.tobytes())) for views in both)

    def _judge(self, network: TrainedNetwork, content: bytes, train: ModuleType) -> Judge:
        facts = self._recipe.input
        model = train.TorchConvNet(CONVNETS[network.architecture], facts, self._classes)
        train.load_weights(model, content, network.name)

        def judge(pixels: Pixels) -> NDArray[np.int64]:
            answers: NDArray[np.int64] = train.infer(model, facts, pixels).argmax(1)
            return answers

        return judge


def stored(images: LabelledImages, chosen: NDArray[np.intp], spec: InputSpec) -> Pixels:
    """The images of those numbers, (n, height, width, 3), as the cascade takes them in."""
    return np.stack([load_input(images.bodies[number], spec, max_pixels=MAX_PIXELS)[0] for number in chosen])


def on_air(coded: Coded) -> int:
    """Bytes of all datagrams, above UDP."""
    return sum(map(len, coded.symbols)) + OVERHEAD * coded.format.n


def holed(coded: Coded, rng: np.random.Generator) -> bytes:
    """The image after a loss of one to k − 1 of its k fragments, equally probable; whole if it has only one."""
    k = coded.format.k
    lost = int(rng.integers(1, k)) if k > 1 else 0
    order = loss_order(k, BURST if rng.integers(2) else 1.0, rng)
    found = decoded(coded, order[lost:])
    assert found is not None, "a fragment came"
    return found[0]


def holed_views(images: Sequence[Coded], spec: InputSpec) -> Pixels:
    """Every image after `VIEWS` losses, (VIEWS, n, height, width, 3); the same ones every time."""
    views = np.empty((VIEWS, len(images), spec.height, spec.width, 3), np.uint8)
    for number, coded in enumerate(images):
        rng = np.random.default_rng((SEED, number))
        for view in views:
            view[number] = load_input(holed(coded, rng), spec, max_pixels=MAX_PIXELS)[0]
    return views


def whole_views(images: Sequence[Coded], spec: InputSpec) -> Pixels:
    """Every image after a crossing without loss, (1, n, height, width, 3)."""
    return arrivals(DatagramLink(0.0, bursty=False), images, np.arange(len(images)), spec).pixels[None]


def arrivals(link: DatagramLink, images: Sequence[Coded], numbers: NDArray[np.intp], spec: InputSpec) -> Arrivals:
    """What arrives of images; which fragments of each are lost follows from its number."""
    pixels = np.zeros((len(images), spec.height, spec.width, 3), np.uint8)
    fractions = np.zeros(len(images))
    for place, (coded, number) in enumerate(zip(images, numbers, strict=True)):
        found = decoded(coded, np.flatnonzero(~link.pattern(int(number), coded.format.k)))
        if found is not None:
            pixels[place] = load_input(found[0], spec, max_pixels=MAX_PIXELS)[0]
            fractions[place] = found[1]
    return Arrivals(link, pixels, fractions)


def row_of(arrived: Arrivals, labels: NDArray[np.int64], judges: Sequence[Judge]) -> GainRow:
    """What the contenders, in their order, make of the same arrivals."""
    came = arrived.fractions > 0
    right = np.stack([(judge(arrived.pixels) == labels) & came for judge in judges]).astype(np.float64)
    partial = came & (arrived.fractions < 1)
    return GainRow(
        arrived.link,
        partial=float(partial.mean()),
        nothing=float(1 - came.mean()),
        top1=tuple(right.mean(1).tolist()),
        over_committed=gain(right[2] - right[0]),
        over_control=gain(right[2] - right[1]),
        among_partial=_improvement(right[0, partial], right[2, partial]) if partial.any() else None,
    )


def _improvement(before: NDArray[np.float64], after: NDArray[np.float64]) -> Improved:
    return Improved(float(before.mean()), float(after.mean()), gain(after - before))


def gain(differences: NDArray[np.float64]) -> Gain:
    """Of paired differences, one for each image."""
    return Gain(float(differences.mean()), float(differences.std() / np.sqrt(len(differences))))


def show(network: TrainedNetwork, rows: Sequence[GainRow], console: Console) -> None:
    """Print the table of one network."""
    title = f"{network.name}, {network.epochs} epochs, learning rate {network.learning_rate}: top-1 % (gains in points)"
    table = Table(title=title, box=None, title_justify="left")
    table.add_column("fragments lost")
    for column in ("in part", "nothing", *CONTENDERS, "tuned − committed", "tuned − control"):
        table.add_column(column, justify="right")
    table.add_column("of those in part", justify="right")
    for row in rows:
        table.add_row(
            _named(row.link),
            f"{row.partial:.0%}",
            f"{row.nothing:.0%}",
            *(f"{100 * one:.1f}" for one in row.top1),
            _signed(row.over_committed),
            _signed(row.over_control),
            "" if row.among_partial is None else _improved(row.among_partial),
        )
    console.print(table)


def _named(link: DatagramLink | None) -> str:
    if link is None:
        return "as stored, not sent"
    return f"{link.loss:.0%}" + (f" in bursts of {BURST:.0f}" if link.bursty else "")


def _improved(among: Improved) -> str:
    return f"{100 * among.before:.1f} → {100 * among.after:.1f} ({_signed(among.gain)})"


def _signed(gained: Gain) -> str:
    return f"{100 * gained.mean:+.1f} ± {100 * gained.error:.1f}"


def _shortened(network: TrainedNetwork, given: argparse.Namespace) -> TrainedNetwork:
    return msgspec.structs.replace(network, epochs=given.epochs, learning_rate=given.learning_rate)


def _silent(epoch: int, index: int, loss: float) -> None:
    """Reports nothing."""


if __name__ == "__main__":
    sys.exit(main())

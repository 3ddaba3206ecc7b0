"""Training recipes of cascades, read from `models/<task>/recipe.toml`.

A recipe has everything that `hawkvision models train` needs besides the images. Manifest, weights and profile follow
from it. Unknown keys are errors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hawkvision.core.errors import ManifestError, NotFound
from hawkvision.core.text_files import read_text
from hawkvision.model_zoo.building.convnet import CONVNETS
from hawkvision.models.manifest import Cascade, Ensemble, Name

Positive = Annotated[float, Meta(gt=0.0)]
Count = Annotated[int, Meta(ge=1)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TrainedNetwork(_Strict, frozen=True):
    """One network's training. Stochastic gradient descent with Nesterov momentum and a one-cycle learning rate."""

    name: Name
    architecture: Name
    seed: int
    epochs: Count
    batch: Count = 256
    learning_rate: Positive = 0.2
    """At the peak."""
    weight_decay: Annotated[float, Meta(ge=0.0)] = 5e-4
    label_smoothing: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    shift: Annotated[int, Meta(ge=0, le=8)] = 4
    """Pixels by which images are moved at most, their border mirrored."""
    flip: bool = True
    cutout: Annotated[int, Meta(ge=0)] = 0
    """Side of a square that is greyed out at a random place (DeVries and Taylor, arXiv 1708.04552); 0 for none."""


class QuantisedNetwork(_Strict, frozen=True):
    """A network retrained from another's float weights, as integers: `weight_bits` a weight, 8 an activation.

    Batches and augmentation are the other's. Adam with a one-cycle learning rate.
    """

    name: Name
    of: Name
    weight_bits: Annotated[int, Meta(ge=2, le=8)]
    seed: int
    epochs: Count
    learning_rate: Positive = 0.002
    """At the peak."""

    def network(self, of: TrainedNetwork) -> TrainedNetwork:
        """Its training, in the words of the network that it comes from."""
        return msgspec.structs.replace(
            of, name=self.name, seed=self.seed, epochs=self.epochs, learning_rate=self.learning_rate
        )


class TrainingImages(_Strict, frozen=True):
    """Which images train. Those marked as test images never do; of the rest, `train` chosen by `seed`."""

    train: Count
    seed: int


class InputFacts(_Strict, frozen=True):
    """Side of the square input in pixels, mean and standard deviation of its channels on the 0..255 scale."""

    side: Annotated[int, Meta(ge=8, le=512)]
    mean: tuple[float, float, float]
    std: tuple[Positive, Positive, Positive]


class TrainingRecipe(_Strict, frozen=True):
    """A cascade to be trained."""

    format: Literal[1]
    task: Name
    labels: str
    license: str
    images: TrainingImages
    input: InputFacts
    networks: Annotated[tuple[TrainedNetwork, ...], Meta(min_length=1)]
    cascade: Cascade
    quantised: tuple[QuantisedNetwork, ...] = ()
    ensembles: tuple[Ensemble, ...] = ()

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of all that is trained: float networks, then quantised ones."""
        return (*(network.name for network in self.networks), *(twin.name for twin in self.quantised))

    def network(self, name: str) -> TrainedNetwork:
        """The network of that name.

        Raises:
            ManifestError: if there is no such network.
        """
        for network in self.networks:
            if network.name == name:
                return network
        raise ManifestError(f"the recipe of {self.task!r} trains no {name!r}; it has {[n.name for n in self.networks]}")

    def wanted(self, only: Sequence[str]) -> set[str]:
        """The named ones of `trained`, or all if none is named.

        Raises:
            ManifestError: if a name is not among them.
        """
        if strange := sorted(set(only) - set(self.trained)):
            raise ManifestError(f"the recipe of {self.task!r} trains no {strange}; it has {list(self.trained)}")
        return set(only or self.trained)


def load_recipe(task: str, models: Path) -> TrainingRecipe:
    """Read `models/<task>/recipe.toml`.

    Raises:
        NotFound: if the task has no recipe there; the message lists those that have.
        ManifestError: if the file breaks the schema, or names an architecture, network or stage that is none.
    """
    path = models / task / "recipe.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in models.glob("*/recipe.toml"))
        raise NotFound(f"no recipe for task {task!r} under {models}; trained here are: {', '.join(known) or 'none'}")
    try:
        recipe = msgspec.convert(tomllib.loads(read_text(path)), TrainingRecipe)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: {error}") from None
    _check_stages(recipe, str(path))
    for network in recipe.networks:
        if network.architecture not in CONVNETS:
            raise ManifestError(
                f"{path}: {network.name}: no architecture {network.architecture!r}; known are {', '.join(CONVNETS)}"
            )
    return recipe


def recipe_labels(recipe: TrainingRecipe, models: Path) -> tuple[str, ...]:
    """The class names in index order, one a line of the file that the recipe names.

    Raises:
        ManifestError: if it is missing, or has fewer than two lines or one of them twice.
    """
    path = models / recipe.task / recipe.labels
    try:
        labels = tuple(read_text(path).splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: cannot read the labels of task {recipe.task!r}: {error}") from None
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise ManifestError(f"{path}: expected at least two labels, one a line, all distinct; found {len(labels)}")
    return labels


def _check_stages(recipe: TrainingRecipe, where: str) -> None:
    networks = [network.name for network in recipe.networks]
    names = [*recipe.trained, *(ensemble.name for ensemble in recipe.ensembles)]
    if len(set(names)) != len(names):
        raise ManifestError(f"{where}: networks and ensembles must have distinct names, got {sorted(names)}")
    for quantised in recipe.quantised:
        if quantised.of not in networks:
            raise ManifestError(f"{where}: {quantised.name}: of {quantised.of!r} is not among the networks {networks}")
    for ensemble in recipe.ensembles:
        if strange := sorted(set(ensemble.members) - set(networks)):
            raise ManifestError(f"{where}: {ensemble.name}: members {strange} are not among the networks {networks}")
    cascade = recipe.cascade
    if strange := sorted({*cascade.edge, *cascade.dc} - set(names)):
        raise ManifestError(f"{where}: cascade names {strange}, which are neither networks nor ensembles")
    if cascade.default_edge not in cascade.edge:
        raise ManifestError(f"{where}: cascade.default_edge {cascade.default_edge!r} is not in cascade.edge")
    if cascade.fpga is not None and cascade.fpga not in {quantised.name for quantised in recipe.quantised}:
        raise ManifestError(f"{where}: cascade.fpga {cascade.fpga!r} is not among the quantised networks")
    if recipe.task != Path(where).parent.name:
        raise ManifestError(f"{where}: it is the recipe of {recipe.task!r}, which belongs into a folder of that name")

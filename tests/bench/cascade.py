"""What the stages of a shipped cascade answer for the images of its certificates and for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import Split, in_random_order
from hawkvision.cascade.certification.profile import Pair, Profile
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.core.errors import ConfigError
from hawkvision.guarantee.evidence import Evidence
from hawkvision.model_zoo.calibration.certification import pair_evidence
from hawkvision.model_zoo.calibration.evidence import clean_images
from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.model_zoo.calibration.splits import split_again
from hawkvision.models.datasets import read_images
from hawkvision.models.image_sets.labelled_images import LabelledImages
from hawkvision.models.manifest import Manifest, cache_dir, load_manifest, models_dir
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import load_kind

DATA: Final = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES: Final = {"cifar10": "cifar10.npz", "imagenet": "imagenet_eval.npz"}
"""The images of each task: those of CIFAR-10's certificates and tests, and ImageNet's design images."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Images of a pair of stages; values of image `numbers[i]` of its file are at i."""

    numbers: NDArray[np.intp]
    evidence: Evidence

    @property
    def reference(self) -> dict[int, bool]:
        """Whether the reference stage is right about each image, by its number."""
        return dict(zip(self.numbers.tolist(), (self.evidence.reference_losses == 0.0).tolist(), strict=True))


class Cascade:
    """A shipped cascade and its images.

    Args:
        task: one of `FILES`.
        edge: the stage below the reference stage; empty for the default.
        data: the folder of the images.

    Raises:
        ConfigError: for another task.
        ManifestError: for an unknown stage.
    """

    def __init__(self, task: str, edge: str = "", data: Path = DATA) -> None:
        if task not in FILES:
            raise ConfigError(f"task {task!r}: expected one of {', '.join(FILES)}")
        models = models_dir()
        self.manifest: Manifest = load_manifest(task, models)
        self.profile: Profile = load_profile_of(self.manifest, models, None)
        self.pair: Pair = self.profile.pair(edge or self.manifest.cascade.default_edge, self.manifest.best)
        self.data = data
        self._kind: TaskKind[Any] = load_kind(self.manifest, models)

    def certifying(self) -> Sample:
        """The images that the profile's certificates rest on."""
        used = next(use for use in reversed(self.profile.uses) if use.purpose == "certify")
        if used.sha256 == self.profile.data.sha256:
            images, split = self._split()
            return self._sample(images, split.used(), split.certify)
        images = self._read(used.name, used.sha256)
        return self._sample(images, clean_images(images), clean_images(images))

    def test(self) -> Sample:
        """CIFAR-10's test images, which served nothing else; ImageNet's design images, which certified nothing."""
        images, split = self._split()
        return self._sample(images, split.used(), split.held_out if self.manifest.training else split.used())

    def population(self) -> Sample:
        """In random order, all images that trained nothing and, where something was trained, fitted no temperature."""
        images, split = self._split()
        trained = self.manifest.training is not None
        used = np.sort(np.concatenate([split.certify, split.held_out])) if trained else split.used()
        return self._sample(images, split.used(), in_random_order(used))

    def _split(self) -> tuple[LabelledImages, Split]:
        images = self._read(FILES[self.manifest.task], self.profile.data.sha256)
        return images, split_again(self.manifest, images, self.profile.data)

    def _read(self, name: str, sha256: str) -> LabelledImages:
        path = self.data / name
        images = read_images(path, self._kind.labels)
        if images.sha256 != sha256:
            raise ConfigError(f"{path}: expected the images of the profile, SHA-256 {sha256}, got {images.sha256}")
        return images

    def _sample(self, images: LabelledImages, run: NDArray[np.intp], chosen: NDArray[np.intp]) -> Sample:
        """Of the images that are run, which kept tensors may have, some."""
        pair = self.pair
        datacenter = [pair.best, *(() if pair.intermediate is None else (pair.intermediate.name,))]
        predictions = run_stages(
            self._kind, self.manifest, images, edge=[pair.edge], datacenter=datacenter,
            shrink=self.profile.shrinks_images, cache=cache_dir(), chosen=run,
        )  # fmt: skip
        truths = self._kind.truths(images.annotated())
        return Sample(chosen, pair_evidence(self.profile, pair, predictions, truths, chosen))

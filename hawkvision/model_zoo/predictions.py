"""What the stages of a cascade answer for a data set, and the tensors of models that are kept to make it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import StagePredictions
from hawkvision.core.types import Tensors, Tier
from hawkvision.models.manifest import Ensemble, Manifest, Variant
from hawkvision.system.files import sha256_of
from hawkvision.tasks.kind import Output, TaskKind, Weights

# What a cascade's stages answer for a data set, from the outputs of their models.

ALIKE: Final = (1.0,)
ViewT = TypeVar("ViewT")


@dataclass(frozen=True, slots=True)
class Views(Generic[ViewT]):
    """One variant on the images that were run, in order."""

    upright: ViewT
    mirrored: ViewT | None
    """On the mirror images; None where no ensemble needs them."""
    cost_ms: float
    """Processor time of one view of one image."""


VariantTensors: TypeAlias = Views[Tensors]
"""The decoded tensors."""
VariantViews: TypeAlias = Views[Sequence[Output]]
"""What `TaskKind.raw` gives, with places in the image; the mirror images turned back."""


class VariantInput(NamedTuple):
    """A variant, and whether its images were made smaller to be sent to the datacenter."""

    variant: str
    reduced: bool


class CascadePredictions:
    """Predictions of stages for the same images, by the tier that serves them."""

    def __init__(
        self,
        kind: TaskKind[Any],
        manifest: Manifest,
        chosen: NDArray[np.intp],
        views: Mapping[VariantInput, VariantViews],
        *,
        reduced: bool,
    ) -> None:
        """Hold what was run.

        Args:
            kind: of the task.
            manifest: of the task.
            chosen: indices of the images that were run, rising.
            views: of every variant that a stage needs.
            reduced: whether some of the images are made smaller to be sent.
        """
        self.kind = kind
        self.chosen = chosen
        self.reduced = reduced
        self._manifest = manifest
        self._views = views
        self._ensembles: dict[tuple[str, Tier], tuple[list[Output], NDArray[np.bool_] | None]] = {}

    def part(self, chosen: NDArray[np.intp]) -> CascadePredictions:
        """The predictions for images that were run, numbered from 0 in this order."""
        place = {index: row for row, index in enumerate(self.chosen.tolist())}
        rows = [place[index] for index in chosen.tolist()]

        def some(view: VariantViews) -> VariantViews:
            mirrored = None if view.mirrored is None else [view.mirrored[row] for row in rows]
            return Views([view.upright[row] for row in rows], mirrored, view.cost_ms)

        views = {key: some(view) for key, view in self._views.items()}
        return CascadePredictions(self.kind, self._manifest, np.arange(len(rows)), views, reduced=self.reduced)

    def raw(self, stage: str, tier: Tier) -> Mapping[int, Output]:
        """What a stage's temperature is fitted on (`TaskKind.raw`), by the index of the image."""
        kind, ensemble = self.kind, self._manifest.ensemble(stage)
        if ensemble is None:
            return self._by_index(self.view(stage, tier).upright)
        together, alone = self._together(ensemble, tier)
        combined = kind.raw_of(together)
        if alone is None:
            return self._by_index(combined)
        first = self._manifest.variant(ensemble.members[0])
        own = kind.tempered(self.view(first.name, tier).upright, first.temperature)
        return self._by_index([a if by_first else b for a, b, by_first in zip(own, combined, alone, strict=True)])

    def outputs(self, stage: str, tier: Tier, temperature: float) -> Mapping[int, Output]:
        """A stage's outputs at a temperature of its own, as it is served, by the index of the image.

        Where the first member of a conditional ensemble answers alone, they are that member's.
        """
        kind, ensemble = self.kind, self._manifest.ensemble(stage)
        if ensemble is None:
            return self._by_index(kind.calibrated(self.view(stage, tier).upright, temperature))
        together, alone = self._together(ensemble, tier)
        combined = kind.recalibrated(together, temperature)
        if alone is None:
            return self._by_index(combined)
        first = self._manifest.variant(ensemble.members[0])
        own = kind.calibrated_after(self.view(first.name, tier).upright, first.temperature, temperature)
        return self._by_index([a if by_first else b for a, b, by_first in zip(own, combined, alone, strict=True)])

    def _together(self, ensemble: Ensemble, tier: Tier) -> tuple[list[Output], NDArray[np.bool_] | None]:
        """What all members give together, and on which images the first answers alone; None if it never does."""
        key = ensemble.name, tier
        if key not in self._ensembles:
            views = list(self._ensemble_views(ensemble, tier))
            weights = self._weights(ensemble)
            combine = self.kind.combine
            found = [combine(members, weights, ensemble.temperature) for members in zip(*views, strict=True)]
            bar = ensemble.accept_confidence
            self._ensembles[key] = found, None if bar is None else ~self._unsure(views[0], bar)
        return self._ensembles[key]

    def served(self, stage: str) -> StagePredictions:
        """A stage as the datacenter serves it, with the manifest's temperature."""
        cost_ms = round(self.cost_ms(stage, Tier.DATACENTER), 3)
        return StagePredictions(stage, self.outputs(stage, Tier.DATACENTER, self.temperature(stage)), cost_ms)

    def temperature(self, stage: str) -> float:
        """The manifest's temperature of a stage; an ensemble's is a part of its outputs."""
        return 1.0 if self._manifest.ensemble(stage) else self._manifest.variant(stage).temperature

    def cost_ms(self, stage: str, tier: Tier) -> float:
        """Mean processor time of one image: all members, and both views if the ensemble mirrors.

        The other members of a conditional ensemble count as often as they run.
        """
        first, *others = (self.view(v.name, tier).cost_ms for v in self._manifest.members(stage))
        return self._views_of(stage) * (first + self._asked(stage, tier) * sum(others))

    def reused_ms(self, first: str, second: str) -> float:
        """The part of the second datacenter stage's cost that the first has already paid
        (`datacenter.stages.cascade_executor`).
        """
        if self._views_of(first) > self._views_of(second):
            return 0.0  # the average of both views does not give the upright image's alone
        members = {variant.name for variant in self._manifest.members(second)}
        shared = [variant.name for variant in self._manifest.members(first) if variant.name in members]
        return round(self._views_of(first) * sum(self.view(name, Tier.DATACENTER).cost_ms for name in shared), 3)

    def _by_index(self, values: Sequence[Output]) -> dict[int, Output]:
        return dict(zip(self.chosen.tolist(), values, strict=True))

    def _asked(self, stage: str, tier: Tier) -> float:
        """The share of the images that a stage's other members run on, 0..1."""
        ensemble = self._manifest.ensemble(stage)
        if ensemble is None or ensemble.accept_confidence is None:
            return 1.0
        first = next(self._ensemble_views(ensemble, tier))
        return float(self._unsure(first, ensemble.accept_confidence).mean())

    def _unsure(self, first: Sequence[Output], accept_confidence: float) -> NDArray[np.bool_]:
        """Whether the first member of a conditional ensemble is too unsure of an image to answer alone."""
        scores = self.kind.score_all(first, self.kind.scores[0])
        return np.asarray(scores < float(np.float32(accept_confidence)))

    def _views_of(self, stage: str) -> int:
        ensemble = self._manifest.ensemble(stage)
        return 2 if ensemble is not None and ensemble.horizontal_flip else 1

    def view(self, member: str, tier: Tier) -> VariantViews:
        """What a variant computed where that tier runs it."""
        return self._views[VariantInput(member, self.reduced and tier is Tier.DATACENTER)]

    def _ensemble_views(self, ensemble: Ensemble, tier: Tier) -> Iterator[list[Output]]:
        for member in ensemble.members:
            temperature = self._manifest.variant(member).temperature
            view = self.view(member, tier)
            yield self.kind.calibrated(view.upright, temperature)
            if ensemble.horizontal_flip and view.mirrored is not None:
                yield self.kind.calibrated(view.mirrored, temperature)

    @staticmethod
    def _weights(ensemble: Ensemble) -> Weights:
        """One for each view of each member."""
        weights = ensemble.weights or ALIKE * len(ensemble.members)
        return tuple(weight for weight in weights for _ in range(2 if ensemble.horizontal_flip else 1))


# Tensors of variants for data sets, kept between runs.

_VIEWS: Final = ("upright", "mirrored")


def tensors_path(cache: Path, task: str, variant: Variant, facts: Sequence[str | int]) -> Path:
    """The file of a variant's tensors; `facts` say on which images and how it was run."""
    decoded = [variant.sha256, variant.input, variant.decoder, variant.decoder_options]
    key = sha256_of(msgspec.json.encode([decoded, *facts], order="sorted"))
    return cache / "looks" / task / f"{variant.name}-{key[:20]}.npz"


def read_tensors(path: Path, n: int) -> VariantTensors | None:
    """Kept tensors of n images; None if there are none, or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        cost, digest = float(arrays.pop("cost_ms")), str(arrays.pop("sha256"))
    except (OSError, ValueError, KeyError, EOFError):
        return None
    views: dict[str, dict[str, NDArray[np.float32]]] = {view: {} for view in _VIEWS}
    for name, array in arrays.items():
        view, _, tensor = name.partition("/")
        if view not in views or len(array) != n:
            return None
        views[view][tensor] = array
    if not views["upright"] or digest != _digest(arrays):
        return None
    return Views(views["upright"], views["mirrored"] or None, cost)


def write_tensors(path: Path, found: VariantTensors) -> None:
    """Keep tensors."""
    arrays: dict[str, NDArray[Any]] = {
        f"{view}/{name}": tensor
        for view, tensors in zip(_VIEWS, (found.upright, found.mirrored or {}), strict=True)
        for name, tensor in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(part, allow_pickle=False, **arrays, cost_ms=np.float64(found.cost_ms), sha256=np.array(_digest(arrays)))
    part.replace(path)


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()

"""Loads the edge stage of a configuration: verified model files, their backends, and the stage's fingerprint."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from edge.inference.edge_stage import ConditionalEnsemble, EdgeStage, LoadedModel
from edge.inference.shared_models import ModelUse, OpenModel, SharedModels
from edge.inference.warm_up import warm_stage
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.inference.adaptive_parallelism import divides, open_wide, usable_cores
from hawkvision.inference.backend_registry import execution_of, open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.artifacts import load_variant
from hawkvision.models.fingerprints import BETWEEN, VariantRun, stage_fingerprint, statement
from hawkvision.models.manifest import Manifest, Variant
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.serving import OutputDecoder

_SHARED: Final = ("auto", "int8", "onnxruntime")
"""Backends whose models several tasks can run: others answer without a model, or have a device of their own."""


class StageLoader:
    """Loads stages of one manifest with one configuration. Its methods block, and belong on a thread."""

    def __init__(
        self,
        config: EdgeConfig,
        manifest: Manifest,
        kind: TaskKind[Any],
        cache: Path,
        given_up: Future[None] | None = None,
        shared: SharedModels | None = None,
    ) -> None:
        """Prepare.

        Args:
            config: names the backend, its devices and its threads.
            manifest: of the task.
            kind: of the task.
            cache: folder of built models.
            given_up: ends the waiting for a device when it is done.
            shared: models that other tasks of this process run; None shares none.
        """
        self._config = config
        self._manifest = manifest
        self._kind = kind
        self._cache = cache
        self._given_up = given_up
        self._shared = SharedModels() if shared is None else shared
        self._threads: dict[str, int] = {}
        """What pays for a lone image, by variant; measured when it is opened for the first time."""

    def load(self, name: str, temperature: float, score: str, *, known: bool = False) -> EdgeStage:
        """A variant or conditional ensemble with all its models.

        Args:
            name: in the manifest.
            temperature: of the stage, from the profile.
            score: one of the kind's scores.
            known: see `open_wide`.

        Raises:
            ArtifactError: if a model file is missing or is not the manifest's.
            BackendError: if the backend cannot run a model, or it does not return what the task kind expects.
            ManifestError: if a decoder is not installed or refuses its options, or the kind has no such score.
            CompileError: if the backend is an FPGA's, and the variant or the build is not.
        """
        config, manifest = self._config, self._manifest
        if score not in (scores := self._kind.scores):
            raise ManifestError(f"stage {name!r}: {self._kind.name} has no score {score!s}; it has {', '.join(scores)}")
        variants = manifest.members(name)
        models = [self._model(variant, known=known) for variant in variants]
        others, ensemble = None, manifest.ensemble(name)
        if ensemble is not None:
            assert ensemble.accept_confidence is not None, "no other ensemble is taken for an edge stage"
            temperatures = tuple(variant.temperature for variant in variants)
            others = ConditionalEnsemble(
                tuple(models[1:]), temperatures, ensemble.temperature, ensemble.accept_confidence,
                weights=ensemble.weights,
            )  # fmt: skip
        runs = [
            VariantRun.of(variant, None if config.backend == "noop" else variant.sha256, self._executions(model))
            for variant, model in zip(variants, models, strict=True)
        ]
        stated, members = statement(runs), tuple(run.name for run in runs)
        fingerprint = stage_fingerprint(
            stated,
            members,
            temperature=1.0 if ensemble is None else ensemble.temperature,
            accept_confidence=None if ensemble is None else ensemble.accept_confidence,
            weights=() if ensemble is None else ensemble.weights,
            task=manifest.task_facts,
        )
        first_fingerprint = stage_fingerprint(stated, members[:1], task=manifest.task_facts)
        return EdgeStage(name, models[0], temperature, score, self._kind, others, fingerprint, first_fingerprint)

    def load_warm(self, name: str) -> EdgeStage:
        """A variant or conditional ensemble with the manifest's temperature, ready for its first image.

        Raises:
            ArtifactError, BackendError, CompileError: as `load`.
        """
        manifest = self._manifest
        temperature = 1.0 if manifest.ensemble(name) is not None else manifest.variant(name).temperature
        stage = self.load(name, temperature, self._kind.scores[0], known=True)
        warm_stage(stage)
        return stage

    def _model(self, variant: Variant, *, known: bool) -> LoadedModel:
        use = ModelUse(self._shared, self._key(variant), partial(self._opened, variant, known=known))
        model = use.begin()
        try:
            decoder = OutputDecoder(variant, self._kind)
            decoder(model.backend.infer(np.zeros((1, *model.backend.input_shape), np.uint8)))
        except BaseException:
            use.end()
            raise
        again = None if self._config.backend.startswith("fpga-") else use  # a device is not opened twice
        return LoadedModel(variant.name, model.backend, variant.input, model.wide, decoder.decode, again)

    def _key(self, variant: Variant) -> Hashable:
        """What two tasks must have in common to run one model. A variant that is not pinned has a model of its own."""
        config = self._config
        execution = (config.backend, config.onnx_providers, config.onnx_precision, config.intra_op_threads)
        spec = (variant.input.height, variant.input.width, self._manifest.classes)
        if variant.sha256 is None or config.backend not in _SHARED:
            return object()
        return (variant.sha256, *spec, *execution)

    def _opened(self, variant: Variant, *, known: bool) -> OpenModel:
        backend, wide = self._open(variant), None
        if divides(self._config.backend, self._config.onnx_providers):
            wanted = self._threads.get(variant.name, self._config.intra_op_threads)
            tried: dict[int, Backend] = {}

            def with_threads(threads: int) -> Backend:
                return tried.setdefault(threads, self._open(variant, threads))

            wide = open_wide(backend, with_threads, wanted, known=known)
            self._threads[variant.name] = next((n for n, each in tried.items() if each is wide), 1)
        return OpenModel(backend, wide)

    def _open(self, variant: Variant, threads: int = 1) -> Backend:
        """A variant's backend, of verified bytes; `threads` work on one image."""
        config, kind = self._config, self._config.backend
        if kind == "fpga-ref" or kind == "fpga-sim" or kind == "fpga-device" or kind == "fpga-offload":
            from fpga.node_backend import open_node_backend
            from fpga.settings import FpgaSettings

            model, settings = load_variant(self._cache, config.task, variant), config.feature(FpgaSettings)
            cores, clock = usable_cores(), MonotonicClock()
            return open_node_backend(kind, model, settings, cores, clock, self._given_up)
        return open_backend(
            kind,
            b"" if kind == "noop" else load_variant(self._cache, config.task, variant),
            variant.input,
            self._manifest.classes,
            providers=config.onnx_providers,
            threads=threads,
            precision=config.onnx_precision,
        )

    def _executions(self, model: LoadedModel) -> str:
        """What runs a loaded model; `load_variant` has verified that its bytes have the manifest's hash."""
        both = [model.backend] if model.wide is None else [model.backend, model.wide]
        return BETWEEN.join(dict.fromkeys(execution_of(self._config.backend, each) for each in both))

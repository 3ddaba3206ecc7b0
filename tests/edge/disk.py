"""Models of known sizes that are loaded from nowhere, for tests of what is kept in memory."""

from __future__ import annotations

from collections.abc import Mapping

from edge.inference.edge_stage import EdgeStage, LoadedModel
from edge.inference.resident_models import ModelMemory
from edge.inference.shared_models import ModelUse, OpenModel
from hawkvision.core.errors import BackendError
from hawkvision.tasks.class_scores import Score
from tests.edge.bench import SPEC, SURE, GatedBackend
from tests.hawkvision.tasks.classes import TEN


class Disk:
    """Where models are loaded from, and the memory that they are loaded into."""

    def __init__(self, limit: int, sizes: Mapping[str, int]) -> None:
        self.memory = ModelMemory(limit)
        self.loads: list[str] = []
        """What was loaded, in order."""
        self.broken = False
        self._sizes = sizes

    def use(self, name: str, file: str | None = None) -> ModelUse:
        """Of a model; those with the same file share it."""
        if not self.memory.shared.bytes_of([file or name]):
            self.memory.shared.grown(file or name, self._sizes[name])

        def load() -> OpenModel:
            self.loads.append(name)
            if self.broken:
                raise BackendError("the disk is broken")
            return OpenModel(GatedBackend(SURE), None)

        return ModelUse(self.memory.shared, file or name, load)

    def stage(self, name: str) -> EdgeStage:
        """One that is not in memory."""
        model = LoadedModel(name, GatedBackend(SURE), SPEC, use=self.use(name), is_open=False)
        return EdgeStage(name, model, 1.0, Score.TOP1, TEN)

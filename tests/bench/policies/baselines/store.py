"""Models that are loaded from nowhere, for tests of what is kept in memory."""

from __future__ import annotations

from edge.inference.edge_stage import EdgeStage
from edge.inference.edge_stage import LoadedModel as Loaded
from hawkvision.tasks.class_scores import Score
from tests.edge.bench import SPEC, SURE, GatedBackend
from tests.hawkvision.tasks.classes import TEN

SIZES = {"small": 5, "mid": 6, "big": 8}


class LoadedModel(GatedBackend):
    """A variant that knows whether it was unloaded."""

    closed = False

    def close(self) -> None:
        super().close()
        self.closed = True


class Store:
    """What variants are loaded from; knows what was."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.models: dict[str, LoadedModel] = {}

    def load(self, name: str) -> EdgeStage:
        self.loads.append(name)
        self.models[name] = LoadedModel(SURE)
        return EdgeStage(name, Loaded(name, self.models[name], SPEC), 1.0, Score.TOP1, TEN)

    def first(self) -> EdgeStage:
        stage = self.load("small")
        self.loads.clear()
        return stage

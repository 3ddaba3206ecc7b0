"""Loaded models that several tasks of one process run, and the memory that they take together.

Views of a task have its very files, so a model counts once. What it takes is measured when it is opened for the first
time, while the process does nothing else: by how much it grows, or where that must be exact, by how much it shrinks
when the model is closed again, because libraries that are loaded with a model stay; then it is opened twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from threading import Lock

import numpy as np

from hawkvision.inference.backends.interface import Backend
from hawkvision.system.memory import give_back_freed, resident_bytes


@dataclass(slots=True)
class OpenModel:
    """The backends of one file, and how many tasks run them."""

    backend: Backend
    wide: Backend | None
    """The same on several threads."""
    users: int = 0

    def close(self) -> None:
        """Give back memory and threads."""
        self.backend.close()
        if self.wide is not None:
            self.wide.close()


class SharedModels:
    """Opens each model once and closes it after its last user. May be used from several threads."""

    def __init__(self, *, exact: bool = False) -> None:
        """Begin without models; `exact` measures them without the libraries that they need."""
        self._exact = exact
        self._lock = Lock()
        self._open: dict[Hashable, OpenModel] = {}
        self._bytes: dict[Hashable, int] = {}
        """Of each model that was ever opened."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the models that are open."""
        return self.bytes_of(tuple(self._open))

    def bytes_of(self, keys: Iterable[Hashable], *, closed: bool = False) -> int:
        """Bytes of these models, each counted once; `closed` leaves out those that are open."""
        return sum(self._bytes.get(key, 0) for key in set(keys) if not (closed and key in self._open))

    def grown(self, key: Hashable, size: int) -> None:
        """Record that an open model takes so many bytes more than when it was opened."""
        self._bytes[key] = self._bytes.get(key, 0) + max(0, size)

    def take(self, key: Hashable, load: Callable[[], OpenModel]) -> OpenModel:
        """The model of that key, loaded if no task runs it; `give_back` is owed.

        Args:
            key: equal for the same file, run in the same way.
            load: opens it. While it does, others wait.
        """
        with self._lock:
            model = self._open.get(key)
            if model is None:
                model = self._open[key] = load() if key in self._bytes else self._measured(key, load)
            model.users += 1
            return model

    def _measured(self, key: Hashable, load: Callable[[], OpenModel]) -> OpenModel:
        before = settled_bytes()
        model = load()
        for each in (model.backend, model.wide):
            if each is not None:
                each.infer(np.zeros((1, *each.input_shape), np.uint8))  # what an inference takes is kept
        after = settled_bytes()
        if self._exact:
            model.close()
            del model
            before, model = settled_bytes(), load()
        self._bytes[key] = max(0, after - before)
        return model

    def give_back(self, key: Hashable) -> None:
        """End one use. After the last, the memory goes back to the system."""
        with self._lock:
            model = self._open[key]
            model.users -= 1
            if model.users:
                return
            del self._open[key]
            model.close()
        del model
        give_back_freed()


def settled_bytes() -> int:
    """Bytes of this process in memory, without what is free for further use; 0 where the system does not say."""
    give_back_freed()
    return resident_bytes() or 0


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A task's use of a model that others may run as well."""

    shared: SharedModels
    key: Hashable
    load: Callable[[], OpenModel]

    def begin(self) -> OpenModel:
        """The model, loaded if no task runs it.

        Raises:
            ArtifactError, BackendError: if it cannot be loaded.
        """
        return self.shared.take(self.key, self.load)

    def end(self) -> None:
        """Unload it, unless another task runs it."""
        self.shared.give_back(self.key)

"""Loaded models that several tasks of one process run: views of a task have its very files."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock

from hawkvision.inference.backends.interface import Backend


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

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: dict[Hashable, OpenModel] = {}

    def take(self, key: Hashable, load: Callable[[], OpenModel]) -> OpenModel:
        """The model of that key, loaded if no task runs it; `give_back` is owed.

        Args:
            key: equal for the same file, run in the same way.
            load: opens it. While it does, others wait.
        """
        with self._lock:
            model = self._open.get(key) or load()
            self._open[key] = model
            model.users += 1
            return model

    def give_back(self, key: Hashable) -> None:
        """End one use."""
        with self._lock:
            model = self._open[key]
            model.users -= 1
            if model.users == 0:
                del self._open[key]
                model.close()

"""Jobs for a worker pool that say which of them it ran together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hawkvision.core.errors import BadImage


class Batches:
    """Jobs that say with whom they were run: numbers, doubled."""

    def __init__(self) -> None:
        self.ran: list[list[int]] = []

    def job(self, number: int) -> Callable[[], int]:
        return functools.partial(self._alone, number)

    def _alone(self, number: int) -> int:
        self.ran.append([number])
        return 2 * number

    def together(self, jobs: Sequence[Any]) -> list[int | Exception]:
        numbers = [job.args[0] for job in jobs]
        self.ran.append(numbers)
        return [BadImage("odd") if number == 13 else 2 * number for number in numbers]

"""The public names of the package."""

from __future__ import annotations

import pytest

import hawkvision
from hawkvision.core.errors import HawkVisionError


@pytest.mark.parametrize("name", hawkvision.__all__)
def test_each_public_name_can_be_imported_from_the_package(name: str) -> None:
    assert getattr(hawkvision, name) is not None
    assert name in dir(hawkvision)


def test_errors_are_subclasses_of_one_public_error() -> None:
    assert issubclass(hawkvision.DeadlineMissed, hawkvision.HawkVisionError)
    assert hawkvision.HawkVisionError is HawkVisionError

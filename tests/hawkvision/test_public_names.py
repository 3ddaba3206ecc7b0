"""The public names of the package, and the errors that old names raise."""

from __future__ import annotations

import importlib
from typing import Any, cast

import pytest

import hawkvision
from hawkvision.client.blocking import Client
from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.renamed import MOVED_MODULES, RENAMED_NAMES


@pytest.mark.parametrize("name", hawkvision.__all__)
def test_each_public_name_can_be_imported_from_the_package(name: str) -> None:
    assert getattr(hawkvision, name) is not None
    assert name in dir(hawkvision)


def test_errors_are_subclasses_of_one_public_error() -> None:
    assert issubclass(hawkvision.DeadlineMissed, hawkvision.HawkVisionError)
    assert hawkvision.HawkVisionError is HawkVisionError


@pytest.mark.parametrize(("old", "new"), RENAMED_NAMES.items())
def test_an_old_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=rf"hawkvision\.{old} has been renamed; use hawkvision\.{new}"):
        exec(f"from hawkvision import {old}", {})
    assert new in hawkvision.__all__


@pytest.mark.parametrize("old", MOVED_MODULES)
def test_an_old_module_is_refused_with_what_to_use(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{old} has moved; ") as caught:
        importlib.import_module(old)
    assert caught.value.name == old
    for module in (word for word in MOVED_MODULES[old].split() if word.startswith("hawkvision.") and "(" not in word):
        importlib.import_module(module)


def test_a_module_that_never_was_is_not_found_as_usual() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hawkvision\.nothing'"):
        importlib.import_module("hawkvision.nothing")


def test_the_old_transport_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match="transport: 'lossy' has been renamed; use 'datagram'"):
        Client("http://127.0.0.1:1", transport=cast(Any, "lossy"))

"""Settings that a feature package adds to a server's own.

A package names a `SettingsGroup` by an entry point of the group `hawkvision.settings`. Its settings are read from the
same places and under the same rules as the server's own, and `--help` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from hawkvision.core.errors import ConfigError

ENTRY_POINTS: Final = "hawkvision.settings"
POLICY_ENTRY_POINTS: Final = "hawkvision.policies"
"""The group by which packages provide policies for edge nodes (`edge.serving.policy_plugin`)."""
BACKEND_ENTRY_POINTS: Final = "hawkvision.backends"
"""The group by which packages provide backends for datacenter tiers (`hawkvision.inference.backend_registry`)."""
BACKENDS: Final = ("auto", "int8", "onnxruntime", "noop")
"""The backends that are built in."""
HAWKVISION: Final = "hawkvision"
"""The policy that is built in."""

Section: TypeAlias = Literal["edge", "dc"]
ServerT = TypeVar("ServerT")
SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class SettingsGroup(Generic[ServerT, SettingsT]):
    """The settings of one feature."""

    section: Section
    """The server, by its section of a configuration file."""
    kind: type[SettingsT]
    """A frozen struct in which every field has a default. Its encoded field names are the names of the settings:
    `rename=lambda name: f"fpga_{name}"` makes `fpga_device` of the field `device`."""
    check: Callable[[ServerT, SettingsT], None]
    """Raises ConfigError for values that contradict one another or the server's own settings."""

    @property
    def names(self) -> frozenset[str]:
        """The names of its settings."""
        return frozenset(field.encode_name for field in msgspec.structs.fields(self.kind))


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the settings of every server have in common: those of its features."""

    features: tuple[Any, ...] = ()
    """A struct of each feature that is not at its defaults; not a setting itself."""

    def feature(self, kind: type[SettingsT]) -> SettingsT:
        """The settings of one feature."""
        return next((each for each in self.features if isinstance(each, kind)), None) or kind()


@functools.cache
def settings_groups(section: Section) -> tuple[SettingsGroup[Any, Any], ...]:
    """The groups that installed packages add to a server.

    Raises:
        ConfigError: if an entry point cannot be loaded, is no group, or declares a setting of an earlier one.
    """
    found: list[SettingsGroup[Any, Any]] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        where = f"entry point {point.name} = {point.value} of {ENTRY_POINTS}"
        try:
            group = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{where}: {error}") from None
        if not isinstance(group, SettingsGroup):
            raise ConfigError(f"{where}: expected a SettingsGroup, got {type(group).__name__}")
        if group.section == section:
            twice = {name for each in found for name in each.names} & group.names
            if twice:
                raise ConfigError(f"{where}: another feature declares {', '.join(sorted(twice))}")
            found.append(group)
    return tuple(found)


def policy_names() -> tuple[str, ...]:
    """The values of an edge node's setting `policy`: the built-in one, and those of installed packages."""
    return (HAWKVISION, *sorted(point.name for point in entry_points(group=POLICY_ENTRY_POINTS)))


def backend_names() -> tuple[str, ...]:
    """The values of a datacenter tier's setting `backend`: the built-in ones, and those of installed packages."""
    return (*BACKENDS, *sorted(point.name for point in entry_points(group=BACKEND_ENTRY_POINTS)))

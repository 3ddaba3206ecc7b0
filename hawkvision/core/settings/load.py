"""Reads the settings of a server: defaults, then a TOML file, then `HAWKVISION_*` variables, then the command line.

An unknown key is an error that names the key and its place.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from hawkvision.core.advice import remember
from hawkvision.core.errors import ConfigError
from hawkvision.core.key_text import clean_key, own_key
from hawkvision.core.server_url import check_route_prefix, check_server_url
from hawkvision.core.settings.access import check_access, check_both_or_neither, is_loopback
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.kubernetes_variables import without_service_links
from hawkvision.core.settings.package_settings import (
    BACKEND_ENTRY_POINTS,
    BACKENDS,
    HAWKVISION,
    POLICY_ENTRY_POINTS,
    Section,
    ServerSettings,
    backend_names,
    policy_names,
    settings_groups,
)
from hawkvision.core.settings.scaling import check_scaling
from hawkvision.core.settings.task_settings import check_tasks, of_each_task, superseding
from hawkvision.core.text_files import read_text

log = logging.getLogger("hawkvision.core.settings.load")

ConfigT = TypeVar("ConfigT", EdgeConfig, DatacenterConfig)

_SECTIONS: dict[type, tuple[Section, str]] = {
    EdgeConfig: ("edge", "HAWKVISION_EDGE_"),
    DatacenterConfig: ("dc", "HAWKVISION_DC_"),
}


_APP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def load_config(
    kind: type[ConfigT],
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ConfigT:
    """Read the settings of one server. Later sources win; an override of None is ignored.

    Raises:
        ConfigError: for a missing file, an unknown key or a bad value; names source and key.
    """
    section, prefix = _SECTIONS[kind]
    values: dict[str, Any] = {}
    if path is not None:
        where = f"{path}: [{section}]"
        values = _merged(kind, values, _file_section(path, section), where)
        _convert(kind, values, where)
    environ = os.environ if environ is None else environ
    settings, links = without_service_links(environ, prefix)
    if links:
        log.warning("%s: ignored, Kubernetes sets them for a service (enableServiceLinks)", ", ".join(sorted(links)))
    words = {name.lower(): text for name, text in settings.items()}
    listed = {key: _listed(text) if _is_tuple(kind, key) else text for key, text in words.items()}
    values = _merged(kind, values, listed, f"environment {prefix}*")
    _convert(kind, values, f"environment {prefix}*")
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    values = _merged(kind, values, given, "command line")
    config = _convert(kind, values, "command line")
    if isinstance(config, EdgeConfig) and config.datacenter_url is not None:
        check_server_url(f"{section}.datacenter_url", config.datacenter_url)
    if isinstance(config, EdgeConfig) and config.datacenter_transport != "tcp" and config.datacenter_url is None:
        raise ConfigError(
            f"{section}.datacenter_transport = {config.datacenter_transport!r}: missing {section}.datacenter_url to "
            "send to"
        )
    if isinstance(config, EdgeConfig):
        check_tasks(config, _convert_edge)
        _check_provided("edge.policy", config.policy, (HAWKVISION,), policy_names, POLICY_ENTRY_POINTS)
    else:
        _check_application(config)
        _check_provided("dc.backend", config.backend, BACKENDS, backend_names, BACKEND_ENTRY_POINTS)
    for group in settings_groups(section):
        group.check(config, config.feature(group.kind))
    if isinstance(config, DatacenterConfig):
        _check_ingress(config)
    check_access(config, section, prefix, loopback=is_loopback(config.host))
    if isinstance(config, DatacenterConfig):
        check_scaling(config)
    if isinstance(config, EdgeConfig):
        _check_datacenter_tls(config)
    elif config.address is not None and config.tls_certificate is not None:
        raise ConfigError(
            "dc.tls_certificate belongs to a tier on one machine: in a cluster (dc.address) the proxies of Ray Serve "
            "listen, and what is in front of them ends TLS; set dc.allow_plain_http = true"
        )
    remember(
        models_dir=config.models_dir,
        cache_dir=config.cache_dir,
        profile=config.profile if isinstance(config, EdgeConfig) else None,
    )
    return _with_clean_keys(config, section)


def settings_of_tasks(config: EdgeConfig) -> dict[str, EdgeConfig]:
    """The settings of each task of a node, the default task first, as those of a node that serves it alone.

    Raises:
        ConfigError: for settings that contradict several tasks.
    """
    return of_each_task(config, _convert_edge)


def _convert_edge(values: dict[str, Any], where: str) -> EdgeConfig:
    return _convert(EdgeConfig, values, where)


def _merged(kind: type, before: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of earlier sources with those of the next."""
    return superseding(before, given, where) if kind is EdgeConfig else {**before, **given}


def _check_application(config: DatacenterConfig) -> None:
    """Check what names the application and its tasks.

    Raises:
        ConfigError: naming the setting, what was expected and what was found.
    """
    if len(set(config.tasks)) != len(config.tasks):
        raise ConfigError(f"dc.tasks: expected each task once, got {', '.join(config.tasks)}")
    check_route_prefix("dc.route_prefix", config.route_prefix)
    if _APP_NAME.fullmatch(config.app_name) is None:
        raise ConfigError(
            f"dc.app_name: expected at most 63 letters, digits and ._-, the first a letter or digit, got "
            f"{config.app_name!r}"
        )


def _check_ingress(config: DatacenterConfig) -> None:
    """Refuse more replicas at least than at most.

    Raises:
        ConfigError: naming both settings.
    """
    least, most = config.ingress_min_replicas, config.ingress_max_replicas
    if least > most:
        raise ConfigError(f"dc.ingress_min_replicas = {least}: expected at most dc.ingress_max_replicas = {most}")


def chosen_settings(config: ServerSettings) -> dict[str, Any]:
    """The settings that are not at their defaults, as JSON and TOML have them: overrides for `load_config`."""
    chosen: dict[str, Any] = {}
    for struct in (config, *config.features):
        defaults = type(struct)()
        for field in msgspec.structs.fields(struct):
            value = getattr(struct, field.name)
            if field.name != "features" and value != getattr(defaults, field.name):
                chosen[field.encode_name] = msgspec.to_builtins(value, enc_hook=str)
    return chosen


def _with_clean_keys(config: ConfigT, section: str) -> ConfigT:
    """The settings with normalised keys.

    Raises:
        ConfigError: for a key that is too short, or that a header cannot carry.
    """
    cleaned: dict[str, Any] = {}
    if config.api_key is not None:
        cleaned["api_key"] = own_key(config.api_key, f"{section}.api_key")
    if isinstance(config, EdgeConfig) and config.datacenter_api_key is not None:
        cleaned["datacenter_api_key"] = clean_key(config.datacenter_api_key, f"{section}.datacenter_api_key")
    return msgspec.structs.replace(config, **cleaned)


def _check_datacenter_tls(config: EdgeConfig) -> None:
    """Refuse TLS settings without effect.

    Raises:
        ConfigError: naming both settings.
    """
    check_both_or_neither(
        "edge", "datacenter_certificate", config.datacenter_certificate, "datacenter_key", config.datacenter_key
    )
    for key in ("datacenter_ca", "datacenter_certificate"):
        if getattr(config, key) is not None and not (config.datacenter_url or "").lower().startswith("https:"):
            raise ConfigError(f"edge.{key} belongs to an edge.datacenter_url of https, got {config.datacenter_url!r}")


def section_of(kind: type[EdgeConfig] | type[DatacenterConfig]) -> tuple[Section, str]:
    """The section of these settings in a file, and the prefix of their variables."""
    return _SECTIONS[kind]


def read_words(kind: type[ConfigT], words: Mapping[str, str | None]) -> dict[str, Any]:
    """Overrides for `load_config` from the words of a command line, where lists are comma-separated."""
    return {k: _listed(v) if v is not None and _is_tuple(kind, k) else v for k, v in words.items()}


def _file_section(path: Path, section: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    known = {name for name, _ in _SECTIONS.values()}
    unknown = sorted(set(document) - known)
    if unknown:
        raise ConfigError(f"{path}: unknown section [{unknown[0]}]; expected one of {sorted(known)}")
    values = document.get(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {section} must be a table")
    return values


def _convert(kind: type[ConfigT], values: dict[str, Any], where: str) -> ConfigT:
    if "features" in values:
        raise ConfigError(f"{where}: Object contains unknown field `features`")
    _check_choices(kind, values, where)
    own, features = dict(values), []
    try:
        for group in settings_groups(_SECTIONS[kind][0]):
            part = {key: own.pop(key) for key in values if key in group.names}
            features.append(msgspec.convert(part, group.kind, strict=False, dec_hook=_path))
        config = msgspec.convert(own, kind, strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    return msgspec.structs.replace(config, features=tuple(each for each in features if each != type(each)()))


def structs_of(kind: type[ServerSettings]) -> list[type[msgspec.Struct]]:
    """The structs that declare a server's settings: its own and those of features."""
    return [kind, *(group.kind for group in settings_groups(_SECTIONS[kind][0]))]


def _hints(kind: type[ConfigT]) -> dict[str, Any]:
    """The types of a server's settings, by name."""
    return {name: hint for struct in structs_of(kind) for name, hint in _hints_of(struct).items()}


@functools.cache
def _hints_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    hints = typing.get_type_hints(struct)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(struct)}


def _check_choices(kind: type[ConfigT], values: Mapping[str, Any], where: str) -> None:
    """Refuse a value that is none of its choices, and list them, which msgspec does not.

    Raises:
        ConfigError: naming the key, the choices and the value.
    """
    for key, hint in _hints(kind).items():
        if typing.get_origin(hint) is Literal and key in values and values[key] not in typing.get_args(hint):
            choices = ", ".join(typing.get_args(hint))
            raise ConfigError(f"{where}: Expected one of {choices}, got {values[key]!r} - at `$.{key}`")


def _check_provided(
    key: str, value: str, own: Collection[str], names: Callable[[], Sequence[str]], entry_points: str
) -> None:
    """Refuse the name of something that no installed package provides.

    Raises:
        ConfigError: naming those that there are.
    """
    if value not in own:  # a look at what is installed takes time
        known = names()
        if value in known:
            return
        raise ConfigError(
            f"{key}: expected one of {', '.join(known)}, got {value!r}; a package with an entry point of "
            f"{entry_points} provides another, and none that is installed has this one"
        )


def _path(kind: type, value: object) -> Path:
    """Convert paths, which msgspec cannot read itself; `~` is a home folder.

    An empty path is an error, because an unset variable in a template must not mean the working folder.
    """
    # msgspec adds the key to the message of a ValueError.
    if kind is not Path or not isinstance(value, str | Path):
        raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
    if value == "":
        raise ValueError("Expected a path, got an empty text")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~somebody who has no home here
        raise ValueError(f"{value}: {error}") from None


def _listed(text: str) -> list[str]:
    """Split comma-separated words; blanks around them are removed, and an empty text is an empty list."""
    return [word.strip() for word in text.split(",")] if text.strip() else []


def _is_tuple(kind: type[ConfigT], key: str) -> bool:
    hint = _hints(kind).get(key)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(typing.get_origin(option) is tuple for option in options)

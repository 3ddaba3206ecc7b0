"""Reads the settings of a server: defaults, then a TOML file, then `HAWKVISION_*` variables, then the command line.

Settings are declared as the options of commands are (`hawkvision.core.command_line`), and one option sets each.

An unknown key is an error that names the key and its place.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from hawkvision.core.advice import remember
from hawkvision.core.command_line import Option, options_of, parser, path_of
from hawkvision.core.errors import ConfigError
from hawkvision.core.server_access import check_route_prefix, check_server_url, clean_key, own_key
from hawkvision.core.settings.access import check_access, check_both_or_neither, is_loopback
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
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
from hawkvision.core.settings.task_settings import check_tasks, of_each_task, superseding
from hawkvision.core.text_files import read_text

log = logging.getLogger("hawkvision.core.settings.load")

FEATURES: Final = "features"
"""The field of a server's settings that holds those of its features; not a setting itself."""

ConfigT = TypeVar("ConfigT", EdgeConfig, DatacenterConfig)

SECTIONS: dict[type, tuple[Section, str]] = {
    EdgeConfig: ("edge", "HAWKVISION_EDGE_"),
    DatacenterConfig: ("dc", "HAWKVISION_DC_"),
}


_APP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SERVICE_LINK: Final = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Endings of variables that only Kubernetes sets, for a service."""
_SERVICE_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def read_command_line(
    kind: type[ConfigT], words: Sequence[str], prog: str, description: str, defaults: Mapping[str, Any] | None = None
) -> ConfigT:
    """The settings of one server from its command line, the environment and the file that `--config` names.

    `defaults` stand in the place of the settings' own.

    Raises:
        ConfigError: as `load_config`.
        SystemExit: 0 after `--help`, 2 for words that are no options.
    """
    given = vars(server_parser(kind, prog, description).parse_args(words))
    path = given.pop("config", None)
    lists = {option.name for option in settings_of(kind) if option.kind == "LIST"}
    return load_config(
        kind,
        None if path is None else Path(path),
        {name: _listed(text) if name in lists else text for name, text in given.items()},
        defaults=defaults,
    )


def server_parser(kind: type[ConfigT], prog: str, description: str) -> ArgumentParser:
    """The parser of a command line with an option for each setting of a server."""
    section, prefix = SECTIONS[kind]
    description = (
        f"{description}\n\nEach setting is an option, a variable {prefix}NAME, or a key of the section [{section}] of\n"
        "a TOML file; the command line wins over variables, and these over the file."
    )
    return parser(prog, description, (*options_of(_file), *settings_of(kind)), switches_take_values=True)


def _file(config: Annotated[Path | None, msgspec.Meta(description="TOML file with the settings.")] = None) -> None:
    """Declares the option of all servers that is no setting."""


def settings_of(kind: type[ServerSettings]) -> tuple[Option, ...]:
    """Every setting of a server, its features' included."""
    structs: tuple[Any, ...] = (kind, *(group.kind for group in settings_groups(SECTIONS[kind][0])))
    return tuple(option for struct in structs for option in options_of(struct) if option.name != FEATURES)


def load_config(
    kind: type[ConfigT],
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Read the settings of one server. Later sources win, `defaults` are the first; an override of None is ignored.

    Raises:
        ConfigError: for a missing file, an unknown key or a bad value; names source and key.
    """
    section, prefix = SECTIONS[kind]
    values: dict[str, Any] = dict(defaults or {})
    if path is not None:
        where = f"{path}: [{section}]"
        values = _merged(kind, values, _file_section(path, section), where)
        _convert(kind, values, where)
    environ = os.environ if environ is None else environ
    words = _from_environment(environ, prefix)
    lists = {option.name for option in settings_of(kind) if option.kind == "LIST"}
    listed = {key: _listed(text) if key in lists else text for key, text in words.items()}
    values = _merged(kind, values, listed, f"environment {prefix}*")
    _convert(kind, values, f"environment {prefix}*")
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    values = _merged(kind, values, given, "command line")
    config = _convert(kind, values, "command line")
    if isinstance(config, EdgeConfig):
        check_tasks(config, _convert_edge)
        _check_provided("edge.policy", config.policy, (HAWKVISION,), policy_names, POLICY_ENTRY_POINTS)
        _check_datacenter(config)
    else:
        _check_application(config)
        _check_provided("dc.backend", config.backend, BACKENDS, backend_names, BACKEND_ENTRY_POINTS)
        _check_scaling(config)
        if config.address is not None and config.tls_certificate is not None:
            raise ConfigError(
                "dc.tls_certificate belongs to a tier on one machine: in a cluster (dc.address) the proxies of Ray "
                "Serve listen, and what is in front of them ends TLS; set dc.allow_plain_http = true"
            )
    for group in settings_groups(section):
        group.check(config, config.feature(group.kind))
    check_access(config, section, prefix, loopback=is_loopback(config.host))
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


def _check_scaling(config: DatacenterConfig) -> None:
    """Refuse numbers of replicas and requests that contradict each other.

    Raises:
        ConfigError: naming both settings.
    """
    for least, most in (("min_replicas", "max_replicas"), ("ingress_min_replicas", "ingress_max_replicas")):
        if getattr(config, least) > getattr(config, most):
            raise ConfigError(
                f"dc.{least} = {getattr(config, least)}: expected at most dc.{most} = {getattr(config, most)}"
            )
    scales = config.min_replicas != config.max_replicas
    if scales and config.target_ongoing_requests > config.max_ongoing_requests:
        raise ConfigError(
            f"dc.target_ongoing_requests = {config.target_ongoing_requests:g}: expected at most "
            f"dc.max_ongoing_requests = {config.max_ongoing_requests}; no replica gets more, so none would be added"
        )


def chosen_settings(config: ServerSettings) -> dict[str, Any]:
    """The settings that are not at their defaults, as JSON and TOML have them: overrides for `load_config`."""
    chosen: dict[str, Any] = {}
    for struct in (config, *config.features):
        defaults = type(struct)()
        for field in msgspec.structs.fields(struct):
            value = getattr(struct, field.name)
            if field.name != FEATURES and value != getattr(defaults, field.name):
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


def _check_datacenter(config: EdgeConfig) -> None:
    """Refuse a datacenter that the settings do not say how to reach, and settings for it without effect.

    Raises:
        ConfigError: naming the settings.
    """
    if config.datacenter_url is not None:
        check_server_url("edge.datacenter_url", config.datacenter_url)
    elif config.datacenter_transport != "tcp":
        raise ConfigError(
            f"edge.datacenter_transport = {config.datacenter_transport!r}: missing edge.datacenter_url to send to"
        )
    check_both_or_neither(
        "edge", "datacenter_certificate", config.datacenter_certificate, "datacenter_key", config.datacenter_key
    )
    for key in ("datacenter_ca", "datacenter_certificate"):
        if getattr(config, key) is not None and not (config.datacenter_url or "").lower().startswith("https:"):
            raise ConfigError(f"edge.{key} belongs to an edge.datacenter_url of https, got {config.datacenter_url!r}")


def _from_environment(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The variables with this prefix by the names of their settings, without those that Kubernetes sets.

    With service links, the environment of a pod has `HAWKVISION_EDGE_PORT=tcp://10.43.7.8:80` and similar variables if
    a service is called `hawkvision-edge` or `hawkvision-edge-…`.
    """
    settings, links = dict[str, str](), list[str]()
    for name, value in environ.items():
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            is_port = rest == "PORT" or rest.endswith("_PORT")
            if _SERVICE_LINK.fullmatch(rest) or (is_port and _SERVICE_ADDRESS.fullmatch(value)):
                links.append(name)
            else:
                settings[rest.lower()] = value
    if links:
        log.warning("%s: ignored, Kubernetes sets them for a service (enableServiceLinks)", ", ".join(sorted(links)))
    return settings


def _file_section(path: Path, section: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    known = {name for name, _ in SECTIONS.values()}
    unknown = sorted(set(document) - known)
    if unknown:
        raise ConfigError(f"{path}: unknown section [{unknown[0]}]; expected one of {sorted(known)}")
    values = document.get(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {section} must be a table")
    return values


def _convert(kind: type[ConfigT], values: dict[str, Any], where: str) -> ConfigT:
    if FEATURES in values:
        raise ConfigError(f"{where}: Object contains unknown field `{FEATURES}`")
    for option in settings_of(kind):
        if option.choices and (value := values.get(option.name, option.choices[0])) not in option.choices:
            # msgspec would not list the choices.
            raise ConfigError(
                f"{where}: Expected one of {', '.join(option.choices)}, got {value!r} - at `$.{option.name}`"
            )
    own, features = dict(values), []
    try:
        for group in settings_groups(SECTIONS[kind][0]):
            part = {key: own.pop(key) for key in values if key in group.names}
            features.append(msgspec.convert(part, group.kind, strict=False, dec_hook=path_of))
        config = msgspec.convert(own, kind, strict=False, dec_hook=path_of)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    return msgspec.structs.replace(config, features=tuple(each for each in features if each != type(each)()))


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


def _listed(text: str) -> list[str]:
    """Split comma-separated words; blanks around them are removed, and an empty text is an empty list."""
    return [word.strip() for word in text.split(",")] if text.strip() else []

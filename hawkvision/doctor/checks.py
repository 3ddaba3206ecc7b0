"""The checks of a tier, in the order in which an operator would solve problems."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from edge.monitoring.certificate_reload import stage_of
from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.core.settings.access import is_loopback
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig, default_state_file
from hawkvision.core.settings.load import ConfigT, load_config, settings_of_tasks
from hawkvision.datacenter.deployment.ray_settings import check_ray
from hawkvision.datacenter.launch.isolation import why_not_private
from hawkvision.datacenter.stages.catalog import TaskFailure, load_catalogs
from hawkvision.doctor import files, machine, network, onnx_runtime
from hawkvision.doctor.findings import Check, Finding, examine, ok, problem, warning
from hawkvision.models.manifest import cache_dir, load_manifest, models_dir
from hawkvision.servers.keys import Keys
from hawkvision.servers.tls import datacenter_certificates, server_certificates
from hawkvision.transport.settings import DatagramSettings

SOON: Final = datetime.timedelta(days=14)
"""Half of the time before expiry at which certbot renews certificates (30 days)."""


def examine_edge(path: Path | None) -> Iterator[Finding]:
    """The findings for an edge node with the settings of a file and of the environment."""
    configs: list[EdgeConfig] = []
    yield from examine([("settings", lambda: _settings(configs, load_config(EdgeConfig, path), path))])
    for config in configs:
        yield from examine(_edge_checks(config))


def examine_datacenter(path: Path | None) -> Iterator[Finding]:
    """The findings for a datacenter tier with the settings of a file and of the environment."""
    configs: list[DatacenterConfig] = []
    yield from examine([("settings", lambda: _settings(configs, load_config(DatacenterConfig, path), path))])
    for config in configs:
        yield from examine(_datacenter_checks(config))


def _settings(configs: list[ConfigT], config: ConfigT, path: Path | None) -> Finding:
    configs.append(config)
    return ok("settings", "of the environment and defaults" if path is None else f"{path} and the environment")


def _machine_checks(wanted: int) -> Iterable[tuple[str, Check]]:
    return (
        ("system", machine.system),
        ("processor", machine.processor),
        ("kernels", machine.kernels),
        ("user", machine.user),
        ("open files", machine.open_files),
        ("memory", partial(machine.memory, wanted)),
    )


def _state_file(config: EdgeConfig) -> Finding:
    if config.state_file is not None:
        return files.state_file(config.state_file)
    try:
        return files.state_file(default_state_file(config), default=True)
    except RuntimeError:  # no home
        return files.state_file(None)


def _edge_checks(config: EdgeConfig) -> Iterable[tuple[str, Check]]:
    yield from _machine_checks(machine.EDGE_BYTES)
    yield "ONNX Runtime", partial(onnx_runtime.runtime, config.onnx_providers)
    yield "cache", partial(files.cache, cache_dir())
    tasks = settings_of_tasks(config)
    for task, each in tasks.items():
        of_task = "" if len(tasks) == 1 else f" of {task}"
        if each.backend != "noop":
            yield f"models{of_task}", partial(_edge_models, each)
            yield f"profile{of_task}", partial(_profile, each)
        yield f"state file{of_task}", partial(_state_file, each)
    yield "keys and TLS", partial(access, config, "edge", _now())
    yield from _port_checks("edge", config.host, config.port, config.feature(DatagramSettings).port)
    if config.datacenter_url is not None:
        for task, each in tasks.items():
            of_task = "" if len(tasks) == 1 else f" for {task}"
            yield f"datacenter{of_task}", partial(_datacenter, each, config.datacenter_url)


def _datacenter_checks(config: DatacenterConfig) -> Iterable[tuple[str, Check]]:
    yield from _machine_checks(machine.DATACENTER_BYTES)
    yield "ONNX Runtime", partial(onnx_runtime.runtime, config.onnx_providers)
    yield "Ray", _ray
    yield "namespaces", partial(_namespaces, config)
    yield "cache", partial(files.cache, cache_dir())
    if config.backend != "noop":
        yield "models", partial(_datacenter_models, config)
    yield "keys and TLS", partial(access, config, "dc", _now())
    below = config.route_prefix.rstrip("/")
    yield from _port_checks("dc", config.host, config.port, config.feature(DatagramSettings).port, below)


def _port_checks(
    section: str, host: str, port: int, datagram_port: int | None, prefix: str = ""
) -> Iterable[tuple[str, Check]]:
    yield f"port {port}", partial(network.port, host, port, socket.SOCK_STREAM, f"{section}.port", prefix)
    if datagram_port is not None:
        where = f"{section}.datagram_port"
        yield f"UDP port {datagram_port}", partial(network.port, host, datagram_port, socket.SOCK_DGRAM, where)


def _edge_models(config: EdgeConfig) -> Iterable[Finding]:
    manifest = load_manifest(config.task, models_dir(config.models_dir, config.task))
    return files.models(config.task, manifest.members(stage_of(config, manifest)), cache_dir(config.cache_dir))


def _datacenter_models(config: DatacenterConfig) -> Iterable[Finding]:
    for task, catalog in load_catalogs(config).items():
        if isinstance(catalog, TaskFailure):
            yield problem(f"task {task}", catalog.reason, "mend it, or take the task out of dc.tasks")
        else:
            yield from files.models(task, catalog.variants, cache_dir(config.cache_dir))


def _profile(config: EdgeConfig) -> Finding:
    folder = models_dir(config.models_dir, config.task)
    manifest = load_manifest(config.task, folder)
    return files.profile(config, manifest, stage_of(config, manifest), folder)


def _datacenter(config: EdgeConfig, url: str) -> Iterable[Finding]:
    folder = models_dir(config.models_dir, config.task)
    manifest = load_manifest(config.task, folder)
    expected: dict[str, str] = {}
    if config.backend != "noop":
        profile = load_profile_of(manifest, folder, config.profile)
        pair = profile.pair(stage_of(config, manifest), manifest.best)
        asked = [manifest.best] if pair.intermediate is None else [manifest.best, pair.intermediate.name]
        expected = {each: profile.stage(each).fingerprint for each in asked}
    certificates = datacenter_certificates(config)
    context = None if certificates is None else certificates.context
    return network.datacenter(url, config.datacenter_api_key, expected, context, task=config.task)


def access(config: EdgeConfig | DatacenterConfig, section: str, now: datetime.datetime) -> Iterator[Finding]:
    """Whether certificate and keys can be used, and until when.

    Raises:
        ConfigError: if they cannot be; names setting and file.
    """
    Keys(config.api_key, config.keys_file, where=f"{section}.api_key")
    if config.api_key is None and config.keys_file is None:
        yield ok("keys", "none: every program on this machine may ask")
    else:
        yield ok("keys", "can be read")
    certificates = server_certificates(config, section)
    if certificates is not None and certificates.expires is not None:
        yield _lifetime(certificates.expires, now)
    elif is_loopback(config.host):
        yield ok("TLS", "none, and none is needed on loopback")
    else:
        advice = f"set {section}.tls_certificate and {section}.tls_key, unless something in front ends TLS"
        yield warning("TLS", "none: keys and images travel in clear text beyond this machine", advice)


def _lifetime(expires: datetime.datetime, now: datetime.datetime) -> Finding:
    day, advice = expires.date().isoformat(), "renew it: the server reads the new files by itself"
    if expires <= now:
        return problem("TLS", f"the certificate has expired on {day}", advice)
    if expires - now < SOON:
        return warning("TLS", f"the certificate expires on {day}", advice)
    return ok("TLS", f"the certificate is good until {day}")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _ray() -> Finding:
    try:
        check_ray()
    except ModuleNotFoundError:
        return problem("Ray", "is not installed", "in a checkout, pip install '.[datacenter]'")
    return ok("Ray", "a version that is taken")


def _namespaces(config: DatacenterConfig) -> Finding:
    reason = why_not_private()
    if reason is None:
        return ok("namespaces", "Ray may have a network of its own")
    advice = (
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns),"
        " or in a container the capability SYS_ADMIN; or where no stranger reaches this machine, set dc.ray_network"
        " = 'shared'"
    )
    found = f"Ray may have no network of its own: {reason}"
    return (problem if config.ray_network == "private" else warning)("namespaces", found, advice)

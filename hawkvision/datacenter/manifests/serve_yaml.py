"""Serve's config file, for `serve deploy` and for a RayService.

It names `hawkvision.datacenter.app:build`, which Serve imports on the cluster. So a node that may run a replica needs
`hawkvision[datacenter]`, and the model files under `cache_dir`. It holds no secret: the builder reads
`HAWKVISION_DC_API_KEY` from the environment of its node.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import chosen_settings
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, load_catalogs, loaded

BUILDER: Final = "hawkvision.datacenter.app:build"
_NOT_ARGS: Final = frozenset({"api_key", "address", "deploy_timeout_s", "port", "ray_network"})
"""A secret, and settings of `dc up`, `dc deploy` and `serve deploy`."""


def serve_config(config: DatacenterConfig) -> str:
    """The YAML for `serve deploy FILE`.

    Raises:
        ConfigError: if the stages are unknown, or if TLS is asked for, which Serve's proxies do not speak.
    """
    return yaml_of(serve_document(config))


def serve_document(config: DatacenterConfig) -> dict[str, Any]:
    """What `serve_config` writes: Serve's listeners and the application with the settings that are not defaults."""
    load_all(config)  # fails here if a stage is unknown, not only in the cluster
    if config.tls_certificate is not None:
        raise ConfigError(
            "dc.tls_certificate belongs to a tier on one machine: in a cluster Ray Serve's proxies listen, and "
            "a load balancer in front of them terminates TLS; set dc.allow_plain_http = true"
        )
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "applications": [
            {
                "name": config.app_name,
                "route_prefix": config.route_prefix,
                "import_path": BUILDER,
                "args": {name: value for name, value in chosen_settings(config).items() if name not in _NOT_ARGS},
            }
        ],
    }


def load_all(config: DatacenterConfig) -> tuple[Catalog, ...]:
    """The catalogs of all tasks.

    Raises:
        ConfigError: if a task cannot be loaded. A tier that runs would serve the others.
    """
    catalogs = load_catalogs(config)
    for task, catalog in catalogs.items():
        if isinstance(catalog, TaskFailure):
            raise ConfigError(f"dc.tasks: {task!r} cannot be loaded: {catalog.reason}")
    return tuple(loaded(catalogs).values())


def yaml_of(document: dict[str, Any]) -> str:
    """The document as YAML, in its own order, without anchors, and text of several lines as such: for human readers."""
    text: str = yaml.dump(document, Dumper=_Plain, sort_keys=False)
    return text


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)

"""What Ray Serve imports on a cluster to build the application: `import_path: hawkvision.datacenter.app:build`."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.datacenter.ingress.application import application

__all__ = ["application", "build"]


def build(args: dict[str, Any]) -> Application:
    """The whole application for `serve deploy` and KubeRay; `args` are fields of `[dc]`.

    They override the `HAWKVISION_DC_*` variables of the node that builds. The key belongs into such a variable.

    Raises:
        ConfigError: for an unknown key or a bad value.
    """
    return application(load_config(DatacenterConfig, overrides=args))

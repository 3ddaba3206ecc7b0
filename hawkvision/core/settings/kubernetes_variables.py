"""Separates variables that Kubernetes sets for a service from settings with the same prefix.

With service links, the environment of a pod has `HAWKVISION_EDGE_PORT=tcp://10.43.7.8:80` and similar variables if a
service is called `hawkvision-edge` or `hawkvision-edge-…`. These are no settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_NAMES: Final = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Endings of variables that can only be a service's."""
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def without_service_links(environ: Mapping[str, str], prefix: str) -> tuple[dict[str, str], list[str]]:
    """Split the variables with a prefix into settings, without the prefix, and names of service variables.

    `PORT` and names that end so are a service's if the value is an address such as `tcp://10.43.7.8:80`.
    """
    settings: dict[str, str] = {}
    links: list[str] = []
    for name, value in environ.items():
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        ends_as_port = rest == "PORT" or rest.endswith("_PORT")
        if _NAMES.fullmatch(rest) or (ends_as_port and _ADDRESS.fullmatch(value)):
            links.append(name)
        else:
            settings[rest] = value
    return settings, links

"""Variables that Kubernetes sets for a service, told from settings that look the same.

Where service links are on, a pod finds `HAWKVISION_EDGE_PORT=tcp://10.43.7.8:80` and some ten more in its environment
if there is a service called `hawkvision-edge`, or `hawkvision-edge-…`. None of them is meant for us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_NAMES: Final = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What follows the name of a service in variables that mean nothing else."""
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def without_service_links(environ: Mapping[str, str], prefix: str) -> tuple[dict[str, str], list[str]]:
    """The variables with a prefix that may be settings, by what follows the prefix, and the names of the others.

    `PORT` and names that end so are a service's where the value is an address such as `tcp://10.43.7.8:80`.
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

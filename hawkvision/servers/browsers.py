"""Which requests of browsers a server without keys takes: none that another site's page sends.

A page of any site may send requests to this machine (cross-site request forgery), and a site whose name suddenly
resolves to this machine even reads the replies (DNS rebinding). A key stops both, because such a page does not know it.
Without one, the name in `Host` and what browsers say of a request's origin decide. Programs send neither `Origin` nor
`Sec-Fetch-Site`, and reach a node by an address or by a name that it knows.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Final

from hawkvision.core.errors import Forbidden
from hawkvision.servers.cors import ANY

_OURS: Final = (b"same-origin", b"none")
"""`none`: the person typed the address, or chose a bookmark."""


class Browsers:
    """The names of a server, and the origins whose pages may call it."""

    def __init__(self, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        """Know these names besides `localhost`, the machine's own and every address."""
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}
        self._origins = frozenset(origins)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request under another name, and one that a page of another origin sends.

        Raises:
            Forbidden: naming the header, its value and the setting that would allow it.
        """
        host = origin = site = b""
        for name, value in headers:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        self.check_host(host)
        known = ANY in self._origins or origin.decode("latin-1") in self._origins
        if origin and not known and origin.partition(b"://")[2] != host:
            raise Forbidden(f"Origin {_shown(origin)}: pages of other sites need its origin in `cors_origins`")
        if site and site not in _OURS and not (origin and known):
            raise Forbidden(f"Sec-Fetch-Site {_shown(site)}: pages of other sites need their origin in `cors_origins`")

    def check_host(self, host: bytes) -> None:
        """Refuse a `Host` that is no name of this server.

        Raises:
            Forbidden: naming it, and the setting that would allow it.
        """
        name = host.decode("latin-1").lower()
        name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
        if not name or name in self._hosts or name.endswith(".localhost") or _is_address(name):
            return
        raise Forbidden(f"Host {_shown(host)}: this server has no such name; add it to `hosts`, or use its address")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))

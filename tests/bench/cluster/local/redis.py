"""A Redis in the private network, in which the head of a cluster keeps its state (Ray's GCS fault tolerance)."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hawkvision.core.errors import NotReady
from tests.bench.cluster.local.network import OUTSIDE
from tests.bench.cluster.local.nodes import HeadStore

PORT: Final = 6379


@contextmanager
def redis(folder: Path) -> Iterator[HeadStore]:
    """Redis with a password and its file in `folder`.

    Raises:
        NotReady: if it is not installed or does not start.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise NotReady("redis-server is missing: apt-get install redis-server")
    password = secrets.token_hex(16)
    settings = folder / "redis.conf"
    settings.touch(mode=0o600)
    settings.write_text(
        f"bind {OUTSIDE}\nport {PORT}\nrequirepass {password}\ndir {folder}\nappendonly yes\nlogfile ''\n"
    )
    process = subprocess.Popen([program, str(settings)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if not any(b"Ready to accept connections" in line for line in process.stdout):
            raise NotReady(f"redis-server ended with status {process.wait()}")
        yield HeadStore(f"{OUTSIDE}:{PORT}", password)
    finally:
        process.terminate()
        process.wait()

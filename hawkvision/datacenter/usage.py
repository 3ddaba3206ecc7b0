"""Keeps Ray from asking the network which cloud it runs in.

Ray's dashboard process starts even where the dashboard is off. For its usage report it asks `169.254.169.254` and
`metadata.google.internal`, before it looks whether reports are wanted; unless there is a cluster's description in the
home directory. So Ray gets a home of its own with an empty one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_DESCRIPTION: Final = "ray_bootstrap_config.yaml"


@contextlib.contextmanager
def home_for_ray() -> Iterator[None]:
    """Give this process, and what it starts from now on, a home that is removed in the end; caches stay where they are.

    To be entered before Ray is imported, by the process that does nothing else.
    """
    given = os.environ.get("HOME")
    with contextlib.suppress(RuntimeError):  # neither HOME nor an entry in /etc/passwd
        os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    with tempfile.TemporaryDirectory(prefix="hawkvision-", ignore_cleanup_errors=True) as home:
        (Path(home) / _DESCRIPTION).write_text("{}\n", encoding="utf-8")
        os.environ["HOME"] = home
        try:
            yield
        finally:
            if given is None:
                del os.environ["HOME"]
            else:
                os.environ["HOME"] = given

"""Commands that see a folder on a file system of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def mounted(folder: Path, options: str) -> list[str]:
    """What to put before a command, so that for it alone a new file system with these options lies over the folder."""
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    prefix += [f'mount -t tmpfs -o {options} none "{folder}" && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount in a namespace of its own")
    return prefix

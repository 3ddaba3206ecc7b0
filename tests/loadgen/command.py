"""`python -m loadgen …` as a real process."""

from __future__ import annotations

import subprocess
import sys


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loadgen", *words], capture_output=True, text=True, timeout=60)

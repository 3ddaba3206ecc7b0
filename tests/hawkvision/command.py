"""Runs commands of `hawkvision` in this process."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from hawkvision.cli import run


class Ran(NamedTuple):
    """What a command left."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both streams, one after the other."""
        return self.stdout + self.stderr


def invoke(*words: str) -> Ran:
    """Run a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Ran(code, out.getvalue(), err.getvalue())

"""A private directory for Ray's sockets and logs, in place of the /tmp/ray that all users share.

It is its owner's alone (mode 0700), is locked while its owner lives, and goes when the tier stops. What a killed tier
has left behind, which nobody holds the lock of, goes at the next start.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hawkvision.core.errors import ConfigError

log = logging.getLogger("hawkvision.datacenter")

PREFIX: Final = "hawk-dc-"
_INNER: Final = "/r"
"""Ray makes the directory that it is given everybody's (mode 0777); so it is given one inside."""
_SOCKET_PATH_BYTES: Final = 107
"""The longest path of a Unix socket (unix(7))."""
_BELOW: Final = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""The longest path that Ray adds for a socket; process ids have at most 7 digits."""
LONGEST_BASE_BYTES: Final = _SOCKET_PATH_BYTES - _BELOW - len(f"/{PREFIX}12345678{_INNER}")
_OTHERS: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - in it a directory of mode 0700 is made


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new one below TMPDIR, or where paths of sockets would become too long there, below /tmp.

    Raises:
        ConfigError: if neither has room for it; names TMPDIR.
    """
    base = _base()
    _sweep(base)
    folder, lock = _make(base)
    try:
        inner = folder / _INNER.removeprefix("/")
        inner.mkdir()
        yield inner
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _base() -> Path:
    wanted = os.environ.get("TMPDIR")
    candidates = [wanted, *_OTHERS] if wanted else [*_OTHERS]
    usable = [Path(its) for its in candidates if _is_usable(its)]
    if not usable:
        raise ConfigError(
            f"TMPDIR = {wanted!r}: expected a writable directory of at most {LONGEST_BASE_BYTES} bytes, for the paths "
            f"of Unix sockets begin with it; {', '.join(_OTHERS)} cannot be written either"
        )
    if wanted and usable[0] != Path(wanted):
        log.warning(
            "TMPDIR = %s is no writable directory of at most %d bytes, which paths of Unix sockets need: taking %s",
            wanted,
            LONGEST_BASE_BYTES,
            usable[0],
        )
    return usable[0]


def _is_usable(base: str) -> bool:
    path = Path(base)
    return (
        path.is_absolute()
        and len(os.fsencode(path)) <= LONGEST_BASE_BYTES
        and path.is_dir()
        and os.access(path, os.W_OK | os.X_OK)
    )


def _make(base: Path) -> tuple[Path, int]:
    """A new directory, and what holds its lock."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        except OSError as error:
            raise ConfigError(f"TMPDIR: no directory can be made in {base}: {error.strerror}") from None
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another tier, which started just now, took it for one left behind


def _sweep(base: Path) -> None:
    """Remove what killed tiers of this user have left."""
    for folder in base.glob(f"{PREFIX}????????"):
        with suppress(OSError):  # it is gone, or it is not ours
            seen = folder.lstat()
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s, which a killed tier has left", folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

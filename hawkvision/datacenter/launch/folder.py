"""A private directory for Ray's sockets and logs, in place of the /tmp/ray that all users share.

Only its owner may read it (mode 0700). It is locked while the tier lives and removed when the tier stops. The next
start removes the unlocked directory of a killed tier.
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
"""Ray makes its directory accessible to all (mode 0777), so it gets one inside."""
_SOCKET_PATH_BYTES: Final = 107
"""The longest path of a Unix socket (unix(7))."""
_BELOW: Final = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""The longest path that Ray adds for a socket; process ids have at most 7 digits."""
LONGEST_BASE_BYTES: Final = _SOCKET_PATH_BYTES - _BELOW - len(f"/{PREFIX}12345678{_INNER}")
_OTHERS: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - in it a directory of mode 0700 is made


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new directory below TMPDIR, or below /tmp if socket paths below TMPDIR would be too long.

    Raises:
        ConfigError: if neither can hold it; names TMPDIR.
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
            f"TMPDIR = {wanted!r}: expected a writable directory of at most {LONGEST_BASE_BYTES} bytes, because "
            f"the paths of Unix sockets begin with it; {', '.join(_OTHERS)} are not writable either"
        )
    if wanted and usable[0] != Path(wanted):
        log.warning(
            "TMPDIR = %s is not a writable directory of at most %d bytes, as paths of Unix sockets need: using %s",
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
    """A new directory, and the descriptor that locks it."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        except OSError as error:
            raise ConfigError(f"TMPDIR: no directory can be made in {base}: {error.strerror}") from None
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another tier, which has just started, took it for an abandoned one


def _sweep(base: Path) -> None:
    """Remove the directories of this user's killed tiers."""
    for folder in base.glob(f"{PREFIX}????????"):
        with suppress(OSError):  # it is gone, or belongs to another user
            seen = folder.lstat()
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                log.info("removing %s of a killed tier", folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

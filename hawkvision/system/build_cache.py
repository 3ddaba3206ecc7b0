"""Code that is compiled on the machine that runs it: each thing once for all who ask, and never loaded damaged.

    <cache>/compiled/<name>-<digest of all that decides the content>/   an entry: its files, and their SHA-256

One process builds an entry while others wait for it (flock). The entry is renamed into place whole, so a builder that
is killed leaves nothing that is used. An entry that is damaged is built again. Files that another user may have written
are refused. Before an entry is built, those used longest ago are removed beyond the bounds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import CompileError
from hawkvision.system.files import cache_dir, check_ours, sha256_of

log = logging.getLogger("hawkvision.system.build_cache")

VARIABLE: Final = "HAWKVISION_BUILD_CACHE"
"""The environment variable that names another folder for all compiled code."""
SUMS: Final = "sha256.json"
KEPT: Final = 256
"""Entries at most."""
KEPT_BYTES: Final = 1 << 29
"""Bytes at most."""
IN_USE_S: Final = 3600.0
"""Entries used this recently are never removed: a process may be about to load them."""
ABANDONED_S: Final = 86_400.0
"""Age after which an unfinished build counts as abandoned."""


def build_cache_dir() -> Path:
    """The folder of compiled code: `$HAWKVISION_BUILD_CACHE`, else `compiled` in the cache folder (`cache_dir`).

    Raises:
        ConfigError: if nothing says where that is.
    """
    given = os.environ.get(VARIABLE)
    return Path(given) if given else cache_dir() / "compiled"


def digest(*parts: str | bytes) -> str:
    """A digest of these parts in 24 digits, for names of entries."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:24]


def build_once(entry: Path, build: Callable[[Path], None]) -> Path:
    """An entry of the cache, built if it is missing or damaged. Returns `entry`.

    Args:
        entry: the folder; its name contains a digest of everything that decides the content.
        build: writes the files into the empty folder that it gets. Folders that it makes there are scratch, and are not
            kept. It may ask for other entries.

    Raises:
        BackendError: if another user may have written a file of the entry.
        CompileError: if the entry cannot be stored, or code cannot run there; nothing is built then.
    """
    if is_intact(entry):
        return entry
    folder = entry.parent
    check_place(folder)
    with locked(folder / f".{entry.name}.lock"):
        if is_intact(entry):  # another process has built it meanwhile
            return entry
        if entry.exists():
            log.warning("%s: damaged; built again", entry)
            remove(entry)
        tidy(folder)
        try:
            _build(entry, build)
        except OSError as error:
            raise CompileError(f"{folder}: cannot write: {error.strerror}") from None
    return entry


def is_intact(entry: Path) -> bool:
    """Whether an entry has all its files unchanged. Notes that it is used.

    Raises:
        BackendError: if another user may have written a file.
        CompileError: if the folder cannot be read.
    """
    try:
        sums = msgspec.json.decode((entry / SUMS).read_bytes(), type=dict[str, str])
        for name, expected in sums.items():
            if sha256_of((entry / name).read_bytes()) != expected:
                return False
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    except OSError as error:
        if error.errno == errno.EIO:  # a failing disk
            return False
        raise CompileError(f"{entry.parent}: cannot read the folder: {error.strerror}") from None
    for name in sums:
        check_ours(entry / name)
    with suppress(OSError):  # a cache that cannot be written to is never tidied
        os.utime(entry)
    return True


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=entry.parent) as scratch:
        work = Path(scratch) / "entry"
        work.mkdir()
        build(work)
        sums = {}
        for path in sorted(work.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.chmod(0o644)  # nobody else may write it, whatever the umask
                sums[path.name] = sha256_of(path.read_bytes())
        (work / SUMS).write_bytes(msgspec.json.encode(sums))
        work.chmod(0o755)
        try:
            work.rename(entry)
        except OSError:
            if not is_intact(entry):  # where there are no locks, another process may have been first
                raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock during the block, which waits until nobody else has it. It ends with the process.

    Where there can be no lock, in folders that are read-only or without locks, the block runs without it.
    """
    held = _lock(path)
    try:
        yield
    finally:
        if held is not None:
            with suppress(OSError):
                path.unlink()  # before others get the lock: they notice, and make a new file
            os.close(held)


def _lock(path: Path) -> int | None:
    while True:
        descriptor = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return descriptor
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
            return None
        except BaseException:  # a signal that ends the process while it waits
            if descriptor is not None:
                os.close(descriptor)
            raise
        os.close(descriptor)


def check_place(folder: Path) -> None:
    """Check that code can be stored in a folder and run from there. The folder is made if needed.

    Raises:
        CompileError: if it cannot be stored, or cannot run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(mmap.PAGESIZE))
            trial.flush()
            try:
                mmap.mmap(trial.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
            except PermissionError:
                raise CompileError(f"{folder}: code cannot run there: its file system is mounted noexec") from None
    except OSError as error:
        reason = "its file system is read-only" if error.errno == errno.EROFS else error.strerror
        raise CompileError(f"{folder}: cannot write: {reason}") from None


def remove(entry: Path) -> None:
    """Remove an entry. Other processes see it whole or not at all; those that have loaded its code keep it."""
    with suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=".gone-", dir=entry.parent))
        with suppress(OSError):  # removed by another process
            entry.rename(gone / entry.name)
        shutil.rmtree(gone, ignore_errors=True)


def tidy(folder: Path, now: float | None = None, *, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
    """Remove abandoned builds, and the entries used longest ago beyond the bounds.

    `now` is a time of the file system; None takes the clock's. Of two processes, the second leaves the work to the
    first.
    """
    now = time.time() if now is None else now
    with _alone(folder) as alone:
        if not alone:
            return
        for pattern in (".new-*", ".gone-*", ".*.lock"):
            for path in folder.glob(pattern):
                with suppress(OSError):
                    if now - path.stat().st_mtime > ABANDONED_S:
                        path.unlink() if path.is_file() else shutil.rmtree(path)
        entries = sorted(_entries(folder))
        count, size = len(entries), sum(entry[2] for entry in entries)
        for _, path, its in entries:
            if count <= kept and size <= kept_bytes:
                return
            with suppress(OSError):
                # Checked again, because it may have been used since.
                if now - path.stat().st_mtime > IN_USE_S:
                    remove(path)
                    count, size = count - 1, size - its


def _entries(folder: Path) -> Iterator[tuple[float, Path, int]]:
    """Time of the last use, path and bytes of each entry; other files in the folder are left alone."""
    for sums in folder.glob(f"[!.]*/{SUMS}"):
        with suppress(OSError):  # removed meanwhile
            entry = sums.parent
            yield entry.stat().st_mtime, entry, sum(file.stat().st_size for file in entry.iterdir())


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether this process may tidy the folder; no other process does meanwhile."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # there is no folder, another process has the lock, or the file system has no locks
            yield False
        else:
            yield True

"""Where caches lie, files written whole or not at all, and files of code checked before they are loaded."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta

from hawkvision.core.errors import ArtifactError, BackendError, ConfigError

CacheDir: TypeAlias = Annotated[Path | None, Meta(description="Folder of built models; default: ~/.cache/hawkvision.")]
"""An option of commands."""


def cache_dir(override: Path | None = None) -> Path:
    """The folder of built artefacts: `override`, else `$XDG_CACHE_HOME/hawkvision`, else `~/.cache/hawkvision`.

    Raises:
        ConfigError: if nothing says where that is.
    """
    if override is not None:
        return override
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "hawkvision"
    try:
        return Path.home() / ".cache" / "hawkvision"
    except RuntimeError:
        raise ConfigError(
            f"there is no cache folder: user {os.geteuid()} has no HOME and no entry in /etc/passwd; "
            "set XDG_CACHE_HOME, or for models give --cache-dir"
        ) from None


def sha256_of(data: bytes) -> str:
    """The SHA-256 in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that readers, also after a power cut, see the whole old file or the whole new one.

    Links are followed. A device or a pipe is written to and not replaced.

    Raises:
        ArtifactError: if the folder cannot be written to.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        place = _place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot write: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)  # mkstemp makes it private, but a service may run as another user
        Path(name).replace(place)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot write: {error.strerror}") from None
    finally:
        Path(name).unlink(missing_ok=True)
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_writable(path: Path) -> None:
    """Check early that `write_atomic` can write a file.

    Raises:
        ConfigError: if it cannot, or if the folder does not exist.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: expected a file to write, got a folder")
        if path.exists() and not path.is_file():
            return  # a device needs no temporary file
        folder = _place(path).parent
        if not folder.is_dir():
            raise ConfigError(f"{path}: no such folder: {folder}")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None


def check_ours(code: Path) -> None:
    """Refuse a file of code that another user may have written, because it would run with our rights.

    Raises:
        BackendError: if its owner is neither this user nor root, if others may write it, or if it is no file.
    """
    try:
        found = code.lstat()
    except OSError as error:
        raise BackendError(f"{code}: {error.strerror}") from None
    mend = "remove it; it will be compiled again"
    if not stat.S_ISREG(found.st_mode):
        raise BackendError(f"{code}: expected a file of code that we compiled, found something else; {mend}")
    if found.st_uid not in (os.geteuid(), 0):
        raise BackendError(f"{code}: expected code of user {os.geteuid()}, found that of user {found.st_uid}; {mend}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendError(
            f"{code}: expected code that only its owner may write, found mode {found.st_mode & 0o777:o}; {mend}"
        )


def _place(path: Path) -> Path:
    """The target of all links. `Path.resolve` would refuse circular links."""
    return Path(os.path.realpath(path))

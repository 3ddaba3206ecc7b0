"""Files written whole or not at all, and files of code checked before they are loaded."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from hawkvision.core.errors import ArtifactError, BackendError, ConfigError


def sha256_of(data: bytes) -> str:
    """The SHA-256 in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a power cut, sees either the old one or the new one, whole.

    Links are followed. A device or a pipe, which nothing must replace, is written to as it is.

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
        Path(name).chmod(0o644)  # mkstemp makes it private; a service may run as another user than the builder
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
    """Refuse what `write_atomic` could not write, before somebody works for it.

    Raises:
        ConfigError: saying why. A folder that is missing is refused too: probably its name is mistyped.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: expected a file to write, got a folder")
        if path.exists() and not path.is_file():
            return  # nothing is made beside a device
        folder = _place(path).parent
        if not folder.is_dir():
            raise ConfigError(f"{path}: no such folder: {folder}")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None


def check_ours(code: Path) -> None:
    """Refuse a file of code that another user may have written: loaded, it would run with our rights.

    Raises:
        BackendError: if it belongs to another user than us or root, if others may write to it, or if it is no file.
    """
    try:
        found = code.lstat()
    except OSError as error:
        raise BackendError(f"{code}: {error.strerror}") from None
    mend = "remove it, and it is made anew"
    if not stat.S_ISREG(found.st_mode):
        raise BackendError(f"{code}: expected a file of code that we compiled, found something else; {mend}")
    if found.st_uid not in (os.geteuid(), 0):
        raise BackendError(f"{code}: expected code of user {os.geteuid()}, found that of user {found.st_uid}; {mend}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendError(
            f"{code}: expected code that only its owner may write, found mode {found.st_mode & 0o777:o}; {mend}"
        )


def _place(path: Path) -> Path:
    """Where a file is, whatever links lead there; `Path.resolve` refuses links that lead nowhere but in circles."""
    return Path(os.path.realpath(path))

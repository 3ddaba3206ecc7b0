"""Built artefacts on disk: written whole or not at all, read only if their bytes are the ones the manifest names.

Runtime-light: serving imports this, so nothing here may import onnx.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from hawkvision.core.advice import advise
from hawkvision.core.errors import ArtifactError, BackendError, ConfigError
from hawkvision.models.manifest import Variant, artifact_path, cache_dir


def sha256_of(data: bytes) -> str:
    """The SHA-256 in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def load_verified(path: Path, sha256: str) -> bytes:
    """The artefact's bytes, which have that SHA-256.

    The bytes are returned, not the path, so that what was checked is what is run.

    Raises:
        ArtifactError: if the file is missing or other than expected; the message says which command builds it.
    """
    is_cached = path.parent.parent.name == "models"  # as `artifact_path` puts it there
    given = {"cache_dir": path.parents[2]} if is_cached and path.parents[2] != default_cache() else {}
    mend = f"build it with `{advise('models build', '--task', path.parent.name, path.stem, **given)}`"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: the model file is missing; {mend}") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot read the model file: {error.strerror}") from None
    found = sha256_of(data)
    if found != sha256:
        raise ArtifactError(f"{path}: the model file is corrupt: expected SHA-256 {sha256}, found {found}; {mend}")
    return data


def default_cache() -> Path | None:
    """Where built artefacts lie if nobody says so; None for a user without a home."""
    try:
        return cache_dir()
    except ConfigError:
        return None


def load_variant(cache: Path, task: str, variant: Variant) -> bytes:
    """The artefact of a variant, verified against its manifest entry.

    Raises:
        ArtifactError: as `load_verified`, and if the manifest pins no SHA-256.
    """
    if variant.sha256 is None:
        raise ArtifactError(f"task {task!r}: variant {variant.name!r} has no sha256 in its manifest to verify against")
    return load_verified(artifact_path(cache, task, variant.name), variant.sha256)


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

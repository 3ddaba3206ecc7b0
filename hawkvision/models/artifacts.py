"""Built models on disk, read only if their bytes are those that the manifest names.

Servers import this module, so it must not import onnx.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hawkvision.core.advice import advise
from hawkvision.core.errors import ArtifactError, ConfigError
from hawkvision.models.manifest import Variant, artifact_path, cache_dir
from hawkvision.system.files import sha256_of


def load_verified(path: Path, sha256: str) -> bytes:
    """Read an artefact and verify its SHA-256.

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
    """The default cache folder; None for a user without a home."""
    try:
        return cache_dir()
    except ConfigError:
        return None


def load_variant(cache: Path, task: str, variant: Variant) -> bytes:
    """The artefact of a variant, verified against its manifest entry.

    Raises:
        ArtifactError: as `load_verified`, if the manifest pins no SHA-256, and if Pillow is to scale its images and is
            not installed.
    """
    if variant.input.needs_pillow and importlib.util.find_spec("PIL") is None:
        raise ArtifactError(
            f"task {task!r}: images of variant {variant.name!r} are scaled by Pillow, which is not installed: "
            "in a checkout, pip install '.[formats]'"
        )
    if variant.sha256 is None:
        raise ArtifactError(f"task {task!r}: variant {variant.name!r} has no sha256 in its manifest to verify against")
    return load_verified(artifact_path(cache, task, variant.name), variant.sha256)

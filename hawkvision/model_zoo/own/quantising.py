"""`hawkvision models quantize`: a stage in fewer bits from a float one, and what that costs.

Images of the profile part alone are used (`calibration.splits`), half to quantise and half to measure, so that
`hawkvision calibrate` on the same images still certifies on others. Where a model was trained on some of the images,
they are the profile part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError, ConfigError, ManifestError
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.building.build import emit_variant
from hawkvision.model_zoo.calibration.evidence import LabelReading, TrainedImages, read_evidence
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_images
from hawkvision.model_zoo.own.graphs.conversion import IMAGE
from hawkvision.model_zoo.own.integer_chain import FloatChain, float_chain
from hawkvision.model_zoo.own.integer_rounding import quantised_net
from hawkvision.model_zoo.own.qonnx_export import write_qonnx
from hawkvision.model_zoo.own.served import Bodies, StageRun, inputs_of
from hawkvision.model_zoo.own.task_folder import TierName, store
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import LabelledImages, UnlabelledImages, read_unlabelled
from hawkvision.models.manifest import (
    FLOAT_OR_INT8,
    FileSource,
    Manifest,
    Precision,
    Variant,
    load_manifest,
    own_models_dir,
    shipped_models_dir,
)
from hawkvision.system.files import sha256_of
from hawkvision.system.graph_limits import one_run
from hawkvision.system.onnx_runtime import ort, quantiser
from hawkvision.tasks.kind import Output, TaskKind, Truth
from hawkvision.tasks.registry import load_kind

FEWEST: Final = 40
"""With fewer images neither ranges nor a difference in accuracy mean anything."""
MOST_TO_QUANTISE: Final = 256
MOST_TO_MEASURE: Final = 1000


@dataclass(frozen=True, slots=True)
class QuantiseOrder:
    """What `models quantize` was asked for."""

    task: str
    stage: str
    data: Path
    precision: Precision = "int8"
    keep_float: tuple[str, ...] = ()
    name: str | None = None
    tier: TierName | None = None
    labelled: bool = True


@dataclass(frozen=True, slots=True)
class Quantised:
    """A stage that was entered, and what it costs beside the float one."""

    manifest: Manifest
    variant: Variant
    kept_float: tuple[str, ...]
    images: int
    """That it was quantised with."""
    measured: int
    """That both stages ran on."""
    accuracy: tuple[float, float] | None
    """The float stage's and the quantised one's; None without labels."""
    agreement: float
    """1 − the mean disagreement of both."""
    cpu_ms: tuple[float, float]


def quantise(order: QuantiseOrder, models: Path, cache: Path) -> Quantised:
    """Make, measure and enter the quantised stage.

    Raises:
        ConfigError: if the task is a shipped one, or there are too few images.
        CompileError: listing every layer without an integer form, before any image is read.
        HawkVisionError: if a model or an image is missing or cannot be read.
    """
    if models == shipped_models_dir() and models != own_models_dir():
        raise ConfigError(f"--task: {order.task!r} comes with HawkVision; `models add` makes a task of your own")
    manifest = load_manifest(order.task, models)
    variant, kind = manifest.variant(order.stage), load_kind(manifest, models)
    if variant.precision != "fp32":
        raise ConfigError(f"stage {order.stage!r} has precision {variant.precision}; expected a float stage")
    if order.keep_float and order.precision not in FLOAT_OR_INT8:
        raise ConfigError(f"--keep-float applies to int8; a network of {order.precision} has integers only")
    content = load_variant(cache, order.task, variant)
    chain = None if order.precision == "int8" else _chain(content, order.stage)
    quantised_with, measured_with, truths = _parts(order, manifest, kind, models)
    weights, kept = _weights(order, variant, content, chain, kind, quantised_with)
    made = _variant(order, variant, weights)
    built = emit_variant(order.task, made, models, weights)
    made = msgspec.structs.replace(made, sha256=sha256_of(built), bytes=len(built))
    before, cpu_ms_before = StageRun(kind, variant, content).over(measured_with)
    after, cpu_ms_after = StageRun(kind, made, built).over(measured_with)
    fresh = msgspec.structs.replace(manifest, variants=(made,), ensembles=())
    changed = store(manifest, fresh, weights, built, _tier(order, manifest), models, cache, of=order.stage)
    return Quantised(
        changed,
        made,
        tuple(kept),
        len(quantised_with),
        len(measured_with),
        _accuracies(kind, before, after, truths),
        1.0 - float(kind.disagreements(after, before).mean()),
        (cpu_ms_before, cpu_ms_after),
    )


def _parts(
    order: QuantiseOrder, manifest: Manifest, kind: TaskKind[Any], models: Path
) -> tuple[Bodies, Bodies, Sequence[Any] | None]:
    """The images to quantise with, those to measure with and the latter's truths, if there are labels.

    Raises:
        ConfigError: if there are too few.
    """
    if order.labelled:
        reading = LabelReading(trained=TrainedImages.FIT)
        evidence = read_evidence(order.data, kind, manifest, models, reading)
        usable = split_images(manifest, evidence.images, SPLIT_SEED, fit_on_trained=True).profile
        truths: list[Truth] | None = evidence.truths
        images: LabelledImages | UnlabelledImages = evidence.images
    else:
        images, truths = read_unlabelled(order.data), None
        usable = np.arange(len(images))
    if len(usable) < FEWEST:
        what = " in the profile part (a fifth of all)" if order.labelled else ""
        raise ConfigError(f"{order.data}: {len(usable)} images{what}; expected at least {FEWEST}")
    drawn = np.random.default_rng(SPLIT_SEED).permutation(usable)
    first = drawn[: min(MOST_TO_QUANTISE, len(drawn) // 2)]
    second = drawn[len(first) : len(first) + MOST_TO_MEASURE]

    def named(chosen: NDArray[Any]) -> list[tuple[str, bytes]]:
        return [(images.called(at), images.bodies[at]) for at in chosen]

    return named(first), named(second), None if truths is None else [truths[at] for at in second]


def _chain(content: bytes, where: str) -> FloatChain:
    import onnx

    return float_chain(onnx.load_from_string(content), where)


def _weights(
    order: QuantiseOrder,
    variant: Variant,
    content: bytes,
    chain: FloatChain | None,
    kind: TaskKind[Any],
    images: Bodies,
) -> tuple[bytes, list[str]]:
    """The weight file of the quantised stage, and the nodes that stay float.

    Of two ways to take ranges, the one whose predictions agree better with the float stage's on these images.
    """
    inputs = list(inputs_of(images, variant.input))
    if chain is not None:
        return write_qonnx(quantised_net(chain, np.stack(inputs), int(order.precision[1])), order.stage), []
    float_outputs = StageRun(kind, variant, content).over(images)[0]
    found: list[tuple[float, bytes, list[str]]] = []
    for averaged in (False, True):
        made, kept = int8_model(content, inputs, order.keep_float, order.stage, averaged=averaged)
        outputs = StageRun(kind, variant, made).over(images)[0]
        found.append((float(kind.disagreements(outputs, float_outputs).mean()), made, kept))
    _, best, kept = min(found, key=lambda each: each[0])
    return best, kept


def _tier(order: QuantiseOrder, manifest: Manifest) -> TierName | None:
    """The edge for what FPGAs run and for a stage of the edge in fewer bits; else costs decide."""
    if order.precision not in FLOAT_OR_INT8 or order.stage in manifest.cascade.edge:
        return order.tier or "edge"
    return order.tier


def _variant(order: QuantiseOrder, of: Variant, weights: bytes) -> Variant:
    name = order.name or f"{of.name}_{order.precision.removesuffix('a8')}"
    if name == of.name:
        raise ManifestError(f"--name: {name!r} is the float stage; choose another")
    source = FileSource(file=f"weights/{name}.onnx", sha256=sha256_of(weights))
    return msgspec.structs.replace(of, name=name, precision=order.precision, source=source, temperature=1.0)


def _accuracies(
    kind: TaskKind[Any], before: list[Output], after: list[Output], truths: Sequence[Any] | None
) -> tuple[float, float] | None:
    if truths is None:
        return None
    lost = [float(kind.losses(outputs, truths).mean()) for outputs in (before, after)]
    return 1.0 - lost[0], 1.0 - lost[1]


# Static int8 quantisation of any graph by the serving contract, in ONNX's QDQ form, by ONNX Runtime's own quantiser.
#
# Activations are uint8, weights int8 per output channel. Weights have 7 bits, so that pairs of products never saturate
# on processors before VNNI: a certified stage gives the same answers on each.

LEAST_OPSET: Final = 13
"""The first with one scale per channel."""
OPERATORS: Final = (
    "Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "Relu",
    "Clip", "LeakyRelu", "Resize",
)  # fmt: skip
"""Operators that are quantised. The arithmetic that decodes boxes, and what forms probabilities, stay float."""


class _CalibrationImages:
    """Images one by one, as the quantiser reads them."""

    def __init__(self, images: Iterable[Pixels]) -> None:
        self._images: Iterator[Pixels] = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        """The next image as the model's input."""
        image = next(self._images, None)
        return None if image is None else {IMAGE: np.ascontiguousarray(image[np.newaxis])}


def int8_model(
    model: bytes, images: Sequence[Pixels], keep_float: Sequence[str], where: str, *, averaged: bool
) -> tuple[bytes, list[str]]:
    """The quantised model, and the nodes that were kept in float.

    Args:
        model: by the serving contract.
        images: inputs (height, width, 3) that the ranges of activations are measured on.
        keep_float: patterns of the names of nodes, as in `*box*`.
        where: names the model in errors.
        averaged: whether a range is the mean over images of each one's extremes, not their extremes: narrower, so that
            one unusual image does not widen it for all.

    Raises:
        ArtifactError: if a pattern fits no node, nothing is left to quantise, or the runtime cannot quantise the model.
    """
    tool = quantiser()
    with tempfile.TemporaryDirectory(prefix="hawkvision-") as folder:
        folded = Path(folder) / "folded.onnx"
        _fold(_modern(model, where), folded, where)
        graph = _named(folded)
        kept = kept_nodes(graph, keep_float, where)
        if not any(node.op_type in OPERATORS and node.name not in kept for node in graph.node):
            raise ArtifactError(
                f"{where}: nothing is left to quantise; the graph has no layer of {', '.join(OPERATORS)}"
            )
        made = Path(folder) / "int8.onnx"
        try:
            with one_run(where, len(images)):
                tool.quantize_static(
                    str(folded),
                    str(made),
                    _CalibrationImages(images),
                    quant_format=tool.QuantFormat.QDQ,
                    op_types_to_quantize=list(OPERATORS),
                    per_channel=True,
                    reduce_range=True,
                    activation_type=tool.QuantType.QUInt8,
                    weight_type=tool.QuantType.QInt8,
                    nodes_to_exclude=kept,
                    extra_options={"CalibMovingAverage": averaged},
                )
        except Exception as error:  # the quantiser raises whatever its parts raise
            raise ArtifactError(
                f"{where}: ONNX Runtime cannot quantise the model: {str(error).splitlines()[0]}"
            ) from error
        done = onnx.load(str(made))
        del done.metadata_props[:]
        content: bytes = done.SerializeToString(deterministic=True)
        return content, kept


def kept_nodes(graph: onnx.GraphProto, patterns: Sequence[str], where: str) -> list[str]:
    """The nodes whose names, or whose outputs', fit a pattern.

    Raises:
        ArtifactError: if a pattern fits none.
    """
    found: list[str] = []
    for pattern in patterns:
        fitting = [
            node.name for node in graph.node if any(fnmatchcase(name, pattern) for name in (node.name, *node.output))
        ]
        if not fitting:
            some = ", ".join(node.name for node in graph.node if node.op_type in OPERATORS)
            raise ArtifactError(f"{where}: --keep-float {pattern!r} fits no node; there are {some[:600]}")
        found += fitting
    return list(dict.fromkeys(found))


def _modern(model: bytes, where: str) -> onnx.ModelProto:
    read = onnx.load_from_string(model)
    version = max(each.version for each in read.opset_import if each.domain in ("", "ai.onnx"))
    if version >= LEAST_OPSET:
        return read
    try:
        return onnx.version_converter.convert_version(read, LEAST_OPSET)
    except Exception as error:  # its errors derive from nothing narrower
        raise ArtifactError(f"{where}: opset {version} cannot be raised to {LEAST_OPSET}: {error}") from error


def _fold(model: onnx.ModelProto, path: Path, where: str) -> None:
    """Write the model with constants and batch normalisations folded, which a quantised layer cannot do later."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    try:
        with one_run(where):
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # see above
        raise ArtifactError(f"{where}: ONNX Runtime cannot load the model: {error}") from error


def _named(path: Path) -> onnx.GraphProto:
    """The graph in a file, with a name for every node, which the quantiser needs to leave one out."""
    model = onnx.load(str(path))
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")  # or the quantiser warns
    onnx.save(model, str(path))
    return model.graph

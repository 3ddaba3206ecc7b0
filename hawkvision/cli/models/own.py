"""Commands about a user's own models: bring them, check them, quantise them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from hawkvision.cli.options import ModelsDir, OwnTask, Unlabelled
from hawkvision.core.command_line import ARGUMENT
from hawkvision.core.errors import ConfigError
from hawkvision.models.input_spec import Interpolation
from hawkvision.system.files import CacheDir

if TYPE_CHECKING:
    from hawkvision.model_zoo.own.adding import Added, AddOrder
    from hawkvision.model_zoo.own.checking import Checked, ObjectCounts
    from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts

SHOWN: Final = 5
"""Images that `models check` lists, most different first."""
_INPUT: Final = "How the model gets its images"
_OUTPUT: Final = "What the model gives"
_STAGE: Final = "The stage"
_AS_THEY_ARE: Final = (
    "layout", "channel_order", "fit", "resize", "crop_fraction", "interpolation", "pad_value", "pad_position",
    "output_meaning", "decoder",
)  # fmt: skip
"""Options that are facts without further reading."""


# fmt: off
class AddOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The options of `hawkvision models add`."""

    task: OwnTask
    model: Annotated[Path, Meta(description="An ONNX file that takes images.", extra=ARGUMENT)]
    labels: Annotated[Path | None, Meta(
        title=_OUTPUT,
        description="Labels in the order of the outputs: a file with one a line, data.yaml, or the folder of class "
        "folders; default: as the file states, else the task's.")] = None
    name: Annotated[str | None, Meta(title=_STAGE, description="Name of the stage; default: the file's.")] = None
    tier: Annotated[Literal["edge", "dc"] | None, Meta(
        title=_STAGE, description="Where it runs; default: the cheapest stage on the edge.")] = None
    allow_worse_reference: Annotated[bool, Meta(
        title=_STAGE, description="Although the reference stage is then worse than an edge stage, by the profile."
    )] = False
    scale: Annotated[str | None, Meta(
        title=_INPUT, description="Pixels 0..255 are multiplied by it first, such as 1/255.")] = None
    mean: Annotated[str | None, Meta(
        title=_INPUT, description="Then subtracted: one number, or one per channel as the model orders them.")] = None
    std: Annotated[str | None, Meta(
        title=_INPUT, description="Then divided by: one number, or one per channel.")] = None
    channel_order: Annotated[Literal["rgb", "bgr"] | None, Meta(
        title=_INPUT, description="Order of the channels.")] = None
    layout: Annotated[Literal["nchw", "nhwc"] | None, Meta(
        title=_INPUT, description="Order of the axes; default: as the graph's shape says.")] = None
    size: Annotated[str | None, Meta(title=_INPUT, description="HEIGHTxWIDTH, for a graph that takes any.")] = None
    fit: Annotated[Literal["crop", "stretch", "letterbox"] | None, Meta(
        title=_INPUT, description="How images of another shape are fitted to the input.")] = None
    resize: Annotated[int, Meta(
        ge=1, title=_INPUT, description="With crop: pixels of the shorter side before the crop.")] | None = None
    crop_fraction: Annotated[float, Meta(
        ge=0.01, le=1, title=_INPUT, description="With crop: the cut-out share of the side.")] | None = None
    interpolation: Annotated[Interpolation | None, Meta(
        title=_INPUT,
        description="How images are scaled: as Pillow or OpenCV do, or faster by bilinear, bicubic, area.")] = None
    pad_value: Annotated[int, Meta(
        ge=0, le=255, title=_INPUT, description="With letterbox: grey beside the image; 114.")] | None = None
    pad_position: Annotated[Literal["centre", "top_left"] | None, Meta(
        title=_INPUT, description="With letterbox: where the image lies; centre.")] = None
    like: Annotated[str | None, Meta(
        title=_INPUT, description="A stage of the task that gets its images in the same way.")] = None
    set_: Annotated[list[str] | None, Meta(
        title=_INPUT, description="NAME=VALUES for a further input of the graph.")] = None
    kind: Annotated[str | None, Meta(title=_OUTPUT, description="Kind of task; default: classification.")] = None
    option: Annotated[list[str] | None, Meta(title=_OUTPUT, description="NAME=VALUE for the kind of task.")] = None
    outputs: Annotated[str | None, Meta(
        title=_OUTPUT,
        description="The outputs to use, or tensors inside the graph, between commas; default: all outputs.")] = None
    output_meaning: Annotated[Literal["logits", "probabilities"] | None, Meta(
        title=_OUTPUT, description="What the numbers of a classifier are, if they do not tell.")] = None
    decoder: Annotated[str | None, Meta(title=_OUTPUT, description="How predictions are read from the outputs.")] = None
    decoder_option: Annotated[list[str] | None, Meta(title=_OUTPUT, description="NAME=VALUE for the decoder.")] = None
    models_dir: ModelsDir = None
    cache_dir: CacheDir = None
# fmt: on


def models_add(given: AddOptions) -> None:
    """Bring your own model: an ONNX file becomes a stage of your task, and nothing about it is guessed.

    What the file does not state is asked for, all at once. A second model of a task makes a cascade.
    """
    from hawkvision.model_zoo.own.adding import add_model
    from hawkvision.models import manifest

    added = add_model(_order(msgspec.structs.asdict(given)), given.models_dir, manifest.cache_dir(given.cache_dir))
    _report_added(given.task, added)


def _order(given: Mapping[str, Any]) -> AddOrder:
    """The order that the options make, by the names of the command's parameters."""
    from hawkvision.model_zoo.own.adding import AddOrder
    from hawkvision.model_zoo.own.graphs import owner_facts as facts

    return AddOrder(
        path=given["model"],
        task=given["task"],
        name=given["name"],
        labels=given["labels"],
        kind=given["kind"],
        kind_options=facts.option_values("--option", given["option"] or ()),
        facts=_facts(given),
        same_as=given["like"],
        fixed={key: facts.numbers("--set", value) for key, value in _assignments("--set", given["set_"] or ())},
        tier=given["tier"],
        allow_worse=given["allow_worse_reference"],
        given=(str(given["model"]), *_words(given)),
    )


def _facts(given: Mapping[str, Any]) -> OwnerFacts:
    """What the owner says of the model."""
    from hawkvision.model_zoo.own.graphs import owner_facts as facts

    size, scale, mean, std, outputs = (given[name] for name in ("size", "scale", "mean", "std", "outputs"))
    return facts.OwnerFacts(
        size=None if size is None else facts.sides("--size", size),
        scale=None if scale is None else facts.number("--scale", scale),
        mean=None if mean is None else facts.numbers("--mean", mean),
        std=None if std is None else facts.numbers("--std", std),
        outputs=() if outputs is None else tuple(name.strip() for name in outputs.split(",")),
        decoder_options=facts.option_values("--decoder-option", given["decoder_option"] or ()),
        **{name: given[name] for name in _AS_THEY_ARE},
    )


def _report_added(task: str, added: Added) -> None:
    """Say what was entered, where, and what comes next."""
    from hawkvision.core.advice import advise

    variant, cascade = added.variant, added.manifest.cascade
    spec, tier = variant.input, "edge" if variant.name in cascade.edge else "datacenter"
    tier = "both tiers" if variant.name in cascade.edge and variant.name in cascade.dc else tier
    batch = "any batch" if added.batch is None else f"batches of {added.batch}"
    how = f"{spec.fit}, crop_fraction {spec.crop_fraction:g}" if spec.fit == "crop" else spec.fit
    print(f"{'replaced' if added.replaced else 'added'} {variant.name!r} in {added.folder}: {tier}")
    print(f"  labels  {added.labels}")
    print(f"  takes   {spec.height}x{spec.width} by {how}, {spec.interpolation}; {batch}")
    print(f"  costs   {added.cpu_ms:.2g} ms of one core per image, {(variant.bytes or 0) / 1e6:.2g} MB")
    print(f"  exact   differs from your graph by at most {added.worst:.1g} of the largest number")
    print(f"  cascade edge {', '.join(cascade.edge)}; datacenter {', '.join(cascade.dc)}")
    for option, meaning in added.unstated.items():
        print(f"not stated: {option}, so nothing serves the stage yet; state it with --decoder-option {option}=VALUE")
        print(f"      {meaning}")
    predictions = "PREDICTIONS.jsonl" if added.located else "PREDICTIONS.csv"
    check = advise("models check", "--task", task, "--reference", predictions)
    print(f"next: `{check}` compares it with predictions of yours, then")
    print(f"      `{advise('calibrate', '--task', task, '--data', 'IMAGES')}`")


def _assignments(option: str, words: list[str] | tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [word.partition("=") for word in words]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise ConfigError(f"{option}: expected NAME=VALUES, got {name + equals + value!r}")
    return [(name, value) for name, _, value in pairs]


def _words(given: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give these options."""
    words: list[str] = []
    for name, value in given.items():
        for each in () if name == "model" else value if isinstance(value, list) else [value]:
            flag = f"--{name.strip('_').replace('_', '-')}"
            words += [] if each in (None, False) else [flag] if each is True else [flag, str(each)]
    return words


def models_check(
    task: OwnTask,
    reference: Annotated[Path, Meta(description="Your predictions: CSV with file, label, probability; or JSON lines.")],
    data: Annotated[Path | None, Meta(description="Folder of the images; default: that of --reference.")] = None,
    stage: Annotated[str | None, Meta(description="The stage; default: the one added last.")] = None,
    tolerance: Annotated[float, Meta(ge=0, le=1, description="Largest accepted difference.")] = 0.05,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> int:
    """Compare what is served with predictions of your own program; exit status 1 beyond the tolerance."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.model_zoo.own.checking import check
    from hawkvision.models import manifest

    found = check(
        task,
        reference,
        data=data,
        stage=stage,
        tolerance=tolerance,
        models=manifest.models_dir(models_dir, task),
        cache=manifest.cache_dir(cache_dir),
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("image", "yours", "served", "difference"):
        table.add_column(title, overflow="fold")
    for image in found.images[:SHOWN]:
        table.add_row(image.file, image.reference, image.served, f"{image.difference:.4f}")
    Console().print(table)
    beyond = sum(image.difference > tolerance for image in found.images)
    print(
        f"{found.stage}: {len(found.images)} images; worst difference {found.worst:.4f}, mean {found.mean:.4f}; "
        f"{beyond} beyond {tolerance:g}"
    )
    if not found.agrees:
        print(_cause(found))
    return int(not found.agrees)


def _cause(found: Checked) -> str:
    """Why predictions differ, as far as that is known, and what to do."""
    differ = "" if found.objects is None else _differing(found.objects)
    if found.unstated:
        differ = f"{', '.join(found.unstated)} is not stated, and nothing serves the stage until it is; "
    if found.better is not None:
        return (
            f"{differ}with {found.better} the mean difference of the worst images is {found.better_mean:.4f}: "
            "add the model again with these options"
        )
    if found.objects is not None:
        return (
            f"{differ}no other order, form or scale of boxes, fit, interpolation or order of channels comes much "
            "closer: check the decoder, its outputs, class_map and score_floor, the threshold of the kind, the order "
            "of --labels, and how pixels are normalised"
        )
    if found.same_labels == len(found.images):
        return (
            "all labels agree, only probabilities differ: check --scale, --mean and --std; or yours are those of a "
            "sigmoid, or of another temperature: without the column `probability` only labels are compared"
        )
    return (
        "no other fit, interpolation or order of channels comes much closer: check --scale, --mean and --std, "
        "the order of --labels, and whether both programs run the same file"
    )


def _differing(counts: ObjectCounts) -> str:
    """How the served objects differ from the owner's."""
    said = (
        (counts.same_label - counts.same_box, f"of your {counts.yours} objects have another box"),
        (counts.yours - counts.same_label, f"of your {counts.yours} objects are missing"),
        (counts.served - counts.same_label, f"of the {counts.served} served objects are not among yours"),
    )
    return "".join(f"{number} {what}; " for number, what in said if number)


def models_quantize(
    stage: Annotated[str, Meta(description="A float stage of the task.", extra=ARGUMENT)],
    task: OwnTask,
    data: Annotated[Path, Meta(description="Your images: a folder per class, or with --unlabelled a plain folder.")],
    precision: Annotated[
        str, Meta(description="int8; or w8a8, w4a8 and so on: an integer network, which FPGAs run.")
    ] = "int8",
    keep_float: Annotated[
        list[str] | None, Meta(description="Nodes that stay float, such as '*box*', by name or output.")
    ] = None,
    name: Annotated[str | None, Meta(description="Name of the new stage; default: STAGE_PRECISION.")] = None,
    tier: Annotated[
        Literal["edge", "dc"] | None, Meta(description="Where it runs; default: as the float stage, or by cost.")
    ] = None,
    unlabelled: Unlabelled = False,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Make a stage in fewer bits from a float one with your images, and say what that costs."""
    from hawkvision.core.advice import advise
    from hawkvision.model_zoo.own.graphs.owner_facts import one_of
    from hawkvision.model_zoo.own.quantising import QuantiseOrder, quantise
    from hawkvision.models import manifest

    wanted = one_of("--precision", precision, manifest.Precision)
    if wanted == "fp32":
        raise ConfigError("--precision: expected int8, or an integer network such as w8a8")
    order = QuantiseOrder(task, stage, data, wanted, tuple(keep_float or ()), name, tier, labelled=not unlabelled)
    made = quantise(order, manifest.models_dir(models_dir, task), manifest.cache_dir(cache_dir))
    variant = made.variant
    cascade = made.manifest.cascade
    print(f"added {variant.name!r} to task {task!r}")
    if made.accuracy is not None:
        before, after = made.accuracy
        print(f"  accuracy   {before:.4f} -> {after:.4f} ({100 * (after - before):+.2f} points)")
    print(f"  agreement  {made.agreement:.4f} with {stage!r}, on {made.measured} images not quantised with")
    sizes = [each.bytes or 0 for each in (made.manifest.variant(stage), variant)]
    print(f"  size       {sizes[0] / 1e6:.3g} -> {sizes[1] / 1e6:.3g} MB")
    print(f"  time       {made.cpu_ms[0]:.2g} -> {made.cpu_ms[1]:.2g} ms of one core in ONNX Runtime")
    if made.kept_float:
        print(f"  float      {', '.join(made.kept_float)}")
    print(f"  cascade    edge {', '.join(cascade.edge)}; datacenter {', '.join(cascade.dc)}")
    print(f"quantised on {made.images} images; next: `{advise('calibrate', '--task', task, '--data', str(data))}`")
    if cascade.fpga == variant.name:
        print(f"      `hawkvision fpga fold --task {task}` compiles it for an FPGA")

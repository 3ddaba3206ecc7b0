"""Commands that bring a user's own models: add, check, quantise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from hawkvision.cli.options import CacheDir, ModelsDir

_INPUT: Final = "How the model gets its images"
_OUTPUT: Final = "What the model gives"
_STAGE: Final = "The stage"

OwnTask = Annotated[str, typer.Option(help="Your task: a new name, or one that you have added to.")]


def models_add(
    task: OwnTask,
    model: Annotated[
        Path | None, typer.Argument(help="An ONNX file that takes images; with --from a state dict (.pth), or none.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="torchvision:NAME, which also says how images are prepared.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="File with one label a line, in the order of the outputs, or the folder of class folders.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the stage; default: the file's.", rich_help_panel=_STAGE)
    ] = None,
    tier: Annotated[
        Literal["edge", "dc"] | None,
        typer.Option(help="Where it runs; default: the cheapest stage on the edge.", rich_help_panel=_STAGE),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Pixels 0..255 are multiplied by it first, such as 1/255.", rich_help_panel=_INPUT),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="Then subtracted: one number, or one per channel as the model orders them.", rich_help_panel=_INPUT
        ),
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Then divided by: one number, or one per channel.", rich_help_panel=_INPUT)
    ] = None,
    channel_order: Annotated[
        Literal["rgb", "bgr"] | None, typer.Option(help="Order of the channels.", rich_help_panel=_INPUT)
    ] = None,
    layout: Annotated[
        Literal["nchw", "nhwc"] | None,
        typer.Option(help="Order of the axes; default: as the graph's shape says.", rich_help_panel=_INPUT),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH, for a graph that takes any.", rich_help_panel=_INPUT)
    ] = None,
    fit: Annotated[
        Literal["crop", "stretch", "letterbox"] | None,
        typer.Option(help="How images of another shape are fitted to the input.", rich_help_panel=_INPUT),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(min=1, help="With crop: pixels of the shorter side before the crop.", rich_help_panel=_INPUT),
    ] = None,
    crop_fraction: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="With crop: the cut-out share of the side.", rich_help_panel=_INPUT),
    ] = None,
    interpolation: Annotated[
        Literal["bilinear", "bicubic", "area"] | None,
        typer.Option(help="How images are scaled.", rich_help_panel=_INPUT),
    ] = None,
    pad_value: Annotated[
        int | None,
        typer.Option(min=0, max=255, help="With letterbox: grey beside the image; 114.", rich_help_panel=_INPUT),
    ] = None,
    pad_position: Annotated[
        Literal["centre", "top_left"] | None,
        typer.Option(help="With letterbox: where the image lies; centre.", rich_help_panel=_INPUT),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="A stage of the task that gets its images in the same way.", rich_help_panel=_INPUT),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUES for a further input of the graph.", rich_help_panel=_INPUT),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Kind of task; default: classification.", rich_help_panel=_OUTPUT)
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the kind of task.", rich_help_panel=_OUTPUT)
    ] = None,
    outputs: Annotated[
        str | None, typer.Option(help="The outputs to use, between commas; default: all.", rich_help_panel=_OUTPUT)
    ] = None,
    output_meaning: Annotated[
        Literal["logits", "probabilities"] | None,
        typer.Option(help="What the numbers of a classifier are, if they do not tell.", rich_help_panel=_OUTPUT),
    ] = None,
    decoder: Annotated[
        str | None, typer.Option(help="How predictions are read from the outputs.", rich_help_panel=_OUTPUT)
    ] = None,
    decoder_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the decoder.", rich_help_panel=_OUTPUT)
    ] = None,
    license_: Annotated[
        str, typer.Option("--license", help="Licence of the model, for the record.", rich_help_panel=_STAGE)
    ] = "unstated",
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Bring your own model: an ONNX file becomes a stage of your task, and nothing about it is guessed.

    What the file does not state is asked for, all at once. A second model of a task makes a cascade.
    """
    from hawkvision.model_zoo.own import owner_facts as facts
    from hawkvision.model_zoo.own.adding import AddOrder, add_model
    from hawkvision.models import manifest

    said = facts.OwnerFacts(
        layout=layout,
        size=None if size is None else facts.sides("--size", size),
        scale=None if scale is None else facts.number("--scale", scale),
        mean=None if mean is None else facts.numbers("--mean", mean),
        std=None if std is None else facts.numbers("--std", std),
        channel_order=channel_order,
        fit=fit,
        resize=resize,
        crop_fraction=crop_fraction,
        interpolation=interpolation,
        pad_value=pad_value,
        pad_position=pad_position,
        outputs=() if outputs is None else tuple(name.strip() for name in outputs.split(",")),
        output_meaning=output_meaning,
        decoder=decoder,
        decoder_options=facts.option_values("--decoder-option", decoder_option or ()),
    )
    given = {
        "task": task, "from": from_, "labels": labels, "name": name, "tier": tier, "scale": scale, "mean": mean,
        "std": std,
        "channel_order": channel_order, "layout": layout, "size": size, "fit": fit, "resize": resize,
        "crop_fraction": crop_fraction, "interpolation": interpolation, "pad_value": pad_value,
        "pad_position": pad_position, "like": like, "set": set_, "kind": kind, "option": option, "outputs": outputs,
        "output_meaning": output_meaning, "decoder": decoder, "decoder_option": decoder_option,
        "models_dir": models_dir, "cache_dir": cache_dir,
    }  # fmt: skip
    if model is None and from_ is None:
        raise typer.BadParameter("expected an ONNX file, or --from torchvision:NAME")
    order = AddOrder(
        path=model or Path(),
        task=task,
        name=name,
        labels=labels,
        kind=kind,
        kind_options=facts.option_values("--option", option or ()),
        facts=said,
        same_as=like,
        fixed={key: facts.numbers("--set", str(value)) for key, value in _assignments("--set", set_ or ())},
        tier=tier,
        license=license_,
        given=(*([] if model is None else [str(model)]), *_words(given)),
    )
    cache = manifest.cache_dir(cache_dir)
    if from_ is None:
        added = add_model(order, models_dir, cache)
    else:
        from hawkvision.model_zoo.own.from_torchvision import add_torchvision

        added = add_torchvision(_torchvision_name(from_), model, order, models_dir, cache)
    _report_added(order.task, added)


def _report_added(task: str, added: Any) -> None:
    """Say what was entered, where, and what comes next."""
    from hawkvision.core.advice import advise

    variant, cascade = added.variant, added.manifest.cascade
    spec, tier = variant.input, "edge" if variant.name in cascade.edge else "datacenter"
    tier = "both tiers" if variant.name in cascade.edge and variant.name in cascade.dc else tier
    batch = "any batch" if added.batch is None else f"batches of {added.batch}"
    how = f"{spec.fit}, crop_fraction {spec.crop_fraction:g}" if spec.fit == "crop" else spec.fit
    typer.echo(f"{'replaced' if added.replaced else 'added'} {variant.name!r} in {added.folder}: {tier}")
    typer.echo(f"  takes   {spec.height}x{spec.width} by {how}, {spec.interpolation}; {batch}")
    typer.echo(f"  costs   {added.cpu_ms:.2g} ms of one core per image, {(variant.bytes or 0) / 1e6:.2g} MB")
    typer.echo(f"  exact   differs from your graph by at most {added.worst:.1g} of the largest number")
    typer.echo(f"  cascade edge {', '.join(cascade.edge)}; datacenter {', '.join(cascade.dc)}")
    predictions = "PREDICTIONS.jsonl" if added.located else "PREDICTIONS.csv"
    check = advise("models check", "--task", task, "--reference", predictions)
    typer.echo(f"next: `{check}` compares it with predictions of yours, then")
    typer.echo(f"      `{advise('calibrate', '--task', task, '--data', 'IMAGES')}`")


def _torchvision_name(text: str) -> str:
    library, _, name = text.partition(":")
    if library != "torchvision" or not name:
        raise typer.BadParameter(f"--from: expected torchvision:NAME, such as torchvision:resnet50, got {text!r}")
    return name


def _assignments(option: str, words: list[str] | tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [word.partition("=") for word in words]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise typer.BadParameter(f"{option}: expected NAME=VALUES, got {name + equals + value!r}")
    return [(name, value) for name, _, value in pairs]


def _words(given: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give these options."""
    words: list[str] = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            words += [] if each is None else [f"--{name.replace('_', '-')}", str(each)]
    return words


def models_check(
    task: OwnTask,
    reference: Annotated[
        Path, typer.Option(help="Your predictions: CSV with file, label, probability; or JSON lines.")
    ],
    data: Annotated[Path | None, typer.Option(help="Folder of the images; default: that of --reference.")] = None,
    stage: Annotated[str | None, typer.Option(help="The stage; default: the one added last.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, max=1, help="Largest accepted difference.")] = 0.05,
    show: Annotated[int, typer.Option(min=0, help="Images to list, most different first.")] = 5,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
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
    for image in found.images[:show]:
        table.add_row(image.file, image.reference, image.served, f"{image.difference:.4f}")
    Console().print(table)
    beyond = sum(image.difference > tolerance for image in found.images)
    typer.echo(
        f"{found.stage}: {len(found.images)} images; worst difference {found.worst:.4f}, mean {found.mean:.4f}; "
        f"{beyond} beyond {tolerance:g}"
    )
    if found.agrees:
        return
    if found.better is not None:
        typer.echo(
            f"with {found.better} the mean difference of the worst images falls to {found.better_mean:.4f}: "
            "add the model again with these options"
        )
    else:
        typer.echo(
            "no other fit, interpolation or order of channels comes much closer: check --scale, --mean and --std, "
            "the order of --labels, and whether both programs run the same file"
        )
    raise typer.Exit(1)


def models_quantize(
    stage: Annotated[str, typer.Argument(help="A float stage of the task.")],
    task: OwnTask,
    data: Annotated[Path, typer.Option(help="Your images: a folder per class, or with --unlabelled a plain folder.")],
    precision: Annotated[
        str, typer.Option(help="int8; or w8a8, w4a8 and so on: an integer network, which FPGAs run.")
    ] = "int8",
    keep_float: Annotated[
        list[str] | None, typer.Option(help="Nodes that stay float, such as '*box*', by name or output.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new stage; default: STAGE_PRECISION.")] = None,
    tier: Annotated[
        Literal["edge", "dc"] | None, typer.Option(help="Where it runs; default: as the float stage, or by cost.")
    ] = None,
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="The images have no labels.")] = False,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Make a stage in fewer bits from a float one with your images, and say what that costs."""
    from hawkvision.core.advice import advise
    from hawkvision.model_zoo.own.owner_facts import one_of
    from hawkvision.model_zoo.own.quantisation.quantising import QuantiseOrder, quantise
    from hawkvision.models import manifest

    wanted = one_of("--precision", precision, manifest.Precision)
    if wanted == "fp32":
        raise typer.BadParameter("--precision: expected int8, or an integer network such as w8a8")
    order = QuantiseOrder(task, stage, data, wanted, tuple(keep_float or ()), name, tier, labelled=not unlabelled)
    made = quantise(order, manifest.models_dir(models_dir, task), manifest.cache_dir(cache_dir))
    variant = made.variant
    cascade = made.manifest.cascade
    typer.echo(f"added {variant.name!r} to task {task!r}")
    if made.accuracy is not None:
        before, after = made.accuracy
        typer.echo(f"  accuracy   {before:.4f} -> {after:.4f} ({100 * (after - before):+.2f} points)")
    typer.echo(f"  agreement  {made.agreement:.4f} with {stage!r}, on {made.measured} images not quantised with")
    typer.echo(f"  size       {made.bytes[0] / 1e6:.3g} -> {made.bytes[1] / 1e6:.3g} MB")
    typer.echo(f"  time       {made.cpu_ms[0]:.2g} -> {made.cpu_ms[1]:.2g} ms of one core in ONNX Runtime")
    if made.kept_float:
        typer.echo(f"  float      {', '.join(made.kept_float)}")
    typer.echo(f"  cascade    edge {', '.join(cascade.edge)}; datacenter {', '.join(cascade.dc)}")
    typer.echo(f"quantised on {made.images} images; next: `{advise('calibrate', '--task', task, '--data', str(data))}`")
    if cascade.fpga == variant.name:
        typer.echo(f"      `hawkvision fpga fold --task {task}` compiles it for an FPGA")

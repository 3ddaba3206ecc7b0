"""`hawkvision models add`: bring a model of your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import typer

from hawkvision.cli.models import add_options as options
from hawkvision.cli.options import CacheDir, ModelsDir

if TYPE_CHECKING:
    from hawkvision.model_zoo.own.adding import Added, AddOrder
    from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts

_AS_THEY_ARE: Final = (
    "layout", "channel_order", "fit", "resize", "crop_fraction", "interpolation", "pad_value", "pad_position",
    "output_meaning", "decoder",
)  # fmt: skip
"""Options that are facts without further reading."""
_NOT_REPEATED: Final = ("model", "license_")
"""Options that the template in an error does not have as options."""


def models_add(
    task: options.Task,
    model: options.ModelFile,
    labels: options.Labels = None,
    name: options.StageName = None,
    tier: options.Tier = None,
    scale: options.Scale = None,
    mean: options.Mean = None,
    std: options.Std = None,
    channel_order: options.ChannelOrder = None,
    layout: options.Layout = None,
    size: options.Size = None,
    fit: options.Fit = None,
    resize: options.Resize = None,
    crop_fraction: options.CropFraction = None,
    interpolation: options.ScaledBy = None,
    pad_value: options.PadValue = None,
    pad_position: options.PadPosition = None,
    like: options.Like = None,
    set_: options.Constants = None,
    kind: options.Kind = None,
    option: options.KindOptions = None,
    outputs: options.Outputs = None,
    output_meaning: options.OutputMeaning = None,
    decoder: options.Decoder = None,
    decoder_option: options.DecoderOptions = None,
    license_: options.License = "unstated",
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Bring your own model: an ONNX file becomes a stage of your task, and nothing about it is guessed.

    What the file does not state is asked for, all at once. A second model of a task makes a cascade.
    """
    given = dict(locals())
    _report_added(task, _added(given))


def _added(given: Mapping[str, Any]) -> Added:
    from hawkvision.model_zoo.own.adding import add_model
    from hawkvision.models import manifest

    return add_model(_order(given), given["models_dir"], manifest.cache_dir(given["cache_dir"]))


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
        license=given["license_"],
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
    typer.echo(f"{'replaced' if added.replaced else 'added'} {variant.name!r} in {added.folder}: {tier}")
    typer.echo(f"  takes   {spec.height}x{spec.width} by {how}, {spec.interpolation}; {batch}")
    typer.echo(f"  costs   {added.cpu_ms:.2g} ms of one core per image, {(variant.bytes or 0) / 1e6:.2g} MB")
    typer.echo(f"  exact   differs from your graph by at most {added.worst:.1g} of the largest number")
    typer.echo(f"  cascade edge {', '.join(cascade.edge)}; datacenter {', '.join(cascade.dc)}")
    predictions = "PREDICTIONS.jsonl" if added.located else "PREDICTIONS.csv"
    check = advise("models check", "--task", task, "--reference", predictions)
    typer.echo(f"next: `{check}` compares it with predictions of yours, then")
    typer.echo(f"      `{advise('calibrate', '--task', task, '--data', 'IMAGES')}`")


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
        for each in () if name in _NOT_REPEATED else value if isinstance(value, list) else [value]:
            words += [] if each is None else [f"--{name.strip('_').replace('_', '-')}", str(each)]
    return words

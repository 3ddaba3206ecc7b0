"""Commands about a user's own models: check them, quantise them. `adding` brings them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hawkvision.cli.options import CacheDir, ModelsDir

if TYPE_CHECKING:
    from hawkvision.model_zoo.own.checking import Checked

OwnTask = Annotated[str, typer.Option(help="Your task: a new name, or one that you have added to.")]


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
    typer.echo(_cause(found))
    raise typer.Exit(1)


def _cause(found: Checked) -> str:
    """Why predictions differ, as far as that is known, and what to do."""
    if found.better is not None:
        return (
            f"with {found.better} the mean difference of the worst images falls to {found.better_mean:.4f}: "
            "add the model again with these options"
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
    from hawkvision.model_zoo.own.graphs.owner_facts import one_of
    from hawkvision.model_zoo.own.quantising import QuantiseOrder, quantise
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

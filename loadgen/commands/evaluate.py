"""`python -m loadgen evaluate`: whether a running node keeps its accuracy targets on labelled images.

A closed loop sends the same images for one target after another, so that the drop below `best` is paired: images that
`best` gets right and the target does not, less the reverse, over all. Accuracies have the exact (Clopper-Pearson) 95 %
interval. Images that a profile was fitted or certified on prove nothing, so by default only those that `hawkvision
calibrate` held out are sent, and only from the data set that it saw.

After Ctrl-C, or if the node fails, the table shows what was answered so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.request import ClassifyFields
from hawkvision.client.response import answer_from_json
from hawkvision.core.errors import ConfigError, HawkVisionError, TargetUnreachable
from hawkvision.core.types import (
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Target,
    target_fields,
)
from hawkvision.models.datasets import LabelledImages
from hawkvision.models.manifest import models_dir
from hawkvision.system.files import write_atomic
from hawkvision.tasks.kind import TaskKind
from loadgen.analysis.evaluation import (
    EvaluatedImage,
    EvaluatedImages,
    TargetRow,
    UnattainableTarget,
    rows_of,
    written,
)
from loadgen.clients.connections import check_server
from loadgen.commands.command_line import option
from loadgen.commands.interrupt import INTERRUPTED_STATUS, first_interrupt, run_unless
from loadgen.commands.terminal import terminal
from loadgen.workload.dataset import Split, chosen_by, read_labelled
from loadgen.workload.held_out import thin
from loadgen.workload.judging import kind_of_task
from loadgen.workload.record import check_files

DEFAULT_TARGETS: Final = "quality=best,quality=balanced,quality=fast,max_accuracy_drop=0.01,max_accuracy_drop=0.05"
MAX_CONCURRENCY: Final = 256
"""Callers in the closed loop; a node sheds beyond its queue of 256."""
LATE_S: Final = 29.0
"""How long after its deadline an answer counts: how late it comes is measured."""


class EvaluationReport(msgspec.Struct, frozen=True):
    """A whole evaluation, as `--json` writes it."""

    url: str
    task: str
    data: str
    data_sha256: str
    split: str
    n: int
    concurrency: int
    rows: tuple[TargetRow | UnattainableTarget, ...]
    interrupted: bool = False
    """By Ctrl-C or by an error. Then rows may have fewer images than `n`, and targets may be missing."""
    not_best: int = 0
    """Answers to `quality=best` that were `degraded`, another stage's: drops are not below the cascade's best then."""


class EvaluateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `python -m loadgen evaluate`."""

    url: Annotated[str, option("Server", "Address of the edge node.")]
    api_key: Annotated[str | None, option("Server", "Key to send with every request.")] = None
    concurrency: Annotated[
        int, option("Server", "Callers; each sends its next image when the last one is answered.")
    ] = 1
    data: Annotated[Path, option("Images", "Labelled images: an npz file, or a folder with a directory per class.")]
    task: Annotated[str, option("Images", "Task of the images.")] = "imagenet"
    split: Annotated[
        Split,
        option(
            "Images",
            "held_out: only images that the calibration did not see; all: for data that it never saw; auto: held_out "
            "where there are some, else those that no model was trained on, if that is known, else all.",
        ),
    ] = "held_out"
    indices: Annotated[
        Path | None,
        option(
            "Images",
            "File that lists the held-out images. Default: held_out.json beside the profile.",
        ),
    ] = None
    class_map: Annotated[
        Path | None,
        option(
            "Images",
            "File with the task's label (or index) of each class directory, a line each: DIRECTORY,LABEL.",
        ),
    ] = None
    limit: Annotated[int | None, option("Images", "Send at most this many images, evenly spread.")] = None
    seed: Annotated[int, option("Images", "Seed of the order in which images are sent.")] = 0
    models_dir: Annotated[
        Path | None,
        option("Images", "Folder of the models, where labels and held-out images are listed."),
    ] = None
    targets: Annotated[str, option("Targets", "Targets to measure, comma-separated, each FIELD=VALUE.")] = (
        DEFAULT_TARGETS
    )
    json: Annotated[Path | None, option("Output", "Write the report to this file.")] = None


async def run(given: EvaluateOptions) -> int:
    """Evaluate as the options say, and print the table.

    The status is 130 after an interrupt, which ends it with what it has; 1 if `best` was not the reference stage's,
    else 0.

    Raises:
        HawkVisionError: for data, indices or targets that do not fit, or a node that does not answer; what was
            answered before is printed and written, too.
    """
    check_server(given.url, given.api_key)
    check_files(given.json)
    targets = parse_targets(given.targets)
    images, chosen = _chosen_images(given)
    seen = EvaluatedImages()
    rows: tuple[TargetRow | UnattainableTarget, ...] | None = None
    failed: HawkVisionError | None = None
    with first_interrupt() as stop:
        async with AsyncClient(
            given.url, api_key=given.api_key, late_s=LATE_S, connections=given.concurrency
        ) as client:
            spec = kind_of_task(given.task, models_dir(given.models_dir, given.task))
            assert spec is not None, "its labels were read"
            task = EvaluatedTask(given.task, spec.open(), spec.form())
            asking = measure(client, task, images, chosen, targets, given.concurrency, seen)
            try:
                rows = await run_unless(stop, asking)
            except HawkVisionError as error:
                if not rows_of(seen, chosen, targets):
                    raise
                failed = error
    report = EvaluationReport(
        url=client.url,
        task=given.task,
        data=images.name,
        data_sha256=images.sha256,
        split=given.split,
        n=len(chosen),
        concurrency=given.concurrency,
        rows=rows_of(seen, chosen, targets) if rows is None else rows,
        interrupted=rows is None,
        not_best=sum(sample.answer.degraded for sample in seen.samples.get(Quality.BEST, {}).values()),
    )
    # A file or a pipe has no width of its own, and Rich would cut the table at 80.
    show(report, terminal(160))
    if given.json is not None:
        write_atomic(given.json, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if failed is not None:
        raise failed
    return INTERRUPTED_STATUS if report.interrupted else int(report.not_best > 0)


def _chosen_images(given: EvaluateOptions) -> tuple[LabelledImages, NDArray[np.intp]]:
    """The data, and the positions of the images to send, in the order of sending."""
    if given.seed < 0:
        raise ConfigError(f"--seed: expected 0 or more, got {given.seed}")
    if not 1 <= given.concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency: expected 1 to {MAX_CONCURRENCY}, got {given.concurrency}")
    models = models_dir(given.models_dir, given.task)
    images = read_labelled(given.data, given.task, models, given.class_map)
    chosen, _ = chosen_by(given.split, images, given.indices or models / given.task / "held_out.json")
    # Data sets come class by class, and a node takes five hundred cats in a row for drift.
    return images, np.random.default_rng(given.seed).permutation(thin(chosen, given.limit))


def parse_targets(text: str) -> tuple[Target, ...]:
    """Targets from `field=value,…`.

    Raises:
        ConfigError: naming the part that is none.
    """
    targets: list[Target] = []
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            match name:
                case "quality":
                    target: Target = Quality(value)
                case "max_accuracy_drop":
                    target = MaxAccuracyDrop(_fraction(value))
                case "min_accuracy":
                    target = MinAccuracy(_fraction(value))
                case "min_confidence":
                    target = MinConfidence(_fraction(value))
                case _:
                    raise ValueError(name)
        except ValueError:
            raise ConfigError(
                f"--targets: expected quality=fast|balanced|best, or max_accuracy_drop, min_accuracy or "
                f"min_confidence with a fraction from 0 to 1; got {part.strip()!r}"
            ) from None
        if target not in targets:
            targets.append(target)
    return tuple(targets)


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:  # also refuses NaN
        raise ValueError(text)
    return value


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """The task that is asked."""

    name: str
    kind: TaskKind[Any]
    path: str
    """Of the API, for tasks of this kind."""


async def measure(
    client: AsyncClient,
    task: EvaluatedTask,
    images: LabelledImages,
    chosen: NDArray[np.intp],
    targets: Sequence[Target],
    concurrency: int,
    seen: EvaluatedImages | None = None,
) -> tuple[TargetRow | UnattainableTarget, ...]:
    """Send the chosen images once per target, `best` first, for the others are compared with it.

    Each answer is in `seen` at once, also for callers that do not wait for the end.

    Raises:
        HawkVisionError: what the node says of an image, with the image's number.
    """
    seen = EvaluatedImages() if seen is None else seen
    await _ask(client, task, images, chosen, Quality.BEST, concurrency, seen)
    for target in targets:
        if target is Quality.BEST:
            continue
        try:
            await _ask(client, task, images, chosen, target, concurrency, seen)
        except TargetUnreachable as error:
            seen.unattainable[target] = error.maximum
    return rows_of(seen, chosen, targets)


async def _ask(
    client: AsyncClient,
    task: EvaluatedTask,
    images: LabelledImages,
    chosen: NDArray[np.intp],
    target: Target,
    concurrency: int,
    seen: EvaluatedImages,
) -> None:
    """Every chosen image. The first refusal ends it: what cannot be answered cannot be judged."""
    samples = seen.samples.setdefault(target, {})
    truths = task.kind.truths(images.annotated())
    waiting = iter(chosen.tolist())
    fields = target_fields(target)

    async def caller() -> None:
        for index in waiting:
            started = time.perf_counter()
            try:
                asked = ClassifyFields(task=task.name, **fields)  # type: ignore[typeddict-item]
                replied = await client.send(task.path, images.bodies[index], asked)
                answer = answer_from_json(replied, task.kind.prediction)
            except HawkVisionError as error:
                error.add_note(f"image {index} of {images.name}, {written(target)}")
                raise
            latency_ms = (time.perf_counter() - started) * 1e3
            samples[index] = EvaluatedImage(1.0 - task.kind.loss(answer.prediction, truths[index]), latency_ms, answer)

    try:
        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(caller())
    except* HawkVisionError as group:
        first = group.exceptions[0]
        raise first from None


def show(report: EvaluationReport, console: Console) -> None:
    """Print the report for a person."""
    table = Table(
        box=None, header_style="bold", title=f"{report.n} images of {report.data} ({report.split}) at {report.url}"
    )
    for title in (
        "target",
        "accuracy",
        "95 % interval",
        "drop below best",
        "guaranteed",
        "status",
        "escalated",
        "degraded",
        "P50 ms",
        "P99 ms",
    ):
        table.add_column(title, justify="left" if title in ("target", "status") else "right", no_wrap=title == "target")
    for row in report.rows:
        if isinstance(row, UnattainableTarget):
            table.add_row(row.target, "", "", "", "", f"unattainable, at most {row.maximum:g}")
            continue
        table.add_row(
            row.target if row.n == report.n else f"{row.target} ({row.n} images)",
            f"{row.accuracy:.1%}",
            f"{row.low:.1%}–{row.high:.1%}",
            f"{row.drop:+.2%} (−{row.lost:.3g} +{row.gained:.3g})",
            "" if row.guaranteed_drop is None else f"≤ {row.guaranteed_drop:.2%}",
            ", ".join(f"{status} {found}" for status, found in row.status.items()),
            f"{row.escalated:.1%}",
            str(row.degraded),
            f"{row.p50_ms:.1f}",
            f"{row.p99_ms:.1f}",
        )
    console.print(table)
    console.print(
        f"closed loop, {report.concurrency} callers; drop: images lost (−) and gained (+) against quality=best"
        + ("; interrupted: targets without answers are missing" if report.interrupted else "")
    )
    if report.not_best:
        console.print(
            f"{report.not_best} of {report.n} answers to quality=best were degraded, another stage's: is the "
            "datacenter reached? Drops are no drops below the reference stage",
            style="bold red",
        )

"""The options that all load tests share, and what is made of them."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from hawkvision.core import __version__
from hawkvision.core.errors import ConfigError
from hawkvision.core.types import OnMiss
from hawkvision.models.manifest import models_dir
from hawkvision.tasks.registry import KIND_OF_FORM
from loadgen.clients.connections import check_server
from loadgen.clients.engine import LoadJob, Protocol, ServerAddress
from loadgen.commands import command_line
from loadgen.commands.command_line import option
from loadgen.workload import target_mix
from loadgen.workload.arrivals import Arrivals, ClosedLoop
from loadgen.workload.dataset import Dataset, Split, read_dataset
from loadgen.workload.judging import path_of
from loadgen.workload.record import Origin, TargetClass

MAX_IN_FLIGHT: Final = 512
"""Unanswered requests, for all processes together: two seconds at 250 per second."""
MOST_IN_FLIGHT: Final = 4096
CLOSED_PLAN: Final = 20_000
"""Requests that are dealt for a closed loop; it begins anew after these."""


class SenderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of everything that sends images: the protocol, the images, and the processes."""

    protocol: Annotated[Protocol, option("Server", "Protocol to send requests with.")] = "http"
    data: Annotated[
        str | None,
        option(
            "Images",
            "Images to send: an npz file, a folder with a directory per class, a COCO annotation file, YOLO's folders, "
            "or a flat folder. Default: a few built-in ones.",
        ),
    ] = None
    limit: Annotated[int | None, option("Images", "Use at most this many images, evenly spread.")] = None
    processes: Annotated[int, option("Load", "Processes that send requests.")] = 1


class LoadOptions(SenderOptions, frozen=True, kw_only=True):
    """The options that all load tests share: the server, the images, the targets, and the senders."""

    url: Annotated[str, option("Server", "Address of the server, such as http://127.0.0.1:8080.")]
    path: Annotated[
        str | None,
        option(
            "Server",
            "Path that images are posted to. Default: the form of the API for the task's kind, such as /v1/detect.",
        ),
    ] = None
    api_key: Annotated[str | None, option("Server", "Key to send with every request.")] = None
    timeout_s: Annotated[float, option("Server", "Seconds after which a request counts as unanswered.")] = 10.0
    task: Annotated[
        str | None,
        option(
            "Images",
            "Task to name in every request; also names the labels. Default: none named, labels of imagenet.",
        ),
    ] = None
    split: Annotated[
        Split,
        option(
            "Images",
            "Which labelled images to use. held_out: those that the calibration did not see; auto: held_out if "
            "the calibration used this very data, else those that no model was trained on, if that is known, else all.",
        ),
    ] = "auto"
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
    targets: Annotated[
        str,
        option(
            "Targets",
            "Targets and their shares, such as max_drop:0.01=0.2,quality:fast=0.5; default: no target.",
        ),
    ] = target_mix.DEFAULT
    deadline_ms: Annotated[float | None, option("Targets", "Deadline of every request, in milliseconds.")] = None
    on_miss: Annotated[
        OnMiss | None,
        option("Targets", "What the server does when it would miss the deadline. Default: its own rule."),
    ] = None
    max_in_flight: Annotated[
        int,
        option("Load", "Most requests without an answer at a time; further ones count as unanswered."),
    ] = MAX_IN_FLIGHT
    seed: Annotated[int, option("Load", "Seed of arrival times, targets and the order of images.")] = 0
    models_dir: Annotated[
        Path | None,
        option("Images", "Folder of the models, where labels and held-out images are listed."),
    ] = None


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """The server, the images, the targets and the number of processes."""

    server: ServerAddress
    dataset: Dataset
    classes: list[TargetClass]
    processes: int
    max_in_flight: int
    seed: int

    def job(self, arrivals: Arrivals, duration_s: float) -> LoadJob:
        """Every request of a run: its time, class and image.

        One seed gives the same requests whatever server is asked, so that runs can be compared in pairs.
        """
        if isinstance(arrivals, ClosedLoop):
            due: list[float] = []
            n = CLOSED_PLAN
        else:
            due = arrivals.due_times(duration_s, self.seed).tolist()
            n = len(due)
        return LoadJob(
            server=self.server,
            fields=[each.fields for each in self.classes],
            target=target_mix.deal(self.classes, n, self.seed + 1).tolist(),
            image=self.dataset.order(n, self.seed + 2).tolist(),
            duration_s=duration_s,
            max_in_flight=self.max_in_flight,
            due=due,
            callers=arrivals.callers if isinstance(arrivals, ClosedLoop) else 0,
        )

    def each_image_once(self, callers: int, duration_s: float | None) -> LoadJob:
        """Every image once per class, one class after another, in a closed loop that ends with them.

        Without a duration it may take as long as if none was answered.
        """
        images, classes = len(self.dataset), len(self.classes)
        target = np.repeat(np.arange(classes), images).tolist()
        return LoadJob(
            server=self.server,
            fields=[each.fields for each in self.classes],
            target=target,
            image=self.dataset.order(len(target), self.seed + 2).tolist(),
            duration_s=len(target) * self.server.timeout_s if duration_s is None else duration_s,
            max_in_flight=self.max_in_flight,
            callers=callers,
            once=True,
        )


def read_setup(given: LoadOptions) -> Setup:
    """What the options say.

    Raises:
        ConfigError: naming the option that does not fit.
    """
    check_server(given.url, given.api_key)
    positive("--timeout-s", given.timeout_s)
    if not 1 <= given.max_in_flight <= MOST_IN_FLIGHT:
        raise ConfigError(f"--max-in-flight: expected 1 to {MOST_IN_FLIGHT}, got {given.max_in_flight}")
    if given.seed < 0:
        raise ConfigError(f"--seed: expected 0 or more, got {given.seed}")
    if given.path is not None and not given.path.startswith("/"):
        raise ConfigError(f"--path: expected to begin with '/', got {given.path!r}")
    if given.protocol != "http" and given.path is not None:
        raise ConfigError(
            f"--path: expected none with --protocol {given.protocol}, which has its own; got {given.path!r}"
        )
    task = given.task or "imagenet"
    dataset = read_dataset(
        given.data,
        task,
        models_dir(given.models_dir, task),
        split=given.split,
        indices=given.indices,
        limit=given.limit,
        class_map=given.class_map,
    )
    path = _checked_path(given, dataset)
    server = ServerAddress(given.url, given.protocol, given.task, path, given.api_key, given.timeout_s)
    classes = target_mix.parse(given.targets, given.deadline_ms, given.on_miss and given.on_miss.value)
    return Setup(server, dataset, classes, given.processes, given.max_in_flight, given.seed)


def _checked_path(given: LoadOptions, dataset: Dataset) -> str:
    """Where images are posted to.

    Raises:
        ConfigError: if that is the form of another kind of task than the one that names the labels.
    """
    if given.path is None:
        return path_of(dataset.kind)
    expected = KIND_OF_FORM.get(given.path)
    if dataset.kind is not None and expected not in (None, dataset.kind.name):
        task = given.task or "imagenet, because --task names none,"
        raise ConfigError(
            f"--path {given.path} is for tasks of kind {expected!r}, and task {task} is of kind {dataset.kind.name!r}"
        )
    return given.path


def positive(option: str, value: float) -> None:
    """Refuse what is no positive number.

    Raises:
        ConfigError: naming the option.
    """
    if not 0.0 < value < math.inf:
        raise ConfigError(f"{option}: expected a number above 0, got {value!r}")


def origin(seed: int) -> Origin:
    """Where a run that begins now comes from."""
    return Origin(
        command=command_line.stated(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        hawkvision=__version__,
        python=platform.python_version(),
        cpu=_processor(),
        cores=len(os.sched_getaffinity(0)),
        load_before=os.getloadavg()[0],
        seed=seed,
    )


def processor_time(stat: Path = Path("/proc/stat")) -> tuple[int, int] | None:
    """(wanted, stolen) since the machine started, all processors together, in ticks; None where nobody counts them.

    Linux counts the time that was wanted and that the machine's host gave to others (proc_stat(5); `st` in top). A
    request that needs a processor meanwhile waits for one that no process of this machine holds.
    """
    try:
        name, *counters = stat.read_text(encoding="ascii").partition("\n")[0].split()
        _, _, _, idle, iowait, _, _, stolen = ticks = [int(each) for each in counters[:8]]  # guests' time is in others
    except (OSError, ValueError):
        return None
    return (sum(ticks) - idle - iowait, stolen) if name == "cpu" else None


def stolen_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The share that was stolen of what was wanted between two `processor_time`, 0..1; None where it is not known.

    It is of the time wanted, because on a machine that is mostly idle little can be stolen, and may still be half of
    what a request needed. A host that has never stolen anything does not count it.
    """
    if before is None or after is None or after[0] <= before[0] or after[1] == 0:
        return None
    return max(0.0, (after[1] - before[1]) / (after[0] - before[0]))


def check_callers(arrivals: Arrivals, processes: int) -> None:
    """Refuse a closed loop with fewer callers than processes: some processes would have nothing to do.

    Raises:
        ConfigError: saying so.
    """
    if isinstance(arrivals, ClosedLoop) and arrivals.callers < processes:
        raise ConfigError(f"--processes {processes}: expected at most as many as callers, {arrivals.callers}")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # no Linux
        pass
    return platform.machine()

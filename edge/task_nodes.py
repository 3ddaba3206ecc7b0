"""Loads and opens the nodes of all tasks. A task that cannot be served takes no other down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future

from edge.factory import Environment, NodeComponents, load_components, open_node
from edge.inference.shared_models import SharedModels
from edge.serving.tasks import Entry, ServedTasks, TaskFailure
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.models.manifest import load_manifest, models_dir

log = logging.getLogger("hawkvision.edge")

Loaded = NodeComponents | TaskFailure


def load_tasks(configs: Mapping[str, EdgeConfig], given_up: Future[None] | None = None) -> dict[str, Loaded]:
    """Load the components of each task, one after the other; `given_up` ends the waiting for a device.

    Raises:
        HawkVisionError: if no task can be loaded; the error of the first.
    """
    loaded: dict[str, Loaded] = {}
    failed: list[Exception] = []
    models = SharedModels()
    for task, config in configs.items():
        try:
            loaded[task] = load_components(config, given_up, models)
        except Exception as error:
            if len(configs) == 1:
                raise
            failed.append(error)
            loaded[task] = _failure(config, error)
    if len(failed) == len(configs):
        raise failed[0]
    return loaded


async def open_tasks(
    configs: Mapping[str, EdgeConfig], loaded: Mapping[str, Loaded], shared: Environment
) -> ServedTasks:
    """The tasks on the running event loop, with warm nodes.

    Raises:
        HawkVisionError: if no task can be opened; the error of the first.
    """
    entries: list[Entry] = []
    failed: list[Exception] = []
    for task, found in loaded.items():
        if isinstance(found, TaskFailure):
            entries.append(found)
            continue
        try:
            entries.append(await open_node(configs[task], found, shared))
        except Exception as error:
            if len(configs) == 1:
                raise
            failed.append(error)
            entries.append(_failure(configs[task], error))
    tasks = ServedTasks(entries)
    if not tasks.nodes:
        raise failed[0]
    for node in tasks.nodes:
        node.pool.beside = tuple(other.pool for other in tasks.nodes if other is not node)
    return tasks


async def close_tasks(tasks: ServedTasks) -> None:
    """Close all nodes; a node that fails to close does not keep the others open."""
    ended = await asyncio.gather(*(node.close() for node in tasks.nodes), return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException):
            raise error


def _failure(config: EdgeConfig, error: Exception) -> TaskFailure:
    """The record of a failed task, which is logged."""
    task = config.task
    try:
        kind: str | None = load_manifest(task, models_dir(config.models_dir, task)).kind
    except HawkVisionError:
        kind = None
    if isinstance(error, HawkVisionError):
        log.error("task %s cannot be served: %s", task, error.message)
        return TaskFailure(task, error.message, kind)
    log.error("task %s cannot be served", task, exc_info=error)
    return TaskFailure(task, f"{type(error).__name__} while it was loaded; the log of the node says more", kind)

"""The settings of each task of an edge node that serves several.

The node's settings hold for all of its tasks. `edge.task_settings` overrides those of one task, and settings that can
only be of one task are refused where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import EdgeConfig

OF_ONE_TASK: Final = ("variant", "profile", "certificates", "state_file")
"""Settings that name something of one task."""
OF_EACH_TASK: Final = (
    *OF_ONE_TASK,
    "backend",
    "onnx_precision",
    "workers",
    "intra_op_threads",
    "max_queue",
    "memory_bytes",
    "request_memory_bytes",
    "audit_share",
    "certificate_max_age_days",
    "max_streams",
)
"""Settings that `task_settings` takes."""
SHARED: Final[Mapping[str, int]] = {"max_queue": 1, "memory_bytes": 32 * 1024 * 1024}
"""Settings that tasks share in equal parts, and the least part."""

Converter = Callable[[dict[str, Any], str], EdgeConfig]
"""Settings from their names and texts, and where they were written; raises `ConfigError`."""


def superseding(before: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of earlier sources and of the next one, in which `task` and `tasks` replace each other.

    Raises:
        ConfigError: if one source has both.
    """
    single, several = "task" in given, bool(given.get("tasks"))
    if single and several:
        raise ConfigError(f"{where}: task and tasks are both given; expected one of them")
    other = {"tasks"} if single else {"task"} if several else set()
    return {**{name: value for name, value in before.items() if name not in other}, **given}


def tasks_of(config: EdgeConfig) -> tuple[str, ...]:
    """The tasks that a node serves, the default first."""
    return config.tasks or (config.task,)


def check_tasks(config: EdgeConfig, convert: Converter) -> None:
    """Refuse what contradicts several tasks.

    Raises:
        ConfigError: naming the setting, what was expected and what was found.
    """
    names = tasks_of(config)
    if "," in config.task:
        raise ConfigError(f"edge.task = {config.task!r}: expected one task; for several: --tasks {config.task}")
    if len(set(names)) != len(names):
        raise ConfigError(f"edge.tasks: expected each task once, got {', '.join(names)}")
    if unknown := set(config.pinned_tasks) - set(names):
        raise ConfigError(f"edge.pinned_tasks: expected some of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    for name in OF_ONE_TASK if len(names) > 1 else ():
        if (value := getattr(config, name)) is not None:
            raise ConfigError(
                f"edge.{name} = {str(value)!r} is of one task, and there are several: write it in edge.task_settings, "
                f"as {names[0]}.{name}={value}"
            )
    for name, least in SHARED.items():
        value = getattr(config, name)
        if value is not None and value < least * len(names):
            raise ConfigError(f"edge.{name} = {value}: expected at least {least} for each of {len(names)} tasks")
    overrides(config, convert)


def of_each_task(config: EdgeConfig, convert: Converter) -> dict[str, EdgeConfig]:
    """The settings of each task, as those of a node that serves it alone.

    Raises:
        ConfigError: as `check_tasks`.
    """
    names, given = tasks_of(config), overrides(config, convert)
    whole = {name: value for name in SHARED if (value := getattr(config, name)) is not None}
    parts = {name: value // len(names) for name, value in whole.items()}
    return {
        task: msgspec.structs.replace(
            config, **{**parts, **given.get(task, {}), "task": task, "tasks": (), "task_settings": ()}
        )
        for task in names
    }


def overrides(config: EdgeConfig, convert: Converter) -> dict[str, dict[str, Any]]:
    """The values of `task_settings`, by task and setting.

    Raises:
        ConfigError: for a word of another form, another task, a setting of the whole node, or a bad value.
    """
    names, found = tasks_of(config), dict[str, dict[str, Any]]()
    for word in config.task_settings:
        where, equals, value = word.partition("=")
        task, dot, name = where.rpartition(".")
        if not (equals and dot and task and name):
            raise ConfigError(f"edge.task_settings: expected TASK.SETTING=VALUE, got {word!r}")
        if task not in names:
            raise ConfigError(f"edge.task_settings: {word!r} is of task {task!r}; served are {', '.join(names)}")
        if name not in OF_EACH_TASK:
            raise ConfigError(
                f"edge.task_settings: {word!r}: {name!r} is no setting of a task; those are {', '.join(OF_EACH_TASK)}"
            )
        if name in found.setdefault(task, {}):
            raise ConfigError(f"edge.task_settings: {task}.{name} is given twice")
        found[task][name] = getattr(convert({name: value}, f"edge.task_settings: {word}"), name)
    return found

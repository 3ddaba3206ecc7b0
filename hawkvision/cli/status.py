"""`hawkvision status`: what edge nodes do now (`GET /v1/status`), in a terminal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from msgspec import Meta

from hawkvision.cli.options import NODE_URL
from hawkvision.core.command_line import ARGUMENT
from hawkvision.core.errors import HawkVisionError, NotReady
from hawkvision.system.terminal import on_one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

TIMEOUT_S: Final = 5.0
"""A node that says nothing for so long is not reached."""
PAUSE_S: Final = 1.0
"""Before one of several nodes that are watched is asked again."""
MOST_ANSWERS: Final = 8
SHARES: Final = ("edge", "escalated", "degraded", "refused")
Found: TypeAlias = dict[str, dict[str, Any] | HawkVisionError]
"""The status of each node by its address, or why there is none."""


def status(
    urls: Annotated[
        list[str] | None,
        Meta(description=f"Addresses of edge nodes; default: HAWKVISION_URL, or {NODE_URL}.", extra=ARGUMENT),
    ] = None,
    watch: Annotated[bool, Meta(description="Go on until Ctrl-C, or until the only node stops.")] = False,
    api_key: Annotated[
        str | None,
        Meta(description="The nodes' key; it must allow `observe`.", extra={"variable": "HAWKVISION_API_KEY"}),
    ] = None,
    ca: Annotated[
        Path | None,
        Meta(description="PEM file of the nodes' certificate authority.", extra={"variable": "HAWKVISION_CA"}),
    ] = None,
) -> int:
    """Show what edge nodes do now, several on a line each; exit status 1 if one of them says nothing."""
    from rich.console import Console

    console, asked = Console(highlight=False), urls or [os.environ.get("HAWKVISION_URL") or NODE_URL]
    found: Found = {url: NotReady("has not answered yet") for url in asked}

    def show() -> None:
        if watch:
            console.clear()
        console.print(_shown(found), crop=False)

    async def run() -> None:
        following = (_follow(url, found, show if watch else None, api_key=api_key, ca=ca) for url in found)
        await asyncio.gather(*following)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        return 0
    show()
    return int(any(isinstance(each, HawkVisionError) for each in found.values()))


async def _follow(url: str, found: Found, show: Callable[[], None] | None, **access: Any) -> None:
    """Keep the status of one node; without `show`, ask once. Several nodes are asked again for ever."""
    from hawkvision.client.asynchronous import AsyncClient

    async with AsyncClient(url, timeout_s=TIMEOUT_S, **access) as client:
        while True:
            try:
                if show is None:
                    found[url] = await client.status()
                    return
                async for line in client.watch_status():
                    found[url] = line
                    show()
                if len(found) == 1:
                    return
                found[url] = NotReady("has stopped")
            except HawkVisionError as error:
                found[url] = error
                if show is None or len(found) == 1:
                    return
            show()
            await asyncio.sleep(PAUSE_S)


# -------------------------------------------------------------------------------------------------------- what is shown


def _shown(found: Found) -> RenderableType:
    """One node in full, several on a line each."""
    from rich.console import Group
    from rich.text import Text

    only = next(iter(found.values()))
    if len(found) == 1 and not isinstance(only, HawkVisionError):
        return Group(*_view(next(iter(found)), only))
    width = max(map(len, found))
    lines = (f"{url:{width}}  {_line(url, now)}" for url, now in found.items())
    return Group(*(Text(line, no_wrap=True, overflow="ignore") for line in lines))


def _line(url: str, now: dict[str, Any] | HawkVisionError) -> str:
    if isinstance(now, HawkVisionError):
        return f"error: {on_one_line(now.message.removeprefix(f'{url} '))}"
    tasks = now["tasks"]
    total = sum(task["per_s"] for task in tasks)
    p99_ms = max((task["p99_ms"] for task in tasks if task["p99_ms"] is not None), default=None)
    alarms = sum(alarm["ended"] is None for task in tasks for alarm in task["alarms"])
    shares = (sum(task[name] * task["per_s"] for task in tasks) / (total or 1.0) for name in SHARES)
    said = [_state(now), f"{total:.1f}/s", f"P99 {_number(p99_ms)} ms"]
    said += (f"{name} {_percent(share)}" for name, share in zip(SHARES, shares, strict=True))
    said += dict.fromkeys(_guarantee(task["guarantee"][0]) for task in tasks)
    return ", ".join([*said, *([f"alarms: {alarms}"] if alarms else []), _datacenter(now)])


def _view(url: str, now: dict[str, Any]) -> Iterator[RenderableType]:
    from rich.text import Text

    memory, tasks, up = now["memory"], now["tasks"], timedelta(seconds=round(now["uptime_s"]))
    yield Text(f"{url}: {_state(now)}, HawkVision {now['version']}, up {up}\n{_datacenter(now)}")
    megabytes = [(memory[f"{each}_bytes"] or 0) / 1e6 for each in ("resident", "bodies", "bodies_limit")]
    yield Text("memory {:.0f} MB, bodies {:.1f} of {:.0f} MB".format(*megabytes))
    rates = ("per_s", "p50_ms", "p99_ms")
    yield _table(
        ("task", "requests/s", "P50 ms", "P99 ms", *SHARES, "queue"),
        [
            (task["task"], *(_number(task[each]) for each in rates), *(_percent(task[each]) for each in SHARES),
             f"{task['queue']}/{task['queue_limit']}")
            for task in tasks
        ],
    )  # fmt: skip
    yield _table(
        ("task", "whose", "guarantee", "audits", "edge differs", "certified", "max drop"),
        [
            (task["task"], _whose(row), _guarantee(row), f"{row['audits_made']}/{row['audits_due']}",
             *(_percent(row[each]) for each in ("disagreement", "certified_disagreement", "max_drop")))
            for task in tasks for row in task["guarantee"]
        ],
    )  # fmt: skip
    for task in tasks:
        for alarm in task["alarms"]:
            ended = "" if alarm["ended"] is None else f" (ended {_time(alarm['ended'])})"
            cause = on_one_line(alarm["cause"])
            yield Text(f"\nalarm {_time(alarm['time'])} {task['task']} {alarm['stream'] or 'node'}: {cause}{ended}")
    yield _table(
        ("at (UTC)", "task", "answer", "by", "guarantee", "ms"),
        [
            (_time(each["time"])[11:], each["task"], on_one_line(each["text"]), each["tier"], each["status"],
             _number(each["ms"]))
            for each in now["answers"][:MOST_ANSWERS]
        ],
    )  # fmt: skip


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(*titles, box=None, pad_edge=False, header_style="bold", title=" ")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _state(now: dict[str, Any]) -> str:
    failed = f", without {', '.join(now['failed'])}" if now["failed"] else ""
    return f"{'stopping' if now['draining'] else 'ready' if now['ready'] else 'starting'}{failed}"


def _datacenter(now: dict[str, Any]) -> str:
    seen, link = now["datacenter"], now["link"]
    if not seen["configured"]:
        return "no datacenter"
    lost = "" if link["loss"] is None else f", loss {_percent(link['loss'])}"
    said = f"datacenter {'up' if seen['up'] else 'down'}, circuit breaker {seen['circuit_breaker']}"
    return f"{said}, answers in {_number(seen['rtt_ms'])} ms by {link['transport']}{lost}"


def _guarantee(row: dict[str, Any]) -> str:
    return row["status"] if row["reason"] is None else f"{row['status']} ({row['reason']})"


def _whose(row: dict[str, Any]) -> str:
    return "node" if row["stream"] is None else f"{'stream' if row['named'] else 'caller'} {row['stream'][:8]}"


def _time(text: str | None) -> str:
    return "at an unknown time" if text is None else text[:19].replace("T", " ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.3g} %"

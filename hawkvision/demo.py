"""The demonstration: both tiers really started on loopback, real photographs, several targets, a clean stop."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hawkvision.client import Client
from hawkvision.errors import HawkVisionError, NotReady
from hawkvision.manifest import load_manifest, models_dir
from hawkvision.process import running
from hawkvision.types import Answer, target_fields
from hawkvision.zoo import build

PICTURES: Final = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png", "motorcycle_left.png")


class AnswerTable:
    """Answers as rows a person can read."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Answer]] = []

    def add(self, name: str, answer: Answer) -> None:
        """One more row, under the picture's name."""
        self.rows.append((name, answer))

    def show(self, console: Console | None = None) -> None:
        """Print the table."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("picture", "target", "label", "confidence", "tier", "model", "ms", "promise"):
            table.add_column(title, justify="right" if title in ("confidence", "ms") else "left")
        for name, answer in self.rows:
            target = "=".join(str(part) for part in next(iter(target_fields(answer.accuracy.target).items())))
            promise = answer.accuracy.status.value
            if answer.accuracy.max_drop is not None:
                promise += f", drop ≤ {answer.accuracy.max_drop:.3g}"
            if answer.degraded:
                promise += ", degraded"
            cells = (
                name,
                target,
                answer.label,
                f"{answer.confidence:.1%}",
                answer.tier.value,
                answer.model,
                f"{answer.timing_ms.total:.1f}",
                promise,
            )
            table.add_row(*map(Text, cells))  # as text, for names and labels may hold what Rich takes for markup
        (console or Console()).print(table)


def show_error(console: Console, error: HawkVisionError) -> None:
    """Print an error as it is: what servers said may hold brackets, as in `[/tmp/ray/session]`."""
    console.print(Text.assemble(("error:", "red"), f" {error}"))


def demo_pictures(folder: Path | None) -> list[Path]:
    """The pictures to classify: those of `folder`, else the photographs inside scikit-image's wheel.

    Raises:
        NotReady: if there are none; says what to install.
    """
    if folder is not None:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
    else:
        spec = importlib.util.find_spec("skimage")
        data = Path(spec.origin).parent / "data" if spec and spec.origin else Path()
        found = [data / name for name in PICTURES if (data / name).is_file()]
    if not found:
        where = folder or "the package scikit-image (pip install 'hawkvision[demo]')"
        raise NotReady(f"no pictures to show: expected some in {where}")
    return found


def run(cache: Path, folder: Path | None = None) -> int:
    """Run the demonstration; 0 if every picture got an answer."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    pictures = demo_pictures(folder)
    models = models_dir()
    manifest = load_manifest("imagenet", models)
    build.build(manifest.task, models=models, cache=cache)
    console.print("starting the datacenter tier (Ray Serve) and an edge node on loopback …")
    where = {"HAWKVISION_DC_CACHE_DIR": str(cache), "HAWKVISION_EDGE_CACHE_DIR": str(cache)}
    # A demonstration runs for a minute, and should in containers that allow no namespaces as well.
    where["HAWKVISION_DC_RAY_NETWORK"] = os.environ.get("HAWKVISION_DC_RAY_NETWORK", "auto")
    try:
        with (
            running("hawkvision.datacenter", "--port", "0", title="the datacenter tier", env=where) as dc,
            running("edge", "--port", "0", "--dc-url", dc.url, title="the edge node", env=where) as edge,
            Client(edge.url) as client,
        ):
            console.print(f"datacenter {dc.url}, edge {edge.url}\n")
            answers = _classify_all(client, pictures)
            answers.show(console)
            at_edge = sum(answer.tier.value == "edge" for _, answer in answers.rows)
            console.print(
                f"\n{len(answers.rows)} pictures answered, {at_edge} at the edge, "
                f"{len(answers.rows) - at_edge} in the datacenter; nobody named a model."
            )
    except HawkVisionError as error:
        show_error(console, error)
        return 1
    return 0


def _classify_all(client: Client, pictures: list[Path]) -> AnswerTable:
    """Every picture at every target; the hardest absolute targets lie just below what the ladder reaches."""
    reachable = float(client.targets()["maximum_min_accuracy"])
    answers = AnswerTable()
    client.classify(pictures[0], quality="best")  # opens the connections that later answers find warm
    for picture in pictures:
        for quality in ("fast", "balanced", "best"):
            answers.add(picture.name, client.classify(picture, quality=quality))
        for below in (0.03, 0.005):
            target = round(reachable - below, 3)
            answers.add(picture.name, client.classify(picture, min_accuracy=target, deadline_ms=2000))
    return answers

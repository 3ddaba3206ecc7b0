"""`hawkvision demo`: start both tiers on loopback, classify photographs at several targets, stop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hawkvision.cli.answer_table import AnswerTable
from hawkvision.cli.up import first_whole_answer
from hawkvision.client.blocking import Client
from hawkvision.core.errors import HawkVisionError, NotReady
from hawkvision.model_zoo.building import build
from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.models.sample_images import photographs
from hawkvision.system.child_server import running


def show_error(console: Console, error: HawkVisionError) -> None:
    """Print an error without markup: output of servers may contain brackets, as in `[/tmp/ray/session]`."""
    console.print(Text.assemble(("error:", "red"), f" {error}"))


def demo_images(folder: Path | None) -> list[Path]:
    """The images to classify: those in `folder`, else the photographs of scikit-image.

    Raises:
        NotReady: if there are none; says what to install.
    """
    if folder is None:
        found = photographs()
    else:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
    if not found:
        where = folder or "the package scikit-image (in a checkout, pip install '.[demo]')"
        raise NotReady(f"no images to show: expected some in {where}")
    return found


def run(cache: Path, folder: Path | None = None, program: str = "hawkvision") -> int:
    """Run the demonstration. Returns 0 if every image was answered.

    Args:
        cache: where built models lie.
        folder: of images; default: photographs of scikit-image.
        program: how this command is called, for the advice at the end.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    images = demo_images(folder)
    models = models_dir()
    manifest = load_manifest("imagenet", models)
    console.print("1/4  building the models (once; weights are downloaded) …")
    build.build(manifest.task, models=models, cache=cache)
    where = {"HAWKVISION_DC_CACHE_DIR": str(cache), "HAWKVISION_EDGE_CACHE_DIR": str(cache)}
    # `auto` also works in containers without namespaces.
    where["HAWKVISION_DC_RAY_NETWORK"] = os.environ.get("HAWKVISION_DC_RAY_NETWORK", "auto")
    console.print("2/4  starting the datacenter tier (Ray Serve) …")
    try:
        with running("hawkvision.datacenter", "--port", "0", title="the datacenter tier", env=where) as dc:
            console.print(f"     {dc.url}\n3/4  starting an edge node …")
            with (
                running("edge", "--port", "0", "--datacenter-url", dc.url, title="the edge node", env=where) as edge,
                Client(edge.url) as client,
            ):
                console.print(f"     {edge.url}\n4/4  classifying {len(images)} images at several targets …\n")
                first_whole_answer(client, images[0], (dc, edge))
                answers = _classify_all(client, images)
                answers.show(console)
                at_edge = sum(answer.tier.value == "edge" for _, answer in answers.rows)
                console.print(
                    f"\n{len(answers.rows)} requests answered, {at_edge} at the edge, "
                    f"{len(answers.rows) - at_edge} in the datacenter; nobody named a model."
                )
    except HawkVisionError as error:
        show_error(console, error)
        return 1
    console.print(f"next: `{program} up` starts both tiers and shows how to ask about an image of your own")
    return 0


def _classify_all(client: Client, images: list[Path]) -> AnswerTable:
    """Classify every image at every target; the hardest absolute targets are just below the cascade's maximum."""
    reachable = float(client.targets()["maximum_min_accuracy"])
    answers = AnswerTable()
    for image in images:
        for quality in ("fast", "balanced", "best"):
            answers.add(image.name, client.classify(image, quality=quality))
        answers.add(image.name, client.classify(image, max_accuracy_drop=0.01))
        for below in (0.03, 0.005):
            target = round(reachable - below, 3)
            answers.add(image.name, client.classify(image, min_accuracy=target, deadline_ms=2000))
    return answers

"""`python -m tests.bench.cascade.ensemble --data … URL [URL …]`: times of running datacenter tiers for the same images.

Each image goes to every tier, in rotating order, one request at a time, in several ways: to the reference stage with
partial replies, as for a caller with a deadline (`parts`), or without (`whole`); and to an intermediate stage first,
followed by the reference stage if the score is too low (`STAGE@SCORE`, only at tiers with that stage). To compare two
versions, start the tier of an older checkout beside:

    hawkvision dc up --port 8090 &  cd ../older; hawkvision dc up --port 8091 &

The time in models is the sum over all members and views of an image, from `GET /metrics`.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hawkvision.core.errors import HawkVisionError
from hawkvision.core.escalation_api import (
    INFER_PATH,
    STAGES_PATH,
    EscalationReply,
    EscalationRequest,
    IntermediateOffer,
    StageList,
)
from hawkvision.core.trace_context import start_trace
from hawkvision.core.types import Score
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import load_labels, load_manifest, models_dir
from tests.hawkvision.tasks.classes import read_reply, top_k

MODEL_TIME: Final = "hawkvision_datacenter_inference_duration_seconds_sum"
WARM_UP: Final = 20


class RunningTier:
    """One tier, over one connection that is kept."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self.url = url
        self._http = http.client.HTTPConnection(where.hostname or "", where.port)
        listing = msgspec.json.decode(self._get(STAGES_PATH), type=StageList)
        self.best, self.stages = listing.best, {stage.name for stage in listing.stages}

    def ask(self, body: bytes, request: EscalationRequest) -> tuple[EscalationReply, float]:
        """The reply that counts, and the milliseconds that it took."""
        headers = request.headers() | {"traceparent": start_trace().header()}
        begun = time.perf_counter()
        self._http.request("POST", INFER_PATH, body, headers)
        response = self._http.getresponse()
        content = response.read()
        taken_ms = (time.perf_counter() - begun) * 1e3
        if response.status != 200:
            raise HawkVisionError(f"{self.url}: HTTP {response.status}: {content[:200]!r}")
        return read_reply(content.splitlines()[-1]), taken_ms

    def model_s(self) -> float:
        """Seconds that all inferences took so far."""
        lines = self._get("/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(MODEL_TIME))

    def _get(self, path: str) -> bytes:
        self._http.request("GET", path)
        return self._http.getresponse().read()


@dataclass(slots=True)
class EnsembleCell:
    """What one tier did with all images asked about in one way."""

    taken_ms: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    by_best: list[bool] = field(default_factory=list)
    model_s: float = 0.0


def ways(best: str, intermediate: tuple[str, float] | None, task: str) -> dict[str, EscalationRequest]:
    """How tiers are asked, by name."""
    waiting = EscalationRequest(task=task, variant=best)
    hurried = msgspec.structs.replace(waiting, deadline_ms=10_000.0, progressive=True)
    found = {"whole": waiting, "parts": hurried}
    if intermediate is not None:
        stage, score = intermediate
        terms = IntermediateOffer(Score.TOP1, score, best)
        found[f"{stage}@{score:g}"] = msgspec.structs.replace(hurried, variant=stage, intermediate=terms)
    return found


def study(
    tiers: list[RunningTier], images: LabelledImages, chosen: list[int], requests: dict[str, EscalationRequest]
) -> dict[tuple[str, str], EnsembleCell]:
    """All images at all tiers that have the stage, one way after the other."""
    cells: dict[tuple[str, str], EnsembleCell] = defaultdict(EnsembleCell)
    for name, request in requests.items():
        asked = [tier for tier in tiers if request.variant in tier.stages]
        for i in chosen[:WARM_UP]:
            for tier in asked:  # in turns: a tier closes connections that are idle
                tier.ask(images.bodies[i], request)
        for tier in asked:
            cells[name, tier.url].model_s = -tier.model_s()
        for turn, i in enumerate(track(chosen, name, transient=True)):
            first = turn % max(1, len(asked))
            for tier in asked[first:] + asked[:first]:
                reply, taken_ms = tier.ask(images.bodies[i], request)
                cell = cells[name, tier.url]
                cell.taken_ms.append(taken_ms)
                cell.said.append(top_k(reply)[0].index)
                cell.right.append(top_k(reply)[0].index == images.labels[i])
                cell.by_best.append(reply.model == tier.best)
        for tier in asked:
            cells[name, tier.url].model_s += tier.model_s()
    return cells


def show(cells: dict[tuple[str, str], EnsembleCell], console: Console) -> None:
    """One row for each way and tier."""
    table = Table(
        "asked", "tier", "n", "P50 ms", "P90", "P99", "ms in models", "by best %", "right %", "as the first %"
    )
    first: dict[str, list[int]] = {}
    for (name, url), cell in cells.items():
        reference = first.setdefault("whole", cell.said)
        table.add_row(
            name,
            url,
            str(len(cell.said)),
            *(f"{value:.1f}" for value in np.percentile(cell.taken_ms, (50, 90, 99))),
            f"{cell.model_s * 1e3 / len(cell.said):.1f}",
            f"{100 * np.mean(cell.by_best):.1f}",
            f"{100 * np.mean(cell.right):.1f}",
            f"{100 * np.mean(np.equal(cell.said, reference)):.1f}",
        )
    console.print(table)


def main() -> int:
    """Ask all tiers, and print what they took."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("url", nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="as `hawkvision calibrate` takes it")
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--intermediate", help="STAGE@SCORE")
    parser.add_argument("--seed", type=int, default=1)
    words = parser.parse_args()
    manifest = load_manifest(words.task, models_dir())
    images = read_images(words.data, load_labels(manifest, models_dir()))
    chosen = np.random.default_rng(words.seed).permutation(len(images))[: words.images].tolist()
    stage, _, score = (words.intermediate or "").partition("@")
    intermediate = (stage, float(score)) if words.intermediate else None
    requests = ways(manifest.best, intermediate, words.task)
    show(study([RunningTier(url) for url in words.url], images, chosen, requests), Console(width=140))
    return 0


if __name__ == "__main__":
    sys.exit(main())

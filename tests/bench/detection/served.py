"""`python -m tests.bench.detection.served --data …/coco_eval.npz [--task coco]`: both tiers over HTTP on one machine.

Starts a datacenter tier and an edge node with their defaults, and sends every image of val2017 once per target, one at
a time, each as a caller would. For each target: accuracy (1 − mean loss; of detection the mean F1) and for detection
mAP and AP50, of val2017 and of the images on which no model was trained; the share that was answered by the datacenter,
P50 and P99 of the round trip, and how often each status was given. `--only-rates` leaves that out.

Then images/s at a target that the edge answers alone, with several callers at once: of the edge node, of one that runs
its model in ONNX Runtime, and of a bare loop that decodes, runs the same model in ONNX Runtime and decodes its boxes on
one thread. Rounds alternate; the worst and the best are given.
"""

from __future__ import annotations

import argparse
import http.client
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track

from hawkvision.core.types import Prediction
from hawkvision.imaging.placement import placement
from hawkvision.imaging.preprocessing import load_input
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import Manifest, cache_dir, load_manifest, models_dir
from hawkvision.system.child_server import running
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.boxes.average_precision import detection_quality
from hawkvision.tasks.boxes.rows import TrueBoxes
from hawkvision.tasks.decoders.registry import open_decoder
from hawkvision.tasks.detection import Detection
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import load_kind

TARGETS: Final = (
    *(f"quality={name}" for name in ("fast", "balanced", "best")),
    *(f"max_accuracy_drop={d}" for d in (0.1, 0.15, 0.2)),
)
ALONE: Final = "quality=fast"
MAX_PIXELS: Final = 50_000_000
CALLERS: Final = 4
ROUNDS: Final = 5
TIMEOUT_S: Final = 120.0


class _Guarantee(msgspec.Struct):
    status: str
    basis: str | None = None


class _Fields(msgspec.Struct):
    tier: str
    model: str
    accuracy: _Guarantee


@dataclass(frozen=True, slots=True)
class Answered:
    """What one caller got."""

    prediction: Prediction
    fields: _Fields
    ms: float


class Caller:
    """One connection to an edge node that is kept."""

    def __init__(self, url: str, task: str, kind: TaskKind[Any]) -> None:
        where = urlsplit(url)
        self._http = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
        self._task, self._kind = task, kind

    def ask(self, body: bytes, target: str) -> Answered:
        """One image to a target, as a query string.

        Raises:
            RuntimeError: for another status than 200, with the answer.
        """
        started = time.perf_counter()
        path = f"/v1/infer?task={self._task}&{target}"
        self._http.request("POST", path, body, {"Content-Type": "image/jpeg"})
        response = self._http.getresponse()
        found = response.read()
        ms = (time.perf_counter() - started) * 1e3
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status}: {found[:300]!r}")
        return Answered(
            msgspec.json.decode(found, type=self._kind.prediction), msgspec.json.decode(found, type=_Fields), ms
        )

    def close(self) -> None:
        """End the connection."""
        self._http.close()


@dataclass(frozen=True, slots=True)
class Val2017:
    """The images of val2017 in `coco_eval.npz` (`../shared/data/README.md`)."""

    bodies: Sequence[bytes]
    truths: Sequence[TrueBoxes]
    clean: Sequence[int]
    """Those on which no model was trained."""


def read_val2017(path: Path) -> Val2017:
    """Read the file."""
    with np.load(path, allow_pickle=False) as z:
        data, ends, at = z["data"], z["offsets"], z["box_offsets"]
        chosen = np.flatnonzero(z["split"] != "train2017")
        return Val2017(
            [data[ends[i] : ends[i + 1]].tobytes() for i in chosen],
            [TrueBoxes(z["boxes"][at[i] : at[i + 1]], z["classes"][at[i] : at[i + 1]]) for i in chosen],
            np.flatnonzero(z["clean"][chosen]).tolist(),
        )


def boxes_of(prediction: Detection) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The objects as rows (k, 6)."""
    return np.array([(*o.box, o.confidence, o.index) for o in prediction.objects], np.float64).reshape(-1, 6)


def quality_of(answers: Sequence[Answered], images: Val2017, part: Sequence[int], kind: TaskKind[Any]) -> str:
    """Accuracy, and of boxes mAP and AP50 before it, in percent; `part` are positions in val2017."""
    truths = [images.truths[i] for i in part]
    predictions = [answers[i].prediction for i in part]
    accuracy = 1 - np.mean([kind.loss(p, t) for p, t in zip(predictions, truths, strict=True)])
    if not isinstance(predictions[0], Detection):
        return f"{accuracy * 100:.1f}"
    rows = [boxes_of(each) for each in predictions if isinstance(each, Detection)]
    found = detection_quality(rows, truths)
    return f"{found['mAP'] * 100:.1f} / {found['AP50'] * 100:.1f} / {accuracy * 100:.1f}"


def targets_table(url: str, task: str, images: Val2017, kind: TaskKind[Any], console: Console) -> None:
    """Ask for every image at every target, and print what came."""
    caller = Caller(url, task, kind)
    console.print("| target | val2017 | clean | by the datacenter | P50, P99 ms | status |\n|---|---|---|---|---|---|")
    for target in TARGETS:
        answers = [caller.ask(body, target) for body in track(images.bodies, target, transient=True)]
        whole, of_clean = (quality_of(answers, images, part, kind) for part in (range(len(answers)), images.clean))
        far = np.mean([each.fields.tier == "datacenter" for each in answers])
        p50, p99 = np.quantile([each.ms for each in answers], [0.5, 0.99])
        given = Counter(f"{a.fields.accuracy.status} ({a.fields.accuracy.basis})" for a in answers)
        statuses = ", ".join(f"{count} {status}" for status, count in given.most_common())
        console.print(f"| `{target}` | {whole} | {of_clean} | {far:.0%} | {p50:.0f}, {p99:.0f} | {statuses} |")
    caller.close()


def bare_loop(manifest: Manifest, kind: TaskKind[Any], bodies: Sequence[bytes]) -> float:
    """Images/s of decoding, the edge's model on one thread, and decoding its boxes."""
    variant = manifest.variant(manifest.cascade.default_edge)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    model = load_variant(cache_dir(), manifest.task, variant)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    decode = open_decoder(variant, len(kind.labels))
    started = time.perf_counter()
    for body in bodies:
        pixels, header = load_input(body, variant.input, max_pixels=MAX_PIXELS)
        tensors = decode(dict(zip(names, session.run(names, {"image": pixels[np.newaxis]}), strict=True)))
        (found,) = kind.outputs(tensors, variant.temperature)
        kind.predict(kind.place(found, placement(header, variant.input).to_image), 5)
    return len(bodies) / (time.perf_counter() - started)


def served_rate(url: str, task: str, kind: TaskKind[Any], bodies: Sequence[bytes]) -> float:
    """Images/s of an edge node with `CALLERS` callers."""

    def call(mine: Sequence[bytes]) -> None:
        caller = Caller(url, task, kind)
        for body in mine:
            caller.ask(body, ALONE)
        caller.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(call, [bodies[i::CALLERS] for i in range(CALLERS)]))
    return len(bodies) / (time.perf_counter() - started)


def main() -> None:
    """Print the tables of `docs/benchmarks/detection.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="coco_eval.npz")
    parser.add_argument("--task", default="coco", help="coco, coco_count or coco_labels")
    parser.add_argument("--only-rates", action="store_true", help="images/s alone")
    options = parser.parse_args()
    images, manifest = read_val2017(options.data), load_manifest(options.task, models_dir())
    kind = load_kind(manifest, models_dir())
    console = Console(width=200, highlight=False, markup=False)
    tier = running("hawkvision.datacenter", "--tasks", options.task, "--port", "0", title="the datacenter tier")
    with tier as datacenter:
        edge = ("--task", options.task, "--port", "0", "--datacenter-url", datacenter.url)
        with (
            running("edge", *edge, title="the edge node") as node,
            running("edge", *edge, "--backend", "onnxruntime", title="the other edge node") as other,
        ):
            if not options.only_rates:
                targets_table(node.url, options.task, images, kind, console)
            bodies = images.bodies
            rates = [
                (*(served_rate(each.url, options.task, kind, bodies) for each in (node, other)),
                 bare_loop(manifest, kind, bodies))
                for _ in range(ROUNDS)
            ]  # fmt: skip
    served, in_ort, bare = (sorted(each) for each in zip(*rates, strict=True))
    console.print(f"images/s, worst and best of {ROUNDS}: served {served[0]:.0f} and {served[-1]:.0f}, in ONNX Runtime "
                  f"{in_ort[0]:.0f} and {in_ort[-1]:.0f}, bare loop {bare[0]:.0f} and {bare[-1]:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()

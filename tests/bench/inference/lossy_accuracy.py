"""`python -m tests.bench.inference.lossy_accuracy --data …`: are the edge's models right about what a link has left
of images?

Every image is sent by every scheme over the same losses: the i-th datagram of an image is lost in all schemes or in
none. Schemes spend the same bytes: the quality is fitted to each image so that its datagrams with all their headers
take no more than one plain JPEG of quality 85 in datagrams with headers of 20 bytes.

    plain       that JPEG, cut at the first lost datagram and decoded as far as it goes
    rs20 …      restart segments and 20 % (50, 100, 200 %) parity
    base        the same with a base image in shares, and 25 % parity
    blind       what `choose` says of a link that it knows nothing of
    adaptive    what `choose` says of this link, with the quality fitted
    served      what `choose` says, with its own quality: what the product sends; bytes differ a little

Losses are independent, or Gilbert's with runs of four on average. Drops are paired with the same model's answers about
the images as they came, with standard errors. Images are not made smaller first. Exit status 1 if the adaptive
scheme loses more than the issue allows on the default edge model.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import LOGITS, Pixels
from hawkvision.imaging.preprocessing import decode as decode_image
from hawkvision.imaging.preprocessing import preprocess, probe
from hawkvision.inference.backend_registry import open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.artifacts import load_variant
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import Manifest, Variant, cache_dir, load_labels, load_manifest, models_dir
from hawkvision.system.files import write_atomic
from hawkvision.transport.coding.image_coding import Coded, Complete, Expired, Plan, decode, encode
from hawkvision.transport.coding.rate_fec_control import choose
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.protocol.wire import FRAGMENT_ROOM, MAX_DATAGRAM, OVERHEAD

LOSSES: Final = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
BURST: Final = 4.0
PLAIN_QUALITY: Final = 85
PLAIN_HEADER: Final = 20
MAX_PIXELS: Final = 50_000_000
BATCH: Final = 8
SEED: Final = 20_261_121
FIXED: Final = {"rs20": 0.2, "rs50": 0.5, "rs100": 1.0, "rs200": 2.0}
SCHEMES: Final = ("plain", *FIXED, "base", "blind", "adaptive", "served")
GOALS: Final = {
    (0.1, False): 0.01, (0.2, False): 0.04, (0.3, False): 0.08, (0.5, False): 0.13,
    (0.1, True): 0.06, (0.3, True): 0.13, (0.5, True): 0.20,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DatagramLink:
    """How datagrams are lost."""

    loss: float
    bursty: bool

    @property
    def state(self) -> LossEstimate:
        """What a sender would know of it after long observation."""
        return LossEstimate(self.loss, BURST if self.bursty else 1 / (1 - self.loss), known=True)

    def pattern(self, image: int, n: int = 1024) -> NDArray[np.bool_]:
        """Which of the datagrams of one image are lost; the same for every scheme."""
        draws = np.random.default_rng([SEED, image, int(1000 * self.loss), self.bursty]).random(n)
        if not self.bursty or self.loss == 0:
            return draws < self.loss
        recover, fail = 1 / BURST, self.loss / (1 - self.loss) / BURST
        lost = [bool(draws[0] < self.loss)]
        for draw in draws[1:]:
            lost.append(bool(draw >= recover if lost[-1] else draw < fail))
        return np.array(lost)


LINKS: Final = tuple(DatagramLink(loss, bursty) for bursty in (False, True) for loss in LOSSES if loss or not bursty)


@dataclass(frozen=True, slots=True)
class SentImage:
    """What is left of one image: a body, or None; how much of it came, at which quality, and the bytes it took."""

    body: bytes | None
    fraction: float
    quality: int
    bytes_ratio: float


@dataclass(frozen=True, slots=True)
class LossCell:
    """One model, scheme and link: means over images."""

    model: str
    scheme: str
    loss: float
    bursty: bool
    top1: float
    drop: float
    drop_error: float
    complete: float
    fraction: float
    quality: float
    bytes_ratio: float


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="labelled ImageNet images, as calibrate takes them")
    parser.add_argument("--limit", type=int, help="only so many images, drawn by chance")
    parser.add_argument("--models", help="variants, separated by commas; default: the edge's single ones")
    parser.add_argument("--json", type=Path, help="write all cells here")
    given = parser.parse_args()
    try:
        manifest = load_manifest("imagenet", models_dir())
        single = [name for name in manifest.cascade.edge if manifest.ensemble(name) is None]
        names = given.models.split(",") if given.models else single
        cells = measure(manifest, names, given.data, given.limit)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(cells, Console(width=None if sys.stdout.isatty() else 150))
    if given.json is not None:
        write_atomic(given.json, msgspec.json.format(msgspec.json.encode([asdict(cell) for cell in cells]), indent=1))
    failures = missed(cells, manifest.members(manifest.cascade.default_edge)[0].name)
    print("\n".join(failures) or "every goal is met")
    return 1 if failures else 0


def missed(cells: Sequence[LossCell], model: str) -> list[str]:
    """What the adaptive scheme owes and does not keep."""
    return [
        f"{model} loses {cell.drop:.3f} at {cell.loss:.0%}{' in bursts' if cell.bursty else ''}; allowed are {goal}"
        for cell in cells
        if cell.model == model and cell.scheme == "adaptive"
        if (goal := GOALS.get((cell.loss, cell.bursty))) is not None and cell.drop > goal
    ]


def measure(manifest: Manifest, names: Sequence[str], data: Path, limit: int | None) -> list[LossCell]:
    """All models over all schemes, links and images."""
    images = read_images(data, load_labels(manifest, models_dir()))
    order = np.random.default_rng(SEED).permutation(len(images))[:limit]
    models = [EdgeModel(manifest, manifest.variant(name)) for name in names]
    sent: list[dict[tuple[str, DatagramLink], SentImage]] = []
    right: list[list[dict[bytes | None, bool]]] = [[] for _ in models]
    try:
        for index in track(sorted(order.tolist()), "sending", transient=True):
            body, label = images.bodies[index], int(images.labels[index])
            sent.append(dict(send(body, index)))
            bodies = [body, *dict.fromkeys(one.body for one in sent[-1].values() if one.body is not None)]
            inputs = [pixels_of(one) for one in bodies]
            for answers, model in zip(right, models, strict=True):
                found = model.labels(inputs)
                answers.append({b: one == label for b, one in zip((None, *bodies[1:]), found, strict=True)})
    finally:
        for model in models:
            model.close()
    return [
        cell_of(model.name, scheme, link, sent, answers)
        for model, answers in zip(models, right, strict=True)
        for scheme, link in itertools.product(SCHEMES, LINKS)
    ]


def cell_of(
    model: str, scheme: str, link: DatagramLink, sent: Sequence[dict[tuple[str, DatagramLink], SentImage]],
    answers: Sequence[dict[bytes | None, bool]],
) -> LossCell:  # fmt: skip
    """Means of one cell; under the key None lies whether the image as it came was recognised."""
    ones = [each[scheme, link] for each in sent]
    right = np.array([a[one.body] if one.body is not None else False for one, a in zip(ones, answers, strict=True)])
    lost = np.array([a[None] for a in answers], np.float64) - right
    return LossCell(
        model, scheme, link.loss, link.bursty,
        top1=float(right.mean()),
        drop=float(lost.mean()),
        drop_error=float(lost.std() / np.sqrt(len(lost))),
        complete=float(np.mean([one.fraction == 1.0 for one in ones])),
        fraction=float(np.mean([one.fraction for one in ones])),
        quality=float(np.mean([one.quality for one in ones])),
        bytes_ratio=float(np.mean([one.bytes_ratio for one in ones])),
    )  # fmt: skip


class EdgeModel:
    """One variant, ready to run."""

    def __init__(self, manifest: Manifest, variant: Variant) -> None:
        self.name = variant.name
        self._spec = variant.input
        path = load_variant(cache_dir(), manifest.task, variant)
        self._backend: Backend = open_backend("onnxruntime", path, variant.input, manifest.classes, threads=1)

    def labels(self, images: Sequence[Pixels]) -> list[int]:
        """The most probable class of each image."""
        inputs = [preprocess(pixels, self._spec) for pixels in images]
        logits = [self._backend.infer(np.stack(inputs[i : i + BATCH]))[LOGITS] for i in range(0, len(inputs), BATCH)]
        return [int(label) for label in np.concatenate(logits).argmax(1)]

    def close(self) -> None:
        """Give the model's memory back."""
        self._backend.close()


def pixels_of(body: bytes) -> Pixels:
    """Decode an image, or as much of it as is there: what is missing stays grey."""
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(body, "RGB", strict=False)
    except ValueError:  # not a JPEG that simplejpeg reads, such as a PNG among the originals
        return decode_image(body, probe(body), max_pixels=MAX_PIXELS, min_side=1 << 16)
    return pixels


def send(body: bytes, image: int) -> Iterator[tuple[tuple[str, DatagramLink], SentImage]]:
    """One image by every scheme over every link."""
    pixels = decode_image(body, probe(body), max_pixels=MAX_PIXELS, min_side=1 << 16)
    plain = simplejpeg.encode_jpeg(pixels, PLAIN_QUALITY, "RGB", "420")
    room = MAX_DATAGRAM - PLAIN_HEADER
    slices = [plain[start : start + room] for start in range(0, len(plain), room)]
    sender = Sender(pixels, len(plain) + PLAIN_HEADER * len(slices))
    blind = choose(LossEstimate(0.0, 1.0, known=False), 1.0)
    for link in LINKS:
        lost = link.pattern(image)
        known = choose(link.state, 1.0)
        yield ("plain", link), cut_at_first_loss(slices, lost)
        for scheme, parity in FIXED.items():
            yield (scheme, link), sender.fitted(Plan(0, parity), lost)
        yield ("base", link), sender.fitted(Plan(0, 0.25, base=True), lost)
        yield ("blind", link), sender.fitted(blind, lost)
        yield ("adaptive", link), sender.fitted(known, lost)
        yield ("served", link), sender.sent(encode(pixels, known, FRAGMENT_ROOM), lost)


def cut_at_first_loss(slices: Sequence[bytes], lost: NDArray[np.bool_]) -> SentImage:
    """What a decoder of plain JPEGs can use: everything before the first gap."""
    whole = int(np.argmax(np.append(lost[: len(slices)], True)))
    end = b"" if whole == len(slices) else b"\xff\xd9"
    body = b"".join(slices[:whole]) + end if whole else None
    return SentImage(body, whole / len(slices), PLAIN_QUALITY, 1.0)


class Sender:
    """One image, coded in ways that fit its budget of bytes; each way is found once."""

    def __init__(self, pixels: Pixels, budget: int) -> None:
        self._pixels = pixels
        self._budget = budget
        self._fitted: dict[tuple[float, bool], Coded] = {}

    def fitted(self, plan: Plan, lost: NDArray[np.bool_]) -> SentImage:
        """The image with a plan's parity at the best quality that the budget allows, or at the worst there is."""
        key = (plan.parity, plan.base)
        if key not in self._fitted:
            self._fitted[key] = self._fit(plan)
        return self.sent(self._fitted[key], lost)

    def sent(self, coded: Coded, lost: NDArray[np.bool_]) -> SentImage:
        """What arrives of it."""
        arrived = decode(coded.format, {i: s for i, s in enumerate(coded.symbols) if not lost[i]})
        quality, ratio = coded.format.quality, cost(coded) / self._budget
        match arrived:
            case Expired():
                return SentImage(None, 0.0, quality, ratio)
            case Complete(body):
                return SentImage(body, 1.0, quality, ratio)
            case _:
                return SentImage(arrived.body, arrived.received_fraction, quality, ratio)

    def _fit(self, plan: Plan) -> Coded:
        best = encode(self._pixels, replace(plan, quality=1), FRAGMENT_ROOM)
        low, high = 2, 95
        while low <= high:
            intermediate = (low + high) // 2
            coded = encode(self._pixels, replace(plan, quality=intermediate), FRAGMENT_ROOM)
            if cost(coded) <= self._budget:
                best, low = coded, intermediate + 1
            else:
                high = intermediate - 1
        return best


def cost(coded: Coded) -> int:
    """Bytes of all datagrams, above UDP."""
    return sum(map(len, coded.symbols)) + OVERHEAD * coded.format.n


def show(cells: Sequence[LossCell], console: Console) -> None:
    """Print what each model and kind of loss came to."""
    for model, bursty in itertools.product(dict.fromkeys(cell.model for cell in cells), (False, True)):
        rows = [cell for cell in cells if (cell.model, cell.bursty) == (model, bursty)]
        kind = f"bursts of {BURST:.0f}" if bursty else "independent losses"
        of = f"{model}, {kind}"
        console.print(table_of(f"{of}: top-1 %, drop ± s.e.", rows, "bytes", bytes_text, drop_text))
        if model == cells[0].model:
            console.print(table_of(f"{kind}: complete %, quality", rows, "", lambda _: "", complete_text))


def table_of(
    title: str, rows: Sequence[LossCell], about: str, of_scheme: Callable[[Sequence[LossCell]], str],
    of_cell: Callable[[LossCell], str],
) -> Table:  # fmt: skip
    """Schemes down, losses across."""
    table = Table(title=title, box=None, title_justify="left", header_style="bold")
    table.add_column("scheme")
    table.add_column(about)
    for loss in dict.fromkeys(cell.loss for cell in rows):
        table.add_column(f"{loss:.0%}", justify="right")
    for scheme in SCHEMES:
        found = [cell for cell in rows if cell.scheme == scheme]
        table.add_row(scheme, of_scheme(found), *map(of_cell, found))
    return table


def bytes_text(cells: Sequence[LossCell]) -> str:
    """Bytes over the budget, least and most."""
    ratios = [cell.bytes_ratio for cell in cells]
    return f"{min(ratios):.2f}–{max(ratios):.2f}"


def drop_text(cell: LossCell) -> str:
    """Accuracy and what was lost."""
    return f"{100 * cell.top1:.1f} {100 * cell.drop:+.1f}±{100 * cell.drop_error:.1f}"


def complete_text(cell: LossCell) -> str:
    """How many images came whole, and their quality."""
    return f"{100 * cell.complete:.1f} q{cell.quality:.0f}"


if __name__ == "__main__":
    sys.exit(main())

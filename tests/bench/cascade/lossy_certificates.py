"""`python -m tests.bench.cascade.lossy_certificates --data IMAGES`: are received images answered within their
guarantee?

Held-out images, on which nothing was fitted or certified, cross an emulated link of every loss rate, with independent
loss or bursts of four fragments, and go through policy and stages as in a node. Each link has two cases: `planned`,
with the quality and parity that `redundancy.choose` takes for it, and `surprised`, with those of a link without loss,
where most images arrive in part.

    gate     route(target, received): condition, temperature and threshold of the image as received
    naive    the threshold certified for whole images, at their temperature, whatever was received

Drops are below the reference stage on the whole original image, in points per received image. Two properties are tested
for each link and target, by an exact paired test of E ℓ ≤ bound, with a total probability of a false alarm of 5 %:

    kept     certified answers give up, with the escalations of their target, no more than the guarantee says
    short    accepted answers without a guarantee give up no more than the target allows, relative to the reference
             stage on the same received image

Exit status 1 if one is violated. Accepted drops of the naive rule are tested in the same way, for comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import Route
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import AccuracyStatus, Logits, MaxAccuracyDrop, Quality, Received, Target, Tier
from hawkvision.imaging.downscale import useful_side
from hawkvision.model_zoo.calibration.loss_simulation import decoded, transcoded
from hawkvision.model_zoo.calibration.model_runner import run_stages
from hawkvision.model_zoo.calibration.splits import split_images
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import cache_dir, load_labels, load_manifest, models_dir
from hawkvision.tasks.class_scores import Score, score, softmax
from hawkvision.tasks.registry import load_kind
from hawkvision.transport.coding.image_coding import Coded, Plan
from hawkvision.transport.coding.rate_fec_control import FecLinkState, choose
from tests.bench.cascade.certificates import logits_of

RATES: Final = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
BURST: Final = 4.0
TARGETS: Final[tuple[Target, ...]] = (*map(MaxAccuracyDrop, (0.01, 0.02, 0.04)), Quality.FAST)
SEED: Final = 2411
ALARM: Final = 0.05
RATE_POINTS: Final = 33

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CertificateLink:
    """A link, and how its sender met it."""

    loss: float
    burst: float
    plan: Plan
    planned: bool

    def __str__(self) -> str:
        kind = "bursts" if self.burst > 1.0 else "i.i.d."
        return f"{self.loss:.0%} {kind}, {'planned' if self.planned else 'surprised'}"

    def kept(self, n: int, rng: np.random.Generator) -> list[int]:
        """The fragments of n that arrive. Bursts are a chain of two states; one loses everything (Gilbert)."""
        if self.burst <= 1.0 or self.loss == 0.0:
            return np.flatnonzero(rng.random(n) >= self.loss).tolist()
        leave, enter = 1.0 / self.burst, self.loss / (self.burst * (1.0 - self.loss))
        losing, kept = rng.random() < self.loss, []
        for index in range(n):
            if not losing:
                kept.append(index)
            losing = rng.random() >= leave if losing else rng.random() < enter
        return kept


@dataclass(frozen=True, slots=True)
class Crossed:
    """What came of the images that arrived over one link, in their order."""

    link: CertificateLink
    share: float
    """Of the images that were sent, that arrived at all."""
    received: tuple[Received, ...]
    edge: Logits
    edge_right: Flags
    best_right: Flags
    """The reference stage, on the images as received."""
    reference_right: Flags
    """The reference stage, on the whole originals."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Answers against a reference: how many were lost and gained, of how many images."""

    lost: int
    gained: int
    n: int

    @property
    def drop(self) -> float:
        """Mean of ℓ; 0 of none."""
        return (self.lost - self.gained) / self.n if self.n else 0.0

    @property
    def error(self) -> float:
        """Standard error of the drop."""
        return float(np.sqrt(max(0.0, (self.lost + self.gained) / self.n - self.drop**2) / self.n)) if self.n else 0.0

    def excess_p(self, bound: float) -> float:
        """p-value of H0: E ℓ ≤ bound, exact given the rate of discordant images, whose supremum is taken."""
        if self.n == 0 or self.drop <= bound:
            return 1.0
        discordant = (self.lost + self.gained) / self.n
        spread = 3.0 * np.sqrt(discordant * (1.0 - discordant) / self.n) + 3.0 / self.n
        counts = np.arange(self.n + 1)
        least = np.ceil((counts + self.lost - self.gained) / 2.0) - 1.0  # b − c ≥ s with b + c = k is 2b ≥ k + s
        worst = 0.0
        for rate in np.linspace(max(bound, discordant - spread, 1e-9), min(1.0, discordant + spread), RATE_POINTS):
            tails = binom.sf(least, counts, min(1.0, (rate + bound) / (2.0 * rate)))
            worst = max(worst, float((binom.pmf(counts, self.n, rate) * tails).sum()))
        return worst


@dataclass(frozen=True, slots=True)
class CertificateCell:
    """One link under one target."""

    link: CertificateLink
    target: Target
    arrived: float
    fraction: float
    held: float
    """Share of arrived images whose guarantee is held."""
    accepted: float
    accuracy: float
    accepted_loss: Loss
    """Of accepted answers against the reference stage on the originals, per arrived image."""
    kept_loss: Loss
    """Of all answers whose guarantee is held, escalations included."""
    kept_bound: float
    overall_loss: Loss
    """Of all answers, escalations included."""
    short_loss: Loss
    """Of accepted answers without a guarantee, against the reference stage on the same image."""
    allowed: float | None
    """What the target allows; None for `fast`, which says what it gives up instead."""
    naive_accepted: float
    naive_accuracy: float
    naive_loss: Loss


def main() -> int:
    """Measure all links, print and write the table, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", default="imagenet")
    parser.add_argument("--edge", help="default: the cascade's")
    parser.add_argument("--profile", type=Path, help="default: the task's")
    parser.add_argument(
        "--spare", type=float, help="times the plain image that the link has room for; default: unknown"
    )
    parser.add_argument("--out", type=Path, help="also write the table here")
    chosen = parser.parse_args()
    try:
        cells = measure(chosen.task, chosen.data, chosen.edge, chosen.profile, chosen.spare)
    except HawkVisionError as error:
        print(error, file=sys.stderr)
        return 2
    broken = violations(cells)
    consoles = [Console(width=190)]
    if chosen.out is not None:
        consoles.append(Console(width=190, file=chosen.out.open("w")))
    for console in consoles:
        console.print(table(cells))
        console.print("\n".join(verdict(cells, broken)), highlight=False)
    return 1 if broken else 0


def links(spare: float | None = None) -> list[CertificateLink]:
    """Every loss rate, one by one and in bursts, planned for and not; `spare` as `choose` takes it."""
    clean = choose(FecLinkState(0.0, 1.0, known=True), spare)
    found = []
    for loss in RATES:
        for burst in (1.0, BURST) if loss else (1.0,):
            found.append(
                CertificateLink(loss, burst, choose(FecLinkState(loss, burst, known=True), spare), planned=True)
            )
            if loss:
                found.append(CertificateLink(loss, burst, clean, planned=False))
    return found


def measure(
    task: str, data: Path, edge: str | None, profile_path: Path | None, spare: float | None = None
) -> list[CertificateCell]:
    """Every target on every link."""
    models, cache = models_dir(), cache_dir()
    manifest = load_manifest(task, models)
    images = read_images(data, load_labels(manifest, models))
    profile = load_profile_of(manifest, models, profile_path)
    edge = edge or manifest.cascade.default_edge
    policy = Policy(profile, edge, manifest.best)
    held_out = split_images(manifest, images, profile.data.seed).held_out
    kind = load_kind(manifest, models)
    before = run_stages(kind, manifest, images, datacenter=(manifest.best,), cache=cache, chosen=held_out)
    reference = logits_of(before, manifest.best, Tier.DATACENTER, len(images)).argmax(axis=1) == images.labels
    cells: list[CertificateCell] = []
    side = useful_side(member.input for stage in profile.stages for member in manifest.members(stage.name))
    for place, link in enumerate(links(spare)):
        there, received = over(link, images, held_out, place, side)
        numbers = np.array([*received], np.intp)
        looks = run_stages(
            kind,
            manifest,
            there,
            edge=(edge,),
            datacenter=(manifest.best,),
            cache=cache,
            chosen=numbers,
            name=str(link),
        )
        logits = logits_of(looks, edge, Tier.EDGE, len(images))[numbers]
        best = logits_of(looks, manifest.best, Tier.DATACENTER, len(images))[numbers].argmax(axis=1)
        labels = images.labels[numbers]
        crossed = Crossed(
            link, len(numbers) / len(held_out), tuple(received.values()), logits, logits.argmax(axis=1) == labels,
            best == labels, reference[numbers],
        )  # fmt: skip
        cells += [judged(policy, profile.stage(edge).temperature, crossed, target) for target in TARGETS]
    return cells


def over(
    link: CertificateLink, images: LabelledImages, chosen: NDArray[np.intp], place: int, side: int
) -> tuple[LabelledImages, dict[int, Received]]:
    """The images as they arrive over a link, and what was received of those that do."""
    bodies, received = list(images.bodies), {}
    digest = hashlib.sha256(images.sha256.encode())
    for number in chosen.tolist():
        coded: Coded = transcoded(images.bodies[number], link.plan, side)
        found = decoded(coded, link.kept(coded.format.n, np.random.default_rng((SEED, place, number))))
        if found is not None:
            bodies[number] = found[0]
            received[number] = Received(found[1], link.plan.quality)
            digest.update(hashlib.sha256(found[0]).digest())
    return replace(images, bodies=bodies, sha256=digest.hexdigest()), received


def judged(policy: Policy, temperature: float, crossed: Crossed, target: Target) -> CertificateCell:
    """What gate and naive rule make of the images of one link."""
    routes = [policy.route(target, received) for received in crossed.received]
    accepted = np.array(
        [
            scored(crossed.edge[i], policy.pair.score, route.temperature or temperature) >= route.threshold
            for i, route in enumerate(routes)
        ]
    )
    held = np.array([route.guarantee.status is AccuracyStatus.CERTIFIED for route in routes])
    short = np.array([route.below_target for route in routes])
    whole: Route = policy.route(target)
    naive = np.array([scored(logits, policy.pair.score, temperature) >= whole.threshold for logits in crossed.edge])
    served = np.where(accepted, crossed.edge_right, crossed.best_right)
    bounds = [route.guarantee.max_drop or 0.0 for route, kept in zip(routes, held, strict=True) if kept]
    reference, everything = crossed.reference_right, np.ones_like(held)
    return CertificateCell(
        crossed.link,
        target,
        crossed.share,
        float(np.mean([received.fraction for received in crossed.received])),
        float(held.mean()),
        float(accepted.mean()),
        share(crossed.edge_right, accepted),
        loss(reference, crossed.edge_right, accepted, everything),
        loss(reference, served, held, held),
        float(np.mean(bounds)) if bounds else 0.0,
        loss(reference, served, everything, everything),
        loss(crossed.best_right, crossed.edge_right, accepted & short, short),
        target.value if isinstance(target, MaxAccuracyDrop) else None,
        float(naive.mean()),
        share(crossed.edge_right, naive),
        loss(reference, crossed.edge_right, naive, everything),
    )


def scored(logits: Logits, kind: str, temperature: float) -> float:
    """The edge's score of one image (classes,), as a node computes it."""
    return float(score(softmax(logits[np.newaxis], temperature), Score(kind))[0])


def share(right: Flags, where: Flags) -> float:
    """Share of right answers among those."""
    return float(right[where].mean()) if where.any() else float("nan")


def loss(reference: Flags, said: Flags, where: Flags, among: Flags) -> Loss:
    """Answers given `where` against the reference's, per image `among`."""
    return Loss(int((where & reference & ~said).sum()), int((where & said & ~reference).sum()), int(among.sum()))


def violations(cells: Sequence[CertificateCell]) -> list[str]:
    """Guarantees that were broken beyond chance."""
    tests = [(cell, "kept", cell.kept_loss, cell.kept_bound) for cell in cells if cell.kept_loss.n]
    tests += [(c, "short", c.short_loss, c.allowed) for c in cells if c.short_loss.n and c.allowed is not None]
    return [
        f"{cell.link}, {said(cell.target)}: {what} drop {found.drop:.2%} of n = {found.n} against {bound:.2%}"
        for cell, what, found, bound in tests
        if found.excess_p(bound) < ALARM / len(tests)
    ]


def table(cells: Sequence[CertificateCell]) -> Table:
    """One line for each link and target; drops in points."""
    made = Table(box=None, pad_edge=False, header_style="bold", caption="drops in points ± one standard error")
    for title in ("loss", "q, parity", "target", "arrived", "fraction", "certified", "accepted", "right",
                  "drop of accepted", "kept: drop", "≤", "overall drop", "naive: accepted", "right",
                  "drop of accepted"):  # fmt: skip
        made.add_column(title, justify="left" if title in ("loss", "target") else "right")
    for cell in cells:
        kept = cell.kept_loss
        made.add_row(
            str(cell.link), f"{cell.link.plan.quality}, {cell.link.plan.parity:.0%}", said(cell.target),
            f"{cell.arrived:.1%}", f"{cell.fraction:.2f}", f"{cell.held:.0%}", f"{cell.accepted:.1%}",
            f"{cell.accuracy:.1%}", points(cell.accepted_loss), points(kept) if kept.n else "–",
            f"{cell.kept_bound * 100:.1f}" if kept.n else "–", points(cell.overall_loss),
            f"{cell.naive_accepted:.1%}", f"{cell.naive_accuracy:.1%}", points(cell.naive_loss),
        )  # fmt: skip
    return made


def verdict(cells: Sequence[CertificateCell], broken: Sequence[str]) -> list[str]:
    """What it comes to, in sentences."""
    asked = [cell for cell in cells if cell.allowed is not None]

    def beyond(losses: Sequence[tuple[Loss, float | None]]) -> str:
        over = sum(found.drop > (bound or 0.0) for found, bound in losses)
        sure = sum(found.excess_p(bound or 0.0) < ALARM for found, bound in losses)
        return f"above the target in {over} of {len(losses)} cells, beyond chance (p < {ALARM:g}, each) in {sure}"

    return [
        f"gate: drop of accepted answers {beyond([(cell.accepted_loss, cell.allowed) for cell in asked])}",
        f"naive: drop of accepted answers {beyond([(cell.naive_loss, cell.allowed) for cell in asked])}",
        f"guarantees broken beyond chance: {len(broken)}",
        *broken,
    ]


def said(target: Target) -> str:
    """A target as the table says it."""
    return f"{target.value:g}" if isinstance(target, MaxAccuracyDrop) else str(target)


def points(found: Loss) -> str:
    """A drop with its standard error."""
    return f"{found.drop * 100:.1f} ± {found.error * 100:.1f}"


if __name__ == "__main__":
    sys.exit(main())

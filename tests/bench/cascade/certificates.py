"""`python -m tests.bench.cascade.certificates`: how often certificates are wrong, and what they cost.

For pairs of stages with a gap of at least a point, samples of n labelled images are drawn from images that trained no
network and fitted no temperature. Each rule picks the lowest threshold for a drop of at most half the gap. The true
drop of that threshold over the whole pool shows whether it is wrong, its true escalation its cost. Rules with a
guarantee (at δ) may be wrong in δ of the draws plus three standard errors. Exit status 1 if one of ours is wrong more
often in any cell.

Samples are drawn with replacement, so the pool is their population and the truth is exact. Thresholds are quantiles of
the unlabelled scores of another such draw. With `--without-replacement` the sample is a random part of the pool and the
truth is measured on the rest, as a test on held-out images would. The rest differs from the sample with variance σ²(1/n
+ 1/(N − n)) instead of σ²/n, so a certificate with exactly δ is found wrong in Φ(−z √(1 − n/N)) of the draws, z the 1 −
δ
quantile: 11 % with 5,000 of 11,000. That share is then allowed.

    exact, unlabelled            `hawkvision.guarantee.bounds`, fixed sequence, with labels and without
    plug-in                      the lowest threshold whose observed drop is within ε: no guarantee
    SGR                          Geifman and El-Yaniv, NeurIPS 2017: binary search, binomial tail at δ / ⌈log₂ steps⌉.
                                 Its selective risk is the error rate of the whole cascade, which may reach the
                                 reference stage's true error + ε; that error is given to it
    LTT                          learn then test (Angelopoulos et al. 2021): the same risk, Clopper-Pearson bounds,
                                 fixed sequence at δ
    conformal alignment          Huang et al., "Reliable Inference in Edge-Cloud Model Cascades via Conformal Alignment"
                                 (arXiv 2510.17543): of the images that the edge answers, at most a share ε is lost
                                 against the reference stage, in expectation. This holds on average over samples, not in
                                 1 − δ of them, and gains do not count
    MAPIE paired                 its Hoeffding-Bentkus p-values and fixed sequence on (ℓ + 1)/2 against (ε + 1)/2,
                                 because its controllers take no signed loss
    MAPIE losses                 the same library on 1{ℓ = +1} against ε, as a binary risk: gains do not count
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import norm

from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.core.types import Logits, Tier
from hawkvision.guarantee.evidence import threshold_grid
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions, run_stages
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_images
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import cache_dir, load_labels, load_manifest, models_dir
from hawkvision.system.files import write_atomic
from hawkvision.tasks.class_scores import Floats, Score, score, softmax
from hawkvision.tasks.registry import load_kind, task_kind
from tests.bench.cascade.threshold_rules import OTHERS, OURS, Goal, Pool, perfect_escalation, sweep_grid

ROOT: Final = Path(__file__).resolve().parents[3]
DATA: Final = {
    "cifar10": ROOT.parent / "shared" / "data" / "cifar10.npz",
    "fashion_mnist": Path("/usr/share/datasets/fashion-mnist"),
    "imagenet": ROOT.parent / "shared" / "data" / "imagenet_eval.npz",
}
PAIRS: Final = (
    "cifar10:tiny:reference",
    "cifar10:small:reference",
    "cifar10:tiny:large",
    "fashion_mnist:tiny:reference",
    "fashion_mnist:small:reference",
)
SMALLEST_GAP: Final = 0.01
GAP_SHARE: Final = 0.5
DELTA: Final = 0.05
GRID_IMAGES: Final = 2_000
GOALS: Final = {1_000: 2.0, 5_000: 1.5}
"""What the exact test may cost, in escalations of perfect knowledge, at n images."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One rule at one n on one pair."""

    pair: str
    n: int
    rule: str
    guarantees: bool
    draws: int
    violations: int
    escalation: float
    perfect: float
    """Escalation of the best threshold there is, were it known."""
    max_drop: float
    expected: float
    """Share of draws in which a rule with exactly δ is found wrong: δ itself, when the truth is the population's."""

    @property
    def rate(self) -> float:
        """Share of draws whose threshold gives up more than ε."""
        return self.violations / self.draws

    @property
    def allowed(self) -> float:
        """What is expected, and three standard errors of counting."""
        return self.expected + 3.0 * math.sqrt(self.expected * (1.0 - self.expected) / self.draws)

    @property
    def ratio(self) -> float:
        """Escalation against perfect knowledge."""
        return self.escalation / max(self.perfect, 1e-9)

    @property
    def broken(self) -> bool:
        """Whether a guarantee was broken more often than chance explains."""
        return self.guarantees and self.rate > self.allowed


def study(
    pool: Pool, n: int, draws: int, seed: int, *, delta: float = DELTA, replace: bool = True,
    chosen: Sequence[str] = tuple(OURS | OTHERS),
    advance: Callable[[], None] = lambda: None,
) -> list[Cell]:  # fmt: skip
    """Let every rule choose from `draws` samples of n images, and count how often and how dearly."""
    rng = np.random.default_rng([seed, n])
    max_drop = GAP_SHARE * pool.gap
    goal = Goal(max_drop, float(pool.best_right.mean()) - max_drop, delta)
    rules = {name: rule for name, rule in (OURS | OTHERS).items() if name in chosen}
    violations, escalated = dict.fromkeys(rules, 0), dict.fromkeys(rules, 0.0)
    for _ in range(draws):
        sample, others, population = _draw(pool, n, rng, replace=replace)
        grid = threshold_grid(others)
        swept, truth = sweep_grid(sample, grid), sweep_grid(population, grid)
        for name, rule in rules.items():
            kept = rule(swept, goal)
            violations[name] += bool(truth.drop[kept] > max_drop)
            escalated[name] += float(truth.escalation[kept])
        advance()
    perfect = perfect_escalation(pool, max_drop)
    expected = delta if replace else float(norm.cdf(norm.ppf(delta) * math.sqrt(1.0 - n / len(pool))))
    return [
        Cell(
            pool.name,
            n,
            name,
            name in OURS,
            draws,
            violations[name],
            escalated[name] / draws,
            perfect,
            max_drop,
            expected,
        )
        for name in rules
    ]


def _draw(pool: Pool, n: int, rng: np.random.Generator, *, replace: bool) -> tuple[Pool, Floats, Pool]:
    """A labelled sample, unlabelled scores of others, and the population that is the truth."""
    size = len(pool)
    if replace:
        others = pool.scores[rng.integers(size, size=GRID_IMAGES)]
        return pool.taken(rng.integers(size, size=n)), others, pool
    order = rng.permutation(size)
    rest = order[n:]
    return pool.taken(order[:n]), pool.scores[rest[:GRID_IMAGES]], pool.taken(rest)


def make_pool(
    name: str, edge: Logits, best: NDArray[np.intp], labels: NDArray[np.integer], profile: NDArray[np.intp],
    used: NDArray[np.intp], kind: Score = Score.TOP1,
) -> Pool:  # fmt: skip
    """A pool of the `used` images, from the edge's logits (N, classes) and the reference stage's answers (N,).

    The edge's temperature is fitted on the `profile` images.
    """
    task = task_kind("classification", [str(label) for label in range(edge.shape[1])], {})
    probabilities = softmax(edge, fit_temperature(task, list(edge[profile]), labels[profile].tolist()))
    said = probabilities.argmax(axis=1)
    scores = score(probabilities, kind).astype(np.float64)
    return Pool(name, scores[used], (said == labels)[used], (best == labels)[used], (said != best)[used])


def logits_of(looks: CascadePredictions, stage: str, tier: Tier, n: int) -> Logits:
    """A stage's logits (n, classes) of n images, some of which were run; those of others are 0."""
    raw = looks.raw(stage, tier)
    found = np.zeros((n, len(next(iter(raw.values())))), np.float32)
    found[list(raw)] = list(raw.values())
    return found


def load_pools(pairs: Sequence[str], data: dict[str, Path], models: Path, cache: Path) -> list[Pool]:
    """The pairs' pools: images of the certification and the held-out part.

    Raises:
        HawkVisionError: for pairs not written as TASK:EDGE:BEST, unknown stages, missing models or images.
    """
    wanted: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs:
        parts = pair.split(":")
        if len(parts) != 3 or parts[0] not in data:
            raise ConfigError(f"--pairs: expected TASK:EDGE:BEST with TASK one of {', '.join(data)}, got {pair!r}")
        wanted.setdefault(parts[0], []).append((parts[1], parts[2]))
    pools: list[Pool] = []
    for task, stages in wanted.items():
        manifest = load_manifest(task, models)
        images = read_images(data[task], load_labels(manifest, models))
        split = split_images(manifest, images, SPLIT_SEED)
        used = np.concatenate([split.certify, split.held_out])
        edges, best_stages = ({pair[i] for pair in stages} for i in (0, 1))
        looks = run_stages(
            load_kind(manifest, models),
            manifest,
            images,
            edge=sorted(edges),
            datacenter=sorted(best_stages),
            cache=cache,
            chosen=split.used(),
        )
        pools += [
            make_pool(
                f"{task} {edge} → {best}", logits_of(looks, edge, Tier.EDGE, len(images)),
                logits_of(looks, best, Tier.DATACENTER, len(images)).argmax(axis=1), images.labels, split.profile, used,
            )
            for edge, best in stages
        ]  # fmt: skip
    return pools


def show(console: Console, pool: Pool, cells: Sequence[Cell]) -> None:
    """One pair's table: for each n how often each rule was wrong, and what it escalates."""
    first = cells[0]
    console.print(
        f"\n{pool.name}: {len(pool)} images, edge {pool.edge_right.mean():.2%}, best {pool.best_right.mean():.2%}, "
        f"ε {first.max_drop:.4f}, perfect knowledge escalates {first.perfect:.1%}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    sizes = sorted({cell.n for cell in cells})
    table.add_column("rule", no_wrap=True)
    for n in sizes:
        table.add_column(f"n = {n}\n wrong escal. ratio", no_wrap=True, justify="right")
    rows: dict[str, list[str]] = {}
    for cell in sorted(cells, key=lambda cell: cell.n):
        wrong = f"{cell.rate:.1%}".rjust(6)
        written = f"[red]{wrong}[/red]" if cell.broken else wrong
        rows.setdefault(cell.rule, []).append(f"{written} {cell.escalation:6.1%} {cell.ratio:4.2f}x")
    for rule, row in rows.items():
        table.add_row(rule, *row)
    console.print(table)


def verdict(cells: Sequence[Cell]) -> tuple[bool, str]:
    """Whether all guarantees were kept, and a sentence on that and on what they cost."""
    guaranteed = [cell for cell in cells if cell.guarantees]
    broken = [f"{c.pair}, n = {c.n}, {c.rule}: {c.rate:.1%} > {c.allowed:.1%}" for c in guaranteed if c.broken]
    if broken:
        said = f"VIOLATED in {len(broken)} of {len(guaranteed)} cells: " + "; ".join(broken)
    else:
        worst = max(guaranteed, key=lambda cell: cell.rate)
        said = (
            f"kept: {len(guaranteed)} cells of exact and unlabelled are wrong at most {worst.rate:.1%} of "
            f"{worst.draws} draws (allowed {worst.allowed:.1%})"
        )
    for n, limit in GOALS.items():
        ratios = [cell.ratio for cell in guaranteed if cell.rule == "exact" and cell.n == n]
        if ratios:
            mean = sum(ratios) / len(ratios)
            said += f"; exact at n = {n} escalates {mean:.2f}x perfect knowledge, at most {max(ratios):.2f}x"
            said += f" (goal {limit:g}x: {sum(ratio <= limit for ratio in ratios)} of {len(ratios)} pairs)"
    return not broken, said


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    """Write all cells as CSV, or as JSON if the file is called so."""
    rows = [{**asdict(c), "rate": c.rate, "allowed": c.allowed, "ratio": c.ratio} for c in cells]
    if path.suffix == ".json":
        write_atomic(path, msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())


def main() -> int:
    """Run the study and print its tables and verdict."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), metavar="TASK:EDGE:BEST")
    parser.add_argument("--n", nargs="+", type=int, default=[500, 1_000, 5_000])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--rules", nargs="+", default=list(OURS | OTHERS), choices=list(OURS | OTHERS))
    parser.add_argument("--seed", type=int, default=2405)
    parser.add_argument(
        "--without-replacement", action="store_true", help="random parts of the pool; truth on the rest"
    )
    parser.add_argument("--data", nargs="*", default=[], metavar="TASK=PATH", help="where a task's images lie")
    parser.add_argument("--out", type=Path, help="all cells, as CSV or JSON")
    given = parser.parse_args()
    console = Console()
    places = DATA | {task: Path(path) for task, _, path in (item.partition("=") for item in given.data)}
    try:
        pools = load_pools(given.pairs, places, models_dir(), cache_dir())
    except HawkVisionError as error:
        console.print(f"certificates: {error.message}", style="red", markup=False)
        return 2
    cells: list[Cell] = []
    for pool in pools:
        if pool.gap < SMALLEST_GAP:
            console.print(f"{pool.name}: left out, the gap is {pool.gap:.2%}")
            continue
        sizes = [n for n in given.n if not given.without_replacement or 2 * n <= len(pool)]
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(pool.name, total=len(sizes) * given.draws)
            found = [
                cell
                for n in sizes
                for cell in study(
                    pool, n, given.draws, given.seed, replace=not given.without_replacement, chosen=given.rules,
                    advance=functools.partial(progress.advance, bar),
                )
            ]  # fmt: skip
        if found:
            show(console, pool, found)
        cells += found
    if not cells:
        console.print("no pair has a gap to close, or enough images")
        return 2
    if given.out is not None:
        write_cells(given.out, cells)
    kept, said = verdict(cells)
    console.print(said, style="green" if kept else "red", markup=False)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

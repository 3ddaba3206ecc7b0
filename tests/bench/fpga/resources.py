"""Fits and checks the estimate of logic and flip-flops.

    python -m tests.bench.fpga.resources [--write]

Synthesises small foldings, fits the weights of `fpga.compiler.resource_model` to yosys's counts (non-negative least
squares of relative errors), then compares on foldings of the tasks' own shapes that took no part in the fit. Block RAMs
and multipliers follow rules and are compared on all foldings. `--write` writes the weights to
fpga/compiler/resources.toml. Exit status 1 if a count is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from fpga.compiler.devices import Resources
from fpga.compiler.emit import TOP, emit
from fpga.compiler.folding import Folding, StageFolding
from fpga.compiler.resource_model import TABLE, LogicKind, ResourceWeights, bits, model, of_graph, weigh
from fpga.compiler.synthesis import synthesise
from hawkvision.integer.ir import IntegerGraph
from tests.hawkvision.integer.graphs import cifar_shape, fashion_shape, random_graph

GOAL: Final = 0.15
KINDS: Final[tuple[LogicKind, ...]] = get_args(LogicKind)

S = StageFolding


@dataclass(frozen=True, slots=True)
class Case:
    """A folded graph."""

    name: str
    graph: IntegerGraph
    folding: Folding


def case(name: str, graph: IntegerGraph, *folds: StageFolding) -> Case:
    """The stages' foldings in order."""
    names = [stage.name for stage in graph.stages]
    return Case(name, graph, Folding(stages=dict(zip(names, folds, strict=True))))


def fitted_cases() -> list[Case]:
    """Small foldings, so that many can be synthesised."""
    two = random_graph(side=12, channels=(8, 16), weight_bits=4)
    wide = random_graph(side=12, planes=3, channels=(8, 16), weight_bits=4)
    eight = random_graph(side=12, channels=(8, 16), weight_bits=8)
    deep = random_graph(side=14, channels=(16, 32), pools=(0, 1), classes=10)
    return [
        case("slowest", two, S(), S(), S()),
        case("columns", two, S(taps=3, pe=2), S(taps=3, channels=2, pe=4), S(pe=5)),
        case("channels", two, S(pe=4), S(channels=8, pe=4), S(channels=8)),
        case("window", two, S(taps=9, pe=2, lanes=2), S(taps=9, channels=8, pe=2, lanes=2), S(channels=4)),
        case("tables", two, S(taps=3, pe=4, lanes=2, lut_pe=4), S(channels=4, pe=8, lut_pe=8), S(lut_pe=1)),
        case("more tables", deep, S(pe=4, lut_pe=2), S(taps=3, channels=4, pe=4, lut_pe=4, lut_requantise=True), S()),
        case("lanes", two, S(taps=3, pe=8, lanes=4), S(taps=3, channels=4, pe=8, lanes=4), S(pe=5, lanes=5)),
        case("eight bits", eight, S(taps=3, pe=2), S(channels=4, pe=4), S(channels=2)),
        case("eight bits, columns", eight, S(taps=3, pe=4, lanes=2), S(taps=3, channels=4, pe=2), S()),
        case("colours", wide, S(taps=3, channels=3, pe=4, lanes=2), S(taps=3, channels=4, pe=4), S(channels=2)),
        case("colours, window", wide, S(taps=9, channels=3, pe=2, lanes=2), S(channels=8, pe=8), S()),
        case("deep", deep, S(taps=3, pe=8, lanes=4), S(taps=3, channels=4, pe=8), S(channels=2, pe=2)),
        case("deep, channels", deep, S(pe=8, lanes=1), S(channels=16, pe=4), S(channels=8)),
        case("requantisers", deep, S(taps=3, pe=4, lanes=2, lut_requantise=True), S(taps=3, pe=4), S()),
    ]


def held_out_cases() -> list[Case]:
    """The tasks' own shapes at foldings of reports, and others."""
    fashion, cifar, eight = fashion_shape(), cifar_shape(), fashion_shape(weight_bits=8)
    return [
        case(
            "fashion w4 for 10,000/s",
            fashion,
            S(taps=3, pe=4, lanes=2),
            S(taps=3, channels=4, pe=8),
            S(taps=3, channels=4, pe=4, lut_pe=2),
            S(),
        ),
        case(
            "fashion w4 for 20,000/s",
            fashion,
            S(taps=3, pe=8, lanes=4),
            S(taps=3, channels=4, pe=16, lanes=2),
            S(taps=3, channels=4, pe=8),
            S(pe=2),
        ),
        case(
            "cifar w4 for 5,000/s",
            cifar,
            S(taps=3, channels=3, pe=4, lanes=2),
            S(taps=3, channels=4, pe=8),
            S(taps=3, channels=4, pe=4),
            S(),
        ),
        case("fashion w8", eight, S(taps=3, pe=2), S(taps=3, channels=4, pe=2), S(taps=3, channels=2, pe=2), S()),
    ]


def synthesised(one: Case) -> Resources:
    """The resources that yosys counts."""
    with tempfile.TemporaryDirectory() as folder:
        sources = emit(one.graph, one.folding, Path(folder))
        return synthesise(sources, TOP, Path(folder)).resources


def row(one: Case) -> NDArray[np.float64]:
    """The graph's bits of each kind, and one frame."""
    total, lanes = np.zeros(len(KINDS)), one.graph.input.channels
    for stage in one.graph.stages:
        fold = one.folding.stages[stage.name]
        found = bits(stage, fold, lanes)
        total += [found[kind] for kind in KINDS]
        lanes = fold.lanes
    return np.append(total, 1.0)


def absorbed(one: Case) -> int:
    """Flip-flops that move into block RAMs, counted: what an estimate takes off the sum of the fitted ones."""
    weights, lanes = model(), one.graph.input.channels
    fitted = round(weights.frame_ffs)
    for stage in one.graph.stages:
        fold = one.folding.stages[stage.name]
        fitted += round(weigh(bits(stage, fold, lanes), weights.ffs))
        lanes = fold.lanes
    return fitted - of_graph(one.graph, one.folding).ffs


def fit(cases: Sequence[Case], counts: Sequence[int]) -> NDArray[np.float64]:
    """Weights that make relative errors small."""
    scale = 1 / np.array(counts, np.float64)
    weights, _ = nnls(np.stack([row(one) for one in cases]) * scale[:, None], np.ones(len(cases)))
    return np.asarray(weights, np.float64)


def fitted_model(cases: Sequence[Case], found: Sequence[Resources]) -> ResourceWeights:
    """Both fits."""
    before = [absorbed(one) for one in cases]
    luts, ffs = (
        fit(cases, [one.luts for one in found]),
        fit(cases, [made.ffs + gone for made, gone in zip(found, before, strict=True)]),
    )
    return ResourceWeights(
        made_by=f"python -m tests.bench.fpga.resources --write, from {len(cases)} foldings",
        luts={kind: round(float(weight), 3) for kind, weight in zip(KINDS, luts, strict=False)},
        ffs={kind: round(float(weight), 3) for kind, weight in zip(KINDS, ffs, strict=False)},
        frame_luts=round(float(luts[-1]), 1),
        frame_ffs=round(float(ffs[-1]), 1),
    )


def as_toml(model: ResourceWeights) -> str:
    """As `fpga.compiler.resource_model` reads it."""
    head = f'made_by = "{model.made_by}"\nframe_luts = {model.frame_luts}\nframe_ffs = {model.frame_ffs}\n'
    parts = [
        f"\n[{name}]\n" + "".join(f"{kind} = {weight}\n" for kind, weight in weights.items())
        for name, weights in (("luts", model.luts), ("ffs", model.ffs))
    ]
    return head + "".join(parts)


def estimated(one: Case, model: ResourceWeights) -> Resources:
    """An estimate with weights that need not be the committed ones."""
    amounts, rules = row(one), of_graph(one.graph, one.folding)
    luts = float(amounts @ [*(model.luts[kind] for kind in KINDS), model.frame_luts])
    ffs = float(amounts @ [*(model.ffs[kind] for kind in KINDS), model.frame_ffs])
    ffs -= absorbed(one)
    return Resources(luts=round(luts), ffs=round(ffs), multipliers=rules.multipliers, block_rams=rules.block_rams)


def main(arguments: Sequence[str] | None = None) -> int:
    """Synthesise, fit, compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fpga.resources", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write fpga/compiler/resources.toml")
    options = parser.parse_args(arguments)
    console, cases, held_out = Console(), fitted_cases(), held_out_cases()
    found = []
    for one in cases:
        found.append(synthesised(one))
        console.print(f"{one.name}: {found[-1]}")
    model = fitted_model(cases, found)
    if options.write:
        TABLE.write_text(as_toml(model), encoding="utf-8")
    table, worst = Table(box=None, header_style="bold"), 0.0
    for title in ("folding", "LUT", "estimate", "", "FF", "estimate", "", "block RAM", "rule", "DSP", "rule"):
        table.add_column(title)
    for kind, group in (
        ("fitted", list(zip(cases, found, strict=True))),
        ("held out", [(c, synthesised(c)) for c in held_out]),
    ):
        for one, counted in group:
            guess = estimated(one, model)
            luts, ffs = guess.luts / counted.luts - 1, guess.ffs / counted.ffs - 1
            if kind == "held out":
                worst = max(worst, abs(luts), abs(ffs))
            table.add_row(
                f"{kind}: {one.name}",
                *(f"{counted.luts:,}", f"{guess.luts:,}", f"{luts:+.1%}"),
                *(f"{counted.ffs:,}", f"{guess.ffs:,}", f"{ffs:+.1%}"),
                *(f"{counted.block_rams}", f"{guess.block_rams}", f"{counted.multipliers}", f"{guess.multipliers}"),
            )
    console.print(table)
    console.print(f"largest error on held-out foldings: {worst:.1%}, goal {GOAL:.0%}")
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())

"""Small graphs with foldings that between them use everything that a folding can say; each is one Verilator build."""

from __future__ import annotations

from dataclasses import dataclass

from fpga.compiler.folding import Folding
from fpga.compiler.folding import StageFolding as Fold
from hawkvision.integer.ir import IntegerGraph
from tests.hawkvision.integer.graphs import fashion_shape, random_graph


@dataclass(frozen=True)
class Case:
    graph: IntegerGraph
    folding: Folding


def case(graph: IntegerGraph, **stages: Fold) -> Case:
    return Case(graph, Folding(stages=stages))


CASES = {
    "one tap and a column of taps at once": case(
        random_graph(), conv0=Fold(taps=3, pe=2), conv1=Fold(channels=2, pe=3, rows=4), head=Fold()
    ),
    "all taps at once, odd side, colour, requantisers side by side": case(
        random_graph(1, side=9, planes=3, weight_bits=3, classes=4),
        conv0=Fold(taps=9, channels=3, pe=2, lanes=2),
        conv1=Fold(taps=3, channels=2, pe=2, lanes=2),
        head=Fold(taps=4, channels=6, pe=2, lanes=2),
    ),
    "8-bit weights, some multipliers of look-up tables, more come at once than are read": case(
        random_graph(2, side=7, planes=3, channels=(2, 4), weight_bits=8, classes=4),
        conv0=Fold(channels=1, pe=2),
        conv1=Fold(taps=9, channels=2, pe=2, lanes=2, lut_pe=1),
        head=Fold(channels=1, pe=2, lanes=2),
    ),
    "mixed widths, unpooled stages, requantisers of look-up tables": case(
        random_graph(3, side=11, channels=(4, 5, 3), pools=(1,), weight_bits=2, first_bits=8, classes=3),
        conv0=Fold(taps=3, pe=4, lanes=2, lut_pe=3, lut_requantise=True),
        conv1=Fold(channels=4, pe=5, lut_pe=2),
        conv2=Fold(taps=3, channels=5, pe=3, lanes=3, lut_requantise=True),
        head=Fold(taps=5, lut_pe=1),
    ),
    "5x5 kernels, 5-bit weights that share multipliers": case(
        random_graph(4, side=10, planes=3, channels=(2, 3), weight_bits=5, kernel=5, classes=2),
        conv0=Fold(taps=5, channels=3, pe=2),
        conv1=Fold(pe=3),
        head=Fold(taps=2, channels=3, pe=2),
    ),
    "1x1 kernels, as fast as pixels come": case(
        random_graph(5, side=6, channels=(4, 4), pools=(0,), weight_bits=6, kernel=1, classes=2),
        conv0=Fold(pe=4, lanes=4),
        conv1=Fold(channels=4),
        head=Fold(taps=3, channels=2),
    ),
}
FASHION = case(
    fashion_shape(),
    conv0=Fold(taps=3, pe=8, lanes=4, lut_requantise=True),
    conv1=Fold(taps=3, channels=4, pe=16, lanes=2, lut_requantise=True),
    conv2=Fold(taps=3, channels=4, pe=8, lut_requantise=True),
    head=Fold(lut_pe=1),
)

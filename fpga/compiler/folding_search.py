"""Searches for a folding: the least hardware for a given rate, or the highest rate that a device holds.

A graph is a chain: its rate is that of its slowest stage, and resources add up. For each stage, the search keeps the
foldings that are fast enough and not dominated in every resource. It then joins the stages one by one and again keeps
only designs that are not dominated, so the result is exact. Resources of a stage depend on the lanes of the stage
before, so designs are kept apart by their lanes.

Part of the look-up tables stays free, because a full device does not route.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np

from fpga.compiler.devices import FpgaDevice, Resources
from fpga.compiler.folding import Folding, StageFolding, beats, check_folding, cycles, input_cycles, interval
from fpga.compiler.resource_model import of_frame, of_stage
from hawkvision.core.errors import CompileError
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.nodes import ConvStage

ROUTABLE: Final = 0.6
"""Usable share of a device's look-up tables and flip-flops; fuller designs may not route, or only
at a low clock."""
MAX_FRONT: Final = 200
"""Partial designs kept per number of lanes; beyond it the cheapest are kept, and the search is not exact."""


def slowest_that_keeps_up(graph: IntegerGraph, device: FpgaDevice, rate: float, mhz: float) -> Folding:
    """The cheapest folding that computes `rate` images per second at a clock of `mhz`.

    Raises:
        CompileError: if the device is too small; the message gives the highest rate that fits.
    """
    limit, search = int(mhz * 1e6 / rate), _FoldingSearch(graph, device)
    found = search.within(limit)
    if found is None:
        fewest = interval(graph, search.fastest())
        raise CompileError(
            f"{graph.name}: {rate:,.0f} a second at {mhz:g} MHz would need {limit:,} cycles an image or fewer; "
            f"{device.name} holds no more than what takes {fewest:,}: {mhz * 1e6 / fewest:,.0f} a second"
        )
    return found


def fastest(graph: IntegerGraph, device: FpgaDevice) -> Folding:
    """The folding with the fewest cycles per image that the device holds; among equals, the cheapest.

    Raises:
        CompileError: if not even the slowest fits.
    """
    return _FoldingSearch(graph, device).fastest()


def cost(resources: Resources, device: FpgaDevice) -> float:
    """The price of a design, for comparing designs.

    Logic counts in full, as its share of the device, because routing runs out of it. Multipliers and block RAMs exist
    whether they are used or not, and count a tenth.
    """
    whole = device.resources
    logic = resources.luts / whole.luts + resources.ffs / whole.ffs
    blocks = resources.multipliers / whole.multipliers + resources.block_rams / whole.block_rams
    return logic + blocks / 10


def foldings(stage: ConvStage) -> Iterator[StageFolding]:
    """The legal foldings of a stage, with multipliers in DSP blocks, look-up tables, or about half of each."""
    kernel, depth, channels = stage.conv.kernel, stage.taken.channels, stage.conv.channels
    for taps in sorted({1, kernel, kernel * kernel}):
        for together in _divisors(depth) if taps <= kernel else (depth,):
            for pe in _divisors(channels):
                period = beats(stage, StageFolding(taps=taps, channels=together, pe=pe))
                lanes = next(lanes for lanes in _divisors(pe) if pe // lanes <= period)
                for lut_pe in sorted({0, pe // 4 * 2, pe}):
                    for lut_requantise in (False, True) if stage.requantise is not None else (False,):
                        yield StageFolding(
                            taps=taps,
                            channels=together,
                            pe=pe,
                            lanes=lanes,
                            lut_pe=lut_pe,
                            lut_requantise=lut_requantise,
                        )


_StageChoice: TypeAlias = tuple[StageFolding, Resources]
"""A folding of one stage, and what it takes for given input lanes."""
_PartialDesign: TypeAlias = tuple[tuple[StageFolding, ...], Resources]
"""The foldings of a graph's first stages, and what they take together."""


class _FoldingSearch:
    """The search for one graph and device; caches the resources of each stage's foldings."""

    def __init__(self, graph: IntegerGraph, device: FpgaDevice) -> None:
        self._graph, self._device = graph, device
        whole = device.resources
        self._budget = msgspec.structs.replace(whole, luts=int(whole.luts * ROUTABLE), ffs=int(whole.ffs * ROUTABLE))
        self._choices: dict[tuple[str, int], list[_StageChoice]] = {}

    def fastest(self) -> Folding:
        stages = self._graph.stages
        limits = sorted({cycles(stage, fold) for stage in stages for fold in foldings(stage)})
        best = self.within(limits[-1])
        if best is None:
            raise CompileError(f"{self._graph.name}: no folding of it fits {self._device.name}")
        low, high = 0, len(limits) - 1
        while low < high:  # halves each time
            intermediate = (low + high) // 2
            found = self.within(limits[intermediate])
            if found is None:
                low = intermediate + 1
            else:
                best, high = found, intermediate
        return best

    def within(self, limit: int) -> Folding | None:
        """The cheapest folding of at most `limit` cycles per image; None if the device holds none."""
        graph = self._graph
        if limit < max(input_cycles(graph), graph.classes):
            return None
        front: Mapping[int, Sequence[_PartialDesign]] = {graph.input.channels: [((), of_frame(graph))]}
        for stage in graph.stages:
            joined: dict[int, list[_PartialDesign]] = {}
            for lanes, parts in front.items():
                for fold, needed in self._unbeaten(stage, lanes, limit):
                    for folds, taken in parts:
                        resources = taken + needed
                        if resources.fits(self._budget):
                            joined.setdefault(fold.lanes, []).append(((*folds, fold), resources))
            front = {lanes: self._front(parts) for lanes, parts in joined.items()}
        parts = [part for found in front.values() for part in found]
        if not parts:
            return None
        folds, _ = min(parts, key=self._cost)
        folding = Folding(stages=dict(zip((stage.name for stage in graph.stages), folds, strict=True)))
        check_folding(graph, folding)
        return folding

    def _cost(self, part: _PartialDesign) -> float:
        return cost(part[1], self._device)

    def _unbeaten(self, stage: ConvStage, lanes: int, limit: int) -> list[_StageChoice]:
        """The choices that no other dominates, per number of output lanes, cheapest first."""
        kept: dict[int, list[_StageChoice]] = {}
        for fold, needed in self._all(stage, lanes):
            others = kept.setdefault(fold.lanes, [])
            if cycles(stage, fold) <= limit and not any(other.fits(needed) for _, other in others):
                others.append((fold, needed))
        return [choice for choices in kept.values() for choice in choices]

    def _all(self, stage: ConvStage, lanes: int) -> list[_StageChoice]:
        known = self._choices.get((stage.name, lanes))
        if known is None:
            known = [
                (fold, of_stage(stage, fold, lanes))
                for fold in foldings(stage)
                if lanes % fold.channels == 0 or fold.channels % lanes == 0
            ]
            known.sort(key=lambda choice: cost(choice[1], self._device))
            self._choices[stage.name, lanes] = known
        return known

    def _front(self, parts: Sequence[_PartialDesign]) -> list[_PartialDesign]:
        ordered = sorted(parts, key=self._cost)
        kept = np.empty((MAX_FRONT, len(Resources.__struct_fields__)), np.int64)
        front: list[_PartialDesign] = []
        for part in ordered:
            needs = np.array(msgspec.structs.astuple(part[1]))
            if not (kept[: len(front)] <= needs).all(axis=1).any():
                kept[len(front)] = needs
                front.append(part)
                if len(front) == MAX_FRONT:
                    break
        return front


def _divisors(whole: int) -> list[int]:
    return [part for part in range(1, whole + 1) if whole % part == 0]

"""Reports of builds as Markdown pages; each figure says whether it is counted, simulated or estimated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fpga.reports.build_report import BuildReport, encode_report, read
from fpga.reports.energy import BOARD_W, constants


def write(report: BuildReport, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `<name>.json` and `<name>.md`; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    data.write_bytes(encode_report(report))
    page.write_text(markdown(read(data)), encoding="utf-8")
    return data, page


def markdown(report: BuildReport) -> str:
    """The report as a page."""
    parts = [
        f"# {report.task} {report.variant} on {report.device}",
        f"`{report.command}`",
        _headline(report),
        "## Implementation\n\n" + _implementation(report),
        "## Cycles\n\n" + _cycles(report),
        "## Proof on the netlist\n\n" + _proof(report),
        "## Energy per inference: an estimate\n\n" + _energy(report),
    ]
    return "\n\n".join(parts) + "\n"


def summary(reports: Sequence[BuildReport]) -> str:
    """Several reports as one page: results, and errors of the estimates made before synthesis."""
    head = (
        *("build", "inferences/s", "MHz", "latency, µs"),
        *("LUT4 / FF", "multipliers / block RAM", "µJ", "differing logits"),
    )
    parts = (
        "# Builds",
        "Clocks are nextpnr's static timing, the median of the seeds tried (in brackets how many); cycles and logits "
        "are simulated; energy is an estimate (low / mid / high, chip only). Nothing here ran on a board.",
        table(head, [_result_row(report) for report in reports]),
        "Estimated before synthesis / found by it. None of these foldings took part in the fit of the estimate.",
        table(
            ("build", "LUT4", "flip-flops", "multipliers", "block RAM", "cycles per image"),
            [_estimate_row(report) for report in reports],
        ),
        "Measurements: [the power model against published currents](../../docs/benchmarks/fpga-power-model.md), "
        "[energy against a CPU core](../../docs/benchmarks/fpga-energy.md), "
        "[builds that did not route](../../docs/benchmarks/fpga-not-routed.md).",
    )
    return "\n\n".join(parts) + "\n"


def _link(report: BuildReport) -> str:
    file = f"{report.task}-{report.variant}-{report.device}.md"
    return f"[{report.task} {report.variant}, {report.device}]({file})"


def _result_row(report: BuildReport) -> list[str]:
    energy = report.energy
    return [
        _link(report),
        f"{report.rate:,.0f}",
        f"{report.median_mhz:.1f} ({len(report.seeds)})",
        f"{report.latency_us:.0f}",
        f"{report.placed.luts:,} / {report.placed.ffs:,}",
        f"{report.placed.multipliers} / {report.placed.block_rams}",
        f"{energy.low.chip_uj:.0f} / **{energy.mid.chip_uj:.0f}** / {energy.high.chip_uj:.0f}",
        f"{report.proof.differing} of {report.proof.logits:,}",
    ]


def _estimate_row(report: BuildReport) -> list[str]:
    made, guess = report.synthesised, report.estimated
    return [
        _link(report),
        f"{guess.luts:,} / {made.luts:,} ({guess.luts / made.luts - 1:+.1%})",
        f"{guess.ffs:,} / {made.ffs:,} ({guess.ffs / made.ffs - 1:+.1%})",
        f"{guess.multipliers} / {made.multipliers}",
        f"{guess.block_rams} / {made.block_rams}",
        f"{report.estimated_cycles:,} / {report.simulated_cycles:,}",
    ]


def _headline(report: BuildReport) -> str:
    low, mid, high = report.energy.low, report.energy.mid, report.energy.high
    return (
        f"{report.rate:,.0f} inferences/s at {report.median_mhz:.1f} MHz, {_seeds(report)}; "
        f"latency {report.latency_us:.0f} µs. Estimated energy {mid.chip_uj:.1f} µJ an inference "
        f"({low.chip_uj:.1f}–{high.chip_uj:.1f}) for the chip. Nothing here ran on a board: the clock is nextpnr's "
        "static timing, cycles are simulated, energy is a model."
    )


def _seeds(report: BuildReport) -> str:
    return "the only seed tried" if len(report.seeds) == 1 else f"the median of {len(report.seeds)} seeds"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


TITLES: Final = {"luts": "LUT4", "ffs": "flip-flops", "multipliers": "MULT18X18", "block_rams": "block RAM"}
COUNTED: Final = "LUT4 as synthesised are cells; as placed they include what feeds carry chains and passes signals on."


def _implementation(report: BuildReport) -> str:
    columns = (report.estimated, report.synthesised, report.placed, report.available)
    rows = [[title, *(f"{getattr(column, field):,}" for column in columns)] for field, title in TITLES.items()]
    seeds = [
        [str(seed.seed), "–" if seed.mhz is None else f"{seed.mhz:.1f}", f"{seed.cpu_s:.0f}", seed.why_not or ""]
        for seed in report.seeds
    ]
    tools = "; ".join(f"{name}: {version}" for name, version in report.tools.items())
    path = "\n".join(f"    {step}" for step in report.critical_path)
    return "\n\n".join(
        [
            table(["", "model's estimate", "synthesised", "placed", "available"], rows),
            COUNTED,
            table(["seed", "MHz", "CPU s", ""], seeds),
            f"Median {report.median_mhz:.1f} MHz, best {report.best_mhz:.1f} MHz (the bitstream's); the placer aimed "
            f"at {report.target_mhz:g}. Synthesis took {report.synthesis_cpu_s:.0f} CPU s. {report.pins}",
            f"Tools: {tools}.",
            f"Slowest path of the best seed:\n\n{path}",
        ]
    )


def _cycles(report: BuildReport) -> str:
    rows = []
    for name, cycles in report.stage_cycles.items():
        fold = report.folding.stages[name]
        shape = f"{fold.taps} × {fold.channels} × {fold.pe}"
        rows.append(
            [name, shape, f"{fold.lanes}", f"{fold.lut_pe}", f"{cycles:,}", f"{cycles / report.estimated_cycles:.0%}"]
        )
    return "\n\n".join(
        [
            table(["stage", "taps × channels × outputs", "lanes", "in LUTs", "cycles", "busy"], rows),
            f"From image to image {report.estimated_cycles:,} cycles by the model, {report.simulated_cycles:,} "
            f"simulated; first pixel to last logit {report.latency_cycles:,}. {report.multipliers_in_use} "
            f"multiply-accumulates a cycle when every stage is busy, {report.multiplications:,} an inference.",
        ]
    )


def _proof(report: BuildReport) -> str:
    proof = report.proof
    cells = ", ".join(f"{count:,} {name}" for name, count in sorted(proof.cells.items(), key=lambda item: -item[1]))
    return (
        f"{proof.differing} of {proof.logits:,} logits of {proof.images:,} images ({proof.images_from}) differ "
        f"from the integer reference, {proof.cycles_per_image:,.1f} cycles an image. Cells: {cells}."
    )


PARTS: Final = {
    "nets": "nets_uj",
    "multipliers": "multipliers_uj",
    "block RAM": "memories_uj",
    "clock": "clock_uj",
    "static": "static_uj",
    "**chip**": "chip_uj",
    "chip and board": "with_board_uj",
}
"""The rows of the table of energy, and their fields."""


def _energy(report: BuildReport) -> str:
    corners = (report.energy.low, report.energy.mid, report.energy.high)
    rows = [[name, *(f"{getattr(energy, field):.1f}" for energy in corners)] for name, field in PARTS.items()]
    digits = 2 if report.energy.low.chip_w >= 0.1 else 4
    rows.append(["chip, W", *(f"{energy.chip_w:.{digits}f}" for energy in corners)])
    switching = report.switching
    return "\n\n".join(
        [
            table(["µJ", "low", "mid", "high"], rows),
            f"At {report.median_mhz:.1f} MHz and full load. Per inference the nets made {switching.net_toggles:,.0f} "
            f"transitions, {switching.branch_toggles:,.0f} reached further inputs, {switching.multiplications:,.0f} "
            f"multiplier operands changed, and block RAM ports were clocked {switching.memory_accesses:,.0f} times "
            f"(netlist, {switching.inferences} inferences, no delays: glitches are missed). The board is assumed to "
            f"draw {BOARD_W[0]}, {BOARD_W[1]} or {BOARD_W[2]} W beside the chip.",
            _constants(),
        ]
    )


def _constants() -> str:
    rows = [
        [name, " / ".join(f"{value:g}" for value in each.values), each.unit, each.basis, each.source]
        for name, each in constants().items()
    ]
    return table(["constant", "low / mid / high", "unit", "basis", "source"], rows)

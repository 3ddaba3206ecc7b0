"""Measures the cascade with the FPGA's network at the edge, over HTTP: accuracy, escalation, and kept guarantees.

    python -m tests.bench.fpga.cascade --task cifar10 --data /path/to/cifar10.npz

Both tiers run on this machine, the edge with `--backend fpga-ref` (or another) and the manifest's FPGA stage.
`loadgen evaluate` sends the images that calibration held out, once per target. A guarantee counts as broken if the
measured drop exceeds it by more than 1.96 standard errors of the paired difference. Exit status 1 if a guarantee is
broken or an answer is degraded.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from hawkvision.core.errors import HawkVisionError
from hawkvision.system.child_server import running
from loadgen.__main__ import main as loadgen
from loadgen.analysis.evaluation import TargetRow
from loadgen.commands.evaluate import EvaluationReport

TARGETS = (
    "quality=best,quality=balanced,quality=fast,max_accuracy_drop=0.01,max_accuracy_drop=0.02,max_accuracy_drop=0.05"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", type=Path, required=True, help="the labelled images of the calibration")
    parser.add_argument("--backend", choices=("fpga-ref", "fpga-sim", "fpga-device"), default="fpga-ref")
    parser.add_argument("--fpga-device", help="for fpga-device")
    parser.add_argument("--profile", type=Path, help="in place of the shipped one; held_out.json lies beside it")
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--limit", type=int, help="of held-out images")
    parser.add_argument("--concurrency", type=int, default=4)
    given = parser.parse_args(argv)
    try:
        report = _evaluated(given)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows = [row for row in report.rows if isinstance(row, TargetRow)]
    table = Table("target", "drop", "± 95 %", "guaranteed", "kept", "escalated", title=f"{given.task}, {given.backend}")
    for row in rows:
        guaranteed = "–" if row.guaranteed_drop is None else f"{row.guaranteed_drop:.4f}"
        kept = "" if row.guaranteed_drop is None else "yes" if is_kept(row) else "NO"
        table.add_row(row.target, f"{row.drop:.4f}", f"{margin(row):.4f}", guaranteed, kept, f"{row.escalated:.1%}")
    Console(width=110).print(table)
    return int(not all(is_kept(row) and not row.degraded for row in rows))


def margin(row: TargetRow) -> float:
    """Half the width of the 95 % interval of the paired drop (normal approximation)."""
    changed = (row.lost + row.gained) / row.n
    return 1.96 * math.sqrt(max(changed - row.drop**2, 0.0) / row.n)


def is_kept(row: TargetRow) -> bool:
    """Whether the drop is not more than guaranteed, as far as these images can tell."""
    return row.guaranteed_drop is None or row.drop - margin(row) <= row.guaranteed_drop


def _evaluated(given: argparse.Namespace) -> EvaluationReport:
    device = () if given.fpga_device is None else ("--fpga-device", given.fpga_device)
    profile = () if given.profile is None else ("--profile", str(given.profile))
    indices = () if given.profile is None else ("--indices", str(given.profile.with_name("held_out.json")))
    with (
        tempfile.TemporaryDirectory() as folder,
        running("hawkvision.datacenter", "--port", "0", "--tasks", given.task) as datacenter,
        running(
            "edge", "--port", "0", "--task", given.task, "--backend", given.backend, *device, *profile,
            "--datacenter-url", datacenter.url,
        ) as edge,
    ):  # fmt: skip
        out = Path(folder) / "report.json"
        limit = () if given.limit is None else ("--limit", str(given.limit))
        status = loadgen(
            [
                "evaluate", "--url", edge.url, "--task", given.task, "--data", str(given.data),
                "--targets", given.targets, "--concurrency", str(given.concurrency), "--json", str(out),
                *limit, *indices,
            ]
        )  # fmt: skip
        if status:
            raise HawkVisionError("loadgen evaluate failed; see above")
        return msgspec.json.decode(out.read_bytes(), type=EvaluationReport)


if __name__ == "__main__":
    sys.exit(main())

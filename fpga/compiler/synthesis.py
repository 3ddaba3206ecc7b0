"""From emitted RTL to a bitstream: yosys, nextpnr with several seeds, a packer; each run is bounded in CPU time.

Placement starts from a random seed and the clock varies with it, so a report states the median of several seeds; the
bitstream is that of the best one. A seed that cannot be routed within its CPU time is recorded, and the next is tried.

Without a pin file, ports lie anywhere and paths to and from them are unconstrained: the build shows that the design
fits and how fast its inside runs, and nothing about timing at the pins. A board needs a pin file (LPF) and
usually a PLL.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fpga.compiler import ecp5_tools
from fpga.compiler.bram_output_registers import absorb
from fpga.compiler.devices import FpgaDevice, Resources
from fpga.compiler.ecp5_tools import BITSTREAM, NETLIST, PACKER, PINS, PLACED, PLACER
from fpga.compiler.toolchain import Say, find, version_of
from fpga.compiler.yosys_netlist import count_cells, read_module
from hawkvision.core.errors import CompileError
from hawkvision.system.subprocess_runner import CommandResult, run

SYNTHESIS_CPU_S: Final = 300
"""CPU seconds of one synthesis."""
ROUTE_CPU_S: Final = 600
"""CPU seconds of one seed."""
PACK_CPU_S: Final = 120


@dataclass(frozen=True, slots=True)
class SynthesisResult:
    """A netlist of the device's cells."""

    netlist: Path
    """The netlist file, in yosys's JSON."""
    cells: Mapping[str, int]
    """Cells by type."""
    resources: Resources
    """The resources of these cells."""
    cpu_s: float


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the placer, as reports have it."""

    seed: int
    mhz: float | None
    """From nextpnr's static timing analysis, at the speed grade's slow corner; None if there is no design."""
    why_not: str | None = None
    cpu_s: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the placer, what it gave and what exactly was tried; kept beside the netlist."""

    result: SeedResult
    placed: Resources | None = None
    """None if there is no design."""
    critical_path: tuple[str, ...] = ()
    """Cells and wires of the slowest path from register to register, with their delays."""
    tried: str = ""
    stopped_at_s: int | None = None
    """The CPU limit that ended it."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How a netlist is placed and routed."""

    seeds: int = 5
    target_mhz: float | None = None
    """Clock that the placer aims at; None: the device's usual."""
    cpu_limit_s: int = ROUTE_CPU_S
    """CPU seconds of one seed."""
    pins: Path | None = None
    """Pin file; None: only the clock has a fixed pin."""


def synthesise(
    files: Sequence[Path],
    top: str,
    folder: Path,
    *,
    cpu_limit_s: int = SYNTHESIS_CPU_S,
    say: Say | None = None,
) -> SynthesisResult:
    """Map Verilog files to the device's cells. `folder` holds the files and the memories that they read.

    Raises:
        CompileError: if yosys is missing, refuses the files or takes too long.
    """
    # Names without folders, because the WebAssembly build has a /tmp of its own.
    script = ecp5_tools.script([path.name for path in files], top)
    command = ["-q", "-p", script]
    ran = run(find("yosys", say), command, cpu_limit_s=cpu_limit_s, folder=folder, title="yosys").check()
    absorb(folder / NETLIST, top)
    module = read_module(folder / NETLIST, top)
    return SynthesisResult(folder / NETLIST, count_cells(module), ecp5_tools.used_resources(module), ran.cpu_s)


def place_and_route(
    made: SynthesisResult, device: FpgaDevice, options: RoutingOptions, say: Say | None = None
) -> Iterator[Attempt]:
    """Try the seeds one by one; a routed one leaves `seed<N>.config` beside the netlist.

    Results are kept beside the netlist: placing the same netlist again with the same tool and arguments returns them at
    once, so an interrupted build continues where it was. A seed that hit its CPU limit is tried again under a higher
    one.

    Raises:
        CompileError: if nextpnr is missing, or the design is larger than the device.
    """
    _check_fits(made.resources, device)
    folder, limit_s = made.netlist.parent, options.cpu_limit_s
    tool = find(PLACER, say)
    version = version_of(PLACER)
    pins = options.pins.read_bytes() if options.pins else ecp5_tools.clock_pin(device).encode()
    (folder / PINS).write_bytes(pins)
    content = made.netlist.read_bytes() + pins
    for seed in range(1, options.seeds + 1):
        arguments = ecp5_tools.route(device, seed, options.target_mhz or device.target_mhz)
        identity = " ".join([version, *arguments]).encode()
        tried = hashlib.sha256(identity + content).hexdigest()
        kept = folder / f"seed{seed}.done.json"
        attempt = _read_attempt(kept, tried, limit_s)
        if attempt is None:
            kept.unlink(missing_ok=True)  # it described files that are rewritten now
            ran = run(tool, arguments, cpu_limit_s=limit_s, folder=folder, title=f"nextpnr seed {seed}")
            attempt = msgspec.structs.replace(
                _attempt(ran, seed, made), tried=tried, stopped_at_s=limit_s if ran.stopped_at_limit else None
            )
            if ran.status >= 0 or ran.stopped_at_limit:  # a killed run may succeed next time
                kept.write_bytes(msgspec.json.encode(attempt))
        yield attempt


def _read_attempt(path: Path, tried: str, cpu_limit_s: int) -> Attempt | None:
    """A seed's result on disk. A file of another trial, or one that cannot be read, counts as missing."""
    try:
        done = msgspec.json.decode(path.read_bytes(), type=Attempt)
    except (OSError, msgspec.DecodeError):
        return None
    same = done.tried == tried and (done.stopped_at_s or cpu_limit_s) >= cpu_limit_s
    return done if same else None


def _check_fits(needed: Resources, device: FpgaDevice) -> None:
    for field in Resources.__struct_fields__:
        want, has = getattr(needed, field), getattr(device.resources, field)
        if want > has:
            raise CompileError(f"{device.name}: the design needs {want} {field}, but there are {has}; fold it more")


def _attempt(ran: CommandResult, seed: int, made: SynthesisResult) -> Attempt:
    written = made.netlist.parent / f"seed{seed}.json"
    if not ran.succeeded or not written.exists():
        return Attempt(result=SeedResult(seed=seed, mhz=None, why_not=ran.complaint, cpu_s=ran.cpu_s))
    report: dict[str, Any] = msgspec.json.decode(written.read_bytes())
    used = {name: entry["used"] for name, entry in report["utilization"].items()}
    counts = {field: used.get(name, 0) for field, name in PLACED.items()}
    mhz = min((clock["achieved"] for clock in report["fmax"].values()), default=0.0)
    return Attempt(
        result=SeedResult(seed=seed, mhz=mhz, cpu_s=ran.cpu_s),
        placed=msgspec.structs.replace(made.resources, **counts),
        critical_path=_slowest(report.get("critical_paths", [])),
    )


def _slowest(paths: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    inside = [path for path in paths if "async" not in path["from"] and "async" not in path["to"] and path["path"]]
    if not inside:
        return ()
    steps = max(inside, key=lambda path: sum(step["delay"] for step in path["path"]))["path"]
    return tuple(
        f"{step['delay']:.2f} ns {step['type']}: "
        + " to ".join(f"{step[end]['cell']}.{step[end]['port']}" for end in ("from", "to"))
        for step in steps
    )


def pack(made: SynthesisResult, seed: int, say: Say | None = None) -> Path:
    """Write the bitstream of a routed seed.

    Raises:
        CompileError: if the packer is missing or fails.
    """
    folder = made.netlist.parent
    run(find(PACKER, say), ecp5_tools.pack(seed), cpu_limit_s=PACK_CPU_S, folder=folder, title=PACKER).check()
    return folder / BITSTREAM


def best_and_median(attempts: Sequence[Attempt]) -> tuple[Attempt, float]:
    """The attempt with the fastest design, and the median clock of all; one without a design counts as 0 MHz.

    Raises:
        CompileError: if no attempt or less than half of them gave a design, with every reason.
    """
    median = statistics.median(attempt.result.mhz or 0.0 for attempt in attempts)
    failed = [attempt.result.why_not or "" for attempt in attempts if attempt.placed is None]
    if len(failed) == len(attempts):
        raise CompileError(f"no seed led to a routed design: {'; '.join(failed)}")
    if not median:
        raise CompileError(
            f"{len(failed)} of {len(attempts)} seeds led to no design, so there is no median clock; fold it more, or "
            f"try more seeds: {'; '.join(failed)}"
        )
    return max(attempts, key=lambda attempt: attempt.result.mhz or 0.0), median

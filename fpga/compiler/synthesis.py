"""From emitted RTL to a bitstream: yosys, nextpnr with several seeds, a packer; each run is bounded in CPU time.

Placement starts from a random seed and the clock varies with it, so a report states the median of several seeds; the
bitstream is that of the best one. A seed that cannot be routed within its CPU time is recorded, and the next is tried.

Without a pin file, ports lie anywhere and paths to and from them are unconstrained: the build shows that the design
fits and how fast its inside runs, and nothing about timing at the pins. A board needs a pin file (LPF, for iCE40 PCF)
and usually a PLL.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from fpga.compiler.device_families import BITSTREAM, FAMILIES, NETLIST
from fpga.compiler.devices import FamilyName, FpgaDevice, Resources
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
    """A netlist of the family's cells."""

    netlist: Path
    """The netlist file, in yosys's JSON."""
    cells: Mapping[str, int]
    """Cells by type."""
    resources: Resources
    """The resources of these cells."""
    cpu_s: float


@dataclass(frozen=True, slots=True)
class RoutedDesign:
    """A seed that gave a complete design."""

    seed: int
    fmax_mhz: float
    """From nextpnr's static timing analysis, at the speed grade's slow corner."""
    resources: Resources
    cpu_s: float
    critical_path: tuple[str, ...]
    """Cells and wires of the slowest path from register to register, with their delays."""


@dataclass(frozen=True, slots=True)
class FailedRouting:
    """A seed that gave no design."""

    seed: int
    why: str
    cpu_s: float


Attempt = RoutedDesign | FailedRouting


def synthesise(
    files: Sequence[Path],
    top: str,
    folder: Path,
    *,
    family: FamilyName = "ecp5",
    parameters: Mapping[str, int] | None = None,
    cpu_limit_s: int = SYNTHESIS_CPU_S,
    say: Say | None = None,
) -> SynthesisResult:
    """Map Verilog files to a family's cells. `folder` holds the files and the memories that they read.

    `parameters` override the top's.

    Raises:
        CompileError: if yosys is missing, refuses the files or takes too long.
    """
    kind = FAMILIES[family]
    # Names without folders, because the WebAssembly build has a /tmp of its own.
    script = kind.script([path.name for path in files], top, parameters or {})
    command = ["-q", "-p", script]
    ran = run(find("yosys", say), command, cpu_limit_s=cpu_limit_s, folder=folder, title="yosys").check()
    kind.refine(folder / NETLIST, top)
    module = read_module(folder / NETLIST, top)
    return SynthesisResult(folder / NETLIST, count_cells(module), kind.used_resources(module), ran.cpu_s)


def place_and_route(
    made: SynthesisResult,
    device: FpgaDevice,
    seeds: Sequence[int],
    *,
    target_mhz: float | None = None,
    cpu_limit_s: int = ROUTE_CPU_S,
    pins: Path | None = None,
    say: Say | None = None,
) -> Iterator[Attempt]:
    """Try the seeds one by one; a routed one leaves `seed<N>.config` (iCE40: `.asc`) beside the netlist.

    The placer aims at `target_mhz`, or at the device's usual clock. Results are kept beside the netlist: placing the
    same netlist again with the same tool and arguments returns them at once, so an interrupted build continues where it
    was. A seed that hit its CPU limit is tried again under a higher one.

    Raises:
        CompileError: if nextpnr is missing, or the design is larger than the device.
    """
    _check_fits(made.resources, device)
    kind, folder = FAMILIES[device.family], made.netlist.parent
    tool = find(kind.placer, say)
    version = version_of(kind.placer)
    placed = pins.read_bytes() if pins else kind.clock_pin(device).encode()
    (folder / kind.pins).write_bytes(placed)
    content = made.netlist.read_bytes() + placed
    for seed in seeds:
        arguments = kind.route(device, seed, target_mhz or device.target_mhz)
        identity = " ".join([version, *arguments]).encode()
        tried = hashlib.sha256(identity + content).hexdigest()
        kept = folder / f"seed{seed}.done.json"
        attempt = _read_attempt(kept, tried, cpu_limit_s)
        if attempt is None:
            kept.unlink(missing_ok=True)  # it described files that are rewritten now
            ran = run(tool, arguments, cpu_limit_s=cpu_limit_s, folder=folder, title=f"nextpnr seed {seed}")
            attempt = _attempt(ran, seed, made, device)
            if ran.status >= 0 or ran.stopped_at_limit:  # a killed run may succeed next time
                _write_attempt(kept, tried, attempt, cpu_limit_s if ran.stopped_at_limit else None)
        yield attempt


class _SeedRecord(msgspec.Struct):
    """The result of a seed, and what exactly was tried."""

    tried: str
    stopped_at_s: int | None = None
    """The CPU limit that ended it."""
    routed: RoutedDesign | None = None
    unrouted: FailedRouting | None = None


def _read_attempt(path: Path, tried: str, cpu_limit_s: int) -> Attempt | None:
    """A seed's result on disk. A file of another trial, or one that cannot be read, counts as missing."""
    try:
        done = msgspec.json.decode(path.read_bytes(), type=_SeedRecord)
    except (OSError, msgspec.DecodeError):
        return None
    if done.tried != tried or (done.stopped_at_s or cpu_limit_s) < cpu_limit_s:
        return None
    return done.routed or done.unrouted


def _write_attempt(path: Path, tried: str, attempt: Attempt, stopped_at_s: int | None) -> None:
    record = _SeedRecord(tried, stopped_at_s)
    if isinstance(attempt, RoutedDesign):
        record.routed = attempt
    else:
        record.unrouted = attempt
    path.write_bytes(msgspec.json.encode(record))


def _check_fits(needed: Resources, device: FpgaDevice) -> None:
    for field in Resources.__struct_fields__:
        want, has = getattr(needed, field), getattr(device.resources, field)
        if want > has:
            raise CompileError(f"{device.name}: the design needs {want} {field}, but there are {has}; fold it more")


class _CellPin(msgspec.Struct):
    cell: str
    port: str


class _PathStep(msgspec.Struct):
    delay: float
    type: str
    from_: _CellPin = msgspec.field(name="from")
    to: _CellPin


class _TimingPath(msgspec.Struct):
    from_: str = msgspec.field(name="from")
    to: str
    path: list[_PathStep]


class _NextpnrReport(msgspec.Struct):
    """nextpnr's report: of each clock what it `achieved`, of each kind of cell how many are `used`."""

    fmax: dict[str, dict[Literal["achieved", "constraint"], float]]
    utilization: dict[str, dict[Literal["available", "used"], int]]
    critical_paths: list[_TimingPath] = []


def _attempt(ran: CommandResult, seed: int, made: SynthesisResult, device: FpgaDevice) -> Attempt:
    written = made.netlist.parent / f"seed{seed}.json"
    if not ran.succeeded or not written.exists():
        return FailedRouting(seed, ran.complaint, ran.cpu_s)
    report = msgspec.json.decode(written.read_bytes(), type=_NextpnrReport)
    used = {name: entry["used"] for name, entry in report.utilization.items()}
    placed = {field: used.get(name, 0) for field, name in FAMILIES[device.family].placed.items()}
    resources = msgspec.structs.replace(made.resources, **placed)
    fmax = min((clock["achieved"] for clock in report.fmax.values()), default=0.0)
    return RoutedDesign(seed, fmax, resources, ran.cpu_s, _slowest(report.critical_paths))


def _slowest(paths: Sequence[_TimingPath]) -> tuple[str, ...]:
    inside = [path for path in paths if "async" not in path.from_ and "async" not in path.to and path.path]
    if not inside:
        return ()
    steps = max(inside, key=lambda path: sum(step.delay for step in path.path)).path
    return tuple(
        f"{step.delay:.2f} ns {step.type}: {step.from_.cell}.{step.from_.port} to {step.to.cell}.{step.to.port}"
        for step in steps
    )


def pack(made: SynthesisResult, device: FpgaDevice, best: RoutedDesign, say: Say | None = None) -> Path:
    """Write the bitstream of a routed seed.

    Raises:
        CompileError: if the packer is missing or fails.
    """
    kind, folder = FAMILIES[device.family], made.netlist.parent
    run(find(kind.packer, say), kind.pack(best.seed), cpu_limit_s=PACK_CPU_S, folder=folder, title=kind.packer).check()
    return folder / BITSTREAM


def routed(attempts: Sequence[Attempt]) -> list[RoutedDesign]:
    """The routed attempts, fastest first.

    Raises:
        CompileError: if no attempt was routed, with every reason.
    """
    found = [attempt for attempt in attempts if isinstance(attempt, RoutedDesign)]
    if not found:
        reasons = "; ".join(attempt.why for attempt in attempts if isinstance(attempt, FailedRouting))
        raise CompileError(f"no seed led to a routed design: {reasons}")
    return sorted(found, key=lambda attempt: -attempt.fmax_mhz)


def median_mhz(attempts: Sequence[Attempt]) -> float:
    """The median clock of all seeds; a seed that did not route counts as 0.

    Raises:
        CompileError: if most seeds did not route.
    """
    found = statistics.median(attempt.fmax_mhz if isinstance(attempt, RoutedDesign) else 0.0 for attempt in attempts)
    if not found:
        failed = [attempt.why for attempt in attempts if isinstance(attempt, FailedRouting)]
        raise CompileError(
            f"{len(failed)} of {len(attempts)} seeds led to no design, so there is no median clock; fold it more, or "
            f"try more seeds: {'; '.join(failed)}"
        )
    return found

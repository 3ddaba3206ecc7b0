"""Checks of the machine: processor, system, compiler, open files, memory, namespaces."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
from typing import Final

from hawkvision.doctor.findings import Finding, ok, problem, warning
from hawkvision.native.library import TILES, cpuinfo, unavailable_reason, unsupported_reason
from hawkvision.servers.connections import MIN_CONNECTIONS, RESERVED_FILES
from hawkvision.system.memory import MemoryRoom, room

OLDEST_LINUX: Final = (4, 18)
"""The oldest kernel that is still maintained (RHEL 8)."""
FEW_FILES: Final = 1024
"""The usual soft limit; the server raises it to the hard one."""
EDGE_BYTES: Final = 512 * 2**20
"""Twice the memory of a node with the ImageNet cascade's edge ensemble; images need the rest."""
DATACENTER_BYTES: Final = 2 * 2**30
"""Ray's own processes take 1 GB, a replica of the ImageNet cascade 0.4 GB."""


def processor(machine: str | None = None, flags: str | None = None) -> Finding:
    """The processor's features for quantised networks; arguments replace those of this machine."""
    machine = machine or platform.machine()
    has = set((cpuinfo("flags") if flags is None else flags).split())
    if machine not in ("x86_64", "AMD64"):
        return warning("processor", f"{machine}: no kernels of our own", "nothing; ONNX Runtime runs the models")
    if "avx512_vnni" in has and {"avx512f", "avx512bw", "avx512vl"} <= has:
        tiles = " and AMX" if set(TILES) <= has else ""
        return ok("processor", f"{machine} with AVX-512 VNNI{tiles}: our own kernels run the quantised models")
    if "avx2" in has:
        return warning(
            "processor",
            f"{machine} with AVX2, without AVX-512 VNNI",
            "nothing; ONNX Runtime gives the same answers and takes about half again as long",
        )
    return warning(
        "processor", f"{machine} without AVX2", "take a processor with AVX2 or later: models run many times slower here"
    )


def kernels() -> Finding:
    """Whether our own kernels run here; compiles them if needed."""
    if unsupported_reason() is not None:
        return ok("kernels", "not for this processor, ONNX Runtime runs the models")
    if importlib.util.find_spec("onnx") is None:
        return warning(
            "kernels",
            "the package onnx, which reads models for them, is missing",
            "in a checkout, pip install '.[int8]'",
        )
    reason = unavailable_reason()
    if reason is None:
        return ok("kernels", "compiled, and loaded")
    advice = "install a C++ compiler (Debian: g++); in an image, run python -m hawkvision.native when it is built"
    if "compiler" not in reason:
        advice = "mend that, or go without: ONNX Runtime gives the same answers more slowly"
    return warning("kernels", reason, advice)


def system(name: str | None = None, release: str | None = None) -> Finding:
    """The operating system's kernel; arguments replace those of this machine."""
    name, release = name or platform.system(), release or platform.release()
    if name != "Linux":
        return warning("system", f"{name} {release}", "run servers on Linux: nothing else is tried")
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_LINUX:
        oldest = ".".join(map(str, OLDEST_LINUX))
        return warning("system", f"Linux {release}", f"take Linux {oldest} or later: older ones are untried")
    return ok("system", f"Linux {release}")


def open_files(limits: tuple[int, int] | None = None) -> Finding:
    """How many connections are possible; `limits` are the soft and the hard limit of this process."""
    _, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        left = max(0, hard - RESERVED_FILES)
        found, advice = f"{shown}, which leaves {left} for callers", "raise it: LimitNOFILE= of the unit, or ulimit -n"
        return (problem if left < MIN_CONNECTIONS else warning)("open files", found, advice)
    return ok("open files", shown)


def memory(wanted: int, found: MemoryRoom | None = None) -> Finding:
    """Whether there is enough memory; None reads this machine's, cgroup limits included."""
    found = found or room()
    shown = f"{found.free_bytes / 2**20:.0f} MiB free, by {found.limited_by}"
    if found.free_bytes < wanted:
        return warning(
            "memory",
            f"{shown}; expected {wanted / 2**20:.0f} MiB or more",
            "raise the limit (MemoryMax= of the unit, limits.memory of the pod), or serve fewer or smaller models",
        )
    return ok("memory", shown)


def user() -> Finding:
    """Whether the server would run with more rights than needed."""
    if os.geteuid() == 0:
        return warning("user", "root", "run servers as a user of their own: they need none of root's rights")
    return ok("user", f"number {os.geteuid()}")

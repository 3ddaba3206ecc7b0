"""Checks of ONNX Runtime: its package, and the execution providers that the settings name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hawkvision.doctor.findings import Finding, ok, problem, warning
from hawkvision.inference.backend_registry import ON_THE_CPU
from hawkvision.inference.backends.execution_providers import (
    REINSTALL,
    available_providers,
    missing_reason,
    runtime_packages,
    start_failure,
)

GPU_PAGE = "docs/operations/gpu.md"


def runtime(providers: Sequence[str]) -> Iterator[Finding]:
    """The package of ONNX Runtime, then each provider of the settings beyond the CPU's."""
    packages, known = runtime_packages(), available_providers()
    on_cpu = tuple(providers) == ON_THE_CPU
    if not known:
        yield problem("ONNX Runtime", f"the module of {' and '.join(packages) or 'no package'} is not whole", REINSTALL)
        return
    if len(packages) > 1:
        both = f"{' and '.join(packages)} are installed, and have overwritten each other"
        yield (warning if on_cpu else problem)("ONNX Runtime", both, REINSTALL)
    else:
        yield ok("ONNX Runtime", f"{packages[0] if packages else 'built here'}, with {', '.join(known)}")
    for name in providers:
        if name not in ON_THE_CPU:
            yield _provider(name, name in known)


def _provider(name: str, available: bool) -> Finding:
    check = f"provider {name}"
    if not available:
        return problem(check, f"is not installed: {missing_reason(name)}", f"install what {GPU_PAGE} says")
    reason = start_failure(name)
    if reason is not None:
        return problem(check, f"does not start: {reason}", f"see the requirements in {GPU_PAGE}")
    return ok(check, "is installed; its libraries load")

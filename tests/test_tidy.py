"""What a machine can check of the style: linting, types, import layers, no cycles, documented names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hawkvision", "edge", "fpga", "loadgen")

# DESIGN §7, innermost name first found wins. A module may import its own package and what its row lists.
L0 = frozenset(
    {
        "hawkvision.core.types",
        "hawkvision.core.errors",
        "hawkvision.core.clock",
        "hawkvision.core.version",
        "hawkvision.system.telemetry",
        "hawkvision.core.text",
        "hawkvision.core.advice",
    }
)
L1 = frozenset(
    {
        "hawkvision.models.manifest",
        "hawkvision.core.settings",
        "hawkvision.core.key_text",
        "hawkvision.core.metrics",
        "hawkvision.core.trace",
        "hawkvision.core.logs",
        "hawkvision.system.log_relay",
        "hawkvision.models.fingerprints",
        "hawkvision.core.escalation_api",
        "hawkvision.models.artifacts",
        "hawkvision.system.files",
        "hawkvision.system.memory",
        "hawkvision.system.subprocess_runner",
        "hawkvision.system.native_build",
        "hawkvision.models.datasets",
        "hawkvision.models.idx_reader",
        "hawkvision.system.process",
        "hawkvision.reports",
        "hawkvision.system.terminal",
        "hawkvision.servers",
        "hawkvision.native",
        "hawkvision.models.onnx_graph",
        "hawkvision.system.onnx_runtime",
        "hawkvision.system.opencv_env",
    }
)
L2 = frozenset({"hawkvision.inference", "hawkvision.cascade", "hawkvision.network", "hawkvision.transport"})
CLIENT = frozenset({"hawkvision.client"})
FPGA = L0 | L1 | {"hawkvision.integer", "hawkvision.inference.backends.interface"}
PROTOCOL, CONGESTION, CODING, ENDPOINT = (
    f"hawkvision.transport.{name}" for name in ("protocol", "congestion", "coding", "endpoint")
)
MAY_IMPORT: dict[str, frozenset[str]] = {
    **dict.fromkeys(L0, L0),
    **dict.fromkeys(L1, L0 | L1),
    **dict.fromkeys(L2, L0 | L1),
    # The datagram transport's own layers, lowest first.
    PROTOCOL: L0 | L1,
    CONGESTION: L0 | L1,
    CODING: L0 | L1 | {PROTOCOL},
    "hawkvision.transport.endpoint": L0 | L1 | {PROTOCOL, CONGESTION, CODING, "hawkvision.transport.server.metrics"},
    "hawkvision.transport.client": L0 | L1 | L2,
    "hawkvision.client.request": L0,
    "hawkvision.client.response": L0 | {"hawkvision.client.request"},
    "hawkvision.client.batch": L0 | {"hawkvision.client.request"},
    "hawkvision.client.loop": L0,
    "hawkvision.client": L0 | L1 | {"hawkvision.transport"},
    # The quantised IR, which the zoo writes and `fpga` compiles.
    "hawkvision.integer": L0 | L1,
    "hawkvision.datacenter": L0 | L1 | L2,
    "hawkvision.model_zoo": L0 | L1 | L2 | {"hawkvision.integer"},
    "fpga": FPGA,
    "fpga.compiler": L0 | L1 | {"hawkvision.integer"},
    "fpga.simulation": FPGA | {"fpga.compiler"},
    "fpga.reports": FPGA | {"fpga.compiler", "fpga.simulation"},
    "fpga.device": FPGA | {"fpga.reports", "fpga.simulation"},
    "fpga.backends": FPGA | {"fpga.compiler", "fpga.simulation", "fpga.reports", "fpga.device"},
    "fpga.offload": FPGA | {"fpga.compiler", "fpga.reports", "fpga.backends"},
    "loadgen": L0 | L1,
    "loadgen.host": L0 | L1,
    "loadgen.workload": L0 | L1,
    "loadgen.network": L0 | L1 | {"loadgen.host", "loadgen.workload"},
    "loadgen.clients": L0 | L1 | CLIENT | {"hawkvision.transport", "loadgen.host", "loadgen.workload"},
    "loadgen.analysis": L0 | L1 | {"loadgen.workload"},
    "loadgen.reports": L0 | L1 | {"loadgen.analysis", "loadgen.host", "loadgen.workload"},
    "loadgen.commands": L0 | L1 | CLIENT | {"loadgen"},
    "loadgen.__main__": L0 | L1 | {"loadgen.commands", "loadgen.host"},
    "edge": L0 | L1 | L2,
    # The only module that loads a backend by name.
    "edge.factory": L0 | L1 | L2 | {"edge", "fpga"},
    "hawkvision.testing": L0 | L1 | {"hawkvision.inference.backends.interface"},
    "hawkvision.cli.answer_table": L0,
    "hawkvision.models.sample_images": L0 | L1,
    "hawkvision.cli.up": L0 | L1 | CLIENT | {"hawkvision.models.sample_images", "hawkvision.model_zoo"},
    "hawkvision.cli.demo": L0
    | L1
    | CLIENT
    | {"hawkvision.cli.answer_table", "hawkvision.models.sample_images", "hawkvision.cli.up", "hawkvision.model_zoo"},
    "hawkvision.doctor": L0 | L1 | L2 | {"edge", "hawkvision.datacenter"},
    "hawkvision.cli": frozenset({*PACKAGES}),
    "hawkvision": L0 | CLIENT | {"hawkvision.renamed"},
}
ONLY_IMPORTERS_OF = {
    "ray": ("hawkvision.datacenter",),
    "torch": ("hawkvision.model_zoo",),
    "torchvision": ("hawkvision.model_zoo",),
    # The first forbids reports before it imports; the second does the same in other servers' environments.
    "onnxruntime": ("hawkvision.system.onnx_runtime", "tests.bench.servers.handlers.work"),
    # It keeps the reports out that the package would make.
    "openvino": ("hawkvision.inference.backends.openvino_backend",),
}


def modules(packages: tuple[str, ...] = PACKAGES) -> Iterator[tuple[str, Path]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it is imported when the file is loaded) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_load = {id(node) for statement in tree.body for node in _outside_functions(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, id(node) in at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, id(node) in at_load


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_functions(child)


def is_under(module: str, parent: str) -> bool:
    return module == parent or module.startswith(f"{parent}.")


def row(module: str) -> str:
    return max((name for name in MAY_IMPORT if is_under(module, name)), key=len)


def test_imports_point_downwards() -> None:
    wrong = []
    for module, path in modules():
        own = row(module)
        allowed = MAY_IMPORT[own]
        for imported, line, _ in imports(path):
            if imported.split(".")[0] not in PACKAGES:
                continue
            inside = is_under(imported, own) and own != "hawkvision"
            if not inside and not any(is_under(imported, name) for name in allowed):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} ({own}) must not import {imported}")
    assert not wrong, "\n".join(wrong)


MOST_MODULES = 12
ROOMS = (
    "fpga",
    "hawkvision/integer",
    "loadgen",
    "tests/fpga",
    "tests/hawkvision/integer",
    "tests/loadgen",
    *(
        f"tests/bench/{room}"
        for room in ("cascade", "fpga", "inference", "policies", "robustness", "servers", "transport")
    ),
)
"""Trees of folders that hold at most `MOST_MODULES` modules each, `__init__` not counted."""


def test_no_folder_holds_more_than_a_dozen_modules() -> None:
    held: dict[Path, int] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if path.name != "__init__.py":
                held[path.parent] = held.get(path.parent, 0) + 1
    assert held, "the folders have moved"
    crowded = [f"{folder.relative_to(ROOT)}: {count}" for folder, count in held.items() if count > MOST_MODULES]
    assert not crowded, "\n".join(crowded)


def test_heavy_libraries_have_their_importers() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {imported}"
        for module, path in modules((*PACKAGES, "models", "tests"))
        for imported, line, _ in imports(path)
        for library, owners in ONLY_IMPORTERS_OF.items()
        if is_under(imported, library) and not any(is_under(module, owner) for owner in owners)
        if not (is_under(module, "tests") and library not in ("onnxruntime", "openvino"))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    known = dict(modules())
    graph = {
        module: {
            target
            for imported, _, at_load in imports(path)
            if at_load
            for target in (imported, imported.rpartition(".")[0])
            if target in known and target != module
        }
        for module, path in known.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)])
def test_linters_are_content(command: tuple[str, ...]) -> None:
    ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_data_and_only_small_weights_of_our_own_are_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.splitlines()]
    foreign = (".npz", ".pth", ".pt", ".h5", ".pkl", ".jpg", ".jpeg")
    forbidden = [f for f in files if f.suffix in foreign]
    assert not forbidden, forbidden
    large = [f for f in files if f.is_file() and f.stat().st_size > 3_000_000]
    assert not large, large
    weights = [f for f in files if f.suffix in (".safetensors", ".onnx")]
    astray = [f for f in weights if f.parent.name != "weights" or not (f.parents[1] / "recipe.toml").is_file()]
    assert not astray, astray
    assert sum(f.stat().st_size for f in weights if f.is_file()) <= 12_000_000

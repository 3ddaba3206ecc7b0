"""The modules of the house and what they import, read from the source: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("hawkvision", "edge", "fpga", "loadgen")
TREES: Final = (*PACKAGES, "tests")


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    """Dotted; a package's is that of its folder."""
    path: Path

    @property
    def folder(self) -> str:
        """Relative to the repository, with slashes."""
        return self.path.parent.relative_to(ROOT).as_posix()

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    """One module that a file imports: at load time, inside a function, or for annotations only."""

    importer: str
    imported: str
    """The deepest module that the statement names."""
    line: int


@cache
def modules(trees: tuple[str, ...] = PACKAGES) -> Mapping[str, Module]:
    """All modules below `trees`, by name."""
    found = {}
    for tree in trees:
        for path in sorted((ROOT / tree).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, path)
    return found


@cache
def imports(trees: tuple[str, ...] = PACKAGES) -> tuple[Import, ...]:
    """Every import of one of `trees` by one of them."""
    known = modules(trees)
    return tuple(
        Import(module.name, target, line)
        for module in known.values()
        for name, line in imported_names(module.path)
        if (target := _deepest(name, known)) is not None and target != module.name
    )


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import in a file, those in functions and for annotations included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _deepest(name: str, known: Mapping[str, Module]) -> str | None:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def is_under(module: str, parent: str) -> bool:
    return module == parent or module.startswith(f"{parent}.")


def cycles(edges: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The strongly connected components of more than one node, each sorted (Tarjan's algorithm)."""
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        if source != target:
            graph.setdefault(source, set()).add(target)
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        path.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in path:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            component = path[path.index(node) :]
            del path[path.index(node) :]
            if len(component) > 1:
                found.append(tuple(sorted(component)))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return sorted(found)

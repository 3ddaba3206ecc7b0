"""Measures of the product's source: lengths of files, functions and classes, duplicated class names, lines of code."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from tests.house.imports import modules

CLASS_LINES: Final = 300
FILE_LINES_P95: Final = 350
FUNCTION_LINES_P95: Final = 30
DUPLICATED_NAMES: Final = 10

_NOT_CODE: Final = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


@dataclass(frozen=True)
class Metrics:
    """Measures of all modules of the product; `__init__` counts in everything but the lengths of files."""

    file_lines: dict[str, int]
    function_lines: dict[str, int]
    class_lines: dict[str, int]
    """By `module.Class`."""
    code_lines: int
    """Lines that hold code: no blank line, comment or docstring."""

    @property
    def duplicated_names(self) -> dict[str, list[str]]:
        """Names of classes that several modules define, with those modules."""
        where: dict[str, set[str]] = {}
        for name in self.class_lines:
            module, _, own = name.rpartition(".")
            where.setdefault(own, set()).add(module)
        return {name: sorted(found) for name, found in sorted(where.items()) if len(found) > 1}

    @property
    def long_classes(self) -> dict[str, int]:
        return {name: lines for name, lines in self.class_lines.items() if lines > CLASS_LINES}


@cache
def measure() -> Metrics:
    """Read all modules of the product."""
    files, functions, classes, code = {}, {}, {}, 0
    for module in modules().values():
        text = module.path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        code += len(_code_lines(text, tree))
        if not module.is_init:
            files[module.name] = text.count("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[f"{module.name}:{node.lineno} {node.name}"] = _length(node)
            elif isinstance(node, ast.ClassDef):
                classes[f"{module.name}.{node.name}"] = _length(node)
    return Metrics(files, functions, classes, code)


def _length(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines with code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - set(_string_lines(tree))


def _string_lines(tree: ast.Module) -> Iterator[int]:
    """The lines of statements that are only a string: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            yield from range(node.lineno, node.end_lineno + 1)


def percentile95(values: Sequence[int]) -> int:
    """The smallest value that at least 95 % do not exceed."""
    return sorted(values)[min(len(values) - 1, -(-95 * len(values) // 100) - 1)]


def report() -> str:
    """The measures and their limits, with what exceeds them."""
    found = measure()
    files, functions = list(found.file_lines.values()), list(found.function_lines.values())
    longest = max(found.file_lines, key=lambda name: found.file_lines[name])
    duplicated = found.duplicated_names
    lines = [
        f"files: {len(files)}; lines median {statistics.median(files):g}, p95 {percentile95(files)} "
        f"(limit {FILE_LINES_P95}), most {found.file_lines[longest]} ({longest})",
        f"functions: {len(functions)}; lines p95 {percentile95(functions)} (limit {FUNCTION_LINES_P95})",
        f"classes: {len(found.class_lines)}; names in several modules: {len(duplicated)} (limit {DUPLICATED_NAMES})",
        *(f"    {name}: {', '.join(where)}" for name, where in duplicated.items()),
        f"classes over {CLASS_LINES} lines: {len(found.long_classes)}",
        *(f"    {name}: {length}" for name, length in found.long_classes.items()),
        f"lines of code without comments and docstrings: {found.code_lines}",
    ]
    return "\n".join(lines)

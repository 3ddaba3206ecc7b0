"""Modules of the product that name a kind of task: everything else must work for any kind."""

from __future__ import annotations

import ast
from typing import Final

from tests.house.imports import imported_names, is_under, modules

KINDS: Final = ("classification", "counting", "detection", "multi_label")
PACKAGE: Final = "hawkvision.tasks"
OWNERS: Final = (PACKAGE,)
"""Kinds themselves, and decoders."""

ALLOWED: Final[dict[str, str]] = {
    "hawkvision.models.input_spec": "manifests: the kind of those that name none",
    "edge.servers.oip.decoding": "a parameter of the protocol has this name",
    "edge.servers.oip.encoding": "a parameter of the protocol has this name",
}
"""Modules outside `OWNERS` that name a kind, each with its reason."""


def naming_modules() -> dict[str, list[str]]:
    """Of the modules outside `OWNERS`, what each names: `line: name`."""
    found = {}
    for module in modules().values():
        if any(is_under(module.name, owner) for owner in OWNERS):
            continue
        tree = ast.parse(module.path.read_text(encoding="utf-8"))
        named = [f"{line}: {imported}" for imported, line in imported_names(module.path) if _is_kind(imported)]
        named += [
            f"{node.lineno}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in KINDS
        ]
        if named:
            found[module.name] = named
    return found


def _is_kind(imported: str) -> bool:
    return any(is_under(imported, f"{PACKAGE}.{kind}") for kind in KINDS)

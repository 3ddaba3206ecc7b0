"""What a machine can check of the style: linters, layers (pyproject.toml, `tool.importlinter`), folder sizes, data."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
MOST_MODULES: Final = 12
"""In one folder, `__init__` not counted."""
MOST_LINES: Final = 70
"""Of a function, its decorators not counted."""


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy", "lint-imports --no-cache"])
def test_linters_are_content(command: str) -> None:
    program, *options = command.split()
    ran = subprocess.run([Path(sys.executable).with_name(program), *options], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_folder_holds_more_than_a_dozen_modules() -> None:
    modules = [path for package in ("hawkvision", "edge", "fpga", "loadgen") for path in (ROOT / package).rglob("*.py")]
    sizes = Counter(path.parent for path in modules if path.name != "__init__.py")
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    packages = ("hawkvision", "edge", "fpga", "loadgen", "models", "tests")
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in (path for package in packages for path in (ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_nothing_advises_to_install_from_an_index_on_which_we_are_not() -> None:
    """A stranger could register the name there. `hawkvision-VERSION-….whl` is a file."""
    advice = re.compile(r"hawkvision\[|pip install[^\n`]*[ '\"/=]hawkvision(?![-/\w.])")
    asked = (
        "git",
        "grep",
        "--name-only",
        "--full-name",
        "-I",
        "-e",
        "",
        "--",
        ":!pyproject.toml",
        ":!tests/test_tidy.py",
    )
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    pages = {name: (ROOT / name).read_text() for name in listed.stdout.splitlines()}
    assert {name: found.group() for name, text in pages.items() if (found := advice.search(text))} == {}
    for bad in ("pip install 'hawkvision[x]'", "pip install hawkvision", 'uv pip install -U "hawkvision==1"'):
        assert advice.search(bad)


def test_no_data_and_only_small_weights_of_our_own_are_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    foreign = (".npz", ".pth", ".pt", ".h5", ".pkl", ".jpg", ".jpeg")
    assert [f for f in files if f.suffix in foreign] == []
    assert [f for f in files if f.stat().st_size > 3_000_000] == []
    weights = [f for f in files if f.suffix in (".safetensors", ".onnx")]
    assert [f for f in weights if f.parent.name != "weights"] == []
    assert sum(f.stat().st_size for f in weights) <= 12_000_000

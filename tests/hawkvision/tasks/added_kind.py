"""The kind that `docs/concepts/task-kinds.md` adds, as its readers would: files of a package of their own."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "task-kinds.md"


def file_of_page(name: str) -> str:
    """The block of the page that is marked with this file name."""
    found = re.findall(
        rf"^<!-- {re.escape(name)} -->\n```python\n(.*?)^```$",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert len(found) == 1, f"{PAGE}: expected one block {name}"
    return str(found[0])


def install(site: Path) -> None:
    """Install the package into a folder, as `pip install --target` does: the module, its name and its entry points."""
    (project,) = [
        tomllib.loads(block)
        for block in re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        if block.startswith("[project]")
    ]
    facts = project["project"]
    (site / "grading.py").write_text(file_of_page("grading.py"))
    information = site / f"{facts['name'].replace('-', '_')}-{facts['version']}.dist-info"
    information.mkdir()
    head = f"Metadata-Version: 2.1\nName: {facts['name']}\nVersion: {facts['version']}\n"
    (information / "METADATA").write_text(head)
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in facts["entry-points"].items()
    ]
    (information / "entry_points.txt").write_text("\n".join(groups))


def names_of(*files: str) -> dict[str, object]:
    """What these files of the page define, each seeing those before it as modules."""
    defined: dict[str, object] = {}
    for file in files:
        module = type(sys)(file.removesuffix(".py"))
        sys.modules[module.__name__] = module
        exec(compile(file_of_page(file), f"{PAGE.name}: {file}", "exec"), module.__dict__)
        defined |= vars(module)
    return defined

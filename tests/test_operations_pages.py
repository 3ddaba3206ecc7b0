"""Pages for operators and load testers name things that exist: metrics, alerts, log lines, options, each other."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from hawkvision.core import command_line
from loadgen.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OPERATIONS = sorted((DOCS / "operations").glob("*.md"))
BENCHMARKS = sorted((DOCS / "benchmarks").glob("*.md"))
LOAD_TESTS = [*sorted((DOCS / "loadtesting").glob("*.md")), ROOT / "loadgen" / "README.md"]
PREFIXES = (
    "datacenter_",
    "datagram_",
    "tls_",
    "offload_",
    "fpga_",
    "fpga_modelled_",
    "fpga_simulated_",
    "fpga_round_trip_",
)
"""Of metrics' names, which their declarations leave to a variable."""
LEAST_FRAGMENT = 8
"""Characters of a log line between placeholders, below which it says nothing."""


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def string_constants() -> str:
    """Every string in the servers' code, one a line."""
    found = []
    for package in ("hawkvision", "edge", "fpga"):
        for path in (ROOT / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(read(path)))
            found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(found)


def declared(metric: str) -> bool:
    """Whether some string ends with the metric's name, or with what follows a prefix."""
    name = metric.removeprefix("hawkvision_").removesuffix("_bucket")
    whole = {name, name.removesuffix("_total")}
    parts = whole | {each.removeprefix(prefix) for each in whole for prefix in PREFIXES}
    return any(re.search(rf"(?m)(^|_){part}$", string_constants()) for part in parts)


@pytest.mark.parametrize("page", OPERATIONS, ids=lambda page: page.name)
def test_every_metric_that_a_page_names_is_declared(page: Path) -> None:
    named = set(re.findall(r"hawkvision_[a-z_]*[a-z]", read(page)))
    assert {metric for metric in named if not declared(metric)} == set()


def test_every_alert_is_explained() -> None:
    groups = yaml.safe_load(read(ROOT / "edge" / "deploy" / "hawkvision-alerts.yaml"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set(re.findall(r"(?m)^\| `(HawkVision\w+)`", read(DOCS / "operations" / "monitoring.md"))) == alerts


def test_log_lines_that_are_explained_are_logged() -> None:
    _, table = read(DOCS / "operations" / "monitoring.md").split("| line | level |")
    lines = [line for row in re.findall(r"(?m)^\| ([^|]*) \|", table) for line in re.findall(r"`([^`]+)`", row)]
    fragments = {part for line in lines for part in re.split(r"\s*…[:\s]*", line) if len(part) >= LEAST_FRAGMENT}
    assert len(fragments) > 10
    assert {part for part in fragments if part not in string_constants()} == set()


@pytest.mark.parametrize("folder", ["operations", "loadtesting", "benchmarks"])
def test_an_index_names_every_page_of_its_folder(folder: str) -> None:
    pages = {page.name for page in (DOCS / folder).glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)", read(DOCS / folder / "README.md")))


@pytest.mark.parametrize("page", [*OPERATIONS, *LOAD_TESTS, *BENCHMARKS], ids=lambda page: page.name)
def test_every_module_that_a_page_runs_is_there(page: Path) -> None:
    at_present = re.sub(r"`[^`]+`\s+(at|of)\s+commit", "", read(page))
    named = re.findall(r"python -m ((?:tests|loadgen|fpga|hawkvision)[.\w]*\w)", at_present)
    paths = {module: ROOT.joinpath(*module.split(".")) for module in named}
    assert {name for name, path in paths.items() if not (path.with_suffix(".py").is_file() or path.is_dir())} == set()


@cache
def options_of(name: str) -> frozenset[str]:
    """The options of a load test, as its command line takes them."""
    run = importlib.import_module(f"loadgen.commands.{name.replace('-', '_')}").run
    return frozenset(option.flag for option in command_line.options_of(run))


@pytest.mark.parametrize("page", LOAD_TESTS, ids=lambda page: page.name)
def test_every_option_of_a_load_test_exists(page: Path) -> None:
    text = read(page).replace("\\\n", "")
    for name, rest in re.findall(r"hawkvision load ([a-z][a-z-]*)(.*)", text):
        assert set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]+", rest)) <= options_of(name), f"{page.name}: {name}"
    anywhere = frozenset().union(*map(options_of, COMMANDS.commands))
    assert set(re.findall(r"--[a-z][a-z0-9-]+", text)) <= anywhere | {"--help"}

"""What a machine can check of the style. `python -m tests.house` prints the figures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house import floors, kinds, metrics, vocabulary
from tests.house.imports import PACKAGES, ROOT, cycles, imported_names, imports, is_under, modules
from tests.house.pending import (
    PENDING_CLASSES,
    PENDING_CYCLES,
    PENDING_DUPLICATED,
    PENDING_FILE_LINES,
    PENDING_IMPORTS,
    PENDING_ROOMS,
    PENDING_WORDS,
)

ONLY_IMPORTERS_OF = {
    "ray": ("hawkvision.datacenter",),
    "torch": ("hawkvision.model_zoo",),
    "torchvision": ("hawkvision.model_zoo",),
    # The first forbids reports before it imports; the second does the same in other servers' environments.
    "onnxruntime": ("hawkvision.system.onnx_runtime", "tests.bench.servers.handlers.work"),
    # It keeps the reports out that the package would make.
    "openvino": ("hawkvision.inference.backends.openvino_backend",),
}


def test_every_room_has_a_row_and_every_row_a_room() -> None:
    assert set(floors.rooms_without_a_row()) <= PENDING_ROOMS
    assert set(floors.rows_without_a_room()) <= PENDING_ROOMS


def test_imports_point_downwards() -> None:
    wrong = [
        f"{modules()[found.importer].path.relative_to(ROOT)}:{found.line}: {found.imported}: {reason}"
        for found, reason in floors.breaches()
        if (floors.room_of(found.importer), floors.room_of(found.imported)) not in PENDING_IMPORTS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_one_another() -> None:
    """Neither for annotations nor inside functions; those of tests neither."""
    assert [cycle for cycle in floors.module_cycles() if not PENDING_CYCLES.issuperset(cycle)] == []


def test_no_rooms_import_one_another() -> None:
    edges = {(floors.room_of(found.importer), floors.room_of(found.imported)) for found in imports()}
    assert cycles(edges - PENDING_IMPORTS) == []


def test_a_cycle_is_found_wherever_it_begins() -> None:
    assert cycles([("a", "b"), ("b", "c"), ("c", "b"), ("c", "d"), ("e", "a")]) == [("b", "c")]
    assert cycles([("a", "a"), ("a", "b"), ("b", "c")]) == []


def test_kinds_of_tasks_are_named_by_themselves_and_by_manifests_only() -> None:
    named = kinds.naming_modules()
    wrong = {module: places for module, places in named.items() if module not in kinds.ALLOWED}
    assert wrong == {}
    assert named.keys() == kinds.ALLOWED.keys(), "the table has a module that names none"


def test_no_folder_holds_more_than_a_dozen_modules() -> None:
    crowded = {folder: size for folder, size in floors.folder_sizes().items() if size > floors.MOST_MODULES}
    assert crowded == {}


def test_classes_and_files_are_short() -> None:
    found = metrics.measure()
    assert {name for name in found.long_classes if name.rpartition(".")[2] not in PENDING_CLASSES} == set()
    assert metrics.percentile95(list(found.file_lines.values())) <= max(metrics.FILE_LINES_P95, PENDING_FILE_LINES)
    assert metrics.percentile95(list(found.function_lines.values())) <= metrics.FUNCTION_LINES_P95


def test_few_classes_share_a_name() -> None:
    duplicated = metrics.measure().duplicated_names
    assert len(duplicated) <= max(metrics.DUPLICATED_NAMES, PENDING_DUPLICATED), duplicated


def test_old_words_are_not_used() -> None:
    left = [str(found) for found in vocabulary.findings() if not found.path.startswith(PENDING_WORDS)]
    assert not left, "\n".join(left)


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("edge/a.py", "class RungReply: ...", ["Rung"]),
        ("edge/a.py", "told = heard_at  # a held-out image", ["told", "heard_at"]),
        ("edge/a.py", 'status = "held"  # the committee is said to be sure', ['"held"', "committee"]),
        ("docs/a.md", "Lossy transport and lossy inference over a wire that is told apart", ["Lossy transport"]),
        ("docs/a.md", "The promise is void.", ["promise", "is void"]),
        ("edge/a.py", 'variant = "committee_upright"', []),
    ],
)
def test_old_words_are_found_in_names_and_in_prose(path: str, line: str, found: list[str]) -> None:
    assert sorted(each.word for each in vocabulary.search(path, line)) == sorted(found)


def test_heavy_libraries_have_their_importers() -> None:
    wrong = [
        f"{module.path.relative_to(ROOT)}:{line}: {imported}"
        for module in modules((*PACKAGES, "models", "tests")).values()
        for imported, line in imported_names(module.path)
        for library, owners in ONLY_IMPORTERS_OF.items()
        if is_under(imported, library) and not any(is_under(module.name, owner) for owner in owners)
        if not (is_under(module.name, "tests") and library not in ("onnxruntime", "openvino"))
    ]
    assert not wrong, "\n".join(wrong)


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


if __name__ == "__main__":
    print(floors.table())

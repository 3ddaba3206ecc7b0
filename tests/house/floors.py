"""The table of the house: its rooms in floors, lowest first. Layers, cycles and folder sizes are checked against it.

A room is a folder of modules; its subfolders are rooms of their own. Some modules on top have rows of their own, which
take them out of their folder's room. A module may import its own room and rooms on lower floors, and no other room:
annotations and imports inside functions count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Final

from tests.house.imports import TREES, Import, cycles, imports, is_under, modules

FLOORS: Final[tuple[tuple[str, ...], ...]] = (
    ("hawkvision.core",),
    ("hawkvision.core.escalation_api",),
    ("hawkvision.core.settings",),
    ("hawkvision.system",),
    ("hawkvision.models.image_sets",),
    ("hawkvision.models", "hawkvision.servers", "hawkvision.reports"),
    ("hawkvision.tasks.boxes",),
    ("hawkvision.tasks.predictions",),
    ("hawkvision.tasks",),
    ("hawkvision.tasks.decoders",),
    ("hawkvision.tasks.serving",),
    ("hawkvision.native", "hawkvision.integer"),
    ("hawkvision.imaging.scale",),
    ("hawkvision.imaging", "hawkvision.inference.backends"),
    ("hawkvision.inference.int8",),
    ("hawkvision.inference",),
    ("hawkvision.cascade.confidence", "hawkvision.cascade.drift", "hawkvision.network"),
    ("hawkvision.cascade.certification",),
    ("hawkvision.cascade",),
    ("hawkvision.transport.protocol", "hawkvision.transport.congestion"),
    ("hawkvision.transport.coding",),
    ("hawkvision.transport.endpoint",),
    ("hawkvision.transport.server", "hawkvision.transport.client"),
    ("hawkvision.transport",),
    ("hawkvision.client",),
    ("hawkvision", "hawkvision.testing"),
    ("hawkvision.datacenter.stages",),
    ("hawkvision.datacenter.servers",),
    ("hawkvision.datacenter.execution",),
    ("hawkvision.datacenter.deployment",),
    ("hawkvision.datacenter.ingress",),
    ("hawkvision.datacenter.launch",),
    ("hawkvision.datacenter",),
    ("hawkvision.datacenter.manifests",),
    ("hawkvision.model_zoo.tfjs",),
    ("hawkvision.model_zoo.building",),
    ("hawkvision.model_zoo.predictions",),
    ("hawkvision.model_zoo.calibration",),
    ("hawkvision.model_zoo.training", "hawkvision.model_zoo.reports"),
    ("hawkvision.model_zoo.own.graphs",),
    ("hawkvision.model_zoo.own",),
    ("hawkvision.model_zoo.own.quantisation",),
    ("hawkvision.model_zoo",),
    ("fpga.compiler",),
    ("fpga.simulation",),
    ("fpga.reports",),
    ("fpga.device",),
    ("fpga.backends",),
    ("fpga.offload",),
    ("fpga",),
    ("edge.inference",),
    ("edge.escalation",),
    ("edge.monitoring",),
    ("edge.serving",),
    ("edge.servers.shared",),
    ("edge.servers.oip",),
    ("edge.servers",),
    ("edge", "edge.factory"),
    ("edge.task_nodes",),
    ("edge.run",),
    ("edge.__main__",),
    ("loadgen.host", "loadgen.workload"),
    ("loadgen.network", "loadgen.clients", "loadgen.analysis"),
    ("loadgen.network.profiles", "loadgen.reports"),
    ("loadgen.commands",),
    ("loadgen.commands.mlperf",),
    ("loadgen",),
    ("hawkvision.doctor",),
    ("hawkvision.cli.options",),
    ("hawkvision.cli.models",),
    ("hawkvision.cli",),
    ("hawkvision.__main__",),
)

APART: Final[dict[str, tuple[str, ...]]] = {
    "hawkvision.transport": ("hawkvision.inference", "hawkvision.cascade", "hawkvision.network"),
    "hawkvision.client": ("hawkvision.inference", "hawkvision.cascade", "hawkvision.network"),
    "hawkvision.cascade": ("hawkvision.transport", "hawkvision.network"),
    "hawkvision.datacenter": ("hawkvision.client", "hawkvision.integer"),
    "hawkvision.model_zoo": ("hawkvision.client", "hawkvision.datacenter"),
    "fpga": (
        "hawkvision.servers",
        "hawkvision.imaging",
        "hawkvision.cascade",
        "hawkvision.network",
        "hawkvision.transport",
        "hawkvision.client",
        "hawkvision.datacenter",
        "hawkvision.model_zoo",
    ),
    "edge": ("hawkvision.client", "hawkvision.datacenter", "hawkvision.model_zoo", "fpga"),
    "loadgen": (
        "hawkvision.imaging",
        "hawkvision.integer",
        "hawkvision.inference",
        "hawkvision.cascade",
        "hawkvision.network",
        "hawkvision.datacenter",
        "hawkvision.model_zoo",
        "fpga",
        "edge",
    ),
}
"""What a package does not import although it is on a lower floor."""

KNOWN: Final = (("edge.factory", "fpga"), ("edge.inference.stage_loader", "fpga"))
"""Exceptions to `APART`: the modules of the edge that load a backend by name."""

MOST_MODULES: Final = 12
"""In one folder, `__init__` not counted."""


@cache
def floor_of() -> dict[str, int]:
    """The number of the floor of each room."""
    return {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """The row of a module: its own, or else that of its folder."""
    return module if module in floor_of() else modules(TREES)[module].folder.replace("/", ".")


def rooms_without_a_row() -> list[str]:
    """Folders of modules that the table does not name."""
    return sorted({room_of(module) for module in modules()} - floor_of().keys())


def rows_without_a_room() -> list[str]:
    """Rows of the table whose folder or module is gone."""
    return sorted(floor_of().keys() - {room_of(module) for module in modules()})


def breaches() -> Iterator[tuple[Import, str]]:
    """Each import that the table forbids, with the reason."""
    floor = floor_of()
    for found in imports():
        own, other = room_of(found.importer), room_of(found.imported)
        if own == other or own not in floor or other not in floor:
            continue
        if floor[other] >= floor[own]:
            yield found, f"{own} is on floor {floor[own]}, {other} on floor {floor[other]}"
        elif any(is_under(found.importer, module) and is_under(other, known) for module, known in KNOWN):
            continue
        elif any(is_under(found.importer, package) and _is_apart(other, apart) for package, apart in APART.items()):
            yield found, f"{own} stays apart from {other}"


def _is_apart(room: str, packages: tuple[str, ...]) -> bool:
    return any(is_under(room, package) for package in packages)


def module_cycles() -> list[tuple[str, ...]]:
    """Of the product and of the tests."""
    return cycles((found.importer, found.imported) for found in imports(TREES))


def room_cycles() -> list[tuple[str, ...]]:
    """Of the table's rooms."""
    return cycles((room_of(found.importer), room_of(found.imported)) for found in imports())


def folder_sizes() -> dict[str, int]:
    """The number of modules in each folder of the product and of the tests, `__init__` not counted."""
    return dict(Counter(module.folder for module in modules(TREES).values() if not module.is_init))


def table() -> str:
    """Floors from the top down, with the modules of each folder; then the folders of tests; then the cycles."""
    sizes = folder_sizes()
    lines = ["floor  modules  room"]
    for number, rooms in reversed(list(enumerate(FLOORS))):
        lines += [f"{number:>5}  {_size(room, sizes):>7}  {room}" for room in rooms]
    lines += ["", "modules  folder of tests"]
    lines += [f"{size:>7}  {folder}" for folder, size in sorted(sizes.items()) if folder.startswith("tests")]
    most = max(sizes, key=lambda folder: sizes[folder])
    lines += [
        "",
        f"folders: {len(sizes)}; modules: {sum(sizes.values())}; most in a folder: {sizes[most]} ({most})",
        f"floors: {len(FLOORS)}; rooms: {len(floor_of())}; imports upwards or across: {len(list(breaches()))}",
        f"cycles of modules: {len(module_cycles())}; cycles of rooms: {len(room_cycles())}",
    ]
    return "\n".join(lines)


def _size(room: str, sizes: dict[str, int]) -> str:
    entry = modules().get(room)
    return "1" if entry is not None and not entry.is_init else str(sizes.get(room.replace(".", "/"), 0))

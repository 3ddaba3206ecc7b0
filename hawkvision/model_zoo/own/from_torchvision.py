"""`hawkvision models add --from torchvision:NAME`: a torchvision classifier, published or fine-tuned, as a stage."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from hawkvision.model_zoo.building.torchvision_export import export_torchvision
from hawkvision.model_zoo.own.adding import Added, AddOrder, add_model
from hawkvision.model_zoo.own.graphs.owner_facts import like

LICENSE = "BSD-3-Clause"


def add_torchvision(name: str, weights: Path | None, order: AddOrder, models: Path | None, cache: Path) -> Added:
    """Export, convert, check and enter a model. What the order leaves unsaid of images is torchvision's preset.

    Args:
        name: of the model in torchvision.
        weights: a state dict; None downloads torchvision's.
        order: the rest; its path is not used.
        models: see `add_model`.
        cache: see `add_model`.

    Raises:
        ConfigError: as `add_model`; a fine-tuned head needs labels.
        ArtifactError: as `export_torchvision` and `add_model`.
    """
    exported = export_torchvision(name, weights)
    with tempfile.TemporaryDirectory(prefix="hawkvision-") as folder:
        path = Path(folder) / f"{name}.onnx"
        path.write_bytes(exported.model)
        labels = order.labels
        if labels is None and exported.labels is not None:
            labels = Path(folder) / "labels.txt"
            labels.write_text("\n".join(exported.labels) + "\n", encoding="utf-8")
        facts = like(order.facts, exported.preset)
        license = LICENSE if order.license == "unstated" and weights is None else order.license  # noqa: A001
        return add_model(replace(order, path=path, labels=labels, facts=facts, license=license), models, cache)

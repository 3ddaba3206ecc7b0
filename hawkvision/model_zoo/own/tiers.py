"""Enters a stage into a task's cascade: which tier runs it, by what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest import FLOAT_OR_INT8, Cascade, Manifest, Variant

TierName: TypeAlias = Literal["edge", "dc"]


def entered(manifest: Manifest, variant: Variant, tier: TierName | None, costs: Mapping[str, float]) -> Manifest:
    """The manifest with the variant, which replaces one of its name.

    Args:
        manifest: of the task.
        variant: the new stage.
        tier: where it runs; None lets costs decide: a stage cheaper than all others runs on the edge.
        costs: multiplications of the new stage and of the cascade's single variants, by name.

    Raises:
        ManifestError: if its name is that of an ensemble.
    """
    if manifest.ensemble(variant.name) is not None:
        raise ManifestError(f"task {manifest.task!r}: {variant.name!r} is an ensemble; choose another --name")
    variants = (*(each for each in manifest.variants if each.name != variant.name), variant)
    cascade = manifest.cascade
    if variant.name not in (*cascade.edge, *cascade.dc) or tier is not None:
        cascade = _placed(cascade, variant, tier, costs)
    return msgspec.structs.replace(manifest, variants=variants, cascade=cascade)


def only_stage(name: str) -> Cascade:
    """The cascade of a task with one stage, which both tiers run until another comes."""
    return Cascade(edge=(name,), dc=(name,), default_edge=name)


def _placed(cascade: Cascade, variant: Variant, tier: TierName | None, costs: Mapping[str, float]) -> Cascade:
    name = variant.name
    edge, dc = _without(cascade.edge, name), _without(cascade.dc, name)
    if len(set(edge + dc)) == 1:  # one stage on both tiers: from now on it has one of its own
        (alone,) = set(edge + dc)
        to_edge = tier == "edge" or (tier is None and _cost(costs, name) < _cost(costs, alone))
        edge, dc = ([name], [alone]) if to_edge else ([alone], [name])
    elif not edge and not dc:
        edge, dc = [name], [name]
    else:
        cheapest = min((_cost(costs, each) for each in edge), default=float("inf"))
        to_edge = tier == "edge" or (tier is None and _cost(costs, name) < cheapest)
        _insert(edge if to_edge else dc, name, costs)
    edge = edge or dc[:1]
    dc = dc or edge[-1:]
    integer = variant.precision not in FLOAT_OR_INT8
    default = cascade.default_edge if cascade.default_edge in edge else edge[0]
    if name in edge and not integer:
        default = name
    fpga = name if integer and name in edge else cascade.fpga
    return Cascade(edge=tuple(edge), dc=tuple(dc), default_edge=default, fpga=fpga if fpga in edge else None)


def _insert(stages: list[str], name: str, costs: Mapping[str, float]) -> None:
    """Put a stage before the first that is dearer. The others keep their order, which their owner may have chosen."""
    dearer = (at for at, each in enumerate(stages) if _cost(costs, each) > _cost(costs, name))
    stages.insert(next(dearer, len(stages)), name)


def _without(stages: tuple[str, ...], name: str) -> list[str]:
    return [each for each in stages if each != name]


def _cost(costs: Mapping[str, float], name: str) -> float:
    """Stages of unknown cost, such as ensembles, are the dearest and keep their order."""
    return costs.get(name, float("inf"))

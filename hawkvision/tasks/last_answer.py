"""The last answer before a deadline: the edge's prediction and those of the datacenter's members that replied, as one
ensemble.

Every model counts once. The datacenter's members also run the mirror image where the ensemble does, so that a model
which both tiers ran counts as the datacenter ran it, unless the transport encoded the image anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from hawkvision.core.escalation_api import PartialEnsemble
from hawkvision.tasks.kind import Output, TaskKind

OwnOutputs: TypeAlias = Mapping[str, tuple[Output, float | tuple[float, ...]]]
"""What the edge's models computed of an image, each with its weight in the stage, by the name of the model."""


def last_answer(kind: TaskKind[Any], own: OwnOutputs, part: PartialEnsemble, *, whole: bool) -> Output | None:
    """The output of all together; None if the edge's own prediction is all that counts.

    Args:
        kind: of the task.
        own: the edge's outputs, at least one.
        part: the datacenter's.
        whole: whether the datacenter ran exactly the image that the edge sent.
    """
    mine = {name: each for name, each in own.items() if not (whole and name in part.members)}
    theirs = len(part.members if whole else set(part.members) - own.keys())
    if not mine or not theirs:
        return part.output if theirs else None
    outputs, weights = [each for each, _ in mine.values()], tuple(weight for _, weight in mine.values())
    edge = kind.combine(outputs, weights, 1.0) if len(mine) > 1 else outputs[0]
    # Weights compare the members of one stage; those of two stages count alike.
    members = [edge] * len(mine) + [part.output] * theirs
    return kind.combine(members, (1.0,) * len(members), 1.0)

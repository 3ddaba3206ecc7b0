"""Whether edge nodes may make images smaller before they send them: decided by what it costs in accuracy.

The datacenter's stages run on images of the profile split as edge nodes send them, and on the original images. If the
smaller ones cost any stage more than `TOLERATED`, images are sent as they are. The profile records the result, and edge
nodes obey it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import select
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS, Shrinking
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.model_zoo.calibration.model_runner import AnyImages, CascadePredictions, run_stages
from hawkvision.models.manifest import Manifest
from hawkvision.tasks.kind import TaskKind, Truth

TOLERATED: Final = CERTIFIED_DROPS[0]
"""The smallest accuracy drop that anybody can ask for."""


def check_shrinking(
    kind: TaskKind[Any],
    manifest: Manifest,
    images: AnyImages,
    truths: Sequence[Truth],
    *,
    stages: Sequence[str],
    backend: BackendKind,
    cache: Path,
    chosen: NDArray[np.intp],
) -> Shrinking | None:
    """What smaller images cost the stages of the datacenter; None if none of the chosen images would be made smaller.

    Args:
        kind: of the task.
        manifest: of the task.
        images: encoded images.
        truths: of all of them.
        stages: of the datacenter.
        backend: what runs the models.
        cache: the folder of built models and cached tensors.
        chosen: indices of the images to decide on; no certificate may rest on them.
    """

    def run(shrink: bool) -> CascadePredictions:
        return run_stages(
            kind, manifest, images, datacenter=stages, shrink=shrink, backend=backend, cache=cache, chosen=chosen
        )

    smaller = run(shrink=True)
    if not smaller.reduced:
        return None
    whole = run(shrink=False)

    def accuracy(predictions: CascadePredictions, stage: str) -> float:
        outputs = predictions.served(stage).of(chosen)
        return 1.0 - float(kind.losses(outputs, select(truths, chosen)).mean())

    found = [(accuracy(smaller, stage), accuracy(whole, stage)) for stage in stages]
    made_smaller, as_they_are = max(found, key=lambda pair: pair[1] - pair[0])
    return Shrinking(
        allowed=as_they_are - made_smaller <= TOLERATED,
        n=len(chosen),
        accuracy=round(made_smaller, 6),
        accuracy_whole=round(as_they_are, 6),
    )

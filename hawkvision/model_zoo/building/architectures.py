"""Every architecture that the zoo can build, by the name that manifests give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.checkpoint import StateDict
from hawkvision.model_zoo.building.convnet import CONVNETS, convnet_emitter
from hawkvision.model_zoo.building.onnx_builders import Emitter, Weights, efficientnet_lite, mobilenet_v2, squeezenet1_1
from hawkvision.models.manifest import InputSpec

EMITTERS: Final[Mapping[str, Emitter]] = {
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_lite0": efficientnet_lite(1.0, "efficientnet_lite0"),
    "efficientnet_lite1": efficientnet_lite(1.1, "efficientnet_lite1"),
    "efficientnet_lite2": efficientnet_lite(1.2, "efficientnet_lite2"),
    "squeezenet1_1": squeezenet1_1,
    **{name: convnet_emitter(name) for name in CONVNETS},
}


def emit(architecture: str, state: StateDict, spec: InputSpec, where: str) -> onnx.ModelProto:
    """The float32 graph of an architecture; `where` names the weights in errors.

    Raises:
        ArtifactError: if the architecture is unknown or the weights are not its own.
    """
    emitter = EMITTERS.get(architecture)
    if emitter is None:
        raise ArtifactError(f"{where}: no architecture {architecture!r}; known are {', '.join(EMITTERS)}")
    return emitter(Weights(state, where), spec)

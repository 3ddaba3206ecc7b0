"""All architectures of the zoo, by their names in manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import onnx

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.checkpoint import StateDict
from hawkvision.model_zoo.building.convnet import CONVNETS, convnet_emitter
from hawkvision.model_zoo.building.onnx_builders import Emitter, Weights, efficientnet_lite, mobilenet_v2, squeezenet1_1
from hawkvision.model_zoo.tfjs.detectors import centernet, ssdlite_float_from, ssdlite_mobilenet_v2
from hawkvision.model_zoo.tfjs.graph import TfjsGraph
from hawkvision.models.manifest import InputSpec

TfjsEmitter: TypeAlias = Callable[[TfjsGraph, InputSpec, str], onnx.ModelProto]

EMITTERS: Final[Mapping[str, Emitter]] = {
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_lite0": efficientnet_lite(1.0, "efficientnet_lite0"),
    "efficientnet_lite1": efficientnet_lite(1.1, "efficientnet_lite1"),
    "efficientnet_lite2": efficientnet_lite(1.2, "efficientnet_lite2"),
    "squeezenet1_1": squeezenet1_1,
    **{name: convnet_emitter(name) for name in CONVNETS},
}
TFJS_EMITTERS: Final[Mapping[str, TfjsEmitter]] = {
    "ssdlite_mobilenet_v2": ssdlite_mobilenet_v2,
    "centernet": centernet,
}
"""Of the architectures that come as TensorFlow.js graphs."""
FLOAT_FROM: Final[Mapping[str, tuple[str, ...]]] = {"ssdlite_mobilenet_v2": ssdlite_float_from()}
"""The tensors from which on a quantised graph stays float, by architecture; elsewhere none do."""


def emit(architecture: str, state: StateDict, spec: InputSpec, where: str) -> onnx.ModelProto:
    """The float32 graph of an architecture; `where` names the weights in errors.

    Raises:
        ArtifactError: if the architecture is unknown or the weights are not its own.
    """
    emitter = EMITTERS.get(architecture)
    if emitter is None:
        raise ArtifactError(f"{where}: no architecture {architecture!r}; known are {', '.join(EMITTERS)}")
    return emitter(Weights(state, where), spec)


def emit_tfjs(architecture: str, graph: TfjsGraph, spec: InputSpec, where: str) -> onnx.ModelProto:
    """The float32 graph of an architecture that comes as a TensorFlow.js graph; `where` names it in errors.

    Raises:
        ArtifactError: if the architecture is unknown or the graph is not its own.
    """
    emitter = TFJS_EMITTERS.get(architecture)
    if emitter is None:
        raise ArtifactError(f"{where}: no architecture {architecture!r}; known are {', '.join(TFJS_EMITTERS)}")
    return emitter(graph, spec, where)

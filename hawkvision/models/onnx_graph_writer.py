"""Writes a model as ONNX, node by node: `image`, uint8 RGB (n, height, width, 3) with any n, to float32 outputs; of
classifiers `logits` (n, classes).

The same nodes and constants always give the same model, so that an artefact's SHA-256 can stand in a manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET: Final = 17
IR_VERSION: Final = 8
NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})


class GraphWriter:
    """Collects nodes and constants in order; each method returns the name of what it adds."""

    def __init__(self, name: str, producer: str) -> None:
        self._name, self._producer = name, producer
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """A constant; the same name is stored once."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """A node with one output, which names it."""
        self._nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def many(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> list[str]:
        """A node with several outputs; the first names it."""
        self._nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], **attributes))
        return outputs

    def model(
        self, height: int, width: int, classes: int, metadata: Mapping[str, str] = NO_METADATA
    ) -> onnx.ModelProto:
        """The finished, checked classifier."""
        return self.model_of(height, width, {"logits": (classes,)}, metadata)

    def model_of(
        self,
        height: int,
        width: int,
        outputs: Mapping[str, tuple[int, ...]],
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> onnx.ModelProto:
        """The finished, checked model, with the shape of each output for one image."""
        graph = helper.make_graph(
            self._nodes,
            self._name,
            [helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", height, width, 3])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]) for name, shape in outputs.items()],
            list(self._constants.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=self._producer)
        if metadata:
            helper.set_model_props(model, dict(metadata))
        onnx.checker.check_model(model, full_check=True)
        return model

"""What is known while a graph is converted, and how operations get at their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.tfjs.graph import Node, TfjsGraph
from hawkvision.model_zoo.tfjs.values import Convolution, Tensor
from hawkvision.models.onnx_layers import GraphBuilder

Constant: TypeAlias = NDArray[Any]
Value: TypeAlias = Tensor | Convolution | Constant


class Context:
    """The values of a graph by the names of the nodes that make them.

    Attributes:
        builder: the ONNX graph.
        feeds: nodes whose values are given, as images whose channels are still to be divided by `divisor`.
    """

    def __init__(
        self, graph: TfjsGraph, builder: GraphBuilder, feeds: Mapping[str, Tensor], divisor: Sequence[float], where: str
    ) -> None:
        """Only the fed values and the weights are known yet; `where` names the model in errors."""
        self.builder = builder
        self.feeds = frozenset(feeds)
        self.divisor = np.asarray(divisor, np.float32)
        self._graph, self._where = graph, where
        self._values: dict[str, Value] = dict(feeds)
        self._last: dict[str, Tensor] = {}
        self._uses: Counter[str] = Counter()

    def error(self, node: Node, what: str) -> ArtifactError:
        """An error at a node."""
        return ArtifactError(f"{self._where}: operation {node.op} of node {node.name!r}: {what}")

    def use(self, names: Iterable[str]) -> None:
        """Count uses of values, before any operation is converted."""
        self._uses.update(names)

    def set(self, name: str, value: Value) -> None:
        """Store a value."""
        self._values[name] = value

    def known(self, name: str) -> bool:
        """Whether a value is stored, or a weight."""
        return name in self._values or name in self._graph.weights

    def value(self, name: str) -> Value:
        """A converted value, or a weight."""
        return self._values[name] if name in self._values else self._graph.weights[name]

    def constant(self, node: Node, index: int) -> Constant:
        """An input that must be constant."""
        value = self.value(node.inputs[index])
        if not isinstance(value, np.ndarray):
            raise self.error(node, f"input {index} must be constant")
        return value

    def tensor(self, name: str) -> Tensor:
        """A value as a tensor of the graph; a convolution takes in nothing more."""
        value = self.value(name)
        if isinstance(value, Convolution):
            value = self._values[name] = value.write(self.builder)
        if not isinstance(value, Tensor):
            raise ArtifactError(f"{self._where}: {name!r} is constant where a tensor was expected")
        return value

    def channels_last(self, name: str) -> Tensor:
        """A value as a tensor in TensorFlow's order."""
        tensor = self.tensor(name)
        if not tensor.planar:
            return tensor
        if name not in self._last:
            last = self.builder.node("Transpose", [tensor.name], f"{tensor.name}.last", perm=[0, 2, 3, 1])
            self._last[name] = Tensor(last, tensor.shape, planar=False)
        return self._last[name]

    def planar(self, node: Node, index: int = 0) -> Tensor:
        """An input that must be images, held as planes."""
        tensor = self.tensor(node.inputs[index])
        if not tensor.planar:
            raise self.error(node, f"input {index} must be images, got shape {tensor.shape}")
        return tensor

    def foldable(self, name: str) -> Convolution | None:
        """A convolution that nothing else uses."""
        value = self.value(name)
        return value if isinstance(value, Convolution) and self._uses[name] == 1 else None

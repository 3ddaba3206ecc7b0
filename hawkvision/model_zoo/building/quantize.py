"""Static int8 quantisation of the zoo's graphs, in ONNX's QDQ form, from committed activation ranges.

Activations are uint8 with a zero point, weights int8 per output channel without one, biases int32 at the product of
both scales (Jacob et al., arXiv 1712.05877). A runtime fuses each dequantise → operator → quantise into one integer
kernel. ReLU and ReLU6 vanish: the quantised range starts at 0 and ends at 6 at most, so saturation is the activation.
The image itself is already a uint8 tensor of scale 1 with the mean as zero point, so the input needs no conversion,
and the first convolution reads them in blocks where it can (`hawkvision.model_zoo.building.quantize`).

Weights must not saturate: before VNNI, x86 multiplies uint8 by int8 with `vpmaddubsw`, which adds *two* products in
saturating int16. 255·(|a|+|b|) must stay below 2^15, so no two weights of one channel and sign may sum beyond 128
(`saturation_free`). Integer arithmetic is then exact on all CPUs, and a certified artefact gives the
same answers on each. Plain 7-bit weights ("reduce_range") are safe as well but coarser.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.building.architectures import F32, GraphBuilder
from hawkvision.models.manifest import Sha256, Variant
from hawkvision.system.files import write_atomic
from hawkvision.system.onnx_runtime import ort

# Activation ranges: measured once on images, committed beside the manifest, read by every build of an int8 graph.
#
# A range is the mean over images of each image's minimum and maximum, so that one unusual image does not widen it for
# all.


class Ranges(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `models/<task>/ranges/<architecture>.json`: tensor → [low, high], and the source of the ranges."""

    format: int
    architecture: str
    weights_sha256: Sha256
    data_sha256: Sha256
    images: int
    seed: int
    ranges: dict[str, tuple[float, float]]


def ranges_path(models: Path, task: str, architecture: str) -> Path:
    """The file with an architecture's ranges."""
    return models / task / "ranges" / f"{architecture}.json"


def load_ranges(models: Path, task: str, variant: Variant) -> Ranges:
    """The committed ranges of a variant's architecture.

    Raises:
        ArtifactError: if they are missing, malformed, or were measured with other weights.
    """
    path = ranges_path(models, task, variant.architecture)
    try:
        ranges = msgspec.json.decode(path.read_bytes(), type=Ranges)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: activation ranges are missing; {variant.name!r} cannot be quantised") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    if ranges.format != 1 or ranges.weights_sha256 != variant.source.sha256:
        raise ArtifactError(f"{path}: measured with weights {ranges.weights_sha256}, expected {variant.source.sha256}")
    return ranges


def save_ranges(models: Path, task: str, ranges: Ranges) -> None:
    """Write ranges to their file, one tensor a line."""
    text = msgspec.json.format(msgspec.json.encode(ranges), indent=1)
    write_atomic(ranges_path(models, task, ranges.architecture), text + b"\n")


def measure_ranges(
    model: onnx.ModelProto, images: Iterable[Pixels], float_from: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """The ranges of a float graph's activations over images (height, width, 3) of its input size.

    `float_from` names tensors from which on the quantised graph stays float (`quantise_model`).

    Raises:
        ArtifactError: if there are no images.
    """
    names = list(quantised_tensors(model, float_from))
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = ort.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    totals = np.zeros((len(names), 2))
    count = 0
    for image in images:
        for i, values in enumerate(session.run(names, {"image": image[None]})):
            totals[i] += values.min(), values.max()
        count += 1
    if not count:
        raise ArtifactError("no images to measure activation ranges on")
    # Six significant digits keep the file readable and are 400 times finer than a quantisation step.
    means = [[float(f"{value:.6g}") for value in row] for row in totals / count]
    return {name: (low, high) for name, (low, high) in zip(names, means, strict=True)}


# The first convolution of a quantised graph, in a layout that fills the words of integer kernels.
#
#     image (h, w, 3) ─ the same bytes ─► (h, w/4, 12) ──► convolution, 2c channels ──► (h/2, w/4, 2c) ─► (h/2, w/2, c)
#
# The layer has the most positions and only three channels, which do not fill a word of four. Four neighbouring pixels
# of a row have the bytes of one pixel with 12 channels, and two neighbouring outputs of c channels those of one with
# 2c. Read so in place, a stride of 2 along the row becomes 1, and a kernel with additional zeros gives the same
# integers (space-to-depth along one axis, on both sides, without moving bytes).

ScalarT = TypeVar("ScalarT", bound=np.generic)

PIXELS: Final = 4
"""Pixels of a row that are read as one."""
OUTPUTS: Final = 2
"""Outputs of a row that are computed as one. With a stride of 2 they are as wide as the pixels."""


class RowBlocks:
    """The blocks in which one convolution reads the rows of an image; its attributes have ONNX's names."""

    def __init__(self, attributes: Mapping[str, Any], width: int) -> None:
        self.attributes, self.width = attributes, width

    @staticmethod
    def of(attributes: Mapping[str, Any], width: int) -> RowBlocks | None:
        """The blocks, or None if rows of `width` pixels or the outputs of the convolution do not divide into them."""
        _, left, _, right = attributes["pads"]
        outputs = (width + left + right - attributes["kernel_shape"][1]) // 2 + 1
        fits = attributes["strides"] == [2, 2] and attributes["group"] == 1 and outputs * 2 == width
        return RowBlocks(attributes, width) if fits and width % PIXELS == 0 else None

    def _columns(self) -> NDArray[np.intp]:
        """(outputs, taps): the pixel that each tap multiplies, counted from the first of the block."""
        taps = np.arange(self.attributes["kernel_shape"][1]) - self.attributes["pads"][1]
        columns: NDArray[np.intp] = 2 * np.arange(OUTPUTS)[:, None] + taps
        return columns

    def convolution(self) -> dict[str, Any]:
        """Attributes of the convolution over blocks."""
        blocks = self._columns() // PIXELS
        top, _, bottom, _ = self.attributes["pads"]
        height = self.attributes["kernel_shape"][0]
        return {
            **self.attributes,
            "kernel_shape": [height, int(np.ptp(blocks)) + 1],
            "strides": [2, 1],
            "pads": [top, -int(blocks.min()), bottom, int(blocks.max())],
        }

    def arranged(self, values: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """A kernel (c, channels, height, width) as (2c, 4 channels, height, blocks), a bias or scales (c,) as (2c,)."""
        if values.ndim == 1:
            return np.tile(values, OUTPUTS)
        c, channels, height, _ = values.shape
        columns = self._columns()
        blocks = columns // PIXELS
        spread = np.zeros((OUTPUTS, c, PIXELS, channels, height, int(np.ptp(blocks)) + 1), values.dtype)
        for (output, tap), column in np.ndenumerate(columns):
            spread[output, :, column % PIXELS, :, :, column // PIXELS - blocks.min()] = values[..., tap]
        return spread.reshape(OUTPUTS * c, PIXELS * channels, height, -1)

    def read(self, builder: GraphBuilder, image: str) -> str:
        """The image (n, height, width, 3) as blocks (n, height, width / 4, 12)."""
        shape = builder.constant(f"{image}.blocks.shape", np.array([0, 0, self.width // PIXELS, -1]))
        return builder.node("Reshape", [image, shape], f"{image}.blocks")

    def write(self, builder: GraphBuilder, blocks: str, output: str) -> str:
        """The result (n, 2c, h, width / 4) of the convolution as (n, c, h, width / 2)."""
        last = builder.node("Transpose", [blocks], f"{output}.rows", perm=[0, 2, 3, 1])
        shape = builder.constant(f"{output}.shape", np.array([0, 0, self.width // 2, -1]))
        apart = builder.node("Reshape", [last, shape], f"{output}.columns")
        return builder.node("Transpose", [apart], output, perm=[0, 3, 1, 2])


Range: TypeAlias = tuple[float, float]

_PAIR_LIMIT = 126.0  # Two weights that sum to 126 before rounding sum to at most 128 after it: 255 * 128 < 2^15.
_BIAS_LIMIT = 2**30  # leaves the other half of int32 to the sum of products
_SMALLEST_SCALE = 1e-12  # the scale of a channel whose weights are all zero


@dataclass(frozen=True, slots=True)
class Affine:
    """real = (integer - zero_point) * scale, with integers 0..255."""

    scale: np.float32
    zero_point: np.uint8

    def quantise(self, values: F32) -> NDArray[np.uint8]:
        """The nearest integers, ties to even, saturated to 0..255, as ONNX's QuantizeLinear."""
        shifted: F32 = np.rint(values / self.scale) + np.float32(self.zero_point)
        return np.clip(shifted, 0, 255).astype(np.uint8)


def affine(low: float, high: float) -> Affine:
    """The mapping of [low, high], widened to hold 0, onto 0..255, with 0 represented exactly.

    Padding and ReLU produce exact zeros, so zero must have an integer of its own.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / 255.0, _SMALLEST_SCALE)
    return Affine(np.float32(scale), np.uint8(round(min(max(-low / scale, 0.0), 255.0))))


def symmetric_scales(kernel: F32, *, saturation_free: bool) -> F32:
    """One scale per output channel (axis 0), so that kernel / scale fits int8."""
    flat = kernel.reshape(kernel.shape[0], -1)
    scales = np.abs(flat).max(axis=1) / 127.0
    if saturation_free and flat.shape[1] > 1:
        for signed in (flat, -flat):
            top = np.partition(signed, -2, axis=1)[:, -2:]
            scales = np.maximum(scales, np.maximum(top, 0).sum(axis=1) / _PAIR_LIMIT)
    floored: F32 = np.maximum(scales, _SMALLEST_SCALE).astype(np.float32)
    return floored


def quantise_weights(kernel: F32, scales: F32) -> NDArray[np.int8]:
    """int8 values whose sum over each output channel is that of the reals, to within one half.

    Each weight is rounded to one of its two neighbouring integers. Inputs after a ReLU are positive, so rounding errors
    that do not cancel shift the whole channel. Flipping the roundings that were closest to a tie removes the shift
    without data (the innermost step of SQuant, arXiv 2202.07471, per channel).
    """
    exact = kernel.reshape(kernel.shape[0], -1).astype(np.float64) / scales[:, None]
    whole = np.rint(exact)
    left = exact - whole
    for channel, surplus in enumerate(np.rint(left.sum(axis=1)).astype(int)):
        step = np.sign(surplus)
        # Stable, so that every machine breaks ties alike. There are at most as many flips as weights rounded that way.
        nearest = np.argsort(-step * left[channel], kind="stable")[: abs(surplus)]
        whole[channel, nearest] += step
    return np.clip(whole, -127, 127).astype(np.int8).reshape(kernel.shape)


def quantise_model(
    model: onnx.ModelProto, ranges: Mapping[str, Range], where: str, float_from: Collection[str] = ()
) -> onnx.ModelProto:
    """The int8 counterpart of a float graph from `hawkvision.model_zoo.building.architectures`.

    Args:
        model: the float graph.
        ranges: [low, high] of the outputs listed by `quantised_tensors`.
        where: names the ranges in errors.
        float_from: tensors that stay float, and so does all that depends on them.

    Raises:
        ArtifactError: if a range is missing or not a range, or the graph has an operator that the zoo never emits.
    """
    return _Quantiser(model, ranges, where, float_from).run()


def quantised_tensors(model: onnx.ModelProto, float_from: Collection[str] = ()) -> tuple[str, ...]:
    """The tensors whose ranges a quantised graph needs, in order: outputs of layers after their activation."""
    found = _Quantiser(model, {}, "", float_from).activations()
    return tuple(out for out in found if out not in ("logits", "pixels", "features"))


class _Quantiser:
    """One pass over the float graph; `_affines` maps each tensor already emitted to how it is quantised."""

    def __init__(
        self, model: onnx.ModelProto, ranges: Mapping[str, Range], where: str, float_from: Collection[str]
    ) -> None:
        self._model = model
        self._ranges = ranges
        self._where = where
        self._nodes = list(model.graph.node)
        self._weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        self._builder = GraphBuilder(f"{model.graph.name}_int8")
        self._affines: dict[str, Affine] = {}
        self._uses = 0
        height, width = (d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[1:3])
        self._size = (height, width)
        self._floats = _dependent(self._nodes, float_from)
        # The name of a layer with an activation behind it is the name of the activation's output.
        self._activated = {n.input[0]: n.output[0] for n in self._nodes if n.op_type in ("Clip", "Relu")}
        # Inputs of a concatenation are quantised as its output is, so that it only moves bytes.
        joins = [n for n in self._nodes if n.op_type == "Concat" and n.output[0] not in self._floats]
        self._joined = {i: n.output[0] for n in joins for i in n.input}

    def activations(self) -> list[str]:
        """Outputs with a range of their own."""
        passive = ("Clip", "Relu", "Cast", "Transpose", "MaxPool")
        layers = [n for n in self._nodes if n.op_type not in passive and n.output[0] not in self._floats]
        made = [self._activated.get(n.output[0], n.output[0]) for n in layers]
        return [name for name in made if name not in self._joined]

    def run(self) -> onnx.ModelProto:
        for node in self._nodes:
            if node.output[0] in self._floats:
                self._copy(node)
            else:
                self._emit(node)
        outputs = {
            o.name: tuple(d.dim_value for d in o.type.tensor_type.shape.dim[1:]) for o in self._model.graph.output
        }
        return self._builder.model_of(*self._size, outputs)

    def _copy(self, node: onnx.NodeProto) -> None:
        """A node that stays float."""
        for name in node.input:
            if name in self._weights:
                self._builder.constant(name, self._weights[name])
        inputs = [self._real(i) if i in self._affines else i for i in node.input]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self._builder.many(node.op_type, inputs, list(node.output), **attributes)

    def _emit(self, node: onnx.NodeProto) -> None:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        match node.op_type:
            case "Cast" | "Clip" | "Relu" | "Transpose":
                pass
            case "Sub":
                self._affines["pixels"] = Affine(np.float32(1), np.uint8(round(float(self._mean().mean()))))
            case "Conv":
                self._conv(node, attributes)
            case "Gemm":
                self._gemm(node, attributes)
            case "MaxPool":
                self._affines[node.output[0]] = self._affines[node.input[0]]
                self._builder.node("MaxPool", [f"{node.input[0]}.q"], f"{node.output[0]}.q", **attributes)
            case "Flatten":
                self._affines[node.output[0]] = self._affines[node.input[0]]
                self._builder.node("Flatten", [f"{node.input[0]}.q"], f"{node.output[0]}.q", **attributes)
            case "Add" | "Concat" | "GlobalAveragePool":
                inputs = [self._real(i) for i in node.input]
                self._quantised(self._builder.node(node.op_type, inputs, f"{node.output[0]}.r", **attributes), node)
            case other:
                raise ArtifactError(f"{self._where}: the zoo does not quantise the operator {other!r}")

    def _mean(self) -> F32:
        mean: F32 = self._weights["image.mean"].reshape(-1)
        return mean

    def _real(self, tensor: str) -> str:
        """The tensor dequantised."""
        how = self._affines[tensor]
        # Every use gets a node of its own: runtimes fuse a DequantizeLinear only into its single consumer.
        self._uses += 1
        output = f"{tensor}.r{self._uses}"
        return self._builder.node("DequantizeLinear", [f"{tensor}.q", *self._affine_constants(tensor, how)], output)

    def _affine_constants(self, tensor: str, how: Affine) -> list[str]:
        scale = self._builder.constant(f"{tensor}.scale", np.array(how.scale))
        return [scale, self._builder.constant(f"{tensor}.zero", np.array(how.zero_point))]

    def _quantised(self, real: str, node: onnx.NodeProto, rows: RowBlocks | None = None) -> None:
        """The node's result by `real` (in blocks, if given), quantised under the name of its activation."""
        output = self._activated.get(node.output[0], node.output[0])
        how = self._affine_of(self._joined.get(output, output))
        self._affines[output] = how
        integers = f"{output}.q" if rows is None else f"{output}.blocks"
        self._builder.node("QuantizeLinear", [real, *self._affine_constants(output, how)], integers)
        if rows is not None:
            rows.write(self._builder, integers, f"{output}.q")

    def _affine_of(self, tensor: str) -> Affine:
        if tensor not in self._ranges:
            raise ArtifactError(f"{self._where}: no range for tensor {tensor!r}")
        low, high = self._ranges[tensor]
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise ArtifactError(f"{self._where}: {tensor}: [{low}, {high}] is not a range")
        return affine(low, high)

    def _constant_weights(
        self, name: str, kernel: F32, bias: F32, x: str, *, saturation_free: bool, rows: RowBlocks | None = None
    ) -> list[str]:
        """The kernel and bias as integers, dequantised. Blocks are arranged last, so the integers are the same."""
        # At its own scale, a channel of (nearly) zero weights would have a bias beyond int32; a coarser scale holds it.
        coarsest = (np.abs(bias) / (self._affines[x].scale * np.float32(_BIAS_LIMIT))).astype(np.float32)
        scales = np.maximum(symmetric_scales(kernel, saturation_free=saturation_free), coarsest)
        bias_scales = self._affines[x].scale * scales
        values: list[tuple[str, NDArray[Any], F32]] = [
            ("weight", quantise_weights(kernel, scales), scales),
            ("bias", np.rint(bias.astype(np.float64) / bias_scales).astype(np.int32), bias_scales),
        ]
        if rows is not None:
            values = [(part, rows.arranged(integers), rows.arranged(scale)) for part, integers, scale in values]
        outputs = []
        for part, integers, scale in values:
            at = f"{name}.{part}"
            zero = self._builder.constant(f"{at}.zero", np.zeros(scale.shape, integers.dtype))
            inputs = [self._builder.constant(f"{at}.q", integers), self._builder.constant(f"{at}.scale", scale), zero]
            outputs.append(self._builder.node("DequantizeLinear", inputs, at, axis=0))
        return outputs

    def _conv(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> None:
        x, name = node.input[0], node.output[0]
        kernel, bias = self._weights[node.input[1]], self._weights[node.input[2]]
        rows: RowBlocks | None = None
        if x == "pixels":
            rows = self._read_pixels(attributes)
            # One zero point must serve all channels, so the remainder of each channel's mean goes into the bias. (At
            # the border, where padding is the zero point, this is off by that remainder: at most 10 of 255.)
            # Summed in float64: NumPy's order of summation differs between CPUs, and the artefact's bytes must not.
            left = float(self._affines[x].zero_point) - self._mean().astype(np.float64)
            bias = bias + np.einsum("oihw,i->o", kernel.astype(np.float64), left)
        # No known runtime pairs products of depthwise kernels, and these have too few weights to spare bits.
        paired = attributes["group"] == 1
        constants = self._constant_weights(name, kernel, bias, x, saturation_free=paired, rows=rows)
        over = attributes if rows is None else rows.convolution()
        self._quantised(self._builder.node("Conv", [self._real(x), *constants], f"{name}.r", **over), node, rows)

    def _read_pixels(self, attributes: dict[str, Any]) -> RowBlocks | None:
        """Arrange `image` for the convolution with these attributes. Returns the blocks; None if it is unchanged."""
        rows = RowBlocks.of(attributes, self._size[1])
        image = "image" if rows is None else rows.read(self._builder, "image")
        self._builder.node("Transpose", [image], "pixels.q", perm=[0, 3, 1, 2])
        return rows

    def _gemm(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> None:
        x, name = node.input[0], node.output[0]
        kernel, bias = self._weights[node.input[1]], self._weights[node.input[2]]
        constants = self._constant_weights(name, kernel, bias, x, saturation_free=True)
        self._builder.node("Gemm", [self._real(x), *constants], name, **attributes)


def _dependent(nodes: Collection[onnx.NodeProto], names: Collection[str]) -> frozenset[str]:
    """The named tensors and all that are computed from them."""
    found: set[str] = set()
    for node in nodes:
        if not found.isdisjoint(node.input) or not set(names).isdisjoint(node.output):
            found.update(node.output)
    return frozenset(found)

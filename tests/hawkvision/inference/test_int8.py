"""Our int8 kernels: every output is ONNX Runtime's, and what they do not understand they refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Logits
from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.backends.interface import Backend
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.inference.int8.backend import Int8Backend
from hawkvision.inference.int8.graph import Unsupported, read
from hawkvision.models.manifest import cache_dir
from hawkvision.native import library
from tests.fuzz.examples import examples
from tests.hawkvision.inference.backend_conformance import BackendConformance, assert_same, random_images
from tests.hawkvision.inference.graphs import Array
from tests.hawkvision.inference.quantised import Quantised, Value, residual_network, two_outputs

runs = pytest.mark.skipif(
    library.unsupported_reason() is not None, reason=f"this machine cannot: {library.unsupported_reason()}"
)
needs_two_cores = pytest.mark.skipif(usable_cores() < 2, reason="a helper needs a core of its own")
ZOO = cache_dir() / "models"
IN_ZOO = [
    "imagenet/efficientnet_lite0_int8",
    "imagenet/efficientnet_lite1_int8",
    "imagenet/efficientnet_lite2_int8",
    "imagenet/mobilenet_v2_int8",
    "coco/ssdlite_mobilenet_v2_int8",
]


@runs
class TestInt8Backend(BackendConformance):
    atol = 0.0

    @pytest.fixture(params=[1, 2], ids=["alone", "with a helper"])
    def make_backend(self, request: pytest.FixtureRequest) -> Callable[[], Backend]:
        return lambda: Int8Backend(residual_network(), threads=request.param)


@runs
class TestSeveralOutputs(BackendConformance):
    atol = 0.0

    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: Int8Backend(two_outputs())


@st.composite
def networks(draw: st.DrawFn) -> bytes:
    """Layers of all kinds and sizes that are understood, in an order in which they fit, and one to five outputs."""
    fold = draw(st.sampled_from([1, 2, 4]))
    height, width = draw(st.integers(5, 40)), draw(st.integers(2, 9)) * 4
    net = Quantised(draw(st.integers(0, 2**32 - 1)), height, width, fold)
    # A row of the first window must be a multiple of four bytes.
    columns = {1: 4, 2: 2, 4: 1}[fold]
    down = draw(st.integers(1, 2))
    made = draw(st.integers(1, 5)) * 16
    taken = net.convolution(net.image, made, (3, columns), (down, 1), (1, 0, draw(st.integers(0, 1)), columns - 1))
    stem = taken
    if draw(st.booleans()):
        taken = net.unfolded(taken, 2)
    seen = [taken]
    for _ in range(draw(st.integers(0, 4))):
        taken = draw(st.sampled_from([_product, _window, _block]))(draw, net, taken)
        seen.append(taken)
    outputs = draw(st.lists(st.sampled_from(["logits", "rows", "real rows"]), min_size=1, max_size=5))
    for number, kind in enumerate(outputs):
        if kind != "logits":
            net.rows(draw(st.sampled_from([stem, *seen])), f"rows{number}", real=kind == "real rows")
            continue
        taken = draw(st.sampled_from(seen))
        taken = net.convolution(taken, 16) if taken.sizes[2] % 4 else taken
        net.logits(taken, draw(st.integers(2, 70)), f"logits{number}")
    return net.model()


def _channels(draw: st.DrawFn, step: int) -> int:
    return draw(st.integers(1, 160 // step)) * step


def _product(draw: st.DrawFn, net: Quantised, taken: Value) -> Value:
    rows, columns = draw(st.sampled_from([(1, 1), (1, 1), (3, 3), (2, 1), (1, 3)]))
    if taken.sizes[0] < rows or taken.sizes[1] < columns:
        rows = columns = 1
    pads = tuple(draw(st.integers(0, most - 1)) for most in (rows, columns, rows, columns))
    strides = draw(st.sampled_from([(1, 1), (2, 2), (1, 2)]))
    made = _channels(draw, 4)
    return net.convolution(taken, made, (rows, columns), strides, pads, relu=draw(st.booleans()))  # type: ignore[arg-type]


def _window(draw: st.DrawFn, net: Quantised, taken: Value) -> Value:
    if taken.sizes[2] % 16:
        taken = net.convolution(taken, _channels(draw, 16), relu=draw(st.booleans()))
    size = draw(st.sampled_from([3, 5]))
    stride = draw(st.sampled_from([1, 2]))
    pads = [draw(st.integers(0, size // 2)) for _ in range(4)]
    if taken.sizes[0] + pads[0] + pads[2] < size or taken.sizes[1] + pads[1] + pads[3] < size:
        pads = [size - 1] * 4
    top, left, bottom, right = pads
    return net.convolution(
        taken,
        taken.sizes[2],
        (size, size),
        (stride, stride),
        (top, left, bottom, right),
        depthwise=True,
        relu=draw(st.booleans()),
    )


def _block(draw: st.DrawFn, net: Quantised, taken: Value) -> Value:
    up = net.convolution(taken, _channels(draw, 16), relu=True)
    window = net.convolution(up, up.sizes[2], (3, 3), (1, 1), (1, 1, 1, 1), depthwise=True, relu=True)
    down = net.convolution(window, taken.sizes[2])
    return net.addition(taken, down) if draw(st.booleans()) else net.addition(down, taken)


@runs
@settings(max_examples=examples(200), deadline=None)
@given(data=networks(), threads=st.integers(1, 2), tiles=st.booleans())
def test_every_output_of_every_network_is_onnx_runtimes(data: bytes, threads: int, tiles: bool) -> None:
    tiles = tiles and library.has_tiles()
    with closing(OnnxRuntimeBackend(data)) as right, closing(Int8Backend(data, threads, tiles)) as backend:
        images = random_images(backend, 3)
        images[1] //= 16
        images[2] = np.maximum(images[2], 240)
        assert list(backend.outputs.items()) == list(right.outputs.items())
        assert_same(backend.infer(images), right.infer(images))


@runs
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", IN_ZOO)
def test_every_output_of_the_cascades_networks_is_onnx_runtimes(name: str, threads: int, tiles: bool) -> None:
    path = ZOO / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"{path} has not been built")
    if tiles and not library.has_tiles():
        pytest.skip("this machine has no tiles")
    with closing(OnnxRuntimeBackend(path)) as right, closing(Int8Backend(path, threads, tiles)) as backend:
        images = random_images(backend, 4)
        images[2:] = images[2:] // 64 * 85
        assert_same(backend.infer(images), right.infer(images))


@runs
def test_tiles_that_the_machine_has_not_are_refused() -> None:
    if library.has_tiles():
        pytest.skip("this machine has tiles")
    with pytest.raises(BackendError, match="this machine has none"):
        Int8Backend(residual_network(), tiles=True)


@runs
@needs_two_cores
def test_callers_at_once_get_the_logits_of_their_own_images() -> None:
    backend = Int8Backend(residual_network(), threads=2)
    images = random_images(backend, 8)
    alone = [backend.infer(image[None])[LOGITS] for image in images]

    def often(number: int) -> bool:
        return all(np.array_equal(backend.infer(images[number][None])[LOGITS], alone[number]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(often, range(8)))
    backend.close()


def helpers_of_this_process() -> list[Path]:
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            if (thread / "comm").read_text() == "hv-int8\n":
                found.append(thread)
    return found


@runs
@needs_two_cores
def test_helpers_end_with_their_backend() -> None:
    before = len(helpers_of_this_process())
    backend = Int8Backend(residual_network(), threads=2)
    backend.infer(random_images(backend, 1))
    assert len(helpers_of_this_process()) == before + 1
    backend.close()
    assert len(helpers_of_this_process()) == before


@runs
def test_closing_leaves_a_run_that_has_begun_to_its_end() -> None:
    backend = Int8Backend(residual_network())
    images = random_images(backend, 500)
    expected = backend.infer(images)[LOGITS]
    begun = threading.Event()
    got: list[Logits] = []

    def run() -> None:
        begun.set()
        with suppress(BackendError):  # closed before it began
            got.append(backend.infer(images)[LOGITS])

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    backend.close()
    thread.join()
    # Whether it was begun before the end is the scheduler's choice; whether it ended well is not.
    if got:
        np.testing.assert_array_equal(got[0], expected)
    with pytest.raises(BackendError, match="closed"):
        backend.infer(images)


Change = Callable[[onnx.ModelProto], object]


def node_of(changed: onnx.ModelProto, kind: str, number: int = 0) -> onnx.NodeProto:
    return [node for node in changed.graph.node if node.op_type == kind][number]


def with_attribute(kind: str, name: str, value: object, number: int = 0) -> Change:
    def change(changed: onnx.ModelProto) -> None:
        node = node_of(changed, kind, number)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return change


def with_constant(name: Callable[[onnx.ModelProto], str], value: Callable[[Array], Array]) -> Change:
    def change(changed: onnx.ModelProto) -> None:
        found = name(changed)
        constant = next(t for t in changed.graph.initializer if t.name == found)
        constant.CopyFrom(onnx.numpy_helper.from_array(value(onnx.numpy_helper.to_array(constant)), found))

    return change


def maker_of(changed: onnx.ModelProto, position: int) -> onnx.NodeProto:
    """What dequantises the first convolution's weights (1) or bias (2)."""
    return next(node for node in changed.graph.node if node.output[0] == node_of(changed, "Conv").input[position])


def more_after_the_last(changed: onnx.ModelProto) -> None:
    scale, zero = node_of(changed, "QuantizeLinear").input[1:]
    changed.graph.node.append(onnx.helper.make_node("QuantizeLinear", ["logits", scale, zero], ["more"]))
    changed.graph.output[0].name = "more"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda changed: setattr(node_of(changed, "Add"), "op_type", "Mul"),
            r"\(Mul\): no layer of an integer",
        ),
        (with_attribute("Conv", "dilations", [2, 2]), r"\(Conv\).* dilated"),
        (with_attribute("Conv", "pads", [9, 0, 0, 0]), r"\(Conv\).* padding of"),
        (with_attribute("Conv", "pads", [-1, 0, 0, 0]), r"\(Conv\).* padding of"),
        (with_attribute("Conv", "strides", [0, 1]), r"\(Conv\).* in steps of"),
        # their product is 1 in 32 bits
        (with_attribute("Conv", "strides", [9, 954437177], 1), r"\(Conv\).* in steps of \(9, 954437177\)"),
        (with_attribute("Conv", "group", 7), r"\(Conv\).* 7 groups"),
        (with_attribute("Gemm", "transB", 0), r"\(Gemm\).*classes, features"),
        (with_attribute("Gemm", "alpha", 0.5), r"\(Gemm\).* factors"),
        (with_attribute("Flatten", "axis", 2), r"\(Flatten\).* flattened"),
        (with_attribute("Transpose", "perm", [0, 2, 1, 3]), r"\(Transpose\).* a transpose by"),
        # without an axis: ONNX's default, 1
        (lambda changed: maker_of(changed, 1).ClearField("attribute"), "scaled by its first axis"),
        (more_after_the_last, "not the last"),
        (lambda changed: changed.graph.ClearField("output"), "1 inputs and 0 outputs"),
        (lambda changed: setattr(changed.graph.output[0], "name", "image"), "an output depends on 'image'"),
        (
            with_constant(lambda changed: node_of(changed, "QuantizeLinear").input[2], lambda _: np.array(0, np.int8)),
            "expected uint8",
        ),
        (with_constant(lambda changed: maker_of(changed, 2).input[1], lambda scale: scale * 2), "another scale"),
    ],
)
def test_what_is_not_understood_is_named_with_its_node(change: Change, says: str) -> None:
    changed = onnx.load_model_from_string(residual_network())
    change(changed)
    with pytest.raises(Unsupported, match=says):
        read(changed)


def test_one_tensor_in_two_sizes_is_refused() -> None:
    net = Quantised(0, 36, 32, fold=4)
    made = net.convolution(net.image, 32)
    net.rows(net.convolution(made, 16), "one")
    net.rows(net.convolution(net.unfolded(made, 2), 16), "other")
    with pytest.raises(Unsupported, match="is seen in sizes"):
        read(onnx.load_model_from_string(net.model()))


def test_layers_that_no_output_needs_are_not_read() -> None:
    net = Quantised(0, 36, 32)
    made = net.convolution(net.image, 32, (3, 4))
    net.convolution(net.unfolded(made, 2), 16)
    assert len(read(onnx.load_model_from_string(net.logits(made, 5))).layers) == 4


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A network some of whose bytes were changed, left out or doubled."""
    data = bytearray(residual_network(height=12, width=8))
    for _ in range(draw(st.integers(1, 4))):
        # Most bytes are weights, which say nothing; the first and last kilobytes are nodes and names.
        at = draw(st.one_of(st.integers(0, 12_000), st.integers(0, len(data) - 1))) % len(data)
        match draw(st.integers(0, 2)):
            case 0:
                data[at] = draw(st.integers(0, 255))
            case 1:
                del data[at : at + draw(st.integers(1, 40))]
            case _:
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@runs
@settings(max_examples=examples(300), deadline=None)
@given(data=spoilt())
def test_a_spoilt_model_is_refused_or_run_as_what_it_says(data: bytes) -> None:
    try:
        backend = Int8Backend(data)
    except BackendError:
        return
    with closing(backend):
        found = backend.infer(random_images(backend, 1))
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: (1, *shape) for name, shape in backend.outputs.items()
    }

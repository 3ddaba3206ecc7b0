from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from hawkvision.core.errors import BackendError, ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.core.types import LOGITS
from hawkvision.inference.backend_registry import NoopBackend, open_backend
from hawkvision.inference.backends.interface import Backend, joined
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.models.manifest import InputSpec
from tests.bench.cluster.local.sleep_backend import BATCH_MS, INSTALLED, SleepBackend
from tests.hawkvision.inference.backend_conformance import BackendConformance, random_images
from tests.hawkvision.inference.graphs import model, tiny_classifier, tiny_detector

SPEC = InputSpec(height=16, width=12, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
ZOO = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hawkvision/models/imagenet"


class TestOnnxRuntimeBackend(BackendConformance):
    @pytest.fixture(params=[tiny_classifier(), tiny_classifier(batch=1), tiny_detector()], ids=["any", "one", "many"])
    def make_backend(self, request: pytest.FixtureRequest) -> Callable[[], Backend]:
        return lambda: OnnxRuntimeBackend(request.param)


class TestNoopBackend(BackendConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        return lambda: NoopBackend((16, 12, 3), 7)


def mean_of_pixels(
    element: int = TensorProto.UINT8, height: int | str = 8, axes: Sequence[int] = (1, 2), output: str = "logits"
) -> bytes:
    """A model of the mean over axes of (n, height, 8, 3)."""
    nodes = [
        helper.make_node("Cast", ["image"], ["f"], to=1),
        helper.make_node("ReduceMean", ["f"], [output], axes=list(axes), keepdims=0),
    ]
    given: tuple[str, int, list[int | str]] = ("image", element, ["n", height, 8, 3])
    shape: list[int | str] = ["n", 3] if 0 not in axes else [3]
    return model(nodes, {}, given, (output, TensorProto.FLOAT, shape))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (mean_of_pixels(TensorProto.FLOAT), r"tensor\(uint8\) of \(n, height, width, 3\)"),
        (mean_of_pixels(height="h"), "height, width, 3"),
        (b"", r"broken\.onnx"),
        (b"not a model", r"broken\.onnx"),
        (b"\x08\x07\x12" + bytes(50), r"broken\.onnx"),
        (None, r"broken\.onnx"),
    ],
    ids=["floats", "free height", "empty", "text", "damaged", "missing"],
)
def test_file_that_is_no_model_of_images_is_refused(data: bytes | None, says: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / "broken.onnx").write_bytes(data)
    with pytest.raises(BackendError, match=says):
        OnnxRuntimeBackend(tmp_path / "broken.onnx")


def test_outputs_have_the_names_of_the_file_and_an_only_one_is_called_logits() -> None:
    assert OnnxRuntimeBackend(tiny_detector()).outputs == {"boxes": (4, 4), "scores": (4, 3), "tenths": (4, 3)}
    assert OnnxRuntimeBackend(mean_of_pixels(output="mean colour")).outputs == {LOGITS: (3,)}


@pytest.mark.parametrize("data", [tiny_classifier(), tiny_detector()], ids=["classifier", "detector"])
def test_answers_are_those_that_the_standard_defines(data: bytes) -> None:
    backend = OnnxRuntimeBackend(data)
    images = random_images(backend, 3)
    expected = ReferenceEvaluator(onnx.load_from_string(data)).run(None, {"image": images})
    for (name, found), wanted in zip(backend.infer(images).items(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1.0 if name == "tenths" else 1e-4)


def test_a_graph_whose_first_axis_is_not_that_of_images_is_refused() -> None:
    backend = OnnxRuntimeBackend(mean_of_pixels(axes=(0, 1, 2)))
    with pytest.raises(BackendError, match=r"'logits' of shape \(3,\); expected \(2,\)"):
        backend.infer(random_images(backend, 2))


def test_batches_whose_axes_differ_are_joined_with_zeros() -> None:
    one, other = np.ones((1, 2, 6), np.float32), np.full((2, 5, 6), 2, np.float32)
    found = joined([{"found": one}, {"found": other}])["found"]
    assert found.shape == (3, 5, 6)
    assert (found[0, :2] == 1).all()
    assert (found[0, 2:] == 0).all()
    assert (found[1:] == 2).all()


def test_provider_that_is_not_installed_is_refused_and_the_installed_are_named() -> None:
    with pytest.raises(BackendError, match=r"TensorrtExecutionProvider is not installed.*CPUExecutionProvider"):
        OnnxRuntimeBackend(tiny_classifier(), ("TensorrtExecutionProvider", "CPUExecutionProvider"))
    with pytest.raises(BackendError, match="none given"):
        OnnxRuntimeBackend(tiny_classifier(), ())


def test_provider_options_reach_the_runtime() -> None:
    backend = OnnxRuntimeBackend(tiny_classifier(), (("CPUExecutionProvider", {}),))
    assert backend.providers == ("CPUExecutionProvider",)
    backend.warm_up((1, 3))
    backend.close()


def test_opened_backend_must_fit_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_classifier(classes=7))
    assert open_backend("onnxruntime", path, SPEC, 7).outputs == {LOGITS: (7,)}
    with pytest.raises(BackendError, match=r"it takes \(16, 12, 3\); the manifest says \(16, 16, 3\)"):
        open_backend("onnxruntime", path, msgspec.structs.replace(SPEC, width=16), 7)


def test_noop_backend_needs_no_file(tmp_path: Path) -> None:
    backend = open_backend("noop", tmp_path / "absent.onnx", SPEC, 10)
    assert backend.infer(random_images(backend, 3))[LOGITS].shape == (3, 10)


def test_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="'tpu'"):
        open_backend("tpu", tmp_path, SPEC, 10)


def test_an_installed_package_provides_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(INSTALLED))
    monkeypatch.setenv(BATCH_MS, "0")
    assert isinstance(open_backend("sleep", b"any", SPEC, 4), SleepBackend)
    assert load_config(DatacenterConfig, environ={}, overrides={"backend": "sleep"}).backend == "sleep"


def test_a_backend_of_a_release_without_named_tensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aged.py").write_text(
        "class Aged:\n"
        "    input_shape, classes = (16, 12, 3), 4\n"
        "    def __init__(self, *_): ...\n"
        "    def infer(self, batch): ...\n"
        "    def close(self): ...\n"
    )
    information = tmp_path / "aged-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: aged\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[hawkvision.backends]\naged = aged:Aged\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendError, match=r"backend 'aged': Aged is no backend of this release; expected .*`outputs`"):
        open_backend("aged", b"any", SPEC, 4)


def test_the_setting_names_the_backends_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"dc\.backend: expected one of auto, int8, .*, noop, got 'sleep'"):
        load_config(DatacenterConfig, environ={}, overrides={"backend": "sleep"})


def test_opening_one_backend_does_not_import_the_others() -> None:
    code = (
        "import sys; from pathlib import Path; from hawkvision.models.manifest import InputSpec;"
        "from hawkvision.inference.backend_registry import open_backend;"
        "s = InputSpec(height=8, width=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0));"
        "open_backend('noop', Path('x'), s, 5);"
        "print([m for m in ('onnx', 'onnxruntime', 'pytest') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["mobilenet_v2_int8", "efficientnet_lite0_int8"])
def test_threads_change_no_bit_of_the_zoos_logits(name: str) -> None:
    path = ZOO / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"{path} has not been built")
    one = OnnxRuntimeBackend(path)
    images = random_images(one, 3)
    wanted = one.infer(images)[LOGITS]
    for threads in (2, 4):
        several = OnnxRuntimeBackend(path, threads=threads)
        for number in range(len(images)):
            np.testing.assert_array_equal(several.infer(images[number : number + 1])[LOGITS], wanted[[number]])

"""Quantisation-aware training: what was trained is what the integers compute, and it starts where floats ended."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from hawkvision.core.errors import ArtifactError, ManifestError
from hawkvision.integer import reference
from hawkvision.integer.qonnx import read_qonnx
from hawkvision.model_zoo.building.convnet import CONVNETS
from hawkvision.model_zoo.training.qonnx_export import write_qonnx
from hawkvision.model_zoo.training.recipe import InputFacts, QuantisedNetwork, TrainedNetwork
from tests.hawkvision.model_zoo.tiny_states import convnet_state

pytestmark = pytest.mark.models

FACTS = InputFacts(side=12, mean=(60.0, 60.0, 60.0), std=(50.0, 50.0, 50.0))
OF = TrainedNetwork(name="n", architecture="convnet_tiny", seed=5, epochs=1, batch=16)
TWIN = QuantisedNetwork(name="n_w4", of="n", weight_bits=4, seed=6, epochs=2)


@pytest.fixture(scope="module")
def qat() -> Any:
    """`hawkvision.model_zoo.training.qat`, which needs torch."""
    pytest.importorskip("torch", reason="the [models] extra is not installed")
    return importlib.import_module("hawkvision.model_zoo.training.qat")


def data(n: int = 48) -> Any:
    train = importlib.import_module("hawkvision.model_zoo.training.train")
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (n, 12, 12, 3), dtype=np.uint8)
    return train.TrainingSet(pixels, rng.integers(0, 4, n).astype(np.int64), "a" * 64)


def start(architecture: str = "convnet_tiny", classes: int = 4) -> bytes:
    state = convnet_state(CONVNETS[architecture], np.random.default_rng(1), FACTS.side, classes)
    content: bytes = safetensors.numpy.save(state)
    return content


def quiet(epoch: int, index: int, loss: float) -> None:
    assert np.isfinite(loss)


def trained(qat: Any, folder: Path, twin: QuantisedNetwork = TWIN, of: TrainedNetwork = OF, report: Any = quiet) -> Any:
    return qat.train_quantised(twin, of, start(of.architecture), FACTS, data(), 4, folder, report)


@pytest.mark.parametrize("architecture", ["convnet_tiny", "convnet_tiny_grey"])
@pytest.mark.parametrize("bits", [4, 8])
def test_integer_graph_computes_what_was_trained(qat: Any, architecture: str, bits: int, tmp_path: Path) -> None:
    of = msgspec.structs.replace(OF, architecture=architecture)
    model = trained(qat, tmp_path, msgspec.structs.replace(TWIN, weight_bits=bits), of)
    graph = read_qonnx(write_qonnx(qat.quantised_net(model, FACTS), "n"), "n")
    pixels = data().pixels
    found = reference.logits(graph, reference.planes(graph, pixels)) * graph.logit_scale
    expected = qat.infer(model, pixels)
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)  # of which a wrong step or bias would be half
    assert {stage.conv.weight_bits for stage in graph.stages} == {bits}
    assert graph.fill == (60,) * graph.input.channels


def test_eight_bits_start_as_right_as_floats(qat: Any, tmp_path: Path) -> None:
    """With a mean of zero, for then padding is the same on either side; at a learning rate that moves nothing."""
    train = importlib.import_module("hawkvision.model_zoo.training.train")
    facts = InputFacts(side=12, mean=(0.0, 0.0, 0.0), std=(50.0, 60.0, 70.0))
    twin = QuantisedNetwork(name="n_w8", of="n", weight_bits=8, seed=6, epochs=1, learning_rate=1e-9)
    model = qat.train_quantised(twin, OF, start(), facts, data(), 4, tmp_path, quiet)
    floats = train.TorchConvNet(CONVNETS["convnet_tiny"], facts, 4)
    train.load_weights(floats, start(), "start")
    expected = train.infer(floats, facts, data().pixels)
    assert np.abs(qat.infer(model, data().pixels) - expected).max() < 0.05 * np.ptp(expected)


def test_interrupted_training_ends_with_the_same_file(qat: Any, tmp_path: Path) -> None:
    def interrupt(epoch: int, index: int, loss: float) -> None:
        if (epoch, index) == (1, 1):
            raise KeyboardInterrupt

    whole = trained(qat, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(qat, tmp_path / "parts", report=interrupt)
    facts = (TWIN, OF, start(), FACTS, data(), 4, tmp_path / "parts")
    assert not qat.is_quantised(*facts)
    seen: list[int] = []
    parts = trained(qat, tmp_path / "parts", report=lambda epoch, index, loss: seen.append(epoch))
    assert set(seen) == {1}
    assert qat.is_quantised(*facts)
    written = [write_qonnx(qat.quantised_net(model, FACTS), "n") for model in (whole, parts)]
    assert written[0] == written[1]


def test_training_from_other_weights_is_another_training(qat: Any, tmp_path: Path) -> None:
    trained(qat, tmp_path)
    assert qat.is_quantised(TWIN, OF, start(), FACTS, data(), 4, tmp_path)
    assert not qat.is_quantised(TWIN, OF, start(classes=4)[:-1] + b"x", FACTS, data(), 4, tmp_path)


def test_networks_that_integer_hardware_does_not_have_are_refused(qat: Any, tmp_path: Path) -> None:
    for architecture in ("convnet_small", "convnet_large"):
        with pytest.raises(ManifestError, match="only networks without residual layers and with a flattened head"):
            trained(qat, tmp_path, of=msgspec.structs.replace(OF, architecture=architecture))


def test_weights_of_another_network_and_too_few_images_are_refused(qat: Any, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"n_w4: the weights of n to start from: head.weight: expected shape"):
        qat.train_quantised(TWIN, OF, start(classes=5), FACTS, data(), 4, tmp_path, quiet)
    with pytest.raises(ManifestError, match="n_w4: a batch has 16 images, but only 15 train"):
        qat.train_quantised(TWIN, OF, start(), FACTS, data(15), 4, tmp_path, quiet)

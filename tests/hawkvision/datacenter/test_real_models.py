"""The committee on the zoo's real models, against NumPy and direct ONNX Runtime runs."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from urllib.parse import urlsplit

import msgspec
import numpy as np
import onnxruntime
import pytest
from scipy.special import softmax

from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.catalog import Catalog, load_catalog
from hawkvision.hop import HopReply
from hawkvision.manifest import Variant, artifact_path, cache_dir
from hawkvision.types import Pixels
from hawkvision.vision.image import load_input
from tests.hawkvision.datacenter.conftest import ROOT, Running, picture, ready_url, stop


def built() -> Catalog:
    catalog = load_catalog(DatacenterConfig())
    missing = [v.name for v in catalog.variants if not artifact_path(cache_dir(), catalog.task, v.name).is_file()]
    if missing:
        pytest.skip(f"models not built on this machine: {', '.join(missing)}; run `hawkvision models build`")
    return catalog


def member_mean(variant: Variant, catalog: Catalog, body: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The member's probabilities over the picture and its mirror image, one view at a time."""
    session = onnxruntime.InferenceSession(
        str(artifact_path(cache_dir(), catalog.task, variant.name)), providers=["CPUExecutionProvider"]
    )
    pixels, _ = load_input(body, variant.input, max_pixels=10**7)

    def view(upright: Pixels) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        (logits,) = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(upright[None])})
        result: np.ndarray[tuple[int], np.dtype[np.float64]] = softmax(
            logits[0].astype(np.float64) / variant.temperature
        )
        return result

    return (view(pixels) + view(pixels[:, ::-1])) / 2


@pytest.mark.slow
def test_the_committee_is_the_numpy_average_of_its_members() -> None:
    catalog, body = built(), picture(300)
    command = [sys.executable, "-m", "hawkvision.datacenter", "--port", "0", "--variants", catalog.best.name]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
    running = Running(process, ready_url(process), "")
    try:
        connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=60)
        connection.request("POST", "/v1/infer", body, {"X-HawkVision-Top-K": "1000"})
        answer = msgspec.json.decode(connection.getresponse().read(), type=HopReply)
        connection.close()
    finally:
        stop(running)
    members = [v for v in catalog.variants if v.name in catalog.best.members]
    mean = np.mean([member_mean(v, catalog, body) for v in members], axis=0)
    expected = softmax(np.log(mean) / catalog.best.temperature)
    served = {c.index: c.confidence for c in answer.top_k}
    np.testing.assert_allclose([served[i] for i in range(len(expected))], expected, atol=2e-5)

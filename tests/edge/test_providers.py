"""A datacenter on another provider than the profile's: certified once a folder has gone through it, and only it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.cascade.certification.profile_files import load_profile, load_site
from hawkvision.models.manifest import artifact_path, cache_dir, models_dir
from hawkvision.system.child_server import running
from tests.edge.conftest import Caller
from tests.edge.peer import running_peer
from tests.images import encoded
from tests.waiting import until

EDGE = "squeezenet1_1_int8"
REFERENCE = load_profile(models_dir() / "imagenet" / "profile.json").stage("reference").fingerprint
GPU, OTHER_GPU = (f"onnxruntime:CUDAExecutionProvider:1.27.0:{device}" for device in ("H200", "T4"))


def accuracy(caller: Caller) -> tuple[str, str | None]:
    found = caller.classify(encoded(), "quality=best").json["accuracy"]
    return found["status"], found["status_reason"]


@pytest.mark.slow
def test_a_gpus_answers_are_certified_by_a_folder_that_went_through_it_and_no_other_gpus(tmp_path: Path) -> None:
    if not artifact_path(cache_dir(), "imagenet", EDGE).is_file():
        pytest.skip(f"{EDGE} has not been built on this machine")
    site, made = tmp_path / "site", tmp_path / "certificates.json"
    site.mkdir()
    for seed in range(60):
        (site / f"{seed}.jpg").write_bytes(encoded(seed=seed))
    with running_peer(model="reference", fingerprint=REFERENCE, execution=GPU) as gpu:
        node = ("edge", "--port", "0", "--backend", "onnxruntime", "--variant", EDGE, "--datacenter-url", gpu.url)
        with running(*node, "--certificates", str(made)) as process:
            caller = Caller(process)
            assert accuracy(caller) == ("best_effort", "uncertified_version")
            words = ("--data", str(site), "--unlabelled", "--from", process.url, "--edge", EDGE, "--out", str(made))
            command = [sys.executable, "-m", "hawkvision", "certify", *words]
            certified = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert certified.returncode == 0, certified.stderr
            assert load_site(made).executions == {"reference": frozenset({GPU})}
            asyncio.run(until(lambda: accuracy(caller) == ("certified", None)))
            for execution in (OTHER_GPU, "int8"):
                gpu.execution = execution
                assert accuracy(caller) == ("best_effort", "uncertified_version"), execution
            caller.close()

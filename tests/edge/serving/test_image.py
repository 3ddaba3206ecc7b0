"""The container image, made step by step without a container engine: what it brings, and that it serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hawkvision.models.manifest import cache_dir
from hawkvision.native.library import unsupported_reason
from hawkvision.system.child_server import running
from tests.edge.conftest import Caller
from tests.edge.image import Stage, build, words
from tests.images import encoded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="a root of its own takes mounts, which need root"
    ),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return build(tmp_path_factory.mktemp("image"))


def test_the_image_brings_its_kernels_and_serves_by_them_without_a_compiler_or_anything_to_write_to(
    image: Stage,
) -> None:
    program, option, module = words(image)
    assert (program, option) == ("python", "-m")
    env = {"HAWKVISION_EDGE_HOST": "127.0.0.1", "HAWKVISION_EDGE_PORT": "0"}
    models = {cache_dir() / "models": "/var/lib/hawkvision/models"}
    entering, outside = image.entering(env, models, read_only=True)
    as_image = [*entering, "sh", "-c", 'shift 1; exec python "$@"', "cmd"]  # its own Python, not this one
    with running(module, prefix=as_image, env=outside) as node:
        caller = Caller(node)
        page = caller.get("/metrics").body.decode()
        assert caller.classify(encoded()).status == 200
        caller.close()
        owner = Path(f"/proc/{node.pid}").stat().st_uid
        assert node.stop() == 0
    backend = "int8" if unsupported_reason() is None else "onnxruntime"
    (info,) = (line for line in page.splitlines() if line.startswith("hawkvision_build_info{"))
    assert f'backend="{backend}"' in info, node.output()
    assert owner == 10001
    assert "compiling" not in node.output()


def test_the_doctor_is_content_with_the_image(image: Stage) -> None:
    env = {"HAWKVISION_EDGE_HOST": "127.0.0.1", "HAWKVISION_EDGE_PORT": "0"}
    entering, outside = image.entering(env, {cache_dir() / "models": "/var/lib/hawkvision/models"}, read_only=True)
    done = subprocess.run([*entering, "hawkvision", "doctor", "--json"], env=outside, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each["level"] for each in found if each["check"] in ("kernels", "profile", "user")} == {"ok"}


def test_what_lies_in_the_working_directory_is_not_imported(image: Stage) -> None:
    (image.place("edge")).mkdir()
    (image.place("edge") / "__init__.py").write_text("raise SystemExit('imported from the working directory')\n")
    entering, outside = image.entering()
    done = subprocess.run([*entering, "python", "-m", "edge", "--help"], env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--log-format" in done.stdout

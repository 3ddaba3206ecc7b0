"""Manifests: the schema, and how breaking it is reported."""

from pathlib import Path

import pytest

from hawkvision.cascade.certification.profile_files import load_profile_of
from hawkvision.core.errors import ManifestError, NotFound
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.models.manifest import (
    FileSource,
    PackageSource,
    default_profile,
    load_labels,
    load_manifest,
    models_dir,
    parse_manifest,
    shipped_models_dir,
)

MINIMAL = """
format = 1
task = "digits"
labels = "labels.txt"
classes = 3
cascade = { edge = ["small"], dc = ["large", "both"], default_edge = "small" }
ensembles = [{ name = "both", members = ["small", "large"], horizontal_flip = true }]
"""
VARIANT = """
[[variants]]
name = "NAME"
architecture = "cnn"
precision = "fp32"
license = "MIT"
source = { package = "p", version = "1", member = "w.pth", sha256 = "SHA" }
input = { height = 32, width = 32, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }
"""
GOOD = MINIMAL + "".join(VARIANT.replace("NAME", n).replace("SHA", "a" * 64) for n in ("small", "large"))


def test_a_users_own_task_is_found_beside_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    own = tmp_path / "hawkvision" / "models"
    for task in ("digits", "cifar10"):
        (own / task).mkdir(parents=True)
        (own / task / "manifest.toml").write_text(GOOD)
    assert models_dir(None, "digits") == own
    assert load_manifest("digits", models_dir(None, "digits")).task == "digits"
    assert models_dir(None, "cifar10") == models_dir() == models_dir(None, "birds"), "shipped ones come first"
    assert models_dir(tmp_path, "digits") == tmp_path, "a folder that is named is the only one"
    with pytest.raises(NotFound, match=r"no task 'birds' under .* or .*known tasks: cifar10, .*digits"):
        load_manifest("birds", models_dir(None, "birds"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("classes = 3", "classes = 3\nclases = 3", "unknown field `clases`"),
        ("height = 32", "height = 0", r"variants\[0\].input.height"),
        ('"a' + "a" * 63 + '"', '"abc"', "sha256"),
        ('precision = "fp32"', 'precision = "fp17"', "fp17"),
        ('members = ["small", "large"]', 'members = ["small", "huge"]', "no variant 'huge'; it has small, large"),
        ('dc = ["large", "both"]', 'dc = ["large", "all"]', "cascade names 'all'"),
        ('default_edge = "small"', 'default_edge = "large"', "default_edge 'large' is not in cascade.edge"),
        ('name = "large"', 'name = "small"', "distinct names"),
        (
            ", horizontal_flip = true",
            ", accept_confidence = 0.8",
            "cascade.dc names 'both'; dc runs .* without accept_confidence",
        ),
        (
            "horizontal_flip = true",
            "horizontal_flip = true, accept_confidence = 0.8",
            "has accept_confidence, and so no horizontal_flip",
        ),
        ("horizontal_flip = true", "accept_confidence = 1.5", "accept_confidence"),
        (
            'edge = ["small"]',
            'edge = ["small", "both"]',
            "cascade.edge names 'both'; edge runs .* with accept_confidence",
        ),
        ("height = 32", 'height = 32, fit = "squash"', r"squash.*variants\[0\].input.fit"),
        (
            "height = 32",
            'height = 32, fit = "stretch", crop_fraction = 0.9',
            "'small': crop_fraction applies to .*'crop'",
        ),
        ("height = 32", "height = 32, pad_value = 0", "'small': pad_value and .* 'letterbox', got fit = 'crop'"),
        ("horizontal_flip = true", "weights = [1.0]", "weights of ensemble 'both': expected 2, one per member, got 1"),
        ("horizontal_flip = true", "weights = [1.0, [1, 2]]", "expected 3 for 'large', one per label, got 2"),
        ("horizontal_flip = true", "weights = [-1.0, 1]", "expected finite numbers of at least 0 for 'small'"),
        ("horizontal_flip = true", "weights = [1.0, inf]", "expected finite numbers of at least 0 for 'large'"),
        ("horizontal_flip = true", "weights = [[0, 1, 1], 0]", "a weight above 0 for every label"),
        ("classes = 3", 'classes = 3\nkind = "Box es"', "regex.*kind"),
        ("classes = 3", "classes = 0", "classes"),
        ("format = 1", "format = 2", "format"),
        ("format = 1", "format = ", "here"),
    ],
)
def test_mistakes_name_the_place(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(ManifestError, match=says):
        parse_manifest(GOOD.replace(old, new), "here")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("horizontal_flip = true", "horizontal_flip = false"),
        ('"a' + "a" * 63 + '"', '"b' + "b" * 63 + '"'),
        ("height = 32", "height = 48"),
        ('members = ["small", "large"]', 'members = ["large", "small"]'),
        ('license = "MIT"', 'license = "MIT"\ntemperature = 0.5'),
        ('license = "MIT"', 'license = "MIT"\ndecoder = "yolo"'),
        ('license = "MIT"', 'license = "MIT"\ndecoder_options = { iou = 0.5 }'),
        ("height = 32", 'height = 32, fit = "stretch"'),
        ("height = 32", 'height = 32, fit = "letterbox"'),
        ("horizontal_flip = true", "horizontal_flip = true, weights = [1.0, 2.0]"),
        ("horizontal_flip = true", "horizontal_flip = true, weights = [1.0, [1.0, 1.0, 0.5]]"),
        ("classes = 3", 'classes = 3\nkind = "detection"'),
        ("classes = 3", "classes = 3\noptions = { limit = 5 }"),
    ],
)
def test_fingerprint_follows_all_that_decides_an_answer(old: str, new: str) -> None:
    text = GOOD.replace("input =", f'sha256 = "{"a" * 64}"\ninput =')
    assert old in text
    before, after = parse_manifest(text, "here"), parse_manifest(text.replace(old, new), "here")
    assert before.fingerprint("both") != after.fingerprint("both")
    assert before.fingerprint("both") == parse_manifest(text, "here").fingerprint("both")


def test_labels_must_be_as_many_as_classes(tmp_path: Path) -> None:
    manifest = parse_manifest(GOOD, "here")
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "labels.txt").write_text("one\ntwo\n")
    with pytest.raises(ManifestError, match="expected 3 lines, one per class, found 2"):
        load_labels(manifest, tmp_path)


FILE_SOURCE = f'source = {{ file = "weights/small.safetensors", sha256 = "{"c" * 64}" }}'
PACKAGE_SOURCE = f'source = {{ package = "p", version = "1", member = "w.pth", sha256 = "{"a" * 64}" }}'


def test_weights_come_from_a_package_or_from_a_file_beside_the_manifest() -> None:
    manifest = parse_manifest(GOOD.replace(PACKAGE_SOURCE, FILE_SOURCE, 1), "here")
    assert manifest.variant("small").source == FileSource(file="weights/small.safetensors", sha256="c" * 64)
    assert manifest.variant("large").source == PackageSource(package="p", version="1", member="w.pth", sha256="a" * 64)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            'file = "w.safetensors", package = "p"',
            r"variants\[0\].source: expected either `file` or `package`",
        ),
        ('file = "w.safetensors", reader = "torch"', r"variants\[0\].source: expected either .*reader"),
        ('file = "../w.safetensors"', r"regex.*variants\[0\].source.file"),
        ('file = "weights/../../w.safetensors"', r"regex.*variants\[0\].source.file"),
        ('file = "/etc/w.safetensors"', r"regex.*variants\[0\].source.file"),
        ('file = "w.pth"', r"regex.*variants\[0\].source.file"),
        ('file = "w.safetensors", kind = "file"', r"variants\[0\].source: unknown field `kind`"),
        ('file = "w.safetensors", size = 3', r"unknown field `size`.*variants\[0\].source"),
        ('version = "1"', r"missing required field `package`.*variants\[0\].source"),
    ],
)
def test_mixed_or_malformed_sources_are_refused(source: str, says: str) -> None:
    text = GOOD.replace(PACKAGE_SOURCE, f'source = {{ {source}, sha256 = "{"c" * 64}" }}', 1)
    with pytest.raises(ManifestError, match=says):
        parse_manifest(text, "here")


CONDITIONAL = '{ name = "steps", members = ["small", "large"], accept_confidence = 0.8 }'


def test_an_edge_stage_may_be_an_ensemble_whose_first_member_answers_what_it_is_sure_of() -> None:
    text = GOOD.replace("horizontal_flip = true }", f"horizontal_flip = true }}, {CONDITIONAL}")
    manifest = parse_manifest(text.replace('edge = ["small"]', 'edge = ["small", "steps"]'), "here")
    found = manifest.ensemble("steps")
    assert found is not None
    assert (found.accept_confidence, [v.name for v in manifest.members("steps")]) == (0.8, ["small", "large"])
    assert parse_manifest(format_manifest(manifest), "written") == manifest
    other = parse_manifest(text.replace("accept_confidence = 0.8", "accept_confidence = 0.9"), "here")
    assert manifest.fingerprint("steps") != other.fingerprint("steps")
    assert manifest.fingerprint("both") == other.fingerprint("both")


def test_a_manifest_of_another_kind_is_written_as_it_is_read() -> None:
    fields = """kind = "detection"
options = { limit = 20, groups = { "on foot" = ["a", "b"], vehicle = ["c"] }, regions = [{ name = "all" }] }
"""
    text = fields + GOOD.replace("horizontal_flip = true", "weights = [1.0, [0.5, 1.5, 2.0]]").replace(
        'license = "MIT"', 'license = "MIT"\ndecoder = "ssd"\ndecoder_options = { iou = 0.6, classes = [1, 2] }'
    ).replace("height = 32", 'height = 32, fit = "letterbox", pad_value = 0, pad_position = "top_left"')
    manifest = parse_manifest(text, "here")
    assert manifest.kind == "detection"
    assert manifest.options["groups"] == {"on foot": ["a", "b"], "vehicle": ["c"]}
    assert manifest.variant("small").input.fit == "letterbox"
    assert parse_manifest(format_manifest(manifest), "written") == manifest


@pytest.mark.parametrize("task", sorted(path.parent.name for path in models_dir().glob("*/manifest.toml")))
def test_every_shipped_manifest_pins_its_labels_and_its_profile(task: str) -> None:
    manifest = load_manifest(task, models_dir())
    assert manifest.labels_sha256 is not None
    load_labels(manifest, models_dir())
    if not (models_dir() / task / "profile.json").exists():
        pytest.skip("the task has no certificates yet")
    assert manifest.profile_sha256 is not None
    assert load_profile_of(manifest, models_dir(), None).task == task


def test_a_new_profile_goes_beside_its_manifest_unless_that_is_shipped(tmp_path: Path) -> None:
    assert default_profile(tmp_path, "pets") == tmp_path / "pets" / "profile.json"
    shipped = [default_profile(shipped_models_dir(), task) for task in ("imagenet", "coco")]
    assert shipped == [Path("imagenet-profile.json"), Path("coco-profile.json")], "none overwrites another"


VIEW = """
format = 1
task = "shapes"
kind = "multi_label"
view_of = "digits"
labels = "../digits/labels.txt"
classes = 3
cascade = { edge = ["small"], dc = ["large"], default_edge = "small" }
"""


def shipped(folder: Path, **texts: str) -> Path:
    for task, text in texts.items():
        (folder / task).mkdir()
        (folder / task / "manifest.toml").write_text(text)
    return folder


def test_a_view_has_the_variants_and_the_labels_of_another_task(tmp_path: Path) -> None:
    measured = f'accuracy = {{ value = 0.5, n = 2, low = 0.1, high = 0.9, data_sha256 = "{"a" * 64}" }}'
    models = shipped(tmp_path, digits=GOOD + measured, shapes=VIEW)
    (models / "digits" / "labels.txt").write_text("a\nb\nc\n")
    view = load_manifest("shapes", models)
    base = load_manifest("digits", models)
    assert base.variant("large").accuracy is not None
    assert [v.sha256 for v in view.variants] == [v.sha256 for v in base.variants]
    assert {v.accuracy for v in view.variants} == {None}, "that is how right the answers to another question are"
    assert view.fingerprint("small") != load_manifest("digits", models).fingerprint("small")
    assert load_labels(view, models) == ("a", "b", "c")
    (models / "shapes" / "manifest.toml").write_text(format_manifest(view))
    assert load_manifest("shapes", models) == view


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (VIEW.replace('"digits"', '"letters"', 1), "view_of: there is no task 'letters'"),
        (VIEW + VARIANT, "expected no variants of its own"),
        (VIEW.replace('view_of = "digits"', 'view_of = "shapes"'), "'shapes' is a view itself"),
        (VIEW.replace('view_of = "digits"', "view_of = 3"), "Expected `str"),
    ],
)
def test_a_view_of_what_is_no_task_with_models_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        load_manifest("shapes", shipped(tmp_path, digits=GOOD, shapes=text))


NPM = 'source = { npm = "@me/weights", version = "1.0.0", member = "package/model.json", archive_sha256 = "SHA" }'


def with_source(source: str) -> str:
    return MINIMAL.replace('"large", "both"', '"small"').replace("ensembles", "# ") + "\n".join(
        source.replace("SHA", "a" * 64) if line.startswith("source") else line
        for line in VARIANT.replace("NAME", "small").splitlines()
    )


def test_a_source_may_be_a_package_of_npm() -> None:
    manifest = parse_manifest(with_source(NPM), "here")
    source = manifest.variant("small").source
    assert (str(source), source.sha256) == ("@me/weights@1.0.0:package/model.json", "a" * 64)
    assert parse_manifest(format_manifest(manifest), "here") == manifest


@pytest.mark.parametrize(
    "name", ["--flag", "../escape", "@me", "http://example.org/x", "git+ssh://x", "a b", "@me/../x", "/root/x"]
)
def test_names_that_npm_would_take_for_something_else_are_refused(name: str) -> None:
    with pytest.raises(ManifestError, match=r"source\.npm"):
        parse_manifest(with_source(NPM.replace("@me/weights", name)), "here")


def test_a_source_is_of_one_kind() -> None:
    with pytest.raises(ManifestError, match=r"got `npm` together with \['package'\]"):
        parse_manifest(with_source(NPM.replace("npm =", 'package = "p", npm =')), "here")

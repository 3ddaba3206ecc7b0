"""A fingerprint follows from what a process states, and names the models as manifests do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.models.fingerprints import (
    EXACT,
    Execution,
    VariantRun,
    parts_of,
    stage_fingerprint,
    statement,
)
from hawkvision.models.input_spec import task_facts
from hawkvision.models.manifest import InputSpec, load_manifest, models_dir, parse_manifest

SPEC = InputSpec(height=16, width=16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
CPU = str(Execution("onnxruntime", "CPUExecutionProvider"))

VARIANT = """
[[variants]]
name = "NAME"
architecture = "detector"
precision = "fp32"
license = "MIT"
decoder = "ssd"
decoder_options = { iou = 0.6, classes = [1, 2] }
source = { package = "p", version = "1", member = "w.pth", sha256 = "SHA" }
sha256 = "SHA"
input = { height = 32, width = 32, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0], fit = "letterbox" }
"""


def run(name: str, **changes: object) -> VariantRun:
    return msgspec.structs.replace(VariantRun(name, name * 64, SPEC, 1.0, CPU), **changes)


@pytest.mark.parametrize("task", ["imagenet", "cifar10", "fashion_mnist"])
def test_a_process_that_runs_what_a_manifest_says_has_its_fingerprints(task: str) -> None:
    manifest = load_manifest(task, models_dir())
    stated = statement([VariantRun(v.name, v.sha256, v.input, v.temperature, CPU) for v in manifest.variants])
    for stage in (*manifest.cascade.edge, *manifest.cascade.dc):
        ensemble = manifest.ensemble(stage)
        found = stage_fingerprint(
            stated,
            tuple(v.name for v in manifest.members(stage)),
            horizontal_flip=ensemble is not None and ensemble.horizontal_flip,
            temperature=1.0 if ensemble is None else ensemble.temperature,
            accept_confidence=None if ensemble is None else ensemble.accept_confidence,
        )
        assert found == f"{manifest.fingerprint(stage)}/{CPU}"


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "f" * 64},
        {"input": msgspec.structs.replace(SPEC, width=17)},
        {"temperature": 1.5},
        {"execution": "x"},
        {"decoder": "ssd"},
        {"decoder_options": {"iou": 0.5}},
        {"input": msgspec.structs.replace(SPEC, fit="stretch")},
    ],
)
def test_all_that_decides_an_answer_changes_it(changes: dict[str, object]) -> None:
    both = ("a", "b")
    before = stage_fingerprint(statement([run("a"), run("b")]), both)
    assert before != stage_fingerprint(statement([run("a"), run("b", **changes)]), both)
    assert before != stage_fingerprint(statement([run("a"), run("b")]), both, horizontal_flip=True)
    assert before != stage_fingerprint(statement([run("a"), run("b")]), both, temperature=0.9)
    assert before != stage_fingerprint(statement([run("a"), run("b")]), ("b", "a"))
    assert before != stage_fingerprint(statement([run("a"), run("b")]), both, weights=(1.0, 2.0))
    assert before != stage_fingerprint(statement([run("a"), run("b")]), both, task=task_facts("detection", {}))
    assert before == stage_fingerprint(statement([run("c"), run("b"), run("a")]), both), "others are of no consequence"


def test_a_process_that_runs_another_kind_of_task_has_its_manifests_fingerprint() -> None:
    text = """
format = 1
task = "boxes"
kind = "detection"
labels = "labels.txt"
classes = 2
options = { limit = 20 }
cascade = { edge = ["a"], dc = ["both"], default_edge = "a" }
ensembles = [{ name = "both", members = ["a", "b"], weights = [1.0, [0.5, 2.0]] }]
""" + "".join(VARIANT.replace("NAME", name).replace("SHA", name * 64) for name in "ab")
    manifest = parse_manifest(text, "here")
    stated = statement([VariantRun.of(variant, variant.sha256, CPU) for variant in manifest.variants])
    for stage, weights in (("a", ()), ("both", (1.0, (0.5, 2.0)))):
        members = tuple(v.name for v in manifest.members(stage))
        found = stage_fingerprint(stated, members, weights=weights, task=manifest.task_facts)
        assert found == f"{manifest.fingerprint(stage)}/{CPU}"


def test_nothing_is_said_of_what_was_not_stated_or_has_no_file() -> None:
    assert stage_fingerprint("", ("a",)) is None
    assert stage_fingerprint(statement([run("a")]), ("a", "b")) is None
    assert stage_fingerprint(statement([run("a", sha256=None)]), ("a",)) is None


words = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), max_size=12)


@given(st.lists(st.builds(Execution, words, words, words, words, words), min_size=1, max_size=3))
def test_no_execution_can_pass_for_another_or_for_several(executions: list[Execution]) -> None:
    members = tuple("abc"[: len(executions)])
    runs = [run(name, execution=str(each)) for name, each in zip(members, executions, strict=True)]
    found = stage_fingerprint(statement(runs), members)
    assert found is not None
    models, ran = parts_of(found)
    assert ran == {str(each) for each in executions}
    assert len(models) == 64
    assert (parts_of(found)[1] <= EXACT) == all(str(each) in EXACT for each in executions)

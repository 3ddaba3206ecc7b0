"""A site's own certificates and the state file, as an operator gives them to a node."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge import openapi
from hawkvision.cascade.profile import SiteCertificates, SiteData, SitePair, SiteRung, dump, load_profile
from hawkvision.errors import NotReady
from hawkvision.process import running
from tests.edge.conftest import Caller
from tests.pictures import encoded

NODE = ("edge", "--port", "0", "--backend", "noop")
PROFILE = Path(__file__).parents[2] / "models" / "imagenet" / "profile.json"
SITE_SHA = "e" * 64


def site(**changes: Any) -> SiteCertificates:
    """The profile's own certificates as if they had been made at a site."""
    profile = load_profile(PROFILE)
    certificates = SiteCertificates(
        format=1,
        task=profile.task,
        as_of="2026-11-20",
        data=SiteData(name="the yard", sha256=SITE_SHA, n=680, labelled=True),
        rungs=tuple(
            SiteRung(name=r.name, fingerprint=r.fingerprint, temperature=r.temperature, accuracy=r.accuracy)
            for r in profile.rungs
        ),
        pairs=tuple(
            SitePair(
                edge=p.edge,
                best=p.best,
                middle=None if p.middle is None else p.middle.name,
                score=p.score,
                middle_score=None if p.middle is None else p.middle.score,
                conditions=p.conditions,
            )
            for p in profile.pairs
        ),
    )
    return msgspec.structs.replace(certificates, **changes)


def written(tmp_path: Path, certificates: SiteCertificates) -> str:
    path = tmp_path / "site.json"
    path.write_bytes(dump(certificates))
    return str(path)


def targets(*options: str) -> Any:
    with running(*NODE, *options) as node:
        caller = Caller(node)
        listed = caller.get("/v1/targets").json
        caller.close()
    return listed


def test_targets_say_which_pictures_stand_behind_the_promises_and_match_the_schema(tmp_path: Path) -> None:
    listed = targets("--certificates", written(tmp_path, site()))
    assert listed["certificates"] == {
        "basis": "labelled", "n": 680, "as_of": "2026-11-20", "data": {"name": "the yard", "sha256": SITE_SHA},
    }  # fmt: skip
    schema = openapi.document()["components"]["schemas"]["Targets"]["properties"]
    assert sorted(listed) == sorted(schema)
    assert {tuple(sorted(entry)) for entry in listed["targets"]} == {
        tuple(sorted(schema["targets"]["items"]["properties"]))
    }


def test_without_a_site_the_profiles_pictures_stand_behind_them() -> None:
    certificates = targets()["certificates"]
    assert certificates["as_of"] is None
    assert certificates["data"]["sha256"] == load_profile(PROFILE).data.sha256


def test_a_site_without_labels_promises_no_absolute_accuracy(tmp_path: Path) -> None:
    rungs = tuple(msgspec.structs.replace(rung, accuracy=None) for rung in site().rungs)
    listed = targets("--certificates", written(tmp_path, site(rungs=rungs)))
    assert {entry["min_accuracy"] for entry in listed["targets"]} == {None}


def refusal(*options: str) -> str:
    with pytest.raises(NotReady) as caught, running(*NODE, *options):
        pass
    return caught.value.message


def test_certificates_for_other_models_refuse_to_start(tmp_path: Path) -> None:
    rungs = tuple(msgspec.structs.replace(rung, fingerprint="f" * 64) for rung in site().rungs)
    said = refusal("--certificates", written(tmp_path, site(rungs=rungs)))
    assert "error: the site's certificates were made for" in said
    assert "run `hawkvision certify` again" in said


def test_certificates_for_another_task_or_none_at_all_refuse_to_start(tmp_path: Path) -> None:
    assert "for task 'digits'" in refusal("--certificates", written(tmp_path, site(task="digits")))
    assert "no such site certificates" in refusal("--certificates", str(tmp_path / "none.json"))


def test_a_state_file_that_is_something_else_refuses_to_start(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("buy milk\n" * 200)
    assert f"error: state_file {notes}: cannot be used" in refusal("--state-file", str(notes))
    assert notes.read_text().startswith("buy milk")


def test_a_node_with_a_state_file_starts_answers_and_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    for _ in range(2):
        with running(*NODE, "--state-file", str(path)) as node:
            caller = Caller(node)
            assert caller.classify(encoded(), "stream=door").status == 200
            caller.close()
    assert path.stat().st_size > 0


def trusting(path: Path) -> None:
    """Alter a file so that every threshold is 0, which believes the edge in everything."""
    path.write_text(re.sub(r'("threshold": )([^,]+)', r"\g<1>0.0", path.read_text()))


def test_a_profile_whose_thresholds_were_altered_refuses_to_start(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(PROFILE.parent, models / "imagenet")
    trusting(models / "imagenet" / "profile.json")
    said = refusal("--models-dir", str(models))
    assert "profile.json: this is not the profile that its manifest pins: expected SHA-256" in said
    assert "profile.json: was altered" in refusal("--profile", str(models / "imagenet" / "profile.json"))


def test_certificates_whose_thresholds_were_altered_refuse_to_start(tmp_path: Path) -> None:
    path = Path(written(tmp_path, site()))
    trusting(path)
    said = refusal("--certificates", str(path))
    assert "site.json: was altered: its digest is that of other content; make it anew with `hawkvision certify`" in said


def test_labels_that_were_altered_refuse_to_start(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(PROFILE.parent, models / "imagenet")
    labels = models / "imagenet" / "labels.txt"
    labels.write_text("".join(reversed(labels.read_text().splitlines(keepends=True))))
    assert "labels.txt: these are not the labels that the manifest pins" in refusal("--models-dir", str(models))

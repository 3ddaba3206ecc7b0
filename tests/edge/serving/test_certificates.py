"""A site's own certificates and the state file, as an operator gives them to a node."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from edge.run import serve
from edge.servers import openapi
from hawkvision.cascade.certification.profile_files import dump, load_profile
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import read_command_line
from hawkvision.system.child_server import running
from tests.edge.conftest import Caller
from tests.hawkvision.system.mounts import mounted
from tests.images import encoded

NODE = ("edge", "--port", "0", "--backend", "noop")
PROFILE = Path(__file__).parents[3] / "models" / "imagenet" / "profile.json"
SITE_SHA = "e" * 64
FROM, TO = (datetime(2026, 11, day, 6, 30, tzinfo=UTC) for day in (1, 20))


def site(**changes: Any) -> SiteCertificates:
    """The profile's own certificates as if they had been made at a site."""
    profile = load_profile(PROFILE)
    certificates = SiteCertificates(
        format=4,
        task=profile.task,
        basis="site",
        since=FROM,
        until=TO,
        data=SiteData(name="the yard", sha256=SITE_SHA, n=680, labels=70, shrinks_images=profile.shrinks_images),
        stages=tuple(
            SiteStage(name=r.name, fingerprint=r.fingerprint, temperature=r.temperature, accuracy=r.accuracy)
            for r in profile.stages
        ),
        pairs=tuple(
            SitePair(
                edge=p.edge,
                best=p.best,
                intermediate=None if p.intermediate is None else p.intermediate.name,
                score=p.score,
                intermediate_score=None if p.intermediate is None else p.intermediate.score,
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


def test_targets_say_which_images_stand_behind_the_guarantees_and_match_the_schema(tmp_path: Path) -> None:
    listed = targets("--certificates", written(tmp_path, site()))
    assert listed["certificates"] == {"name": "the yard", "sha256": SITE_SHA}
    document = openapi.document()
    Draft202012Validator({**document, "$ref": "#/components/schemas/Targets"}).validate(listed)
    assert sorted(listed) == sorted(document["components"]["schemas"]["Targets"]["properties"])


def test_without_a_site_the_profiles_images_stand_behind_them() -> None:
    certificates = targets()["certificates"]
    assert certificates["sha256"] == load_profile(PROFILE).certified_on[1]


def test_a_site_without_labels_guarantees_no_absolute_accuracy(tmp_path: Path) -> None:
    stages = tuple(msgspec.structs.replace(stage, accuracy=None) for stage in site().stages)
    listed = targets("--certificates", written(tmp_path, site(stages=stages)))
    assert {entry["min_accuracy"] for entry in listed["targets"]} == {None}


def refusal(*options: str) -> str:
    """Why a node does not start that is run in this process."""
    config = read_command_line(EdgeConfig, [*NODE[1:], *options], "edge", "")
    with pytest.raises(HawkVisionError) as caught:
        asyncio.run(asyncio.wait_for(serve(config), 60.0))
    return caught.value.message


def test_certificates_for_other_models_refuse_to_start(tmp_path: Path) -> None:
    stages = tuple(msgspec.structs.replace(stage, fingerprint="f" * 64) for stage in site().stages)
    said = refusal("--certificates", written(tmp_path, site(stages=stages)))
    assert "the site's certificates were made for" in said
    assert "run `hawkvision certify --task" in said


def test_certificates_for_another_task_or_none_at_all_refuse_to_start(tmp_path: Path) -> None:
    assert "for task 'digits'" in refusal("--certificates", written(tmp_path, site(task="digits")))
    assert "no such site certificates" in refusal("--certificates", str(tmp_path / "none" / "certificates.json"))


def serves_without(path: Path, *prefix: str) -> str:
    """What a node says that answers although its state file is worn out, which its metrics show."""
    with running(*NODE, "--state-file", str(path), prefix=prefix) as node:
        caller = Caller(node)
        assert caller.get("/readyz").status == 200
        assert caller.classify(encoded(), "stream=server").status == 200
        metrics = caller.get("/metrics").body.decode()
        caller.close()
        said = node.output()
    assert 'hawkvision_state_kept{task="imagenet"} 0.0' in metrics
    assert 'hawkvision_state_failures_total{operation="open",task="imagenet"} 1.0' in metrics
    assert "Traceback" not in said
    return said


def test_a_state_file_that_is_no_database_any_more_is_done_without_and_left_alone(tmp_path: Path) -> None:
    worn = tmp_path / "state.sqlite3"
    worn.write_bytes(b"\xff" * 20_000)
    assert "serving without the state of streams" in serves_without(worn)
    assert worn.read_bytes() == b"\xff" * 20_000


def test_a_state_file_on_a_full_disk_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    fill = ["sh", "-c", f'head -c 200000 /dev/zero > "{tmp_path}/full/filler" 2>/dev/null; exec "$@"', "sh"]
    prefix = [*mounted(tmp_path / "full", "size=64k"), *fill]
    assert "serving without the state of streams" in serves_without(tmp_path / "full" / "state", *prefix)


def test_a_state_file_on_a_read_only_disk_is_read(tmp_path: Path) -> None:
    (tmp_path / "worn").mkdir()
    with running(*NODE, "--state-file", str(tmp_path / "state")):
        pass
    make = [
        "sh",
        "-c",
        f'cp "{tmp_path}/state" "{tmp_path}/worn/" && mount -o remount,ro "{tmp_path}/worn" && exec "$@"',
    ]
    prefix = [*mounted(tmp_path / "worn", "size=1m"), *make, "sh"]
    assert "is read, but cannot be written" in serves_without(tmp_path / "worn" / "state", *prefix)


def test_a_state_file_that_is_another_programs_refuses_to_start(tmp_path: Path) -> None:
    albums = tmp_path / "albums"
    with closing(sqlite3.connect(albums)) as raw:
        raw.execute("CREATE TABLE albums (name TEXT)")
    assert f"state_file {albums}: is a database of something else" in refusal("--state-file", str(albums))


def test_a_node_with_a_state_file_starts_answers_and_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    for _ in range(2):
        with running(*NODE, "--state-file", str(path)) as node:
            caller = Caller(node)
            assert caller.classify(encoded(), "stream=server").status == 200
            caller.close()
    assert path.stat().st_size > 0


def test_a_reference_stage_that_is_worse_than_the_edge_stage_refuses_to_start_unless_allowed(tmp_path: Path) -> None:
    profile, path = load_profile(PROFILE), tmp_path / "profile.json"
    poor = msgspec.structs.replace(profile.stages[0].accuracy, value=0.1, low=0.05, high=0.15)
    stages = tuple(
        msgspec.structs.replace(stage, accuracy=poor, sent_accuracy=msgspec.UNSET)
        if stage.name == profile.pairs[0].best
        else stage
        for stage in profile.stages
    )
    path.write_bytes(dump(msgspec.structs.replace(profile, stages=stages)))
    said = refusal("--profile", str(path))
    assert re.search(r"the reference stage \w+ is right on 10.0% .*, and \w+, which is below it, on [4-9]", said)
    assert targets("--profile", str(path), "--allow-worse-reference")["best"]["accuracy"]["value"] == 0.1


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
    assert "site.json: was altered: its digest is that of other content" in said
    assert "make another with `hawkvision certify --data IMAGES`" in said


def test_labels_that_were_altered_refuse_to_start(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(PROFILE.parent, models / "imagenet")
    labels = models / "imagenet" / "labels.txt"
    labels.write_text("".join(reversed(labels.read_text().splitlines(keepends=True))))
    assert "labels.txt: these are not the labels that the manifest pins" in refusal("--models-dir", str(models))

"""The whole system on real models: an image and a target in, an answer from the right tier out."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from urllib.request import Request, urlopen

import cv2
import msgspec
import pytest

from hawkvision.cascade.certification.profile_files import dump, load_profile, load_site
from hawkvision.client.blocking import Client
from hawkvision.core.errors import BadImage, TargetUnreachable
from hawkvision.core.types import AccuracyStatus, Reason, Tier
from hawkvision.models.manifest import load_labels, load_manifest, models_dir
from hawkvision.system.child_server import running
from tests.hawkvision.command import invoke
from tests.images import encoded
from tests.processors import confined_to_one
from tests.system.conftest import Up
from tests.waiting import WAIT_LIMIT_S

pytestmark = pytest.mark.slow


def photograph(name: str) -> Path:
    spec = importlib.util.find_spec("skimage")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data" / name


CAT = photograph("chelsea.png")
LABELS = load_labels(load_manifest("imagenet", models_dir()), models_dir())


@pytest.fixture
def client(both: Up) -> Iterator[Client]:
    with Client(both.address("edge node")) as client:
        yield client


def wait_for_certificates(client: Client) -> None:
    """Until the node has seen which models the datacenter runs."""
    until = monotonic() + WAIT_LIMIT_S
    while client.classify(CAT, quality="best").tier is not Tier.DATACENTER:
        assert monotonic() < until


def test_a_cat_is_a_cat_at_every_target(client: Client) -> None:
    wait_for_certificates(client)
    fast, best = client.classify(CAT, quality="fast"), client.classify(CAT, quality="best")
    assert (fast.tier, best.tier) == (Tier.EDGE, Tier.DATACENTER)
    assert (fast.model, best.model) == ("efficientnet_lite0_int8", "reference")
    assert "cat" in fast.label
    assert "cat" in best.label
    assert best.reason is Reason.TARGET
    assert fast.accuracy.status is best.accuracy.status is AccuracyStatus.CERTIFIED


def test_certificates_hold_for_the_models_that_both_tiers_really_run(client: Client) -> None:
    wait_for_certificates(client)
    targets = client.targets()
    assert targets["certificates_valid"] is True
    for entry in targets["targets"]:
        # What no certificate stands behind is a plan, and says so.
        said = entry["accuracy"]
        planned = said["basis"] is None and said["max_drop"] is None
        assert said["status"] == ("best_effort" if planned else "certified"), entry
    assert [e for e in targets["targets"] if e["accuracy"]["status"] == "certified" and e["escalation"] < 1.0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for number in range(60):
        (folder / f"{number}.jpg").write_bytes(encoded(width=64, height=64, seed=number))
    return folder


def certify(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hawkvision", "certify", *words],
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_folder_is_certified_for_what_runs_in_node_and_tier(
    client: Client, both: Up, site: Path, tmp_path: Path
) -> None:
    wait_for_certificates(client)
    ours, list_ = tmp_path / "ours.json", tmp_path / "list.csv"
    words = ("--data", str(site), "--unlabelled")
    done = certify(*words, "--from", both.address("edge node"), "--out", str(ours), "--to-label", str(list_))
    assert done.returncode == 0, done.stderr
    made = load_site(ours)
    (pair,) = made.pairs
    assert (pair.edge, pair.best, made.basis, made.data.n) == ("edge_ensemble", "reference", "site", 60)
    assert {stage.name: stage.fingerprint for stage in made.stages}["reference"]
    here = certify(*words, "--edge", pair.edge, "--out", str(tmp_path / "here.json"))
    assert here.returncode == 0, here.stderr
    local = load_site(tmp_path / "here.json")
    assert made.stages == local.stages
    assert made.data == local.data
    one, other = (each.pairs[0].conditions[0].fast for each in (made, local))
    assert one.observed_drop == other.observed_drop, "the stages differ on the same images"
    with list_.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 30
    assert {row["answer_1"] for row in rows} <= set(LABELS)


def test_a_folder_is_reviewed_by_what_a_node_answers(client: Client, both: Up, site: Path, tmp_path: Path) -> None:
    wait_for_certificates(client)
    command = (
        "hawkvision", "review", str(site), "--from", both.address("edge node"), "--port", "0",
        "--labels", str(tmp_path / "labels.csv"), "--out", str(tmp_path / "site.json"),
    )  # fmt: skip
    with running(*command) as desk:
        at = f"http://127.0.0.1:{desk.port}/v1/"
        page = json.loads(urlopen(f"{at}review?limit=100").read())
        assert page["audits"] == 60
        for item in page["items"]:
            said = "right" if len(item["answers"]) == 1 else "cannot_tell"
            body = json.dumps({"label": said}).encode()
            assert json.loads(urlopen(Request(f"{at}review/{item['id']}", body)).read())["label"]
        labelled = json.loads(urlopen(f"{at}review").read())["labelled"]
    assert labelled == len(page["items"]) >= 30


def test_a_node_of_another_cascade_and_an_image_that_it_refuses_are_named(
    client: Client, both: Up, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hawkvision.cli.certification.BUSY_S", 0.5)
    words = ("--data", str(site), "--unlabelled", "--out", str(tmp_path / "site.json"))
    other = certify(*words, "--from", both.address("edge node"), "--edge", "squeezenet1_1_int8")
    assert (other.returncode, "edge: the node has edge_ensemble" in other.stderr) == (1, True), other.stderr
    gone = invoke("certify", *words, "--from", "http://127.0.0.1:9")
    assert (gone.exit_code, "127.0.0.1:9" in gone.stderr) == (1, True), gone.stderr
    broken = tmp_path / "broken"
    shutil.copytree(site, broken)
    (broken / "0.jpg").write_bytes(b"no image")
    words = ("--data", str(broken), "--unlabelled", "--out", str(tmp_path / "site.json"))
    refused = certify(*words, "--from", both.address("edge node"))
    assert (refused.returncode, "0.jpg: " in refused.stderr) == (1, True), refused.stderr
    assert not (tmp_path / "site.json").exists()


def test_unsure_answers_are_escalated_and_sure_ones_are_not(client: Client) -> None:
    wait_for_certificates(client)
    answers = [client.classify(photograph(n), quality="balanced") for n in ("coffee.png", "rocket.jpg")]
    assert [a.tier for a in answers] == [Tier.EDGE, Tier.DATACENTER]
    assert answers[1].reason is Reason.LOW_CONFIDENCE
    certified = client.classify(photograph("rocket.jpg"), max_accuracy_drop=0.01).accuracy
    assert certified.status is AccuracyStatus.CERTIFIED
    assert certified.max_drop is not None
    assert certified.max_drop <= 0.01


def test_a_node_on_one_core_answers_many_callers_as_one_on_all_cores_does(client: Client, both: Up) -> None:
    """Its loop looks at images itself, and no longer while an escalation is under way."""
    wait_for_certificates(client)
    asked = [
        (photograph(name), target)
        for name in ("chelsea.png", "coffee.png", "rocket.jpg")
        for target in ({"quality": "fast"}, {"max_accuracy_drop": 0.04}, {"quality": "best"})
    ]
    with ExitStack() as started:
        with confined_to_one():  # which the node inherits
            node = started.enter_context(running("edge", "--port", "0", "--datacenter-url", both.address("datacenter")))
        there = started.enter_context(Client(node.url))
        wait_for_certificates(there)
        with ThreadPoolExecutor(12) as callers:
            answers = list(callers.map(lambda ask: there.classify(ask[0], **ask[1]), 4 * asked))
    expected = [client.classify(image, **target) for image, target in asked]
    assert [(a.tier, a.label, a.confidence) for a in answers] == 4 * [(e.tier, e.label, e.confidence) for e in expected]


def test_absolute_accuracy_is_aimed_at_or_refused(client: Client) -> None:
    maximum = float(client.targets()["maximum_min_accuracy"])
    listed = [entry["min_accuracy"] for entry in client.targets()["targets"]]
    for accuracy in (maximum - 0.001, min(accuracy for accuracy in listed if accuracy is not None)):
        assert client.classify(CAT, min_accuracy=accuracy).accuracy.status is AccuracyStatus.BEST_EFFORT
    with pytest.raises(TargetUnreachable) as caught:
        client.classify(CAT, min_accuracy=min(1.0, maximum + 0.001))
    assert caught.value.maximum == maximum


def test_a_truncated_photograph_is_refused_and_the_next_one_answered(client: Client) -> None:
    body = CAT.read_bytes()
    for quality in ("fast", "best"):
        with pytest.raises(BadImage):
            client.classify(body[: len(body) // 2], quality=quality)
    assert "cat" in client.classify(body, quality="best").label


def test_a_huge_photograph_is_read_at_reduced_scale(client: Client) -> None:
    large = cv2.resize(cv2.imread(str(CAT)), (6000, 4000), interpolation=cv2.INTER_CUBIC)
    done, body = cv2.imencode(".jpg", large)
    assert done
    assert len(body) < 10 * 1024 * 1024
    assert "cat" in client.classify(body.tobytes(), quality="fast").label


def test_command_line_answers_as_the_client_does(client: Client, both: Up) -> None:
    wait_for_certificates(client)
    command = [
        sys.executable,
        "-m",
        "hawkvision.cli",
        "classify",
        "--url",
        both.address("edge node"),
        "--max-accuracy-drop",
        "0.03",
    ]
    table = subprocess.run([*command, str(CAT)], capture_output=True, text=True)
    assert table.returncode == 0, table.stderr
    assert "cat" in table.stdout
    rows = subprocess.run([*command, "--json", str(CAT), "nothing.jpg"], capture_output=True, text=True)
    assert rows.returncode == 1
    assert "nothing.jpg" in rows.stderr
    assert json.loads(rows.stdout)["index"] == client.classify(CAT, max_accuracy_drop=0.03).index


def test_losing_the_datacenter_degrades_and_does_not_fail(cascade: None) -> None:
    with (
        running("edge", "--port", "0", "--datacenter-url", "http://127.0.0.1:9") as lonely,
        Client(lonely.url) as client,
    ):
        answer = client.classify(CAT, quality="best")
        assert (answer.tier, answer.degraded) == (Tier.EDGE, True)
        assert answer.accuracy.status is AccuracyStatus.BEST_EFFORT


def test_stopping_answers_what_was_accepted(cascade: None) -> None:
    with running("edge", "--port", "0") as edge, Client(edge.url) as client:
        client.classify(CAT)
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(client.classify, CAT, quality="fast") for _ in range(40)]
            pending[0].result()
            edge.process.send_signal(signal.SIGTERM)
            outcomes = [future.exception() for future in pending]
        assert edge.process.wait(60) == 0
        # Accepted requests were answered; those that came after the stop could not connect. Nothing in between.
        assert outcomes[0] is None
        assert {type(e).__name__ for e in outcomes if e is not None} <= {"Unreachable", "NotReady"}


def refuses_to_start(*arguments: str) -> str:
    """What a node says that ends at once with status 1."""
    ran = subprocess.run([sys.executable, "-m", "edge", "--port", "0", *arguments], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    return ran.stderr


def test_a_corrupt_model_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "models" / "imagenet" / "efficientnet_lite0_int8.onnx"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"not a model")
    assert "corrupt" in refuses_to_start("--cache-dir", str(tmp_path))


def test_certificates_for_other_models_are_refused(tmp_path: Path, cascade: None) -> None:
    profile = load_profile(Path(__file__).parents[2] / "models" / "imagenet" / "profile.json")
    altered = {"efficientnet_lite0_int8": "0" * 64}
    stages = tuple(
        msgspec.structs.replace(each, models={name: altered.get(name, sha256) for name, sha256 in each.models.items()})
        for each in profile.stages
    )
    (tmp_path / "profile.json").write_bytes(dump(msgspec.structs.replace(profile, stages=stages)))
    said = refuses_to_start("--profile", str(tmp_path / "profile.json"))
    assert "certificates were made for efficientnet_lite0_int8 with sha256 000000" in said


def test_callers_without_the_key_learn_only_that_the_node_lives() -> None:
    with running("edge", "--port", "0", "--backend", "noop", "--api-key", "a-secret-of-ours") as edge:
        from tests.edge.conftest import Caller

        caller = Caller(edge)
        assert caller.get("/healthz").status == caller.get("/readyz").status == 200
        for path in ("/metrics", "/v1/targets", "/openapi.json"):
            assert caller.get(path).status == 401
        refused = caller.classify(CAT.read_bytes())
        assert (refused.status, refused.json["code"]) == (401, "unauthorized")
        assert caller.classify(CAT.read_bytes(), Authorization="Bearer a-secret-of-ours").status == 200
        caller.close()

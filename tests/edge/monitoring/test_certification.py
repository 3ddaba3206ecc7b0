"""A node takes up other certificates while it serves, as an operator gives them to it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from hawkvision.cascade.certification.profile_files import dump, load_profile
from hawkvision.models.manifest import artifact_path, cache_dir, models_dir
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.system.files import sha256_of, write_atomic
from tests.edge.conftest import Caller
from tests.edge.peer import Peer, running_peer
from tests.edge.serving.test_certificates import site
from tests.images import encoded
from tests.waiting import until

pytestmark = pytest.mark.slow
EDGE, NEXT = "squeezenet1_1_int8", "b" * 64
SHIPPED = models_dir() / "imagenet"
ENSEMBLE = load_profile(SHIPPED / "profile.json").stage("reference").fingerprint
CERTIFIED, UNCERTIFIED = ("certified", None), ("best_effort", "uncertified_version")
SUSPENDED = ("suspended", "alarm")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of manifests that may be changed."""
    if not artifact_path(cache_dir(), "imagenet", EDGE).is_file():
        pytest.skip(f"{EDGE} has not been built on this machine")
    shutil.copytree(SHIPPED, tmp_path / "imagenet")
    return tmp_path


@pytest.fixture
def datacenter() -> Iterator[Peer]:
    with running_peer(model="reference", fingerprint=ENSEMBLE, intermediate="upright_ensemble") as peer:
        yield peer


def replaced(models: Path, profile: bytes, *, pin: bool = True) -> None:
    """Another profile, as an update writes it: with the manifest that pins it."""
    write_atomic(models / "imagenet" / "profile.json", profile)
    if pin:
        path = models / "imagenet" / "manifest.toml"
        text = re.sub(r'(profile_sha256 = ")\w+', rf"\g<1>{sha256_of(profile)}", path.read_text())
        write_atomic(path, text.encode())


def for_the_next_version(edge: str = "") -> bytes:
    """The shipped profile with another reference stage, and perhaps another edge stage."""
    profile = load_profile(SHIPPED / "profile.json")
    changes = {"reference": NEXT} | ({EDGE: edge} if edge else {})
    stages = tuple(msgspec.structs.replace(r, fingerprint=changes.get(r.name, r.fingerprint)) for r in profile.stages)
    return dump(msgspec.structs.replace(profile, stages=stages))


def said(node: ServerProcess, words: str, times: int = 1) -> None:
    asyncio.run(until(lambda: node.output().count(words) >= times))


def dated(path: Path, since: datetime, n: int = 680) -> None:
    """Certificates of a site from `n` images, the oldest of them of this time; few audits confirm or refute them."""
    made = site(since=since, until=since + timedelta(seconds=1))
    pairs = []
    for pair in made.pairs:
        (each,) = pair.conditions
        lax = [msgspec.structs.replace(c, edge_disagreement=max(c.edge_disagreement, 0.3)) for c in each.certificates]
        fast = msgspec.structs.replace(each.fast, n=n)
        condition = msgspec.structs.replace(each, fast=fast, certificates=tuple(lax))
        pairs.append(msgspec.structs.replace(pair, conditions=(condition,)))
    write_atomic(path, dump(msgspec.structs.replace(made, pairs=tuple(pairs))))


def test_no_reload_lifts_the_alarm_of_a_caller_but_audits_do(models: Path, datacenter: Peer, tmp_path: Path) -> None:
    """Signals and `kill -9` are real."""
    begun, certificates, state = datetime.now(UTC), tmp_path / "site.json", tmp_path / "state.sqlite3"
    dated(certificates, begun)
    command = [
        "edge", "--port", "0", "--backend", "onnxruntime", "--variant", EDGE, "--datacenter-url", datacenter.url,
        "--models-dir", str(models), "--cache-dir", str(cache_dir()), "--certificates", str(certificates),
        "--state-file", str(state), "--audit-share", "0.2",
    ]  # fmt: skip
    image = encoded()

    def fast(caller: Caller) -> tuple[str, str | None]:
        answer = caller.classify(image, "quality=fast").json
        return answer["accuracy"]["status"], answer["accuracy"]["status_reason"]

    with running(*command) as node, closing(Caller(node)) as caller:
        asyncio.run(until(lambda: fast(caller) == CERTIFIED))
        for _ in range(2000):
            if fast(caller) == SUSPENDED:
                break
        assert fast(caller) == SUSPENDED
        for number, n in enumerate((681, 680), 1):
            dated(certificates, begun, n)
            os.kill(node.pid, signal.SIGHUP)
            said(node, "certificates: read again, and in force from now on", number)
            assert fast(caller) == SUSPENDED, "other certificates, and then the first ones again"
        os.kill(node.pid, signal.SIGKILL)
    with running(*command) as node, closing(Caller(node)) as caller:
        assert fast(caller) == SUSPENDED
        dated(certificates, datetime.now(UTC))
        os.kill(node.pid, signal.SIGHUP)
        said(node, "certificates: read again, and in force from now on")
        assert fast(caller) == SUSPENDED, "of certificates from later images, too"
        datacenter.top_k = [(caller.classify(image, "quality=fast").json["top_k"][0]["index"], 0.99)]
        asyncio.run(until(lambda: fast(caller) == CERTIFIED, 120.0))


def claim(caller: Caller) -> tuple[str, str | None]:
    answer = caller.classify(encoded(), "quality=best").json
    assert answer["tier"] == "datacenter"
    return answer["accuracy"]["status"], answer["accuracy"]["status_reason"]


def test_certificates_are_taken_up_by_a_node_that_serves_and_broken_ones_change_nothing(
    models: Path, datacenter: Peer
) -> None:
    shipped, manifest = ((models / "imagenet" / name).read_bytes() for name in ("profile.json", "manifest.toml"))
    stays = "certificates: what was in use stays in use"
    command = ["edge", "--port", "0", "--backend", "onnxruntime", "--variant", EDGE, "--datacenter-url", datacenter.url]
    with running(*command, "--models-dir", str(models), "--cache-dir", str(cache_dir())) as node:
        caller = Caller(node)
        asyncio.run(until(lambda: claim(caller) == CERTIFIED))
        replaced(models, shipped[:1000], pin=False)
        said(node, stays)
        assert "not the profile that its manifest pins" in node.output()
        replaced(models, shipped.replace(b'"threshold"', b'"treshold"', 1))
        said(node, stays, 2)
        replaced(models, for_the_next_version(edge="c" * 64))
        said(node, "restart the node to load other models")
        assert claim(caller) == CERTIFIED, "none of these came into force"
        replaced(models, for_the_next_version())
        said(node, "certificates: read again, and in force from now on")
        assert claim(caller) == UNCERTIFIED, "the datacenter still runs the version before"
        datacenter.states = f"{NEXT}/int8"
        assert claim(caller) == CERTIFIED
        (models / "imagenet" / "profile.json").write_bytes(shipped)
        (models / "imagenet" / "manifest.toml").write_bytes(manifest)
        os.kill(node.pid, signal.SIGHUP)
        said(node, "certificates: read again, and in force from now on", 2)
        assert claim(caller) == UNCERTIFIED
        datacenter.states = f"{ENSEMBLE}/int8"
        assert claim(caller) == CERTIFIED
        caller.close()
    assert "Traceback" not in node.output()

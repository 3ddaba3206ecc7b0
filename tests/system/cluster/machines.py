"""Machines made of Linux namespaces: each has its own network, processes and /tmp, and all share one folder."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
"""The checkout, which a machine sees even if it is below /tmp."""
ADDRESSES: Final = ("10.0.0.1", "10.0.0.2")
_BOOT: Final = r"""
set -e
mount --bind "$1" /mnt
exec 9< "$3"
mount -t tmpfs -o mode=1777 tmpfs /tmp
if [ ! -d "$3" ]; then mkdir -p "$3"; mount --no-canonicalize --bind /proc/self/fd/9 "$3"; fi
exec 9<&-
# Names of other machines are unknown at once; a name server that nobody reaches would take seconds each time.
mkdir /tmp/.etc
printf '127.0.0.1 localhost\n%s %s\n' "$2" "$(hostname)" > /tmp/.etc/hosts
: > /tmp/.etc/resolv.conf
for file in hosts resolv.conf; do mount --bind /tmp/.etc/$file /etc/$file; done
ip link set lo up
echo booted
# As the first process it inherits orphans, and as a shell it collects their exit statuses.
read -r _ || exit 0
"""


class Machine:
    """A machine that runs. Its commands run in the shared folder, which is `/mnt` there."""

    def __init__(self, folder: Path, address: str) -> None:
        words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", _BOOT]
        self._boot = subprocess.Popen(
            [*words, "boot", folder, address, ROOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._boot.stdout is not None
        assert self._boot.stdout.readline() == b"booted\n", "needs root, and ip(8)"
        children = Path(f"/proc/{self._boot.pid}/task/{self._boot.pid}/children")
        self.pid = int(children.read_text())

    def entering(self) -> Sequence[str]:
        """A command that becomes the one behind it, on this machine."""
        into = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid"]
        return [*into, "bash", "-c", 'cd /mnt && exec "$@"', "on"]

    def run(self, *command: str) -> None:
        """Run a command here; it must succeed."""
        done = subprocess.run([*self.entering(), *command], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def stop(self) -> None:
        """Switch it off: all its processes end."""
        assert self._boot.stdin is not None
        self._boot.stdin.close()
        assert self._boot.wait(30) == 0
        assert self._boot.stdout is not None
        self._boot.stdout.close()


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[dict[str, Machine]]:
    """Machines `first` and `second` at `ADDRESSES`, joined by a cable, which share a folder."""
    with contextlib.ExitStack() as stack:
        machines = {}
        for name, address in zip(("first", "second"), ADDRESSES, strict=True):
            machines[name] = Machine(folder, address)
            stack.callback(machines[name].stop)
        first, second = machines.values()
        end = ("peer", "name", "eth0", "netns", str(second.pid))
        # In the first machine's network but outside its processes, where the second one's number means nothing.
        cable = ["nsenter", f"--target={first.pid}", "--net", "ip", "link", "add", "eth0", "type", "veth", *end]
        subprocess.run(cable, check=True)
        for machine, address in zip(machines.values(), ADDRESSES, strict=True):
            machine.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")
        yield machines

"""The steps of `edge/deploy/Dockerfile`, performed in roots of their own with nothing but mounts and chroot.

A root holds this machine's /usr and Python in place of the base image's, both read-only, and `apt-get` does nothing,
for what it would install must be here already; compilers are hidden from a stage that installs none. All else is as the
file says: each RUN line is given to a shell as it stands, COPY takes what the ignore file leaves, and ENV, ARG, WORKDIR
and USER hold for what follows.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tests.edge.deploy_files import DEPLOY, ROOT, instructions

COMPILERS: Final = ("c++", "g++", "cc", "gcc", "clang", "clang++")
_ENTER: Final = r"""
set -e
root=$1 user=$2 cwd=$3 hide=$4; shift 4
mount --bind "$root" "$root"
mount --rbind /usr "$root/usr"
mount -o remount,bind,ro "$root/usr"
for place in /proc /dev "$PYTHON_HOME"; do mount --rbind "$place" "$root$place"; done
for program in $hide; do
    for found in "$root"/usr/bin/$program "$root"/usr/bin/$program-[0-9]* "$root"/usr/local/bin/$program; do
        if [ -e "$found" ]; then mount --bind /dev/null "$found"; fi
    done
done
for each in $MOUNTED; do mount --bind "${each%%:*}" "$root${each#*:}"; done
if [ -n "$READ_ONLY" ]; then
    mount -t tmpfs tmpfs "$root/tmp"
    mount -o remount,bind,ro "$root"
fi
exec chroot --userspec="$user" "$root" /usr/bin/env -i "$@"
"""


@dataclass
class Stage:
    """One stage's root, and what holds in it."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/image/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin"})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    command: str = "[]"
    hidden: tuple[str, ...] = COMPILERS

    def place(self, path: str) -> Path:
        """A path in the root."""
        return self.root / os.path.normpath(Path(self.workdir, path)).lstrip("/")

    def entering(
        self,
        env: Mapping[str, str] | None = None,
        mounted: Mapping[Path, str] | None = None,
        *,
        read_only: bool = False,
    ) -> tuple[list[str], dict[str, str]]:
        """A command that becomes the one behind it, in this stage; and what it needs in its environment."""
        for place in (mounted or {}).values():
            self.place(place).mkdir(parents=True, exist_ok=True)
        outside = {
            "PATH": os.environ["PATH"],
            "PYTHON_HOME": sys.base_prefix,
            "MOUNTED": " ".join(f"{source}:{place}" for source, place in (mounted or {}).items()),
            "READ_ONLY": "1" if read_only else "",
        }
        inside = {**self.env, **self.arguments, **(env or {})}
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "enter"]
        words += [str(self.root), self.user, self.workdir, " ".join(self.hidden)]
        words += [f"{name}={value}" for name, value in inside.items()]
        return [*words, "sh", "-c", 'cd "$0" && exec "$@"', self.workdir], outside

    def run(self, line: str, env: Mapping[str, str]) -> None:
        """A RUN line."""
        entering, outside = self.entering(env)
        done = subprocess.run([*entering, "sh", "-c", line], env=outside, capture_output=True, text=True)
        assert done.returncode == 0, f"RUN {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def build(scratch: Path) -> Stage:
    """The last stage of the Dockerfile, after all its steps."""
    stages: dict[str, Stage] = {}
    stage = Stage(scratch)
    # How packages are fetched is the machine's affair, not the image's.
    fetching = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k.lower().endswith("_proxy")}
    for name, rest in instructions():
        match name:
            case "FROM":
                _, *alias = rest.split()
                stage = _base(scratch / f"stage{len(stages)}")
                stages[alias[1] if alias else ""] = stage
            case "ENV":
                words = (word.partition("=") for word in shlex.split(rest))
                stage.env |= {key: value.replace("$PATH", stage.env["PATH"]) for key, _, value in words}
            case "ARG":
                key, _, value = rest.partition("=")
                stage.arguments[key] = value
            case "WORKDIR":
                stage.workdir = rest
                stage.place(".").mkdir(parents=True, exist_ok=True)
            case "COPY" if rest.startswith("--from="):
                whence, source, target = rest.removeprefix("--from=").split()
                subprocess.run(["cp", "-a", stages[whence].place(source), stage.place(target)], check=True)
            case "COPY":
                *sources, target = rest.split()
                for each in sources:
                    _copy(ROOT / each, stage.place(target) / ("" if (ROOT / each).is_file() else "."))
            case "RUN":
                if "apt-get install" in rest:  # of compilers, and nothing else
                    stage.hidden = ()
                stage.run(rest, fetching)
            case "USER":
                stage.user = rest
            case "CMD":
                stage.command = rest
            case _:
                pass
    return stage


def _base(root: Path) -> Stage:
    home = Path(sys.base_prefix)
    for folder in ("usr", "proc", "dev", "tmp", "opt", "var/lib", "image/bin", "etc", str(home).lstrip("/")):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    accounts, names = ("passwd", "group", "shadow", "gshadow", "login.defs"), ("resolv.conf", "hosts", "nsswitch.conf")
    for path in (*accounts, *names, "pip.conf", "ld.so.cache"):
        if Path("/etc", path).is_file():
            shutil.copy(Path("/etc", path), root / "etc" / path)
    for path in ("ssl", "alternatives", "ca-certificates"):
        if Path("/etc", path).is_dir():
            shutil.copytree(Path("/etc", path), root / "etc" / path, symlinks=True)
    (root / "image/bin/python").symlink_to(home / "bin" / f"python3.{sys.version_info.minor}")
    nothing = root / "image/bin/apt-get"
    nothing.write_text("#!/bin/sh\nexit 0\n")
    nothing.chmod(0o755)
    return Stage(root)


def _copy(source: Path, target: Path) -> None:
    """Without what the ignore file names."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [re.sub(r"^\*\*/", "", line) for line in lines if line and not line.startswith("#")]
    if source.is_file():
        shutil.copy(source, target)
    else:
        shutil.copytree(source, target.parent / source.name, ignore=shutil.ignore_patterns(*patterns))


def words(stage: Stage) -> Sequence[str]:
    """The image's own command."""
    return msgspec.json.decode(stage.command, type=list[str])

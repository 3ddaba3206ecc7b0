"""Old words that the house no longer uses, and where they are left. CHANGELOG.md lists what replaced them."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.house.imports import ROOT

OLD: Final[dict[str, str]] = {
    "picture": "image",
    "door": "server or route",
    "hop": "escalation",
    "rung": "stage",
    "ladder": "cascade",
    "committee": "ensemble",
    "stepwise": "conditional",
    "promise": "guarantee",
    "promised": "guaranteed",
    "rival": "baseline",
    "weather": "link trace",
    "patience": "timeout or wait cutoff",
    "patient": "waits for the full deadline",
    "vain": "missed",
    "hopeless": "cannot meet the target",
    "settled": "decided",
}
"""Words, in identifiers and in prose, with what is said instead. Plurals count."""

OLD_NAMES: Final[dict[str, str]] = {
    "hear": "on_reply",
    "heard": "on_reply, received",
    "hears": "on_reply",
    "tell": "send, report",
    "tells": "reports",
    "told": "notified, received",
    "saw": "record",
    "void": "suspended",
}
"""Words that are plain English in prose, and are not used as parts of Python's names; tests' names are prose."""

OLD_PHRASES: Final[dict[str, str]] = {
    r"[\"'`](?:held|void)[\"'`]": "certified or suspended",
    r"\b(?:is|was|became|become|becomes|not|made) void\b": "suspended",
    r"\blossy (?:transport|server|client|endpoint|hop|door)\b": "datagram",
}
"""Expressions that are searched for in every line, whatever their case."""

ALLOWED: Final[tuple[tuple[str, str, str], ...]] = (
    (r".*", r"held[-_ ]?out|\bHeldOut", "held-out images, a term of statistics"),
    (r".*", r"c_void_p", "a type of ctypes"),
    (
        r".*",
        r"(?:[\"'`:=/,]|before |another |→ |\b(?:edge|tiny)_)committee(?:_\w+)?|\bcommittee_\w+",
        "stages' names, which are data",
    ),
    (
        r"hawkvision/(core/escalation_api/\w+|cascade/certification/\w+|models/manifest)\.py",
        r"",
        "readers of the old words",
    ),
    (
        r"loadgen/__main__\.py|hawkvision/(renamed|cli/options)\.py|tests/(hawkvision/(cli/test_renamed_options|test_public_names)|"
        r"loadgen/commands/test_run|hawkvision/datacenter/servers/test_previous_wire)\.py",
        r"",
        "old words that are answered with the new ones",
    ),
    (r"tests/bench/policies/baselines/test_infaas\.py", r"stepwise|committee", "names of models in its own manifest"),
    (r"(tests/)?loadgen/.*", r"[\"'`]held[\"'`]", "packets that a link holds back, rates that a server holds"),
    (r"(tests/)?edge/monitoring/\w+\.py", r"[\"']void[\"']", "a key in state files of the first version"),
    (r"hawkvision/transport/(WIRE\.md|protocol/control\.py)", r"[\"`]picture[\"`]", "a key on the wire"),
    (r"hawkvision/datacenter/servers/http_server\.py", r"`held`", "what a request keeps until its work ends"),
    (
        r"tests/hawkvision/cascade/certification/test_old_formats\.py",
        r"[\"'](ladder|pictures)[\"']",
        "old keys of manifests, which are refused",
    ),
    (r"tests/.*", r"PREVIOUS|/v1/rungs|\"rungs\"", "tests of what the previous release sends"),
    (r"fpga/.*|tests/(fpga|rtl|bench/fpga)/.*", r"settled?", "electric levels settle"),
    (r"tests/(house/vocabulary|house/pending|test_tidy)\.py", r"", "this list and its test"),
)
"""(expression of whole paths, what is no old word there, why). An empty second expression allows the whole file."""

_TEXT: Final = frozenset(
    {".py", ".md", ".toml", ".sv", ".v", ".cpp", ".c", ".h", ".html", ".css", ".js", ".service", ".yml", ".yaml"}
)
_NAMED: Final = frozenset({"Makefile", "Dockerfile", "run"})
_SKIPPED: Final = frozenset({"CHANGELOG.md"})
_PART: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


@dataclass(frozen=True)
class Finding:
    """An old word in a line of a file."""

    path: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: say {self.instead}"


@cache
def findings() -> tuple[Finding, ...]:
    """In all files that git tracks, the change log apart."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(name) for name in listed.stdout.splitlines()]
    return tuple(
        finding
        for path in paths
        if (path.suffix in _TEXT or path.name in _NAMED) and path.name not in _SKIPPED and (ROOT / path).is_file()
        for finding in search(path.as_posix(), (ROOT / path).read_text(encoding="utf-8"))
    )


def search(path: str, text: str) -> Iterator[Finding]:
    """Each old word in a file's text, once a line."""
    exceptions = [expression for files, expression, _ in ALLOWED if re.fullmatch(files, path)]
    if "" in exceptions:
        return
    allowed = re.compile("|".join(exceptions))
    names = _names(text) if path.endswith(".py") else {}
    for number, line in enumerate(text.splitlines(), 1):
        kept = allowed.sub(" ", line)
        found = dict(_words(kept))
        found |= {
            word: instead for name in names.get(number, ()) for word, instead in _name_parts(allowed.sub(" ", name))
        }
        for expression, instead in OLD_PHRASES.items():
            found |= {match.group(): instead for match in re.finditer(expression, kept, re.IGNORECASE)}
        for word, instead in found.items():
            yield Finding(path, number, word, instead)


def _words(line: str) -> Iterator[tuple[str, str]]:
    for part in _PART.findall(line):
        instead = OLD.get(part.lower()) or OLD.get(part.lower().removesuffix("s"))
        if instead is not None:
            yield part, instead


def _name_parts(name: str) -> Iterator[tuple[str, str]]:
    yield from ((name, OLD_NAMES[part.lower()]) for part in _PART.findall(name) if part.lower() in OLD_NAMES)


def _names(text: str) -> dict[int, set[str]]:
    """The identifiers of a module, by line."""
    names: dict[int, set[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and not token.string.startswith("test_"):
            names.setdefault(token.start[0], set()).add(token.string)
    return names


def report() -> str:
    """The number of findings in each folder."""
    counts = Counter(Path(finding.path).parent.as_posix() for finding in findings())
    lines = [f"old words left: {sum(counts.values())}"]
    return "\n".join(lines + [f"{count:>7}  {folder}" for folder, count in sorted(counts.items())])

"""The record of a load test: one `RequestOutcome` per request, a `Run` for all of them, and the file that holds it.

Latencies, accuracies, pages and comparisons are computed from this file, so anyone can compute them again. Times are
seconds from the start of the run.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import AccuracyStatus
from hawkvision.system.files import check_writable, write_atomic

FORMAT: Final = 1

UNANSWERED: Final = 0
"""The status of a request that no reply came to: refused, broken off or timed out."""
INTERRUPTED: Final = "interrupted"
"""The error of a request that the end of a test cut off."""


class RequestOutcome(msgspec.Struct, frozen=True, array_like=True):
    """One request: when it was due, what it asked, what came back."""

    due_s: float
    """When the schedule wanted it sent. Latency counts from here, so that a generator or a server that falls behind
    cannot hide it (coordinated omission). In a closed loop, the moment it was sent."""
    sent_s: float
    done_s: float
    target: int
    """Number in `Run.targets`."""
    image: int
    """Number in the data set."""
    status: int
    """HTTP status, or `UNANSWERED`."""
    error: str = ""
    """The stable code of an error (`overloaded`, `unreachable`, …)."""
    index: int | None = None
    """The class that was answered."""
    right: float | bool | None = None
    """1 − the loss of the answer (`TaskKind.loss`), which is 0 or 1 for a class; None without an answer or a label."""
    confidence: float | None = None
    tier: str = ""
    model: str = ""
    escalated: bool = False
    degraded: bool = False
    guarantee: AccuracyStatus | None = None
    """What the answer says of its accuracy target; None from servers that guarantee nothing."""
    max_drop: float | None = None
    received_fraction: float = 1.0
    sent_bytes: int = 0
    """Of the image as sent: the body over HTTP, datagrams over the datagram transport."""

    @property
    def latency_s(self) -> float:
        """From when it was due to when the answer was there."""
        return self.done_s - self.due_s

    @property
    def answered(self) -> bool:
        """Whether it was answered at all."""
        return self.status == 200


class TargetClass(msgspec.Struct, frozen=True):
    """One of the kinds of request that are mixed."""

    fields: dict[str, str]
    """As the node reads them: `{"max_accuracy_drop": "0.01", "deadline_ms": "100"}`."""
    share: float
    """Of all requests, 0..1."""

    @property
    def name(self) -> str:
        """`max_accuracy_drop=0.01`: its accuracy target, or `default`."""
        found = [f"{key}={value}" for key, value in self.fields.items() if key not in ("deadline_ms", "on_miss")]
        return ", ".join(found) or "default"


CLIENT_EDGE: Final = "client-edge"


class LinkSample(msgspec.Struct, frozen=True, array_like=True):
    """What an emulated link was like from a moment on."""

    at_s: float
    link: str
    """`CLIENT_EDGE`, or a name of its own."""
    rate_mbit_s: float | None
    delay_ms: float
    loss: float
    up: bool = True


class NoiseFloor(msgspec.Struct, frozen=True):
    """What the generator itself adds, measured against a server that does nothing, before the run."""

    p50_ms: float
    p99_ms: float
    max_rate: float
    """Requests per second that this generator sends at most, same images and same number of processes."""

    def __str__(self) -> str:
        return f"P99 {self.p99_ms:.2f} ms, at most {self.max_rate:.0f} requests/s"


class Origin(msgspec.Struct, frozen=True):
    """Where a run comes from: enough to repeat it."""

    command: str
    started: str
    """ISO 8601, UTC."""
    hawkvision: str
    python: str
    cpu: str
    cores: int
    load_before: float
    """The machine's load average before the run: others' work shows in latencies."""
    seed: int


class Run(msgspec.Struct, frozen=True):
    """A load test, whole."""

    name: str
    """A policy, a server, a release: what the page calls it."""
    url: str
    protocol: str
    schedule: str
    """As given: `poisson:8`, `closed:4`."""
    duration_s: float
    warm_up_s: float
    """Requests due before this are not counted."""
    deadline_ms: float | None
    data: str
    labelled: bool
    targets: list[TargetClass]
    outcomes: list[RequestOutcome]
    origin: Origin
    noise: NoiseFloor | None = None
    links: list[LinkSample] = []
    steady: bool | None = None
    """Whether the second half of the counted time looked like the first; None if too short to tell."""
    interrupted: bool = False
    reference: Mapping[int, float | bool] | None = None
    """Per image number, how right the reference stage on the whole image is; None if not measured. Drops are paired
    with it."""
    stolen: float | None = None
    """Share of the processor time wanted meanwhile, 0..1, that the machine's host held back; None if not known."""
    server: str = ""
    """What the server says of itself (`loadgen.clients.server_info`); empty if it says nothing, or was not asked."""
    kind: str = ""
    """The kind of task whose loss says how right an answer is; empty if that is not known."""
    link: str = ""
    """The profile of the link that was put before the server, as it names itself; empty without one."""
    format: int = FORMAT

    @property
    def link_words(self) -> str:
        """`lte`, or `no link`."""
        return self.link or "no link"

    def counted(self) -> list[RequestOutcome]:
        """The outcomes after warm-up."""
        return [each for each in self.outcomes if each.due_s >= self.warm_up_s]


def check_files(*written: Path | None) -> None:
    """Refuse, before anything is measured, what cannot be written, and one file for two things; None is no file.

    Raises:
        ConfigError: naming it.
    """
    asked = [path for path in written if path is not None]
    for path in asked:
        check_writable(path)
    if len({path.resolve() for path in asked}) < len(asked):
        raise ConfigError(f"{asked[0]}: expected a file of its own for --json and for --html, got the same for both")


def save(run: Run, path: Path, summary: msgspec.Struct | None = None) -> None:
    """Write a run as JSON, gzipped if the name ends in `.gz`.

    `summary` is what is said of it (`summary.summarise`), for readers without this program: it goes into the same file,
    and `load` ignores it, because it is computed again from the run.
    """
    said = {} if summary is None else {"summary": summary}
    body = msgspec.json.encode({**said, **msgspec.structs.asdict(run)})
    write_atomic(path, gzip.compress(body, mtime=0) if path.suffix == ".gz" else body)


def load(path: Path) -> Run:
    """Read a run.

    Raises:
        ConfigError: if there is none, or it is not one of this format.
    """
    try:
        body = path.read_bytes()
        run = msgspec.json.decode(gzip.decompress(body) if path.suffix == ".gz" else body, type=Run)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `python -m loadgen run --json` writes one") from None
    except (msgspec.DecodeError, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: not a load test's record: {error}") from None
    if run.format != FORMAT:
        raise ConfigError(f"{path}: format {run.format}; this version reads {FORMAT}")
    return run

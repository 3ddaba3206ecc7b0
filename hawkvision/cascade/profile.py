"""A ladder's profile: what was measured of its rungs, and the certificates that targets are mapped to.

A profile is made by `hawkvision calibrate`, committed beside the manifest, and names by sha256 both the pictures it
came from and the models it holds for. Thresholds of ±∞ are written "always" (escalate) and "never".
Several conditions per pair leave room for pictures that arrive incomplete; today there is one, the whole picture.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.cascade.scores import Score
from hawkvision.errors import ManifestError
from hawkvision.manifest import Fraction, MeasuredAccuracy, Name, Sha256

CERTIFIED_DROPS = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15)
"""The ε that are certified ahead; a target between two of them uses the smaller."""

EscalationThreshold: TypeAlias = Fraction | Literal["always", "never"]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ProfileData(_Strict, frozen=True):
    """The pictures behind a profile, and how they were split. Splits are disjoint and drawn with `seed`."""

    name: str
    sha256: Sha256
    seed: int
    profile: Annotated[int, Meta(ge=1)]
    """Pictures used for temperatures, the threshold grid and the gap that defines `balanced`."""
    certify: Annotated[int, Meta(ge=1)]
    """Pictures used for accuracies and certificates."""
    held_out: Annotated[int, Meta(ge=0)]
    """Pictures kept out of all of it, for testing what was promised."""


class RungProfile(_Strict, frozen=True):
    """One rung as measured: hashes of the variants it runs, its temperature and its accuracy (certification split)."""

    name: Name
    models: dict[str, Sha256]
    fingerprint: Sha256
    """`Manifest.fingerprint` of the rung that was measured."""
    temperature: Annotated[float, Meta(gt=0.0)]
    accuracy: MeasuredAccuracy
    calibration_error: Fraction


class Certificate(_Strict, frozen=True):
    """A threshold with its guarantee: the drop is below `max_drop`, wrong with probability at most `delta`."""

    max_drop: Fraction
    threshold: EscalationThreshold
    delta: Fraction
    n: Annotated[int, Meta(ge=1)]
    basis: Literal["labelled", "agreement", "profile"]
    escalation: Fraction
    observed_drop: float


class FrontierPoint(_Strict, frozen=True):
    """What a threshold did on the certification split; for planning, not a guarantee."""

    threshold: EscalationThreshold
    escalation: Fraction
    drop: float


class Condition(_Strict, frozen=True):
    """Certificates that hold when at least this fraction of the picture was received."""

    min_received_fraction: Fraction
    balanced: Certificate
    fast: Certificate
    certificates: tuple[Certificate, ...]
    frontier: tuple[FrontierPoint, ...]


class Pair(_Strict, frozen=True):
    """An edge rung backed by the ladder's best rung."""

    edge: Name
    best: Name
    score: Score
    conditions: Annotated[tuple[Condition, ...], Meta(min_length=1)]


class Profile(_Strict, frozen=True):
    """All that was measured of a ladder."""

    format: Literal[1]
    task: Name
    data: ProfileData
    rungs: tuple[RungProfile, ...]
    pairs: tuple[Pair, ...]

    def rung(self, name: str) -> RungProfile:
        """The rung of that name.

        Raises:
            ManifestError: if the profile has none.
        """
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise ManifestError(f"the profile of {self.task!r} has no rung {name!r}; it has {[r.name for r in self.rungs]}")

    def pair(self, edge: str, best: str) -> Pair:
        """The pair of those rungs.

        Raises:
            ManifestError: if the profile has none.
        """
        for pair in self.pairs:
            if (pair.edge, pair.best) == (edge, best):
                return pair
        known = [f"{p.edge} → {p.best}" for p in self.pairs]
        raise ManifestError(
            f"the profile of {self.task!r} has no certificates for {edge} → {best}, only for {known}; "
            f"run `hawkvision calibrate --edge {edge} --best {best} …`"
        )


def threshold_value(written: float | str) -> float:
    """A written threshold as a number to compare scores with: +∞ for "always", −∞ for "never"."""
    if isinstance(written, str):
        return math.inf if written == "always" else -math.inf
    return written


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ManifestError: if the file is missing or breaks the schema; names the file and the key.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such profile; make one with `hawkvision calibrate`") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: {error}") from None


def dump_profile(profile: Profile) -> bytes:
    """The profile as indented JSON, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"

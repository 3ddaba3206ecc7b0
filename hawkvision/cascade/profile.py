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
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.cascade import calibration, certificate
from hawkvision.cascade.scores import Probabilities, Score, score, softmax
from hawkvision.errors import ManifestError
from hawkvision.manifest import Fraction, MeasuredAccuracy, Name, Sha256
from hawkvision.types import Logits

CERTIFIED_DROPS = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15)
"""The ε that are certified ahead; a target between two of them uses the smaller."""

BALANCED_GAP_SHARE = 0.25
"""`balanced` may give up a quarter of the gap between edge and best: closing the last quarter costs as many
escalations as the first three."""

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


def _written(value: float) -> float | Literal["always", "never"]:
    if math.isinf(value):
        return "always" if value > 0 else "never"
    return float(value)


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


class Split(msgspec.Struct, frozen=True):
    """Disjoint index sets of a data set."""

    profile: NDArray[np.intp]
    certify: NDArray[np.intp]
    held_out: NDArray[np.intp]


def split_indices(groups: NDArray[np.str_], seed: int, shares: tuple[float, float] = (0.2, 0.5)) -> Split:
    """Divide pictures into profile, certification and held-out sets, with equal shares of every group.

    Args:
        groups: (n,) the source of each picture, so that each part has the same mixture.
        seed: of the shuffle.
        shares: of the profile and the certification part; the rest is held out.
    """
    rng = np.random.default_rng(seed)
    parts: tuple[list[NDArray[np.intp]], ...] = ([], [], [])
    for group in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == group))
        first, second = (round(len(members) * share) for share in (shares[0], shares[0] + shares[1]))
        for part, chosen in zip(parts, np.split(members, [first, second]), strict=True):
            part.append(chosen)
    profile, certify, held_out = (np.sort(np.concatenate(part)) for part in parts)
    return Split(profile, certify, held_out)


def measure_accuracy(correct: NDArray[np.bool_], data_sha256: str) -> MeasuredAccuracy:
    """Top-1 accuracy with its exact 95 % interval."""
    low, high = calibration.clopper_pearson(int(correct.sum()), len(correct))
    return MeasuredAccuracy(
        value=round(float(correct.mean()), 6), n=len(correct), low=round(low, 6), high=round(high, 6),
        data_sha256=data_sha256,
    )  # fmt: skip


def profile_rung(
    name: str,
    models: dict[str, str],
    logits: Logits,
    labels: NDArray[np.integer],
    split: Split,
    data_sha256: str,
) -> tuple[RungProfile, Probabilities]:
    """Fit one rung's temperature on the profile split and measure it on the certification split.

    Returns the rung and its calibrated probabilities for all pictures (n, classes).
    """
    temperature = calibration.fit_temperature(logits[split.profile], labels[split.profile])
    probabilities = softmax(logits, temperature)
    right = probabilities.argmax(axis=1) == labels
    confidence = probabilities.max(axis=1)[split.certify].astype(np.float64)
    return RungProfile(
        name=name,
        models=models,
        temperature=round(temperature, 6),
        accuracy=measure_accuracy(right[split.certify], data_sha256),
        calibration_error=round(calibration.expected_calibration_error(confidence, right[split.certify]), 6),
    ), probabilities  # fmt: skip


def profile_pair(
    edge: str,
    best: str,
    edge_probabilities: Probabilities,
    best_probabilities: Probabilities,
    labels: NDArray[np.integer],
    split: Split,
    delta: float = 0.05,
) -> Pair:
    """Certify a pair: grid and score from the profile split, certificates from the certification split."""
    edge_right = edge_probabilities.argmax(axis=1) == labels
    best_right = best_probabilities.argmax(axis=1) == labels
    kind = _choose_score(edge_probabilities[split.profile], edge_right[split.profile], best_right[split.profile])
    scores = score(edge_probabilities, kind).astype(np.float64)
    grid = certificate.threshold_grid(scores[split.profile])
    sample = split.certify
    s, e, b = scores[sample], edge_right[sample], best_right[sample]

    def certified(max_drop: float) -> Certificate:
        found = certificate.certify(s, e, b, grid, max_drop, delta)
        return Certificate(
            max_drop=round(max_drop, 6), threshold=_written(found.value), delta=delta, n=len(sample), basis="labelled",
            escalation=round(found.escalation, 6), observed_drop=round(found.drop, 6),
        )  # fmt: skip

    gap = float(best_right[split.profile].mean() - edge_right[split.profile].mean())
    lost, gained = int((b & ~e).sum()), int((e & ~b).sum())
    fast = Certificate(
        max_drop=math.ceil(certificate.drop_upper_bound(lost, gained, len(sample), delta) * 1e4) / 1e4,
        threshold="never", delta=delta, n=len(sample), basis="labelled",
        escalation=0.0, observed_drop=round((lost - gained) / len(sample), 6),
    )  # fmt: skip
    frontier = tuple(
        FrontierPoint(threshold=_written(t.value), escalation=round(t.escalation, 6), drop=round(t.drop, 6))
        for t, _, _ in certificate.sweep(s, e, b, grid[:: max(1, len(grid) // 50)])
    )
    whole = Condition(
        min_received_fraction=1.0,
        balanced=certified(max(0.0, BALANCED_GAP_SHARE * gap)),
        fast=fast,
        certificates=tuple(certified(drop) for drop in CERTIFIED_DROPS),
        frontier=frontier,
    )
    return Pair(edge=edge, best=best, score=kind, conditions=(whole,))


def _choose_score(probabilities: Probabilities, edge_right: NDArray[np.bool_], best_right: NDArray[np.bool_]) -> Score:
    """The score with the smaller area under its drop-against-escalation curve; top-1 when there is no difference."""
    area: dict[Score, float] = {}
    for kind in Score:
        values = score(probabilities, kind).astype(np.float64)
        grid = certificate.threshold_grid(values)
        points = [t for t, _, _ in certificate.sweep(values, edge_right, best_right, grid)]
        area[kind] = float(np.trapezoid([t.drop for t in points][::-1], [t.escalation for t in points][::-1]))
    return Score.MARGIN if area[Score.MARGIN] < area[Score.TOP1] else Score.TOP1

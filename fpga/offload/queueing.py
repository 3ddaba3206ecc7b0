"""Waiting times from queueing theory, with which the planner predicts latencies.

*One server, Poisson arrivals* (M/G/1; M/D/1 for constant service). The work V in the system is empty with probability
p₀ and has a density v with

    v(x) = λ p₀ P(S > x) + λ ∫₀ˣ v(y) P(S > x − y) dy

(level crossing; Brill and Posner, Operations Research 1977). Its solution is the geometric sum of equilibrium service
times of Pollaczek and Khinchine. Arrivals see this V. On a grid it is Panjer's recursion (ASTIN Bulletin 1981), exact
up to the width of the grid, for any distribution of service times.

*A bounded queue* accepts images only while V ≤ B, which for constant service bounds their number. Below B the same
equation holds, for loads above one as well; only p₀ changes, and follows from (1 − p₀) = λ E[S] P(V ≤ B).

*Several servers* (M/G/c): an image waits with the probability of Erlang's C formula (1917); if so, it waits as in an
M/G/1 queue that serves c times as fast (Nozaki and Ross, J. Applied Probability 1978; the mean is that of Lee and
Longton 1959). This is an approximation, exact for c = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CELLS: Final = 8
"""Grid cells per mean service time."""
MAX_CELLS: Final = 2048
"""Cells at most: waits of up to 256 service times; longer ones count as never served."""
MAX_ATOMS: Final = 200
_LARGE: Final = 1e200


@dataclass(frozen=True)
class ServiceTime:
    """A distribution of service times: equally likely values in seconds, sorted; one value if constant."""

    atoms: tuple[float, ...]

    @classmethod
    def constant(cls, seconds: float) -> ServiceTime:
        """A constant service time."""
        return cls((seconds,))

    @classmethod
    def measured(cls, seconds: Sequence[float]) -> ServiceTime:
        """Quantiles of a sample with its mean."""
        ordered = np.sort(np.asarray(seconds, np.float64))
        if len(ordered) <= MAX_ATOMS:
            return cls(tuple(ordered.tolist()))
        groups = np.array_split(ordered, MAX_ATOMS)
        atoms = np.array([group.mean() for group in groups])
        return cls(tuple((atoms * (ordered.mean() / atoms.mean())).tolist()))

    @classmethod
    def spread(cls, mean_s: float, variation: float) -> ServiceTime:
        """Log-normal with the given mean and coefficient of variation, for when only these are known."""
        if variation == 0:
            return cls.constant(mean_s)
        sigma, normal = math.sqrt(math.log1p(variation**2)), NormalDist()
        atoms = np.exp([sigma * normal.inv_cdf((i + 0.5) / MAX_ATOMS) for i in range(MAX_ATOMS)])
        return cls(tuple((atoms * (mean_s / atoms.mean())).tolist()))

    @property
    def mean_s(self) -> float:
        """Mean in seconds."""
        return math.fsum(self.atoms) / len(self.atoms)

    @property
    def variation(self) -> float:
        """Standard deviation ÷ mean."""
        return float(np.std(self.atoms)) / self.mean_s if self.mean_s else 0.0

    def scaled(self, factor: float) -> ServiceTime:
        """The distribution with all times multiplied by `factor`."""
        return ServiceTime(tuple(atom * factor for atom in self.atoms))


def mixed(parts: Sequence[tuple[float, ServiceTime]]) -> ServiceTime:
    """The service time of several streams together, weighted by their rates (any unit, not all zero)."""
    total = math.fsum(rate for rate, _ in parts)
    values = np.concatenate([np.array(service.atoms) for _, service in parts])
    weights = np.concatenate([np.full(len(s.atoms), rate / total / len(s.atoms)) for rate, s in parts])
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    at = (np.cumsum(weights) - weights / 2).clip(0.0, 1.0)
    atoms = np.interp((np.arange(MAX_ATOMS) + 0.5) / MAX_ATOMS, at, values)
    return ServiceTime(tuple((atoms * (float(weights @ values) / atoms.mean())).tolist()))


@dataclass(frozen=True, eq=False)
class WaitingTime:
    """Distribution of the time that an image waits before it is served."""

    step_s: float
    below: Floats
    """P(wait ≤ (k + ½) · step) for k from 0; the rest up to 1 waits longer than the grid reaches."""
    taken: float = 1.0
    """Share of arrivals that find a place; the others are turned away."""

    def cdf(self, seconds: Floats) -> Floats:
        """P(wait ≤ t) of accepted images."""
        edges = (np.arange(len(self.below)) + 0.5) * self.step_s
        found: Floats = np.where(seconds < 0, 0.0, np.interp(seconds, edges, self.below))
        return found

    @property
    def mean_s(self) -> float:
        """Mean wait of accepted images; infinite if the queue is not stable."""
        if self.below[-1] < 0.999:
            return math.inf
        return float((1.0 - self.below).sum()) * self.step_s


NO_WAITING: Final = WaitingTime(1e-9, np.ones(1))
ENDLESS: Final = WaitingTime(1.0, np.zeros(1))
"""The wait of a queue that grows without bound."""


@lru_cache(maxsize=4096)
def one_server(rate_hz: float, service: ServiceTime, places: int | None = None) -> WaitingTime:
    """Poisson arrivals at one server; `places` bounds the images in the system, the one in service included."""
    mean = service.mean_s
    load = rate_hz * mean
    if load == 0:
        return NO_WAITING
    if places is None and load >= 1:
        return ENDLESS
    step = mean / CELLS
    residual = _residual(service, step)
    cells = MAX_CELLS if places is None else min(MAX_CELLS, (places - 1) * CELLS + 1)
    if load * residual[0] >= 1:
        # Beyond the grid's resolution, and only possible with `places`: each free place is taken immediately.
        return WaitingTime(step, np.where(np.arange(cells) < cells - 1, 0.0, 1.0), taken=1 / load)
    work, empty = _work(load, residual, cells, 1 / (1 - load) if places is None else math.inf)
    if places is None:
        return WaitingTime(step, np.cumsum(work) * (1 - load) / empty)
    # The last cell straddles the bound, so half of it is accepted. The first holds the atom of an empty system.
    work[-1] = empty if cells == 1 else work[-1] / 2
    total = work.sum()
    return WaitingTime(step, np.cumsum(work) / total, taken=float(total / (empty + load * total)))


def several_servers(rate_hz: float, service: ServiceTime, servers: int) -> WaitingTime:
    """Poisson arrivals at `servers` equal servers with one queue."""
    if servers == 1:
        return one_server(rate_hz, service)
    load = rate_hz * service.mean_s / servers
    if load >= 1:
        return ENDLESS
    if load == 0:
        return NO_WAITING
    fast = one_server(rate_hz, service.scaled(1 / servers))
    later = np.clip((1 - fast.below) / load, 0.0, 1.0)
    return WaitingTime(fast.step_s, 1 - erlang_c(servers, load * servers) * later)


def erlang_c(servers: int, erlangs: float) -> float:
    """Probability that all `servers` are busy under a load of `erlangs` < servers (Erlang 1917)."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = erlangs * blocked / (n + erlangs * blocked)
    return blocked / (1 - erlangs / servers * (1 - blocked))


def _residual(service: ServiceTime, step: float) -> Floats:
    """Equilibrium service time: P(it lies within half a step of k · step), for k from 0."""
    cells = min(MAX_CELLS, math.ceil(service.atoms[-1] / step + 0.5) + 1)
    edges = np.maximum((np.arange(cells + 1) - 0.5) * step, 0.0)
    whole = np.minimum(np.array(service.atoms)[:, None], edges).mean(axis=0)
    found: Floats = np.diff(whole) / service.mean_s
    return found


def _work(load: float, residual: Floats, cells: int, total: float) -> tuple[Floats, float]:
    """The work in the system by cell, and the atom of an empty system in the first cell, both up to a factor.

    It ends early when all but a millionth of `total`, the sum for an atom of 1, is found.
    """
    work, empty = np.zeros(cells), 1.0
    factor = load / (1 - load * residual[0])
    work[0] = 1 / (1 - load * residual[0])
    backwards = residual[:0:-1]
    missing = total * (1 - 1e-6) - work[0]
    for k in range(1, cells):
        first = max(0, k - len(backwards))
        work[k] = factor * (backwards[len(backwards) - (k - first) :] @ work[first:k])
        missing -= work[k]
        if missing < 0:
            return work[: k + 1], empty
        if work[k] > _LARGE:
            work /= _LARGE
            empty /= _LARGE
    return work, empty


Way: TypeAlias = tuple[float, float, WaitingTime, ServiceTime]
"""A way from arrival to answer: the share of images that take it, and its delay in seconds, wait and service, which are
independent."""


def quantile(ways: Sequence[Way], probability: float) -> float:
    """Quantile of the latency of images whose ways' shares sum to one; infinite if too many are never served."""
    ways = [way for way in ways if way[0] > 0]
    low = 0.0
    high = max(
        delay_s + service.atoms[-1] + len(waiting.below) * waiting.step_s for _, delay_s, waiting, service in ways
    )

    def reached(seconds: float) -> bool:
        parts = (
            share * float(waiting.cdf(seconds - delay_s - np.array(service.atoms)).mean())
            for share, delay_s, waiting, service in ways
        )
        return math.fsum(parts) >= probability - 1e-9

    if not reached(high):
        return math.inf
    for _ in range(26):  # halving: to 10⁻⁸ of the range
        intermediate = (low + high) / 2
        low, high = (low, intermediate) if reached(intermediate) else (intermediate, high)
    return high

"""How soon an alarm comes when traffic changes, and how often one is false.

    python -m tests.bench.guarantee delays [--seeds 50] [--requests 100000]

A named stream with eight claims of a certified disagreement d of 5 %, all broken at once, is simulated with the
product's log (`hawkvision.guarantee.bets.Log`): 1.5, 2 and 4 times d and always, with a new log and after 2,000
quiet audits (half of d), disagreements of 0 or 1 and fractions of the same mean.

*Derived*, before the run: Z and W, the numbers of audits so far that differ and agree, are Poisson variables. The delay
is the first number of requests at which one bet alone reaches the threshold with probability 0.95, for the best of the
bets, plus a block of audits, because bets start with blocks. All bets count together and suspicion raises the share of
audits, so this is an upper bound. Fractions of the same mean vary less, so that it holds for them, too.

False alarms are counted on the very bounds. Exit status 1 if more than 5 % of the seeds have no alarm at the derived
delay, or if more alarms are false than stated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.stats import poisson

from hawkvision.guarantee.bets import BETS, BLOCK, HORIZON, MOST_SHARE, Claims, Log
from tests.hawkvision.guarantee.simulated import EIGHT, MOST_REQUESTS, NAMED_PART, SHARE, delay

SUMMARY: Final = "how soon an alarm comes, and how often one is false"
TIMES: Final = (1.5, 2.0, 4.0, math.inf)
"""Disagreement as a multiple of what is claimed; infinite: with every answer."""
QUIET: Final = (0, 2_000)


def written(times: float) -> str:
    """In words."""
    return "always" if times == math.inf else f"{times:g} times"


def derived(
    claims: Claims, rates: Sequence[float], share: float, part: float = NAMED_PART, chance: float = 0.95
) -> float:
    """An upper bound on a quantile of the requests until the alarm; `rates` are what P(Z = 1) of each claim became.

    `share` of the images are audited, and the log has a `part` of δ.
    """
    log = Log(claims, part)
    on, off = map(np.log, log.alarm_bets)
    at = math.log(log.alarm_at * on.size)
    bets = [(rate, float(on[k, a]), float(off[k, a])) for k, rate in enumerate(rates) for a in range(len(BETS))]
    times = [_requests(rate * share, (1.0 - rate) * share, up, down, at, chance) for rate, up, down in bets]
    return min(times) + BLOCK / share


def _requests(differing: float, agreeing: float, up: float, down: float, at: float, chance: float) -> float:
    """The first number of requests after which a bet is paid out with this chance; infinite if that is never."""
    if differing * up + agreeing * down <= 0.0:
        return math.inf

    def paid(requests: float) -> float:
        mean = agreeing * requests
        others = np.arange(int(poisson.ppf(1e-9, mean)), int(poisson.ppf(1.0 - 1e-9, mean)) + 1)
        needed = np.ceil((at - others * down) / up)
        return float((poisson.pmf(others, mean) * poisson.sf(needed - 1.0, differing * requests)).sum())

    low, high = 1.0, 2.0
    while paid(high) < chance:
        low, high = high, 2.0 * high
        if high > MOST_REQUESTS:
            return math.inf
    while high - low > 1.0:
        intermediate = (low + high) / 2.0
        low, high = (low, intermediate) if paid(intermediate) >= chance else (intermediate, high)
    return math.ceil(high)


def false_alarms(seeds: int, requests: int, *, fractions: bool) -> tuple[int, int, float]:
    """Of so many runs on the very bounds: how many raise an alarm, audits made, and alarms stated at most."""
    alarms = audits = 0
    for seed in range(seeds):
        rng, log, at = np.random.default_rng([seed, 1]), Log(EIGHT, NAMED_PART), 0
        while not log.alarm:
            at += int(rng.geometric(min(SHARE * log.suspicion, MOST_SHARE)))
            if at > requests:
                break
            log.record(0.9, float(rng.beta(0.1, 1.9) if fractions else rng.random() < 0.05))
            audits += 1
        alarms += log.alarm
    return alarms, audits, EIGHT.delta * NAMED_PART * audits / HORIZON


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--requests", type=int, default=100_000, help="per seed, for false alarms")


def run(given: argparse.Namespace) -> int:
    """Derive, simulate, and print the table in Markdown."""
    print(
        "| the stages differ | by | quiet audits before | median | 95th percentile | most | derived | later |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    broken = False
    for fractions in (False, True):
        for times in TIMES:
            limit = derived(EIGHT, [min(1.0, 0.05 * times)] * 8, SHARE)
            for quiet in QUIET:
                rngs = [np.random.default_rng([seed, quiet]) for seed in range(given.seeds)]
                found = [delay(times, quiet, rng, fractions=fractions) for rng in rngs]
                median, late = np.percentile(found, [50, 95])
                later = sum(each > limit for each in found)
                broken |= later > 0.05 * given.seeds
                kind = "fractions" if fractions else "0 or 1"
                print(
                    f"| {written(times)} | {kind} | {quiet:,} | {median:,.0f} | {late:,.0f} | {max(found):,} "
                    f"| {limit:,.0f} | {later} of {given.seeds} |",
                    flush=True,
                )
    for fractions in (False, True):
        alarms, audits, most = false_alarms(given.seeds, given.requests, fractions=fractions)
        kind = "fractions" if fractions else "0 or 1"
        print(
            f"\nfalse alarms on the very bounds, disagreements of {kind}: {alarms} in {given.seeds} runs of "
            f"{given.requests:,} requests, {audits / given.seeds / given.requests:.1%} of them audited; stated: at "
            f"most {most:.1f} in the mean"
        )
        broken |= alarms > most + 3.0 * math.sqrt(most) + 1.0
    return int(broken)
